"""Activation functions. Each computes its gradient from its input, or from its result if that is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from passes.kernels.registration import Gradients, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

aten = torch.ops.aten

Activated = tuple[TensorProxy, Callable[[TensorProxy], Gradients]]

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


def _from_input(forward: Symbol, backward: Symbol, a: TensorProxy, *options: Any) -> Activated:
    return forward(a, *options), lambda grad: [(a, backward(grad, a, *options))]


def _from_result(forward: Symbol, backward: Symbol, a: TensorProxy, *options: Any) -> Activated:
    out = forward(a, *options)
    return out, lambda grad: [(a, backward(grad, out, *options))]


relu_forward = _forward("relu", torch.relu)
relu_backward = _backward("relu", lambda grad, out: aten.threshold_backward(grad, out, 0))


@implements(ltorch.relu, supported=_out_of_place)
def relu(a: TensorProxy, inplace: bool = False) -> Activated:
    return _from_result(relu_forward, relu_backward, a)


sigmoid_forward = _forward("sigmoid", torch.sigmoid)
sigmoid_backward = _backward("sigmoid", aten.sigmoid_backward)


@implements(ltorch.sigmoid, supported=_out_of_place)
def sigmoid(a: TensorProxy) -> Activated:
    return _from_result(sigmoid_forward, sigmoid_backward, a)


tanh_forward = _forward("tanh", torch.tanh)
tanh_backward = _backward("tanh", aten.tanh_backward)


@implements(ltorch.tanh, PrimIDs.TANH, supported=_out_of_place)
def tanh(a: TensorProxy) -> Activated:
    return _from_result(tanh_forward, tanh_backward, a)


gelu_forward = _forward("gelu", lambda a, approximate: F.gelu(a, approximate=approximate))
gelu_backward = _backward("gelu", lambda grad, a, approximate: aten.gelu_backward(grad, a, approximate=approximate))


@implements(ltorch.gelu, supported=_out_of_place)
def gelu(a: TensorProxy, *, approximate: str = "none") -> Activated:
    return _from_input(gelu_forward, gelu_backward, a, approximate)


silu_forward = _forward("silu", F.silu)
silu_backward = _backward("silu", aten.silu_backward)


@implements(ltorch.silu, supported=_out_of_place)
def silu(a: TensorProxy, inplace: bool = False) -> Activated:
    return _from_input(silu_forward, silu_backward, a)


mish_forward = _forward("mish", F.mish)
mish_backward = _backward("mish", aten.mish_backward)


@implements(ltorch.mish, supported=_out_of_place)
def mish(a: TensorProxy, inplace: bool = False) -> Activated:
    return _from_input(mish_forward, mish_backward, a)


hardswish_forward = _forward("hardswish", F.hardswish)
hardswish_backward = _backward("hardswish", aten.hardswish_backward)


@implements(ltorch.hardswish, supported=_out_of_place)
def hardswish(a: TensorProxy, inplace: bool = False) -> Activated:
    return _from_input(hardswish_forward, hardswish_backward, a)


hardsigmoid_forward = _forward("hardsigmoid", F.hardsigmoid)
hardsigmoid_backward = _backward("hardsigmoid", aten.hardsigmoid_backward)


@implements(ltorch.hardsigmoid, supported=_out_of_place)
def hardsigmoid(a: TensorProxy, inplace: bool = False) -> Activated:
    return _from_input(hardsigmoid_forward, hardsigmoid_backward, a)


softplus_forward = _forward("softplus", F.softplus)
softplus_backward = _backward("softplus", aten.softplus_backward)


@implements(ltorch.softplus, supported=_out_of_place)
def softplus(a: TensorProxy, beta: float = 1.0, threshold: float = 20.0) -> Activated:
    return _from_input(softplus_forward, softplus_backward, a, beta, threshold)


leaky_relu_forward = _forward("leaky_relu", F.leaky_relu)
leaky_relu_backward = _backward("leaky_relu", lambda grad, a, slope: aten.leaky_relu_backward(grad, a, slope, False))


@implements(ltorch.leaky_relu, supported=_out_of_place)
def leaky_relu(a: TensorProxy, negative_slope: float = 0.01, inplace: bool = False) -> Activated:
    return _from_input(leaky_relu_forward, leaky_relu_backward, a, negative_slope)


# elu(a) = scale * (a if a > 0 else alpha * (exp(input_scale * a) - 1))
elu_forward = _forward("elu", aten.elu)
elu_backward = _backward(
    "elu", lambda grad, a, alpha, scale, input_scale: aten.elu_backward(grad, alpha, scale, input_scale, False, a)
)


@implements(ltorch.elu, supported=_out_of_place)
def elu(a: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> Activated:
    return _from_input(elu_forward, elu_backward, a, alpha, 1, 1)


@implements(ltorch.selu, supported=_out_of_place)
def selu(a: TensorProxy, inplace: bool = False) -> Activated:
    return _from_input(elu_forward, elu_backward, a, SELU_ALPHA, SELU_SCALE, 1)


@implements(ltorch.celu, supported=_out_of_place)
def celu(a: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> Activated:
    return _from_input(elu_forward, elu_backward, a, alpha, 1, 1 / alpha)


hardtanh_forward = _forward("hardtanh", F.hardtanh)
hardtanh_backward = _backward("hardtanh", aten.hardtanh_backward)


@implements(ltorch.hardtanh, supported=_out_of_place)
def hardtanh(a: TensorProxy, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Activated:
    return _from_input(hardtanh_forward, hardtanh_backward, a, min_val, max_val)


@implements(ltorch.relu6, supported=_out_of_place)
def relu6(a: TensorProxy, inplace: bool = False) -> Activated:
    return _from_input(hardtanh_forward, hardtanh_backward, a, 0.0, 6.0)


def _halved(a: TensorProxy, dim: int) -> TensorProxy:
    dim %= a.ndim
    return like(a, (*a.shape[:dim], a.shape[dim] // 2, *a.shape[dim + 1 :]))


glu_forward = kernel("glu", _halved, F.glu)
glu_backward = kernel("glu_backward", lambda grad, a, dim: like(a), aten.glu_backward)


@implements(ltorch.glu, supported=_out_of_place)
def glu(a: TensorProxy, dim: int = -1) -> Activated:
    return _from_input(glu_forward, glu_backward, a, dim)
