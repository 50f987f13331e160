"""Functions that permute, add, drop, cut or join dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes.plan.dims.relation import Draft, Labels, Operand, Rule, Shapes, Unknown, axes, axis, counted, number


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
    parts = _listed(tensors)
    every = counted(len(results[0]))
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
