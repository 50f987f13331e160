"""The work of a line of compute: the FLOPs of its matrix products, its special functions, and the bytes that it moves.

A multiply-add is 2 FLOPs, as in PyTorch's ``torch.utils.flop_counter``.

Which lines of a block to repeat in backward, so that little is saved and nothing costly is computed twice.

Autodiff says what backward needs of the values of forward. Each needed value is saved, or computed again from values
that are. A minimum cut through forward's values, weighted with their bytes, is the least that must be saved if only
cheap lines may be repeated (as in PyTorch's min-cut partitioner of functorch, He and Yu, 2023, "Transcending runtime-
memory tradeoffs in checkpointing by being fusion aware"). Products, attention, convolutions and random lines are not
cheap. The inputs of the block are there anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from passes.analysis.calls import block_function, function_of_lines, lines_within
from passes.analysis.recognise import (
    AWAITED,
    ISSUED,
    bucket_of,
    differentiated_as,
    identity,
    is_foreign,
    is_repeatable,
    names,
    part_at,
    properties,
)
from passes.comm.symbols import Property
from passes.compat.jit import shape_of
from passes.kernels.aten import counts_flops, flops_of, operator_of
from passes.kernels.executors import kernel_id
from passes.kernels.parts import CausalAttention, ChunkedLoss
from passes.kernels.torch_call import Line, TorchCall, call_of
from passes.plan.cost import Work

import networkx as nx
import torch
from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import dce
from thunder.executors import sdpaex
from thunder.transforms.autodiff import grad_transform_on_trace
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

SOURCE, SINK = "source", "sink"


class _Line(NamedTuple):
    """A tag that autodiff hands on: the number of the line that a line was made of."""

    number: int


def cheap_lines(lines: Sequence[BoundSymbol], results: Collection[str], taken: Collection[str]) -> set[int]:
    """The numbers of the lines to repeat in backward.

    Args:
        lines: of one block, none of which autodiff takes apart.
        results: names of the values that other lines read.
        taken: names that new values must not have.
    """
    outputs = [o for b in lines for o in b.flat_proxy_outs if isinstance(o, TensorProxy) and o.name in results]
    if not any(dtypes.is_float_dtype(o.dtype) for o in outputs):
        return set()
    joint = _differentiated(lines, outputs, taken)
    forward = [b for b in joint.bound_symbols if BoundSymbolTag.BACKWARD not in b.tags and _number(b) is not None]
    backward = [b for b in joint.bound_symbols[:-1] if BoundSymbolTag.BACKWARD in b.tags]
    made = {o.name: o for b in forward for o in b.flat_proxy_outs if isinstance(o, TensorProxy)}
    needed = names([b.flat_proxy_args for b in backward]) & made.keys()
    saved_side = _cut(forward, made, needed)
    kept = {_number(b) for b in forward if not _is_cheap(b) or not saved_side.isdisjoint(names(b.flat_proxy_outs))}
    return {n for b in forward if (n := _number(b)) is not None} - kept


def _cut(forward: Sequence[BoundSymbol], made: dict[str, TensorProxy], needed: set[str]) -> set[str]:
    """The values that a minimum cut does not compute again: those that it saves, and all that are only read before."""
    graph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for name, value in made.items():
        graph.add_edge(("in", name), ("out", name), capacity=value.numel * value.dtype.bytes)
        if name in needed:
            graph.add_edge(("out", name), SINK)  # an edge without capacity is infinite
    for bsym in forward:
        outs = names(bsym.flat_proxy_outs) & made.keys()
        if not _is_cheap(bsym):
            graph.add_edges_from((SOURCE, ("in", o)) for o in outs)
        else:
            graph.add_edges_from(
                (("out", a), ("in", o)) for a in names(bsym.flat_proxy_args) & made.keys() for o in outs
            )
    _, (before, _) = nx.minimum_cut(graph, SOURCE, SINK)
    return {name for name in made if ("in", name) in before}


def _differentiated(lines: Sequence[BoundSymbol], outputs: Sequence[TensorProxy], taken: Collection[str]) -> TraceCtx:
    """The lines and those of their backward, each with the number of the line that it was made of."""
    made = {o.name for b in lines for o in b.flat_proxy_outs}
    inputs = {a.name: a for b in lines for a in b.flat_proxy_args if isinstance(a, TensorProxy) and a.name not in made}
    with tracectx(TraceCtx()):  # the names are taken in the lines' own trace
        args = [TensorProxy(like=a, name=a.name, requires_grad=dtypes.is_float_dtype(a.dtype)) for a in inputs.values()]
    swap = {variableify(a): new for a, new in zip(inputs.values(), args, strict=True)}
    lines = [b.from_bsym_swap_proxies(swap, skip_output=True) for b in lines]
    numbered = [_copy(b, _Line(i)) for i, b in enumerate(lines)]
    result: Any = {"output": tuple(outputs), "flat_args": tuple(args)}
    return dce(grad_transform_on_trace(function_of_lines("block", args, numbered, result, taken)))


def _copy(bsym: BoundSymbol, tag: _Line) -> BoundSymbol:
    return bsym.from_bsym(subsymbols=[_copy(part, tag) for part in bsym.subsymbols], tags={tag})


def _number(bsym: BoundSymbol) -> int | None:
    return next((tag.number for tag in bsym.tags if isinstance(tag, _Line)), None)


def _is_cheap(bsym: BoundSymbol) -> bool:
    return is_repeatable(bsym) and not _is_costly(bsym)


def _is_costly(bsym: BoundSymbol) -> bool:
    if is_library_call(bsym.sym) or block_function(bsym) is not None or is_foreign(bsym.sym):
        return True
    return any(map(_is_costly, lines_within(bsym)))


def flops(bsym: BoundSymbol) -> int:
    """FLOPs of the matrix products, convolutions and attentions in a line, including its subsymbols."""
    return work(bsym).flops


def work(bsym: BoundSymbol) -> Work:
    """The arithmetic of a line, by the rate at which it is done."""
    call = call_of(bsym.sym)
    if call is not None:
        id = bsym.sym.id
        backward = isinstance(id, Line) and id.kind == "_backward"
        if isinstance(call.function, CausalAttention):
            shapes = [m.shape for m in call.inputs]
            count = attention_backward_flops([(), *shapes], []) if backward else attention_flops(shapes, [])
            return _attention(count, _tensors(bsym.flat_proxy_outs))
        if isinstance(call.function, ChunkedLoss):
            return Work() if backward else _of_chunked_loss(call)
        return _products(call.reads.flops * (2 if backward else 1), _tensors(bsym.flat_proxy_outs))
    operator = operator_of(bsym.sym)
    if operator is not None:
        return _of_operator(operator, bsym)
    function = differentiated_as(bsym.sym)
    found = identity(bsym.sym) if function is None else function
    rule = FLOPS.get(found)
    if rule is not None:
        tensors, outs = _tensors(bsym.flat_proxy_args), _tensors(bsym.flat_proxy_outs)
        # A function's gradient takes its arguments and the output's gradient. It recomputes the output and then
        # usually computes two gradients of the same cost.
        shapes, results = list(map(_shape, tensors)), list(map(_shape, outs))
        count = rule(shapes, results) if function is None else 3 * rule(shapes[:-1], shapes[-1:])
        if rule in ATTENTIONS:
            return _attention(count, outs)
        return _products(count, outs)
    if found in SPECIAL:
        return Work(special=max(map(_elements, _tensors(bsym.flat_proxy_outs)), default=0))
    total = Work()
    for part in lines_within(bsym):
        total += work(part)
    return total


def useful_flops(bsym: BoundSymbol) -> int:
    """FLOPs of a recorded line, with half of the scores of causal attention."""
    return flops(bsym) - _causal(bsym) // 2


def _causal(bsym: BoundSymbol) -> int:
    """FLOPs of the causal attention in a line. What a mask that is a tensor hides is not known."""
    call, operator = call_of(bsym.sym), operator_of(bsym.sym)
    if call is not None:
        args, kwargs = pytree.tree_unflatten(list(call.flat), call.spec)
        of_torch = call.function is torch.nn.functional.scaled_dot_product_attention
        is_causal = isinstance(call.function, CausalAttention) or (
            of_torch and any(a is True for a in (*args[5:6], kwargs.get("is_causal")))
        )
    elif operator is not None:
        given = dict(zip((a.name for a in operator._schema.arguments), bsym.args, strict=False)) | bsym.kwargs
        is_causal = given.get("is_causal", False)
    elif FLOPS.get(identity(bsym.sym)) in ATTENTIONS:
        is_causal = any(a is True for a in (*bsym.args, bsym.kwargs.get("is_causal")))
    else:
        return sum(map(_causal, lines_within(bsym)))
    return flops(bsym) if is_causal else 0


def _sizes_of_loss(call: TorchCall) -> tuple[int, int, int, int]:
    """The rows, their width, the classes and the bytes of a weight's element of a loss in chunks."""
    (rows, width), (classes, _), size = call.inputs[0].shape, call.inputs[1].shape, call.inputs[1].dtype.itemsize
    return rows, width, classes, size


