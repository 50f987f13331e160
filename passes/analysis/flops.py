"""What a line of compute does: the FLOPs of its matrix products and the bytes that it moves.

FLOPs are 2 for each multiply-add, as PyTorch's ``torch.utils.flop_counter`` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol


class Work(NamedTuple):
    """FLOPs by the rate at which they are done: fp32 (and fp64, which no rate is known for), and 16 bits or less."""

    full: int
    half: int


def flops(bsym: BoundSymbol) -> int:
    """FLOPs of the matrix products, convolutions and attentions in a line, its subsymbols included."""
    return sum(work(bsym))


def bytes_moved(bsym: BoundSymbol) -> int:
    """Bytes that a line reads and writes in memory: each tensor that goes in or comes out once.

    A fusion region so moves what crosses its border. A view moves nothing, and a look-up (an embedding, an index)
    reads no more of its table than it writes.
    """
    name = bsym.sym.name
    if name in VIEWS or is_free(bsym):
        return 0
    read = _sizes(bsym.flat_proxy_args)
    if name in INDEXING and len(read) == 1:
        return 0  # slices and numbers alone: a view
    written = _sizes(bsym.flat_proxy_outs)
    if name in CASTS and len(read) == len(written) == 1 and _same_kind(bsym.args[0], bsym.flat_proxy_outs[0]):
        return 0
    if name in LOOK_UPS or name in INDEXING:
        most = sum(written.values())
        return most + sum(min(size, most) for size in read.values())
    return sum((read | written).values())


# Lines that compute nothing.
FREE = frozenset(
    {"python_del", "python_return", "unpack_trivial", "unpack_sequence", "clear_mutable_collection", "comment", "sink"}
)


# Lines whose result shares the memory of their first argument. A reshape may have to copy, which its proxies do not
# tell: their strides are unknown.
VIEWS = frozenset(
    {"broadcast_in_dim", "chunk", "diagonal", "expand", "flatten", "movedim", "narrow", "permute", "reshape", "select"}
    | {"shallow_copy", "shape", "slice_prim", "split", "squeeze", "stop_gradient", "tensor_split", "transpose"}
    | {"unbind", "unfold", "unsqueeze", "update_aliases", "view", "view_as", "atleast_1d", "atleast_2d", "atleast_3d"}
    | {"torch_prims_reshape_impl", "torch_slice_prim_impl"}
)


INDEXING = frozenset({"getitem", "__getitem__"})  # a view, or a look-up if it is indexed by a tensor


CASTS = frozenset({"to", "convert_element_type"})  # to what it is already: nothing


LOOK_UPS = frozenset({"embedding", "gather", "index_select", "take", "take_along_axis", "take_along_dim"})


COLLECTIVE = "shardtrace."  # how the ids of the symbols in passes.comm.symbols begin


def is_free(bsym: BoundSymbol) -> bool:
    return bsym.sym.name in FREE or (isinstance(bsym.sym.id, str) and bsym.sym.id.startswith(COLLECTIVE))


def _sizes(proxies: Iterable[Any]) -> dict[str, int]:
    """Bytes of each tensor, by name: one that is passed twice is read once."""
    return {p.name: _elements(p) * p.dtype.bytes for p in proxies if isinstance(p, TensorProxy)}


def _same_kind(a: TensorProxy, b: TensorProxy) -> bool:
    return bool(a.dtype == b.dtype and a.device == b.device)


def _shape(p: TensorProxy) -> tuple[int, ...]:
    # with symbolic values a dim is a proxy, known by the value that it had when the call was traced
    return tuple(d if isinstance(d, int) else int(d.value) for d in p._shape)


def _elements(p: TensorProxy) -> int:
    return math.prod(_shape(p))


def work(bsym: BoundSymbol) -> Work:
    name = bsym.sym.name
    is_vjp = name.endswith(VJP)
    rule = FLOPS.get(name[: -len(VJP)] if is_vjp else name)
    if rule is not None:
        tensors, out = _tensors(bsym.flat_proxy_args), _tensors(bsym.flat_proxy_outs)[0]
        count = 3 * rule(tensors[:-1], tensors[-1]) if is_vjp else rule(tensors, out)
        return Work(0, count) if out.dtype.bytes <= 2 else Work(count, 0)
    full = half = 0
    for part in bsym.subsymbols:
        done = work(part)
        full, half = full + done.full, half + done.half
    return Work(full, half)


# Of tensor arguments and the first output. (A number or None among the arguments is left out.)
Rule = Callable[[Sequence[TensorProxy], TensorProxy], int]


# How the names end of the gradients of functions that Thunder takes from torch as they are: such a line takes the
# arguments and the output's gradient, computes the output again and then, as a rule, two gradients of the same cost.
VJP = "_vjp"


def _tensors(proxies: Iterable[Any]) -> list[TensorProxy]:
    return [p for p in proxies if isinstance(p, TensorProxy)]


def _product(left: int) -> Rule:
    """A matrix product whose left factor is tensor argument number ``left``: (..., m, k) x (..., k, n) -> (..., m, n).

    A bias is not counted, nor a tensor to which the product is added.
    """
    return lambda tensors, out: 2 * _elements(out) * _shape(tensors[left])[-1]


def _grouped_product(tensors: Sequence[TensorProxy], out: TensorProxy) -> int:
    """Products of groups of rows of one matrix with a matrix each, (m, k) x (g, k, n) -> (m, n), and its gradients."""
    a, b = tensors[:2]
    if len(_shape(a)) == 2:  # each element meets one row of one matrix
        return 2 * _elements(a) * _shape(b)[-1]
    return _product(0)(tensors, out)


def _convolution(tensors: Sequence[TensorProxy], out: TensorProxy) -> int:
    """(n, c, ...) * (o, c / groups, kernel...) -> (n, o, ...)"""
    return 2 * _elements(out) * math.prod(_shape(tensors[1])[1:])


def _transposed_convolution(tensors: Sequence[TensorProxy], out: TensorProxy) -> int:
    """(n, c, ...) * (c, o / groups, kernel...) -> (n, o, ...)"""
    return 2 * _elements(tensors[0]) * math.prod(_shape(tensors[1])[1:])


def _attention(query: int, by_key: int, by_value: int) -> Rule:
    """Fused attention: so many products with the keys' width and with the values', for each query and each key.

    ``query`` is its place among the tensor arguments; keys and values follow. Queries are (..., queries, width), keys
    (..., keys, width). A causal mask is not counted off, as in ``torch.utils.flop_counter``.
    """

    def count(tensors: Sequence[TensorProxy], out: TensorProxy) -> int:
        q, k, v = tensors[query : query + 3]
        *rows, width = _shape(q)
        return 2 * math.prod(rows) * _shape(k)[-2] * (by_key * width + by_value * _shape(v)[-1])

    return count


_attention_forward = _attention(query=0, by_key=1, by_value=1)  # Q K^T and P V


# The scores again, and the gradients of Q and K; of P and V. The output's gradient comes first.
_attention_backward = _attention(query=1, by_key=3, by_value=2)


# By name, which a symbol of Thunder's, its prim and its executors' versions share.
FLOPS: Mapping[str, Rule] = {
    **dict.fromkeys(("linear", "matmul", "linalg_matmul", "bmm", "mv", "dot", "vdot"), _product(0)),
    **dict.fromkeys(("mm", "spmm", "dsmm", "hsmm"), _product(0)),  # the last three are other names of torch.mm
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), _product(1)),
    "_grouped_mm": _grouped_product,
    **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    "scaled_dot_product_attention": _attention_forward,
    "sdpaex_grad_forward_scaled_dot_product_efficient_attention": _attention_forward,
    "sdpafx_grad_forward_scaled_dot_product_efficient_attention": _attention_forward,
    "sdpaex_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "sdpafx_scaled_dot_product_efficient_attention_backward": _attention_backward,
    **dict.fromkeys(("cudnn_sdpa_fwd", "nv_sdpfa_fwd", "fa3_fwd"), _attention_forward),
    **dict.fromkeys(("cudnn_sdpa_bwd", "nv_sdpfa_bwd", "fa3_bwd"), _attention_backward),
}
