"""Functions of single elements: activations, products, chunk, and dropout, which saves its mask, one byte for each
element.

The mask of a dropout is a line of its own, so that a checkpointed block saves nothing else.
"""

from __future__ import annotations

from typing import Any

from passes.comm.properties import Property
from passes.compat.lines import shape_of
from passes.kernels.registration import HALF, Differentiated, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.devices import DeviceType, to_device
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

aten = torch.ops.aten


def _kernels(name: str, forward: Any, backward: Any) -> tuple[Symbol, Symbol]:
    """``backward`` takes the result's gradient, then the activation's input or result."""
    return (
        kernel(name, lambda a, *options: like(a), forward),
        kernel(f"{name}_backward", lambda grad, saved, *options: like(saved), backward),
    )


def _out_of_place(a: TensorProxy, inplace: bool, **options: Any) -> bool:
    return is_floating(a) and not inplace


def _from_input(kernels: tuple[Symbol, Symbol], a: TensorProxy, *options: Any) -> Differentiated:
    forward, backward = kernels
    return forward(a, *options), lambda grad: [(a, backward(grad, a, *options))]


def _implement(*functions: Any, kernels: tuple[Symbol, Symbol], of_result: bool = False) -> None:
    forward, backward = kernels

    @implements(*functions, supported=_out_of_place)
    def activation(a: TensorProxy, inplace: bool = False) -> Differentiated:
        out = forward(a)
        return out, lambda grad: [(a, backward(grad, out if of_result else a))]


_implement(
    ltorch.relu,
    kernels=_kernels("relu", torch.relu, lambda grad, out: aten.threshold_backward(grad, out, 0)),
    of_result=True,
)
_implement(ltorch.sigmoid, kernels=_kernels("sigmoid", torch.sigmoid, aten.sigmoid_backward), of_result=True)
_implement(ltorch.tanh, PrimIDs.TANH, kernels=_kernels("tanh", torch.tanh, aten.tanh_backward), of_result=True)
_implement(ltorch.silu, kernels=_kernels("silu", F.silu, aten.silu_backward))
_implement(ltorch.mish, kernels=_kernels("mish", F.mish, aten.mish_backward))

GELU = _kernels(
    "gelu",
    lambda a, approximate: F.gelu(a, approximate=approximate),
    lambda grad, a, approximate: aten.gelu_backward(grad, a, approximate=approximate),
)


@implements(ltorch.gelu, supported=lambda a, approximate: is_floating(a))
def gelu(a: TensorProxy, *, approximate: str = "none") -> Differentiated:
    return _from_input(GELU, a, approximate)


SOFTPLUS = _kernels("softplus", F.softplus, aten.softplus_backward)


@implements(ltorch.softplus, supported=lambda a, **options: is_floating(a))
def softplus(a: TensorProxy, beta: float = 1.0, threshold: float = 20.0) -> Differentiated:
    return _from_input(SOFTPLUS, a, beta, threshold)


LEAKY_RELU = _kernels(
    "leaky_relu", F.leaky_relu, lambda grad, a, slope: aten.leaky_relu_backward(grad, a, slope, False)
)


@implements(ltorch.leaky_relu, supported=_out_of_place)
def leaky_relu(a: TensorProxy, negative_slope: float = 0.01, inplace: bool = False) -> Differentiated:
    return _from_input(LEAKY_RELU, a, negative_slope)


# elu(a) = scale * (a if a > 0 else alpha * (exp(a) - 1))
ELU = _kernels("elu", aten.elu, lambda grad, a, alpha, scale: aten.elu_backward(grad, alpha, scale, 1, False, a))
# of torch.nn.functional.selu (https://arxiv.org/abs/1706.02515, equation 2)
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@implements(ltorch.elu, supported=_out_of_place)
def elu(a: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> Differentiated:
    return _from_input(ELU, a, alpha, 1)


@implements(ltorch.selu, supported=_out_of_place)
def selu(a: TensorProxy, inplace: bool = False) -> Differentiated:
    return _from_input(ELU, a, SELU_ALPHA, SELU_SCALE)


def _product_meta(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    return like(a, torch.broadcast_shapes(shape_of(a), shape_of(b)))


mul_forward = kernel("mul", _product_meta, torch.mul)


@implements(ltorch.mul, supported=lambda a, b: is_floating(a, b) and a.dtype in HALF)
def mul(a: TensorProxy, b: TensorProxy) -> Differentiated:
    return mul_forward(a, b), lambda grad: [
        (a, _summed_to(a, mul_forward(grad, b))),
        (b, _summed_to(b, mul_forward(grad, a))),
    ]


def _summed_to(a: TensorProxy, grad: TensorProxy) -> TensorProxy:
    """The gradient of ``a``, which was broadcast to the shape of ``grad``."""
    shape, new = shape_of(a), len(shape_of(grad)) - len(shape_of(a))
    dims = [i for i, d in enumerate(shape_of(grad)) if i < new or shape[i - new] != d]
    return ltorch.reshape(ltorch.sum(grad, dims), shape) if dims else grad


def _chunk_meta(a: TensorProxy, chunks: int, dim: int) -> tuple[TensorProxy, ...]:
    return tuple(like(a, part.shape) for part in torch.empty(shape_of(a), device="meta").chunk(chunks, dim))


chunk_forward = kernel("chunk", _chunk_meta, torch.chunk, tags=(Property.VIEW,))


@implements(ltorch.chunk, supported=lambda a, **others: is_floating(a))
def chunk(a: TensorProxy, chunks: int, dim: int = 0) -> Differentiated:
    return chunk_forward(a, chunks, dim), lambda *grads: [(a, ltorch.cat(grads, dim))]


dropout_mask = kernel(
    "dropout_mask",
    lambda shape, p, device: TensorProxy(
        shape=shape, dtype=dtypes.bool8, device=to_device(device), requires_grad=False
    ),
    lambda shape, p, device: torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p),
    tags=(Property.RANDOM, OpTags.RANDOM_OP),
)
# a * mask * scale; its gradient is the same function of the result's gradient
dropout_forward = kernel(
    "dropout", lambda a, mask, scale: like(a), lambda a, mask, scale: torch.mul(a, mask).mul_(scale)
)


@implements(dropout_forward, supported=lambda a, mask, scale: True)
def masked(a: TensorProxy, mask: TensorProxy, scale: float) -> Differentiated:
    return dropout_forward(a, mask, scale), lambda grad: [(a, dropout_forward(grad, mask, scale))]


def _supported(a: TensorProxy, p: float, training: bool, inplace: bool) -> bool:
    return is_floating(a) and training and not inplace and isinstance(p, float) and 0 < p < 1


@implements(ltorch.dropout, supported=_supported)
def dropout(a: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> Differentiated:
    return masked(a, dropout_mask(tuple(a.shape), p, a.device.device_str()), _scale(a, p))


def _scale(a: TensorProxy, p: float) -> float:
    """The factor of the elements that are kept. On a CPU, torch rounds it to the dtype."""
    if a.device.devicetype is not DeviceType.CPU:
        return 1 / (1 - p)
    return torch.ones((), dtype=dtypes.to_torch_dtype(a.dtype)).div_(1 - p).item()