def _of_chunked_loss(call: TorchCall) -> Work:
    """All products in the dtype of the weight, and an exponential for each logit."""
    rows, _, classes, size = _sizes_of_loss(call)
    return Work(**{"half" if size <= 2 else "full": call.reads.flops}, special=rows * classes)


def _of_operator(operator: OpOverload, bsym: BoundSymbol) -> Work:
    name, outs = operator._schema.name.partition("::")[2], _tensors(bsym.flat_proxy_outs)
    if counts_flops(operator):
        count = flops_of(operator, bsym.args, bsym.kwargs, bsym.output)
        return (_attention if "attention" in name else _products)(count, outs)
    if name.strip("_").removesuffix("_data").removesuffix("_backward") in SPECIAL_NAMES:
        return Work(special=max(map(_elements, outs), default=0))
    return Work()


def _products(count: int, outs: Sequence[TensorProxy]) -> Work:
    """The FLOPs of products with these results."""
    return Work(half=count) if _is_half(outs) else Work(full=count)


def _attention(count: int, outs: Sequence[TensorProxy]) -> Work:
    """The FLOPs of an attention with these results."""
    return Work(half_attention=count) if _is_half(outs) else Work(attention=count)


def _is_half(outs: Sequence[TensorProxy]) -> bool:
    return bool(outs) and outs[0].dtype.bytes <= 2


