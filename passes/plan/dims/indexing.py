"""Functions that pick elements: indexing, look-ups, gathers and scatters."""

from __future__ import annotations

from typing import Any

from passes.plan.dims.relation import (
    Draft,
    Labels,
    Operand,
    Rule,
    Shapes,
    Unknown,
    aligned,
    axis,
    counted,
    unequal,
)


def embedding(
    results: Shapes,
    input: Operand,
    weight: Operand,
    padding_idx: Any = None,
    max_norm: Any = None,
    *args: Any,
    **named: Any,
) -> Draft:
    special = max_norm is not None or any(args[1:2]) or named.get("scale_grad_by_freq")
    if special or weight.dims != 2:  # the first writes into the weight, the last counts all positions
        raise Unknown
    every = counted(input.dims + 1)
    return Draft({input: every[:-1], weight: (None, every[-1])}, [every])


def embedding_of_weight(results: Shapes, weight: Operand, indices: Operand, *args: Any, **named: Any) -> Draft:
    """torch.embedding."""
    if any(args[1:]) or any(named.values()):
        raise Unknown
    return embedding(results, indices, weight)


def one_hot(results: Shapes, input: Operand, num_classes: Any = -1) -> Draft:
    if type(num_classes) is not int or num_classes < 0:  # they are counted
        raise Unknown
    return Draft({input: counted(input.dims)}, [(*counted(input.dims), None)])


def gather(results: Shapes, input: Operand, dim: Any, index: Operand, *args: Any, **named: Any) -> Draft:
    """Other dims of the input may be longer than those of the index. These are mixed."""
    if not input.dims or input.dims != index.dims:
        raise Unknown
    at, every = axis(dim, input.dims), counted(input.dims)
    row = tuple(None if d == at else d for d in every)
    return Draft({input: row, index: every}, [every], mixed=unequal((row, input.shape), (every, index.shape)))


def take_along_dim(results: Shapes, input: Operand, indices: Operand, dim: Any = None) -> Draft:
    if dim is None or input.dims != indices.dims:
        raise Unknown
    at, every = axis(dim, input.dims), counted(input.dims)
    return Draft({input: tuple(None if d == at else d for d in every), indices: every}, [every])


def index_select(results: Shapes, input: Operand, dim: Any, index: Operand) -> Draft:
    if not input.dims:
        raise Unknown
    at, every = axis(dim, input.dims), counted(input.dims)
    rows = {input: tuple(None if d == at else d for d in every), index: (at,) * index.dims}
    return Draft(rows, [every])


def take(results: Shapes, input: Operand, index: Operand) -> Draft:
    return Draft({index: counted(index.dims)}, [counted(index.dims)])


def scatter(results: Shapes, input: Operand, dim: Any, index: Operand, *sources: Any, **named: Any) -> Draft:
    """All tensors have the same number of dims; other dims are mixed where they are not of the same size."""
    at, every = axis(dim, input.dims), counted(input.dims)
    row = tuple(None if d == at else d for d in every)
    rows: dict[Operand, Labels] = {input: every, index: row}
    for source in (*sources, *named.values()):
        if isinstance(source, Operand) and source.dims:
            rows[source] = row
    if any(x.dims != input.dims for x in rows):
        raise Unknown
    differing = unequal(*((labels, x.shape) for x, labels in rows.items()))
    return Draft(rows, [every], mixed=differing | {at})


def index_add(
    results: Shapes, input: Operand, dim: Any, index: Operand, source: Operand, *args: Any, **named: Any
) -> Draft:
    """torch.index_add, index_copy, index_reduce."""
    at, every = axis(dim, input.dims), counted(input.dims)
    row = tuple(None if d == at else d for d in every)
    if source.dims != input.dims:
        raise Unknown
    return Draft({input: every, source: row}, [every], mixed=frozenset({at}))


def index_fill(results: Shapes, input: Operand, dim: Any, index: Operand, value: Any) -> Draft:
    at, every = axis(dim, input.dims), counted(input.dims)
    return Draft({input: every}, [every], mixed=frozenset({at}))


