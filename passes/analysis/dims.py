"""How the lines of a trace compute on parts: which dims of results are split if a dim of an operand is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from passes.analysis.recognise import identity
from passes.comm.sequence import (
    Part,
    cut,
    from_input,
    from_own_input,
    gather_output,
    gather_parts,
    scatter_parts,
    sum_parts,
    to_output,
    to_own_output,
)
from passes.compat.versions import grouped_mm
from passes.kernels.parts import PartOfLoss
from passes.kernels.torch_call import TorchCall
from passes.plan.dims import products, table, views
from passes.plan.dims.reductions import LIKE_OTHER, RESHAPES, moved
from passes.plan.dims.relation import Labels, Relation, Shape
from passes.plan.dims.table import canonical, relation, tensors
from passes.plan.plan import Split

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

# prims that stand at the top level of traces, by the function of torch with the same arguments
PRIMS: Mapping[Hashable, str] = {
    PrimIDs.BROADCAST_IN_DIM: "prims.broadcast_in_dim",
    PrimIDs.CONVERT_ELEMENT_TYPE: "to",
    PrimIDs.DEVICE_PUT: "to",
    PrimIDs.FULL: "full",
    PrimIDs.RESHAPE: "reshape",
    PrimIDs.SHALLOW_COPY: "clone",
    PrimIDs.SQUEEZE: "squeeze",
    PrimIDs.STRIDE_ORDER: "contiguous",
    PrimIDs.TRANSPOSE: "permute",
}


class TorchLine(NamedTuple):
    """A line of a trace as a call of torch.

    Attributes:
        name: the canonical name of the function: "add", "nn.functional.linear", "special.erf". See
            ``passes.plan.dims.canonical``.
        args: with proxies in the place of tensors.
        kwargs: likewise.
        operands: the tensors among the arguments, in the order of ``tree_flatten``.
        results: the tensors among the results.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[TensorProxy, ...]
    results: tuple[TensorProxy, ...]


class Placed(NamedTuple):
    """How a line computes on parts.

    Attributes:
        operands: the split of each; None: it must be whole.
        results: the split of each; None: it is whole, the same on all ranks.
        combine: how to combine the results, which are partial, over ranks: see ``Relation``. None: they are not.
    """

    operands: tuple[Split | None, ...]
    results: tuple[Split | None, ...]
    combine: str | None = None


def torch_line(bsym: BoundSymbol) -> TorchLine | None:
    """A line that has a symbol of Thunder's for a function of torch, or calls a function of torch; None for others."""
    id = bsym.sym.id
    if isinstance(id, TorchCall):
        flat = list(id.flat)
        for place, proxy in zip(id.places, bsym.args, strict=True):
            flat[place] = proxy
        args, kwargs = pytree.tree_unflatten(flat, id.spec)
        name = name_of(id.function)
    else:
        found = _name_of_symbol(identity(bsym.sym))
        if found is None:
            return None
        args, kwargs, name = bsym.args, bsym.kwargs, found
    return TorchLine(name, tuple(args), dict(kwargs), tensors((args, kwargs)), tensors(bsym.output))


@functools.cache
def name_of(function: Callable[..., Any]) -> str:
    """The canonical name of a function; "" if it is neither one of torch's nor one of ours that the table has."""
    if isinstance(function, PartOfLoss):
        return PART_OF_LOSS
    if function is grouped_mm:
        return products.GROUPED
    return canonical(resolve_name(getattr(function, "of_tensors", function)) or "")


def _name_of_symbol(id: Hashable) -> str | None:
    if id in OWN:
        return str(id)
    if isinstance(id, PrimIDs):
        return PRIMS.get(id)
    if isinstance(id, str) and id.startswith(("torch.", "Tensor.")):
        return canonical(id)
    return None


def follow(line: TorchLine, number: int, split: Split) -> Placed | None:
    """How a line computes on parts if operand ``number`` is split. None: it cannot, or nothing is known about it."""
    if not _fits(split, line.operands[number]) or not _is_aligned(line, split):
        return None
    if line.name in RESHAPES:
        return _reshaped(line, split, of_operand=number)
    if (own := SPECIAL.get(line.name)) is not None and (placed := own(line, split, number)) is not None:
        return placed
    found = _relation(line)
    label = found.operands[number][split.dim] if found else None
    if found is None or label is None:
        return None
    return _placed(found, label, split)