def is_library_call(sym: Symbol) -> bool:
    """True for a costly symbol that fusions leave to a library. Its inputs and outputs are in memory."""
    call = call_of(sym)
    if call is not None:
        return call.reads.flops > 0 or not call.reads.known or isinstance(call.function, CausalAttention)
    operator = operator_of(sym)
    return identity(sym) in FLOPS if operator is None else counts_flops(operator)


def is_free(bsym: BoundSymbol) -> bool:
    """True for a line that computes nothing, such as a cast to the dtype that the tensor has, or ATen's own view."""
    found = properties(bsym.sym)
    if Property.VIEW in found and operator_of(bsym.sym) is not None:
        return True
    if Property.CAST in found:
        return not _changed(bsym)
    return Property.FREE in found or (Property.PARTS in found and _is_in_order(bsym))


def _is_in_order(bsym: BoundSymbol) -> bool:
    """True for half of a collective whose parts lie one behind the other, which neither packs nor adds them up."""
    op = ISSUED.get(bsym.sym.id) or AWAITED.get(bsym.sym.id)
    if op is None or op.carries != "value" or op.exchanges:
        return False
    part, is_issue = part_at(bsym), bsym.sym.id in ISSUED
    value = bsym.args[0] if is_issue else bsym.output
    return part.is_in_order(tuple(value.shape)) and (is_issue or not (op.adds and part.plan.direct))


def bytes_moved(bsym: BoundSymbol) -> int:
    """Bytes that a line reads and writes in memory. Each input and output counts once.

    A fusion moves only its inputs and outputs. A view moves nothing, a cast only the tensors that it changes, and a
    look-up (an embedding, an index) reads no more of its table than it writes. A copy of parts reads what it writes.
    """
    found = properties(bsym.sym)
    if _is_view(bsym):
        return 0
    if block_function(bsym) is not None:
        return sum(map(bytes_moved, lines_within(bsym)))
    if Property.CAST in found:
        return sum(sum(_sizes(pair).values()) for pair in _changed(bsym))
    read, written = _sizes(_tensors(bsym.flat_proxy_args)), _sizes(_tensors(bsym.flat_proxy_outs))
    call = call_of(bsym.sym)
    if call is not None and isinstance(call.function, ChunkedLoss):
        return _moved_by_chunks(bsym, call, call.function.chunks)
    if Property.STATEFUL in found:
        return sum(read.values()) + 2 * _summed(bsym)
    if Property.PARTS in found:
        return 2 * sum(written.values())
    if found & (Property.INDEX | Property.LOOK_UP):
        most = sum(written.values())
        return most + sum(min(size, most) for size in read.values())
    return sum((read | written).values())


