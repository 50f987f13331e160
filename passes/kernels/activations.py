"""Activation functions. Each computes its gradient from its input, or from its result if that is enough."""

from __future__ import annotations

from typing import Any

from passes.kernels.registration import Differentiated, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.prims import PrimIDs
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
