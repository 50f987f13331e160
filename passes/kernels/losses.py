"""cross_entropy of rows of scores: a line of log_softmax and one of nll_loss, as in eager PyTorch."""

from __future__ import annotations

from typing import Any

from passes.kernels.registration import Differentiated, Gradients, implements, is_floating, kernel, like
from passes.kernels.softmax import log_softmax_backward, log_softmax_forward

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

aten = torch.ops.aten

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