def _moved_by_chunks(bsym: BoundSymbol, call: TorchCall, chunks: int) -> int:
    """Logits are written and read by the product, the cast, the logarithm of the softmax, and by their gradients. Each
    chunk adds to the gradient of the weight. Backward multiplies the gradients by a number."""
    if isinstance(bsym.sym.id, Line) and bsym.sym.id.kind == "_backward":
        return 2 * sum(_sizes(_tensors(bsym.flat_proxy_outs)).values())
    rows, width, classes, size = _sizes_of_loss(call)
    of_logits = rows * classes * (36 if size > 2 else 42)
    return of_logits + chunks * classes * width * (8 if size > 2 else 12) + 2 * rows * width * size


def bytes_made(bsym: BoundSymbol) -> int:
    """Bytes of the new tensors that a line makes."""
    found = properties(bsym.sym)
    if _is_view(bsym) or Property.STATEFUL in found:
        return 0
    if Property.CAST in found:
        return sum(_sizes(out for _, out in _changed(bsym)).values())
    read, written = _sizes(_tensors(bsym.flat_proxy_args)), _sizes(_tensors(bsym.flat_proxy_outs))
    return sum(size for name, size in written.items() if name not in read)


def _is_view(bsym: BoundSymbol) -> bool:
    """True for a line that computes nothing, or a view. Indexing only by slices and numbers is one."""
    found = properties(bsym.sym)
    indexes = Property.INDEX in found and len(_sizes(_tensors(bsym.flat_proxy_args))) == 1
    return bool(found & (Property.FREE | Property.VIEW)) or indexes


def _changed(bsym: BoundSymbol) -> list[tuple[TensorProxy, TensorProxy]]:
    """The arguments of a cast whose dtype or device changes, each with its result."""
    pairs = zip(_tensors(bsym.flat_proxy_args), _tensors(bsym.flat_proxy_outs), strict=False)
    return [(a, b) for a, b in pairs if (a.dtype, a.device) != (b.dtype, b.device)]


def _summed(bsym: BoundSymbol) -> int:
    """Bytes of the sums to which a line adds gradients. It reads and writes them in place."""
    bucket = bucket_of(bsym)
    width = bucket.plan.summed_dtype(bucket.rest_dtype).bytes
    return sum(_elements(grad) * width for grad in _tensors(bsym.flat_proxy_args))


def _sizes(tensors: Iterable[TensorProxy]) -> dict[str, int]:
    """Bytes of each tensor, by name. A tensor that is passed twice is read once."""
    return {t.name: _elements(t) * t.dtype.bytes for t in tensors}


def _shape(p: TensorProxy) -> tuple[int, ...]:
    # with symbolic values a dimension is a proxy that has the value from when the call was traced
    return tuple(d if isinstance(d, int) else int(d.value) for d in shape_of(p))


def _elements(p: TensorProxy) -> int:
    return math.prod(_shape(p))


def _tensors(proxies: Iterable[Any]) -> list[TensorProxy]:
    return [p for p in proxies if isinstance(p, TensorProxy)]


# ---- rules ----

Shapes = Sequence[Sequence[int]]
# FLOPs from the shapes of a line's tensor arguments and of its results. Numbers and None are left out.
Flops = Callable[[Shapes, Shapes], int]


def product(left: int) -> Flops:
    """Of a matrix product whose left factor is tensor number ``left``: (..., m, k) x (..., k, n) -> (..., m, n).

    Adding a bias or another tensor is not counted.
    """
    return lambda tensors, outs: 2 * math.prod(outs[0]) * tensors[left][-1]


def convolution_flops(tensors: Shapes, outs: Shapes) -> int:
    """(n, c, ...) * (o, c / groups, kernel...) -> (n, o, ...)"""
    return 2 * math.prod(outs[0]) * math.prod(tensors[1][1:])


