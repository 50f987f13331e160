"""The cost model: how long a collective and a line of compute will take, from a handful of measured rates.

Plain data and pure functions over the lines of a lowered trace. ``shardtrace.calibrate`` measures the rates of a
machine; the constants below stand in where nothing was measured. Nothing here imports another pass, so that a plan may
carry a cost model.

The roofline model (Williams, Waterman and Patterson, 2009): a line takes as long as its arithmetic or its memory
traffic, whichever is longer. FLOPs are those of matrix products, 2 for each multiply-add, as PyTorch's
``torch.utils.flop_counter`` counts them; all else is bound by memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

if TYPE_CHECKING:
    from passes.plan import Bucket


@dataclass(frozen=True)
class Link:
    """What joins the ranks. ``bandwidth``: bytes/s that a rank sends while it receives as many; ``latency``: seconds
    that each collective takes besides."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check_rates(self)


@dataclass(frozen=True)
class Device:
    """What computes. ``flops`` and ``half_flops``: FLOP/s of matrix products in fp32 and in bf16 or fp16;
    ``bandwidth``: bytes/s of memory, read and written; ``overhead``: seconds for each line of a trace besides;
    ``host_bandwidth``: bytes/s that are copied between its memory and the host's, either way."""

    flops: float
    half_flops: float
    bandwidth: float
    overhead: float
    host_bandwidth: float = 20e9  # of the 32 GB/s of PCIe 4.0 x16, what is left of it to a copy

    def __post_init__(self) -> None:
        _check_rates(self)


@dataclass(frozen=True)
class CostModel:
    """Seconds for what stands in a trace. ``dataclasses.asdict`` and :meth:`from_dict` are each other's inverse."""

    link: Link
    device: Device

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Raises KeyError, TypeError or ValueError if something is missing, unknown or not a rate."""
        return cls(Link(**data["link"]), Device(**data["device"]))

    def collective_seconds(self, bucket: Bucket) -> float:
        """One collective of a bucket, from issue to arrival, if nothing else is on the link.

        Each rank sends ``bytes * (N - 1) / N`` and receives as many (all_reduce: twice): by a ring as well as directly,
        and no algorithm sends less (Chan, Heimlich, Purkayastha and van de Geijn, 2007, "Collective communication").
        """
        ranks = bucket.plan.world_size
        return self.link.latency + bucket.trips * bucket.bytes * (ranks - 1) / ranks / self.link.bandwidth

    def copy_seconds(self, bucket: Bucket) -> float:
        """This rank's shards of a bucket, or of its gradients, between the memory of the host and the device's."""
        return bucket.numel * bucket.rest_dtype.bytes / self.device.host_bandwidth

    def compute_seconds(self, bsym: BoundSymbol) -> float:
        """One line of compute. 0 for a line that computes nothing (``del``, return, unpacking), and for a collective:
        that has :meth:`collective_seconds`."""
        if _is_free(bsym):
            return 0.0
        work = _work(bsym)
        arithmetic = work.full / self.device.flops + work.half / self.device.half_flops
        return self.device.overhead + max(arithmetic, bytes_moved(bsym) / self.device.bandwidth)


def _check_rates(rates: Link | Device) -> None:
    for name, value in vars(rates).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} of {type(rates).__name__} must be a number, not {value!r}")
        is_time = name in ("latency", "overhead")  # may be too short to measure; a rate of 0 would divide by zero
        if not math.isfinite(value) or value < 0 or (value == 0 and not is_time):
            raise ValueError(f"{name} of {type(rates).__name__} must be finite and positive, not {value!r}")


# ---- where nothing was measured ----
# Pessimistic about links and optimistic about devices: whoever believes that a link is slow beside the compute issues
# gathers earlier and waits for reductions later, which costs some memory; whoever believes that it is fast leaves
# compute idle.

# 1 Gbit/s, the slowest network that ranks are usually joined by; a round trip through TCP and gloo's threads.
GLOO = Link(bandwidth=0.125e9, latency=200e-6)
# A tenth of NVLink and a bit less than 100 Gbit/s InfiniBand; a kernel launch and a ring's hops over a few nodes.
NCCL = Link(bandwidth=10e9, latency=30e-6)
# Some 16 cores with AVX-512 at 2 GHz (2 units x 16 lanes x 2 FLOPs each), bf16 at twice that, eight channels of DDR4;
# calling torch from Python takes a few microseconds.
CPU = Device(flops=2e12, half_flops=4e12, bandwidth=200e9, overhead=3e-6)
# NVIDIA H100 SXM, from its data sheet: dense TF32 and bf16, HBM3; launching a kernel takes 5 us.
CUDA = Device(flops=494e12, half_flops=989e12, bandwidth=3.35e12, overhead=5e-6)


def default_cost_model(device_type: str, backend: str) -> CostModel:
    """The constants for a ``torch.device``'s type and a process group's backend.

    An accelerator other than CUDA counts as CUDA. A backend other than gloo and nccl (fake, MPI, UCC) counts as the
    one that is usual for the device.
    """
    on_cpu = device_type == "cpu"
    links = {"gloo": GLOO, "nccl": NCCL}
    return CostModel(link=links.get(backend, GLOO if on_cpu else NCCL), device=CPU if on_cpu else CUDA)


# ---- what a line does ----


class _Work(NamedTuple):
    """FLOPs by the rate at which they are done: fp32 (and fp64, which no rate is known for), and 16 bits or less."""

    full: int
    half: int


def flops(bsym: BoundSymbol) -> int:
    """FLOPs of the matrix products, convolutions and attentions in a line, its subsymbols included."""
    return sum(_work(bsym))


def bytes_moved(bsym: BoundSymbol) -> int:
    """Bytes that a line reads and writes in memory: each tensor that goes in or comes out once.

    A fusion region so moves what crosses its border. A view moves nothing, and a look-up (an embedding, an index)
    reads no more of its table than it writes.
    """
    name = bsym.sym.name
    if name in VIEWS or _is_free(bsym):
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
COLLECTIVE = "shardtrace."  # how the ids of the symbols in passes.collectives begin


def _is_free(bsym: BoundSymbol) -> bool:
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


def _work(bsym: BoundSymbol) -> _Work:
    name = bsym.sym.name
    is_vjp = name.endswith(VJP)
    rule = FLOPS.get(name[: -len(VJP)] if is_vjp else name)
    if rule is not None:
        tensors, out = _tensors(bsym.flat_proxy_args), _tensors(bsym.flat_proxy_outs)[0]
        count = 3 * rule(tensors[:-1], tensors[-1]) if is_vjp else rule(tensors, out)
        return _Work(0, count) if out.dtype.bytes <= 2 else _Work(count, 0)
    full = half = 0
    for part in bsym.subsymbols:
        work = _work(part)
        full, half = full + work.full, half + work.half
    return _Work(full, half)


# ---- FLOPs by symbol ----

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
