"""Activation functions. Each computes its gradient from its input, or from its result if that is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from passes.kernels.registration import Differentiated, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

aten = torch.ops.aten

# The scale and alpha of torch.nn.functional.selu (https://arxiv.org/abs/1706.02515, equation 2).
SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


def _forward(name: str, fn: Callable[..., torch.Tensor]) -> Symbol:
    return kernel(name, lambda a, *options: like(a), fn)


def _backward(name: str, fn: Callable[..., torch.Tensor]) -> Symbol:
    """``saved`` is the activation's input, or its result."""
    return kernel(f"{name}_backward", lambda grad, saved, *options: like(saved), fn)


def _out_of_place(a: TensorProxy, *options: Any, inplace: bool = False, **named: Any) -> bool:
    return is_floating(a) and not inplace and not any(option is True for option in options)


def _from_input(forward: Symbol, backward: Symbol, a: TensorProxy, *options: Any) -> Differentiated:
    return forward(a, *options), lambda grad: [(a, backward(grad, a, *options))]


def _of_input(name: str, forward: Any, backward: Any, *functions: Any) -> None:
    """Implements functions of a tensor alone, whose gradient follows from their input."""
    out_of, gradient_of = _forward(name, forward), _backward(name, backward)

    def activation(a: TensorProxy, inplace: bool = False) -> Differentiated:
        return _from_input(out_of, gradient_of, a)

    implements(*functions, supported=_out_of_place)(activation)


def _of_result(name: str, forward: Any, backward: Any, *functions: Any) -> None:
    """Implements functions of a tensor alone, whose gradient follows from their result."""
    out_of, gradient_of = _forward(name, forward), _backward(name, backward)

    def activation(a: TensorProxy, inplace: bool = False) -> Differentiated:
        out = out_of(a)
        return out, lambda grad: [(a, gradient_of(grad, out))]

    implements(*functions, supported=_out_of_place)(activation)


_of_result("relu", torch.relu, lambda grad, out: aten.threshold_backward(grad, out, 0), ltorch.relu)
_of_result("sigmoid", torch.sigmoid, aten.sigmoid_backward, ltorch.sigmoid)
_of_result("tanh", torch.tanh, aten.tanh_backward, ltorch.tanh, PrimIDs.TANH)
_of_input("silu", F.silu, aten.silu_backward, ltorch.silu)
_of_input("mish", F.mish, aten.mish_backward, ltorch.mish)
_of_input("hardswish", F.hardswish, aten.hardswish_backward, ltorch.hardswish)
_of_input("hardsigmoid", F.hardsigmoid, aten.hardsigmoid_backward, ltorch.hardsigmoid)


gelu_forward = _forward("gelu", lambda a, approximate: F.gelu(a, approximate=approximate))
gelu_backward = _backward("gelu", lambda grad, a, approximate: aten.gelu_backward(grad, a, approximate=approximate))


@implements(ltorch.gelu, supported=_out_of_place)
def gelu(a: TensorProxy, *, approximate: str = "none") -> Differentiated:
    return _from_input(gelu_forward, gelu_backward, a, approximate)


softplus_forward = _forward("softplus", F.softplus)
softplus_backward = _backward("softplus", aten.softplus_backward)


@implements(ltorch.softplus, supported=_out_of_place)
def softplus(a: TensorProxy, beta: float = 1.0, threshold: float = 20.0) -> Differentiated:
    return _from_input(softplus_forward, softplus_backward, a, beta, threshold)


leaky_relu_forward = _forward("leaky_relu", F.leaky_relu)
leaky_relu_backward = _backward("leaky_relu", lambda grad, a, slope: aten.leaky_relu_backward(grad, a, slope, False))


@implements(ltorch.leaky_relu, supported=_out_of_place)
def leaky_relu(a: TensorProxy, negative_slope: float = 0.01, inplace: bool = False) -> Differentiated:
    return _from_input(leaky_relu_forward, leaky_relu_backward, a, negative_slope)


# elu(a) = scale * (a if a > 0 else alpha * (exp(input_scale * a) - 1))
elu_forward = _forward("elu", aten.elu)
elu_backward = _backward(
    "elu", lambda grad, a, alpha, scale, input_scale: aten.elu_backward(grad, alpha, scale, input_scale, False, a)
)


@implements(ltorch.elu, supported=_out_of_place)
def elu(a: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> Differentiated:
    return _from_input(elu_forward, elu_backward, a, alpha, 1, 1)


@implements(ltorch.selu, supported=_out_of_place)
def selu(a: TensorProxy, inplace: bool = False) -> Differentiated:
    return _from_input(elu_forward, elu_backward, a, SELU_ALPHA, SELU_SCALE, 1)


@implements(ltorch.celu, supported=_out_of_place)
def celu(a: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> Differentiated:
    return _from_input(elu_forward, elu_backward, a, alpha, 1, 1 / alpha)


hardtanh_forward = _forward("hardtanh", F.hardtanh)
hardtanh_backward = _backward("hardtanh", aten.hardtanh_backward)


@implements(ltorch.hardtanh, supported=_out_of_place)
def hardtanh(a: TensorProxy, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Differentiated:
    return _from_input(hardtanh_forward, hardtanh_backward, a, min_val, max_val)


@implements(ltorch.relu6, supported=_out_of_place)
def relu6(a: TensorProxy, inplace: bool = False) -> Differentiated:
    return _from_input(hardtanh_forward, hardtanh_backward, a, 0.0, 6.0)


def _halved(a: TensorProxy, dim: int) -> TensorProxy:
    dim %= a.ndim
    return like(a, (*a.shape[:dim], a.shape[dim] // 2, *a.shape[dim + 1 :]))


glu_forward = kernel("glu", _halved, F.glu)
glu_backward = kernel("glu_backward", lambda grad, a, dim: like(a), aten.glu_backward)


@implements(ltorch.glu, supported=_out_of_place)
def glu(a: TensorProxy, dim: int = -1) -> Differentiated:
    return _from_input(glu_forward, glu_backward, a, dim)
