"""softmax and log_softmax. Both save their result only."""

from __future__ import annotations

from typing import Any

from passes.kernels.registration import FLOATING, Differentiated, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
from thunder import clang
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

aten = torch.ops.aten


def _differentiated(name: str, forward: Any, backward: Any) -> tuple[Symbol, Symbol]:
    return (
        kernel(name, lambda a, dim: like(a), lambda a, dim: forward(a, dim, False)),
        kernel(
            f"{name}_backward",
            lambda grad, out, dim: like(out),
            lambda grad, out, dim: backward(grad, out, dim, out.dtype),
        ),
    )


softmax_forward, softmax_backward = _differentiated("softmax", aten._softmax, aten._softmax_backward_data)
log_softmax_forward, log_softmax_backward = _differentiated(
    "log_softmax", aten._log_softmax, aten._log_softmax_backward_data
)


def _supported(a: TensorProxy, dim: int, dtype: Any) -> bool:
    return is_floating(a) and (dtype is None or dtypes.to_dtype(dtype) in FLOATING)


def _in_dtype(forward: Symbol, backward: Symbol, a: TensorProxy, dim: int, dtype: Any) -> Differentiated:
    """Converts the input first, as eager does."""
    converted = clang.maybe_convert_to_dtype(a, dtypes.to_dtype(dtype) if dtype is not None else a.dtype)
    out = forward(converted, dim)
    return out, lambda grad: [(a, clang.maybe_convert_to_dtype(backward(grad, out, dim), a.dtype))]


@implements(ltorch._softmax, supported=_supported)
def softmax(a: TensorProxy, dim: int, *, dtype: Any = None) -> Differentiated:
    return _in_dtype(softmax_forward, softmax_backward, a, dim, dtype)


@implements(ltorch.log_softmax, supported=_supported)
def log_softmax(a: TensorProxy, dim: int, *, dtype: Any = None) -> Differentiated:
    return _in_dtype(log_softmax_forward, log_softmax_backward, a, dim, dtype)
