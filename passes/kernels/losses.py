"""softmax, log_softmax and cross_entropy of rows of scores, which is a line of log_softmax and one of nll_loss, as in
eager PyTorch. They save their results only."""

from __future__ import annotations

from typing import Any

from passes.kernels.registration import FLOATING, Differentiated, Gradients, implements, is_floating, kernel, like

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


def _softmax_supported(a: TensorProxy, dim: int, dtype: Any) -> bool:
    return is_floating(a) and (dtype is None or dtypes.to_dtype(dtype) in FLOATING)


def _in_dtype(forward: Symbol, backward: Symbol, a: TensorProxy, dim: int, dtype: Any) -> Differentiated:
    """Converts the input first, as eager does."""
    converted = clang.maybe_convert_to_dtype(a, dtypes.to_dtype(dtype) if dtype is not None else a.dtype)
    out = forward(converted, dim)
    return out, lambda grad: [(a, clang.maybe_convert_to_dtype(backward(grad, out, dim), a.dtype))]


@implements(ltorch._softmax, supported=_softmax_supported)
def softmax(a: TensorProxy, dim: int, *, dtype: Any = None) -> Differentiated:
    return _in_dtype(softmax_forward, softmax_backward, a, dim, dtype)


@implements(ltorch.log_softmax, supported=_softmax_supported)
def log_softmax(a: TensorProxy, dim: int, *, dtype: Any = None) -> Differentiated:
    return _in_dtype(log_softmax_forward, log_softmax_backward, a, dim, dtype)


REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as aten numbers them

# scores are (classes,) or (n, classes); ``options`` are the weights of the classes, the reduction and the ignored label
nll_loss_forward = kernel(
    "nll_loss",
    lambda scores, target, weight, reduction, ignore: (
        like(scores, target.shape if reduction == REDUCTIONS["none"] else ()), like(scores, ()),
    ),
    aten.nll_loss_forward,
)  # fmt: skip
nll_loss_backward = kernel(
    "nll_loss_backward", lambda grad, scores, target, *options: like(scores), aten.nll_loss_backward
)


def _supported(a: TensorProxy, target: TensorProxy, weight: TensorProxy | None, reduction: str, **others: Any) -> bool:
    plain = not others["label_smoothing"] and others["size_average"] is None and others["reduce"] is None
    labels = target.dtype in (dtypes.int64, dtypes.uint8) and target.ndim < a.ndim <= 2
    return plain and labels and reduction in REDUCTIONS and is_floating(a, weight)


@implements(ltorch.cross_entropy, supported=_supported, fusible=False)
def cross_entropy(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Differentiated:
    dim, options = a.ndim - 1, (weight, REDUCTIONS[reduction], ignore_index)
    scores = log_softmax_forward(a, dim)
    loss, total = nll_loss_forward(scores, target, *options)

    def gradients(grad: TensorProxy) -> Gradients:
        of_scores = nll_loss_backward(grad, scores, target, *options, total)
        return [(a, log_softmax_backward(of_scores, scores, dim))]

    return loss, gradients
