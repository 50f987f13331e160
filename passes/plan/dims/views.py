"""Functions that permute, add, drop, cut or join dims, or pick elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes.plan.dims.relation import (
    Draft,
    Labels,
    Operand,
    Rule,
    Shapes,
    Unknown,
    aligned,
    axes,
    axis,
    counted,
    number,
    unequal,
)


def _varargs(given: Sequence[Any]) -> Sequence[Any]:
    return given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given


def _in_order(input: Operand, order: Sequence[int]) -> Draft:
    return Draft({input: counted(input.dims)}, [tuple(order)])


# ---- another order ----


def transpose(results: Shapes, input: Operand, dim0: Any, dim1: Any) -> Draft:
    order = list(counted(input.dims))
    a, b = axis(dim0, input.dims), axis(dim1, input.dims)
    order[a], order[b] = order[b], order[a]
    return _in_order(input, order)


def permute(results: Shapes, input: Operand, *args: Any, dims: Any = None) -> Draft:
    given = _varargs(args) if args else dims
    order = [axis(d, input.dims) for d in given]
    if sorted(order) != list(counted(input.dims)):
        raise Unknown
    return _in_order(input, order)


def movedim(results: Shapes, input: Operand, source: Any, destination: Any) -> Draft:
    def listed(dims: Any) -> list[int]:
        return [axis(d, input.dims) for d in (dims if isinstance(dims, Sequence) else (dims,))]

    moved, places = listed(source), listed(destination)
    if len(set(moved)) != len(moved) or sorted(set(places)) != sorted(places) or len(moved) != len(places):
        raise Unknown
    rest = iter(d for d in counted(input.dims) if d not in moved)
    at = dict(zip(places, moved, strict=True))
    return _in_order(input, [at[d] if d in at else next(rest) for d in counted(input.dims)])


def reversed_dims(results: Shapes, input: Operand) -> Draft:
    return _in_order(input, counted(input.dims)[::-1])


def matrix_transpose(results: Shapes, input: Operand) -> Draft:
    if input.dims < 2:
        raise Unknown
    return transpose(results, input, -2, -1)


# ---- dims of size 1 ----


def squeeze(results: Shapes, input: Operand, dim: Any = None) -> Draft:
    every = counted(input.dims)
    given = every if dim is None else axes(dim, input.dims) if isinstance(dim, int) or dim else ()
    kept = tuple(d for d in every if d not in given or input.shape[d] != 1)
    return Draft({input: tuple(d if d in kept else None for d in every)}, [kept])


def unsqueeze(results: Shapes, input: Operand, dim: Any) -> Draft:
    at = axis(dim, input.dims + 1)
    labels: list[int | None] = list(counted(input.dims))
    labels.insert(at, None)
    return Draft({input: counted(input.dims)}, [labels])


def at_least(dims: int) -> Any:
    def rule(results: Shapes, input: Any) -> Draft:
        if not isinstance(input, Operand):
            raise Unknown
        return Draft({input: counted(input.dims)}, [grown(input, dims)])

    return rule


def grown(input: Operand, dims: int, labels: Labels | None = None) -> Labels:
    """The labels of ``torch.atleast_1d``, 2d or 3d."""
    row = counted(input.dims) if labels is None else labels
    if dims == 3 and input.dims in (1, 2):
        return (None, *row, None) if input.dims == 1 else (*row, None)
    return (None,) * (dims - input.dims) + row


# ---- cut ----


def cut(results: Shapes, input: Operand, *args: Any, dim: Any = 0, **named: Any) -> Draft:
    """torch.split, chunk, tensor_split. All parts are as long as their dim if there is one."""
    if len(args) > 2:
        raise Unknown
    at = axis(args[1] if len(args) == 2 else dim, input.dims)
    return Draft({input: counted(input.dims)}, [counted(input.dims)] * len(results), mixed=frozenset({at}))


def cut_along(dim: int) -> Any:
    """torch.hsplit (1), vsplit (0), dsplit (2)."""

    def rule(results: Shapes, input: Operand, *args: Any, **named: Any) -> Draft:
        return cut(results, input, dim=dim if input.dims > 1 else 0)

    return rule


def unbind(results: Shapes, input: Operand, dim: Any = 0) -> Draft:
    return _without(results, input, axis(dim, input.dims))


def select(results: Shapes, input: Operand, dim: Any, index: Any) -> Draft:
    return _without(results, input, axis(dim, input.dims))


def _without(results: Shapes, input: Operand, *gone: int) -> Draft:
    kept = tuple(d for d in counted(input.dims) if d not in gone)
    return Draft({input: counted(input.dims)}, [kept] * len(results), mixed=frozenset(gone))


def narrow(results: Shapes, input: Operand, dim: Any, start: Any, length: Any) -> Draft:
    at = axis(dim, input.dims)
    mixed = frozenset[int]() if number(length) == input.shape[at] else frozenset({at})
    return Draft({input: counted(input.dims)}, [counted(input.dims)], mixed=mixed)


def windows(results: Shapes, input: Operand, dimension: Any, size: Any, step: Any) -> Draft:
    """Tensor.unfold."""
    at = axis(dimension, input.dims)
    return Draft({input: counted(input.dims)}, [(*counted(input.dims), None)], mixed=frozenset({at}))


def diagonal(results: Shapes, input: Operand, offset: Any = 0, dim1: Any = 0, dim2: Any = 1) -> Draft:
    gone = (axis(dim1, input.dims), axis(dim2, input.dims))
    kept = tuple(d for d in counted(input.dims) if d not in gone)
    return Draft({input: counted(input.dims)}, [(*kept, None)], mixed=frozenset(gone))


def linalg_diagonal(results: Shapes, A: Operand, *, offset: Any = 0, dim1: Any = -2, dim2: Any = -1) -> Draft:
    return diagonal(results, A, offset, dim1, dim2)


def select_scatter(results: Shapes, input: Operand, src: Operand, dim: Any, index: Any) -> Draft:
    at = axis(dim, input.dims)
    every = counted(input.dims)
    return Draft({input: every, src: tuple(d for d in every if d != at)}, [every], mixed=frozenset({at}))


def slice_scatter(results: Shapes, input: Operand, src: Operand, dim: Any = 0, *args: Any, **named: Any) -> Draft:
    at, every = axis(dim, input.dims), counted(input.dims)
    return Draft({input: every, src: every}, [every], mixed=frozenset({at}))


# ---- join ----


def _listed(tensors: Any) -> Sequence[Operand]:
    if not isinstance(tensors, Sequence) or not tensors or not all(isinstance(t, Operand) for t in tensors):
        raise Unknown
    return tensors


def cat(results: Shapes, tensors: Any, dim: Any = 0) -> Draft:
    every = counted(len(results[0]))
    parts = [t for t in _listed(tensors) if t.dims == len(every) or t.shape != (0,)]  # torch skips these, as of a cache
    return Draft(dict.fromkeys(parts, every), [every], mixed=frozenset({axis(dim, len(every))}))


def stack(results: Shapes, tensors: Any, dim: Any = 0) -> Draft:
    parts = _listed(tensors)
    labels: list[int | None] = list(counted(parts[0].dims))
    row = tuple(labels)
    labels.insert(axis(dim, len(row) + 1), None)
    return Draft(dict.fromkeys(parts, row), [labels])


def stacked(dims: int, at: int) -> Any:
    """torch.hstack (1), vstack (2) and dstack (3): tensors get so many dims and are joined along dim ``at``."""

    def rule(results: Shapes, tensors: Any) -> Draft:
        rows = {part: (1,) if part.dims == 1 < dims else counted(part.dims) for part in _listed(tensors)}
        size = len(results[0])
        return Draft(rows, [counted(size)], mixed=frozenset({at if size > 1 else 0}))

    return rule


def column_stack(results: Shapes, tensors: Any) -> Draft:
    rows = {part: counted(part.dims) for part in _listed(tensors)}
    return Draft(rows, [counted(len(results[0]))], mixed=frozenset({1}))


def meshgrid(results: Shapes, *tensors: Any, indexing: Any = "ij") -> Draft:
    parts = _listed(_varargs(tensors))
    if indexing not in ("ij", "xy", None):
        raise Unknown
    order = list(counted(len(parts)))
    if indexing == "xy" and len(parts) > 1:
        order[:2] = 1, 0
    rows = {part: (label,) * part.dims for label, part in enumerate(parts)}
    return Draft(rows, [order] * len(results))


# ---- mixed dims ----


def mixed_last(count: int) -> Any:
    """The last ``count`` dims of the first operand are mixed. Results have these, or the first of them, or none."""

    def rule(results: Shapes, input: Operand, *args: Any, **named: Any) -> Draft:
        if input.dims < count or any(len(r) > input.dims for r in results):
            raise Unknown
        every = counted(input.dims)
        rows = [every[: len(r)] for r in results]
        return Draft({input: every}, rows, mixed=frozenset(every[input.dims - count :]))

    return rule


def tensors_of_complex(results: Shapes, input: Operand) -> Draft:
    return Draft({input: counted(input.dims)}, [(*counted(input.dims), None)])


def complex_of_tensors(results: Shapes, input: Operand) -> Draft:
    return Draft({input: counted(input.dims)}, [counted(input.dims - 1)], mixed=frozenset({input.dims - 1}))


def padded(results: Shapes, input: Operand, pad: Any, mode: Any = "constant", value: Any = None) -> Draft:
    """Pairs of sizes, for the last dim first."""
    counts = [number(n) for n in pad]
    if len(counts) % 2 or len(counts) > 2 * input.dims:
        raise Unknown
    pairs = [counts[i : i + 2] for i in range(0, len(counts), 2)]
    mixed = frozenset(input.dims - 1 - i for i, pair in enumerate(pairs) if pair != [0, 0])
    return Draft({input: counted(input.dims)}, [counted(input.dims)], mixed=mixed)


def constant_padded(results: Shapes, input: Operand, pad: Any, value: Any = 0) -> Draft:
    return padded(results, input, pad)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("movedim", "moveaxis"), movedim),
    **dict.fromkeys(("mT", "mH", "adjoint"), matrix_transpose),
    **dict.fromkeys(("t", "T", "H"), reversed_dims),
    **dict.fromkeys(("split", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split"), cut),
    **dict.fromkeys(("split_with_sizes", "unsafe_split_with_sizes"), cut),
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    **dict.fromkeys(("tril", "triu"), mixed_last(2)),
    **dict.fromkeys(("nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle"), mixed_last(3)),
    **dict.fromkeys(("vstack", "row_stack"), stacked(2, 0)),
    "diagonal": diagonal,
    "linalg.diagonal": linalg_diagonal,
    "permute": permute,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "atleast_1d": at_least(1),
    "atleast_2d": at_least(2),
    "atleast_3d": at_least(3),
    "hsplit": cut_along(1),
    "vsplit": cut_along(0),
    "dsplit": cut_along(2),
    "unbind": unbind,
    "select": select,
    "narrow": narrow,
    "unfold": windows,
    "select_scatter": select_scatter,
    "slice_scatter": slice_scatter,
    "stack": stack,
    "hstack": stacked(1, 1),
    "dstack": stacked(3, 2),
    "column_stack": column_stack,
    "meshgrid": meshgrid,
    "view_as_real": tensors_of_complex,
    "view_as_complex": complex_of_tensors,
    "nn.functional.pad": padded,
    "constant_pad_nd": constant_padded,
}


# ---- indexing ----


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

PICKING: dict[str, Rule] = {
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