def lead(line: TorchLine, number: int, split: Split) -> Placed | None:
    """How a line computes only a part of result ``number``. None: it cannot, or nothing is known about it."""
    if not _fits(split, line.results[number]) or not _is_aligned(line, split):
        return None
    if line.name in RESHAPES:
        return _reshaped(line, split)
    if (own := SPECIAL.get(line.name)) is not None and (placed := own(line, split, None)) is not None:
        return placed
    found = _relation(line)
    label = found.results[number][split.dim] if found else None
    if found is None or label is None:
        return None
    return _placed(found, label, split)


def resized(line: TorchLine, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a line gives results of these local shapes: sizes among them are replaced."""
    if not line.results:
        return line.args, line.kwargs
    if line.name in OF_PARTS:
        return (line.args[0], _resized_part(line.args[1], line.results[0], shapes[0]), *line.args[2:]), line.kwargs
    operand = _shape(line.operands[0]) if line.operands else ()
    change = table.Change(operand, _shape(line.results[0]), tuple(shapes[0]))
    return table.resized(line.name, line.args, line.kwargs, change)


def _resized_part(part: Part, result: TensorProxy, shape: Shape) -> Part:
    """The part of a result of this local shape: of a part of the sequence."""
    whole, local = result.shape[part.split.dim], shape[part.split.dim]
    if whole == local:
        return part
    blocks = "inner" if part.split.outer == 1 else "outer"
    return Part(part.plan, part.split._replace(**{blocks: getattr(part.split, blocks) * local // whole}), part.fill)


def _fits(split: Split, t: TensorProxy) -> bool:
    return split.dim < t.ndim and split.size == t.shape[split.dim]


def _is_aligned(line: TorchLine, split: Split) -> bool:
    """False for a part that torch's grouped product would refuse: its strides are multiples of 16 bytes."""
    if line.name != products.GROUPED:
        return True
    x: Any = line.operands[0]
    return bool(split.inner * (x.dtype.bytes if isinstance(x, TensorProxy) else x.element_size()) % 16 == 0)


def _shape(t: TensorProxy) -> Shape:
    return tuple(t.shape)


def _relation(line: TorchLine) -> Relation | None:
    if (own := OWN.get(line.name)) is not None:
        return own(line)
    return relation(line.name, line.args, line.kwargs, [_shape(t) for t in line.results])


def _keeps_dims(line: TorchLine) -> Relation:
    """A collective of other ranks: of a value that these hold in parts, it may be sent a part. It mixes at most the dim
    that it splits itself."""
    part: Part = line.args[1]
    moves = line.operands[0].shape != line.results[0].shape
    row = tuple(None if moves and d == part.split.dim else d for d in range(line.operands[0].ndim))
    return Relation((row,), (row,))


def _of_each_row(line: TorchLine) -> Relation:
    return Relation(((0, None), (0,)), ((0, None),))


def _cut_twice(line: TorchLine, split: Split, of_operand: int | None) -> Placed | None:
    """A collective over other ranks along the sequence that is split. Either each chunk of the sequence is cut over
    these ranks, or the sequences of a batch are shared out. The split is that of the operand, or of the result."""
    part: Part = line.args[1]
    ranks, within, cuts = part.plan.ranks, part.plan.within, part.split
    if cuts.dim != split.dim or cuts.length != ranks or within == 1 or part.fill is not None:
        return None
    of_whole = (line.name == gather_parts.id) == (of_operand is None)  # whether the split is that of the whole value
    sequences = split.outer if of_whole else split.outer * ranks
    if cuts.outer % (split.outer * within) == 0:  # each chunk
        longest = split.length if of_whole else split.length * ranks
        rows, rest = divmod(longest, within * ranks)
        other = split._replace(length=within * rows if of_whole else longest)
    else:
        share, rest = divmod(sequences, ranks)
        rest += cuts.outer - 1
        other = split._replace(outer=share if of_whole else sequences)
    if rest:
        return None
    return Placed((split,), (other,)) if of_operand is not None else Placed((other,), (split,))


PART_OF_LOSS = "part of loss"
OF_PARTS = tuple(s.id for s in (cut, gather_parts, scatter_parts))
BORDER = (gather_output, to_output, from_input, to_own_output, from_own_input)
OWN: Mapping[Hashable, Callable[[TorchLine], Relation]] = {
    **dict.fromkeys((*OF_PARTS, *(s.id for s in (sum_parts, *BORDER))), _keeps_dims),
    PART_OF_LOSS: _of_each_row,
}


def _placed(found: Relation, label: int, split: Split) -> Placed | None:
    if label in found.mixed:
        return None
    operands = tuple(_at(row, label, split) for row in found.operands)
    results = tuple(_at(row, label, split) for row in found.results)
    if all(results):
        return Placed(operands, results)
    if not any(results) and label in found.combine:
        how = found.combine[label]
        return Placed(operands, results, None if how == "same" else how)
    return None


def _at(labels: Labels, label: int, split: Split) -> Split | None:
    return split._replace(dim=labels.index(label)) if label in labels else None


def _reshaped(line: TorchLine, split: Split, of_operand: int | None = None) -> Placed | None:
    """The split is that of an operand, or of the result."""
    if len(line.results) != 1 or not line.operands or not _is_reshape(line):
        return None
    old, new = _shape(line.operands[0]), _shape(line.results[0])
    after = moved(split, old, new) if of_operand == 0 else split
    before = split if of_operand == 0 else moved(split, new, old)
    if before is None or after is None:
        return None
    like = (after,) if line.name in LIKE_OTHER else ()
    return Placed((before, *like), (after,))


def _cut_in_pieces(line: TorchLine, split: Split, of_operand: int | None) -> Placed | None:
    """A dim of several values, each of which is split, such as queries, keys and values. The split is that of the
    operand, or of a result."""
    dim, count = split.dim, len(line.results)
    sizes = [r.shape[dim] if dim < r.ndim else 0 for r in line.results]
    alike = all(_shape(r)[:dim] + _shape(r)[dim + 1 :] == _without(line.operands[0], dim) for r in line.results)
    if len(line.operands) != 1 or not alike or sum(sizes) != line.operands[0].shape[dim] or count == 1:
        return None
    if len(set(sizes)) == 1:
        whole = split if of_operand is not None else split._replace(outer=split.outer * count)
        if whole.outer % count or whole.sections:
            return None
        return Placed((whole,), (whole._replace(outer=whole.outer // count),) * count)
    found = in_sections(dim, sizes, split.length)
    if found is None or (split != found if of_operand is not None else split.outer != 1 or bool(split.sections)):
        return None
    return Placed((found,), tuple(Split(dim, 1, split.length, found.inner * n) for n in found.sections))


def in_sections(dim: int, sizes: Sequence[int], ranks: int) -> Split | None:
    """The split of a dim of values of these sizes, each of which is split; None if they do not divide."""
    unit = math.gcd(*sizes)
    inner, rest = divmod(unit, ranks)
    sections = tuple(size // unit for size in sizes)
    return None if rest else Split(dim, sum(sections), ranks, inner, sections)


def slice_along(line: TorchLine, dim: int) -> tuple[int, int] | None:
    """The first position and the end of a slice of one dim, of which it takes every position; None for other lines."""
    ranges = _ranges(line) if line.name == "getitem" else None
    if ranges is None:
        return None
    start, stop, step = ranges[dim]
    whole = [(0, size, 1) for size in line.operands[0].shape]
    return (start, stop) if step == 1 and all(r == whole[d] for d, r in enumerate(ranges) if d != dim) else None


def _ranges(line: TorchLine) -> list[tuple[int, int, int]] | None:
    """The first position, the end and the step of the slice of each dim; None for an index of something else."""
    x = line.operands[0]
    index = of_each_dim(line.args[1], x.ndim) if len(line.operands) == 1 else None
    if index is None or not all(isinstance(i, slice) for i in index):
        return None
    return [i.indices(size) for i, size in zip(index, x.shape, strict=True)]


def _without(t: TensorProxy, dim: int) -> Shape:
    return (*t.shape[:dim], *t.shape[dim + 1 :])


def _sliced(line: TorchLine, split: Split, of_operand: int | None) -> Placed | None:
    """Some blocks of a dim, or each nth element, such as gates that take turns with what they are multiplied by. The
    split is that of the operand, or of the result."""
    if (ranges := _ranges(line)) is None:
        return None
    size = line.operands[0].shape[split.dim]
    start, stop, step = ranges[split.dim]
    if step == 1:
        return _some_blocks(split, size, start, stop, of_operand)
    inner, rest = divmod(split.inner, step if of_operand is not None else 1)
    if start >= step or stop != size or size % step or rest:
        return None
    return Placed((split._replace(inner=inner * step),), (split._replace(inner=inner),))


def _some_blocks(split: Split, size: int, start: int, stop: int, of_operand: int | None) -> Placed | None:
    """A slice that takes some blocks of a dim as they are, such as queries in front of keys and values. Of sections it
    takes one."""
    block = split.length * split.inner
    if split.sections and of_operand is not None:
        for n, end in zip(split.sections, accumulate(n * block for n in split.sections), strict=True):
            if (start, stop) == (end - n * block, end):
                return Placed((split,), (Split(split.dim, 1, split.length, split.inner * n),))
        return None
    if start >= stop or start % block or stop % block or size % block or split.sections:
        return None
    return Placed((split._replace(outer=size // block),), (split._replace(outer=(stop - start) // block),))


def _repeated(line: TorchLine, split: Split, of_operand: int | None) -> Placed | None:
    """``repeat_interleave`` along the dim that is split, such as of the keys that several queries share. The split is
    that of the operand, or of the result."""
    named: dict[str, Any] = dict(zip(("repeats", "dim"), line.args[1:], strict=False)) | line.kwargs
    (x, *others), count, dim = line.operands, named.pop("repeats", None), named.pop("dim", None)
    if others or named or not type(count) is type(dim) is int or count < 1:
        return None
    inner, rest = divmod(split.inner, 1 if of_operand is not None else count)
    if dim % x.ndim != split.dim or split.sections or rest:
        return None
    return Placed((split._replace(inner=inner),), (split._replace(inner=inner * count),))


def _grouped(line: TorchLine, split: Split, of_operand: int | None) -> Placed | None:
    """Attention in which several heads of queries share one of keys and values (``enable_gqa``), split along heads. The
    split is that of an operand, or of the result."""
    query, key, value, *mask = line.operands
    heads, shared = (t.shape[1] if t.ndim == 4 else 0 for t in (query, key))
    if not line.kwargs.get("enable_gqa") or heads == shared or mask or not shared or value.shape[1] != shared:
        return None
    each = heads // shared
    inner = split.inner * each if of_operand in (1, 2) else split.inner
    if split.dim != 1 or inner % each:
        return None
    queries, keys = split._replace(inner=inner), split._replace(inner=inner // each)
    return Placed((queries, keys, keys), (queries,))


SPECIAL: Mapping[str, Callable[[TorchLine, Split, int | None], Placed | None]] = {
    **dict.fromkeys(("chunk", "split"), _cut_in_pieces),
    "getitem": _sliced,
    "repeat_interleave": _repeated,
    **dict.fromkeys(OF_PARTS, _cut_twice),
    "nn.functional.scaled_dot_product_attention": _grouped,
}


def _is_reshape(line: TorchLine) -> bool:
    """False if it changes the dtype, or has other tensors among its arguments than those known."""
    count = 2 if line.name in LIKE_OTHER else 1
    sizes = pytree.tree_leaves((line.args[count:], line.kwargs))
    return len(line.operands) == count and all(type(size) is int for size in sizes)


# ---- products ----


class Product(NamedTuple):
    """A product of activations and a matrix, or of one matrix of several for each group or batch. ``inner``: the dim of
    the matrix that is summed."""

    x: TensorProxy
    weight: TensorProxy
    bias: TensorProxy | None
    inner: int


def product_of(call: TorchLine | None) -> Product | None:
    """The product that a line computes; None if it computes none, or another one."""
    if call is None or len(call.operands) not in (2, 3):
        return None
    found: Product | None = None
    if call.name == "nn.functional.linear" and call.kwargs.keys() <= {"bias"}:
        x, weight, *bias = call.operands
        found = Product(x, weight, bias[0] if bias else None, 1)
    elif call.name == "addmm" and len(call.operands) == 3 and not call.kwargs:
        added, x, weight = call.operands
        found = Product(x, weight, added, 0)
    elif call.name in ("matmul", "mm", "bmm", products.GROUPED):
        x, weight = call.operands[:2]
        found = Product(x, weight, None, weight.ndim - 2)
    if found is None or found.weight.ndim not in (2, 3) or found.x.ndim < max(2, found.weight.ndim - 1):
        return None
    return found


def without_bias(call: TorchLine, product: Product) -> TorchLine:
    """The line that computes a product without its bias."""
    operands = (product.x, product.weight)
    if call.name == "addmm":
        return call._replace(name="matmul", args=operands, kwargs={}, operands=operands)
    return call._replace(args=(*operands, None), kwargs={}, operands=operands)


# ---- arguments of lines ----


def attention_arguments(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    **options: Any,
) -> tuple[Any, ...]:
    return query, key, value, attn_mask, dropout_p, is_causal, options


def loss_arguments(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Any, ...]:
    return input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing


def is_plain_embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False,
    sparse: Any = False,
) -> bool:
    """Whether an embedding with these arguments only takes rows, and its gradient only adds them up."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return False
    return padding_idx is None or (isinstance(padding_idx, int) and padding_idx >= 0)


def of_each_dim(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """An index with a slice or a number for each dim; None if it is another one."""
    each = views.of_each_dim(index, ndim)
    return tuple(each) if all(type(i) in (slice, int) for i in each) else None
