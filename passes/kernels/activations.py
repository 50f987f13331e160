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


def _implement(*functions: Any, kernels: tuple[Symbol, Symbol], of_result: bool = False) -> None:
    forward, backward = kernels

    @implements(*functions, supported=lambda a, inplace: is_floating(a) and not inplace)
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

gelu_forward, gelu_backward = _kernels(
    "gelu",
    lambda a, approximate: F.gelu(a, approximate=approximate),
    lambda grad, a, approximate: aten.gelu_backward(grad, a, approximate=approximate),
)


@implements(ltorch.gelu, supported=lambda a, approximate: is_floating(a))
def gelu(a: TensorProxy, *, approximate: str = "none") -> Differentiated:
    return gelu_forward(a, approximate), lambda grad: [(a, gelu_backward(grad, a, approximate))]