def searchsorted(results: Shapes, sorted_sequence: Operand, input: Any, **named: Any) -> Draft:
    """Each value is looked up in the sequence of its row."""
    if not isinstance(input, Operand) or any(isinstance(v, Operand) for v in named.values()):
        raise Unknown
    every = counted(input.dims)
    if sorted_sequence.dims == 1:
        return Draft({input: every}, [every])
    return Draft({input: every, sorted_sequence: (*every[:-1], None)}, [every])


# ---- indexing ----


def getitem(results: Shapes, input: Operand, index: Any) -> Draft:
    """A full slice keeps its dim; an int, another slice or a tensor mixes it. Dims of index tensors are kept.

    Tensors that are not next to each other put their dims first. Ints, and tensors without dims, are applied before.
    """
    items = _items(input, index)
    tensors = [x for x in items if isinstance(x, Operand) and x.dims]
    wide = max((x.dims for x in tensors), default=0)
    looked_up: Labels = tuple(range(input.dims, input.dims + wide))
    rows: dict[Operand, Labels] = {x: aligned(x.shape, wide) for x in tensors}
    rows = {x: tuple(input.dims + label for label in row if label is not None) for x, row in rows.items()}
    labels: list[int | None] = []
    mixed: set[int] = set()
    places: list[int] = []  # among the labels, of what is looked up
    dim, together = 0, True
    for item in items:
        if item in tensors:
            together = together and (not places or places[-1] == len(labels))
            places.append(len(labels))
        if item is None:
            labels.append(None)
            continue
        if isinstance(item, slice):
            labels.append(dim)
        if not isinstance(item, slice) or not is_full(item, input.shape[dim]):
            mixed.add(dim)
        dim += 1
    at = places[0] if places and together else 0
    result = (*labels[:at], *looked_up, *labels[at:])
    return Draft({**rows, input: counted(input.dims)}, [result], mixed=frozenset(mixed))


def _items(input: Operand, index: Any) -> list[Any]:
    for item in index if isinstance(index, tuple) else [index]:
        known = item is None or item is Ellipsis or type(item) is int or isinstance(item, slice | Operand)
        if not known or (isinstance(item, Operand) and item.boolean):
            raise Unknown
        if isinstance(item, slice) and not {type(n) for n in (item.start, item.stop, item.step)} <= {int, type(None)}:
            raise Unknown
    return of_each_dim(index, input.dims)


def of_each_dim(index: Any, dims: int) -> list[Any]:
    """The index of each dim, and None for new dims. There are no boolean tensors in it."""
    given = list(index) if isinstance(index, tuple) else [index]
    rest = dims - sum(item is not None and item is not Ellipsis for item in given)
    dots = [i for i, item in enumerate(given) if item is Ellipsis]
    if rest < 0 or len(dots) > 1:
        raise Unknown
    at = dots[0] if dots else len(given)
    return [*given[:at], *[slice(None)] * rest, *given[at + 1 :]]


def is_full(item: slice, size: int) -> bool:
    """True if a slice takes a dim of this size as it is."""
    return item.indices(size) == (0, size, 1)


def setitem(results: Shapes, input: Operand, index: Any, value: Any) -> Draft:
    """The input with a value, which is broadcast, in the place of what the index picks."""
    picked = getitem(results, input, index)
    [row] = picked.results
    rows = dict(picked.operands)
    if isinstance(value, Operand):
        if value.dims > len(row):
            raise Unknown
        rows[value] = row[len(row) - value.dims :]
    return Draft(rows, [counted(input.dims)], mixed=picked.mixed)


F = "nn.functional."

RULES: dict[str, Rule] = {
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scatter),
    **dict.fromkeys(("index_add", "index_copy"), index_add),
    F + "embedding": embedding,
    "embedding": embedding_of_weight,
    F + "one_hot": one_hot,
    "gather": gather,
    "take_along_dim": take_along_dim,
    "index_select": index_select,
    "index_fill": index_fill,
    "take": take,
    "searchsorted": searchsorted,
    "getitem": getitem,
    "setitem": setitem,
}