def _of_attention(query: int, by_key: int, by_value: int) -> Flops:
    """Of ``by_key`` products with the keys' width and ``by_value`` with the values', for each pair of a query and a
    key.

    ``query`` is its index among the tensors; keys and values follow. Queries are (..., queries, width), keys
    (..., keys, width). A causal mask does not lower the count, as in ``torch.utils.flop_counter``.
    """

    def count(tensors: Shapes, outs: Shapes) -> int:
        (*rows, width), keys, values = tensors[query : query + 3]
        return 2 * math.prod(rows) * keys[-2] * (by_key * width + by_value * values[-1])

    return count


attention_flops = _of_attention(query=0, by_key=1, by_value=1)  # Q K^T and P V
# By key: recomputed scores, gradients of Q and K. By value: gradients of P and V. The output's gradient comes first.
attention_backward_flops = _of_attention(query=1, by_key=3, by_value=2)


def _grouped_product(tensors: Shapes, outs: Shapes) -> int:
    """Products of groups of rows, each with its own matrix, (m, k) x (g, k, n) -> (m, n), and their gradients."""
    a, b = tensors[:2]
    if len(a) == 2:  # each element is multiplied by one row of one matrix
        return 2 * math.prod(a) * b[-1]
    return product(0)(tensors, outs)


def _transposed_convolution(tensors: Shapes, outs: Shapes) -> int:
    """(n, c, ...) * (c, o / groups, kernel...) -> (n, o, ...)"""
    return 2 * math.prod(tensors[0]) * math.prod(tensors[1][1:])


FLOPS: Mapping[Hashable, Flops] = {
    **dict.fromkeys((PrimIDs.LINEAR, PrimIDs.MATMUL, "torch.nn.functional.linear"), product(0)),
    **dict.fromkeys(("torch.matmul", "torch.linalg.matmul", "torch.bmm", "torch.mv"), product(0)),
    **dict.fromkeys(("torch.dot", "torch.vdot"), product(0)),
    # the last three are other names of torch.mm
    **dict.fromkeys(("torch.mm", "torch.spmm", "torch.dsmm", "torch.hsmm"), product(0)),
    **dict.fromkeys(("torch.addmm", "torch.addmv", "torch.baddbmm"), product(1)),
    **dict.fromkeys((PrimIDs._GROUPED_MM, "torch._grouped_mm"), _grouped_product),
    **dict.fromkeys((PrimIDs.CONVOLUTION, "torch.convolution"), convolution_flops),
    **dict.fromkeys((f"torch.nn.functional.conv{n}d" for n in (1, 2, 3)), convolution_flops),
    **dict.fromkeys((f"torch.conv_transpose{n}d" for n in (1, 2, 3)), _transposed_convolution),
    **dict.fromkeys((f"torch.nn.functional.conv_transpose{n}d" for n in (1, 2, 3)), _transposed_convolution),
    "torch.nn.functional.scaled_dot_product_attention": attention_flops,
    **dict.fromkeys((sdpaex.sdpea_gradfwd.id, sdpaex.sdpfa_gradfwd.id), attention_flops),
    **dict.fromkeys((sdpaex.sdpea_bwd.id, sdpaex.sdpfa_bwd.id), attention_backward_flops),
    # executors that exist only if their library is installed
    **dict.fromkeys(("cudnn_sdpa_fwd", "nv_sdpfa_fwd", "fa3_fwd"), attention_flops),
    **dict.fromkeys(("cudnn_sdpa_bwd", "nv_sdpfa_bwd", "fa3_bwd"), attention_backward_flops),
}

ATTENTIONS = frozenset({attention_flops, attention_backward_flops})


def _special(names: Iterable[str]) -> frozenset[Hashable]:
    """The symbols of Thunder, torch and shardtrace for functions with these names."""
    prims = {PrimIDs[name.upper()] for name in names if name.upper() in PrimIDs.__members__}
    prefixes = ("torch.", "torch.nn.functional.")
    kernels = (kernel_id(name + suffix) for name in names for suffix in ("", "_backward"))
    return frozenset({*prims, *(prefix + name for prefix in prefixes for name in names), *kernels})


# Functions of one element that take far longer than an addition on a CPU.
SPECIAL_NAMES = frozenset(
    """cos erf exp exp2 expm1 log log1p log2 pow rsqrt sin sqrt tanh sigmoid softplus
    elu gelu log_sigmoid logsigmoid mish selu silu softmax log_softmax""".split()  # noqa: SIM905
)
SPECIAL = _special(SPECIAL_NAMES)
