"""Losses. Cross entropy is a line of log_softmax and one of nll_loss, as in eager PyTorch."""

from __future__ import annotations

from typing import Any

from passes.kernels.registration import Differentiated, Gradients, implements, is_floating, kernel, like
from passes.kernels.softmax import log_softmax_backward, log_softmax_forward

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

aten = torch.ops.aten

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as aten numbers them
IGNORE = -100  # torch's default ignore_index


def _reduced(a: TensorProxy, reduction: str, shape: Any = None) -> TensorProxy:
    return like(a, (a.shape if shape is None else shape) if reduction == "none" else ())


# ---- nll_loss and cross_entropy: scores are (classes,), (n, classes) or (n, classes, ...) ----


def _flat(scores: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of more than two dimensions as (n, classes, 1, rest), which nll_loss2d takes."""
    n, classes = scores.shape[:2]
    return scores.reshape(n, classes, 1, -1), target.reshape(n, 1, -1)


def _nll_loss(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, ignore: int
) -> tuple[torch.Tensor, torch.Tensor]:
    options = (weight, REDUCTIONS[reduction], ignore)
    if scores.ndim <= 2:
        found: tuple[torch.Tensor, torch.Tensor] = aten.nll_loss_forward(scores, target, *options)
        return found
    loss, total = aten.nll_loss2d_forward(*_flat(scores, target), *options)
    return (loss.reshape(target.shape) if reduction == "none" else loss), total


def _nll_loss_backward(
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    total: torch.Tensor,
    reduction: str,
    ignore: int,
) -> torch.Tensor:
    options = (weight, REDUCTIONS[reduction], ignore, total)
    if scores.ndim <= 2:
        found: torch.Tensor = aten.nll_loss_backward(grad, scores, target, *options)
        return found
    flat_scores, flat_target = _flat(scores, target)
    flat_grad = grad.reshape(flat_target.shape) if reduction == "none" else grad
    return aten.nll_loss2d_backward(flat_grad, flat_scores, flat_target, *options).reshape(scores.shape)


nll_loss_forward = kernel(
    "nll_loss",
    lambda scores, target, weight, reduction, ignore: (_reduced(scores, reduction, target.shape), like(scores, ())),
    _nll_loss,
)
nll_loss_backward = kernel(
    "nll_loss_backward",
    lambda grad, scores, target, weight, total, reduction, ignore: like(scores),
    _nll_loss_backward,
)


def _labels(scores: TensorProxy, target: TensorProxy, weight: TensorProxy | None) -> bool:
    return is_floating(scores, weight) and target.dtype in (dtypes.int64, dtypes.uint8) and scores.ndim > target.ndim


def _nll_loss_supported(
    a: TensorProxy, target: TensorProxy, weight: Any = None, ignore_index: Any = None, reduction: str = "mean"
) -> bool:
    return _labels(a, target, weight) and reduction in REDUCTIONS


@implements(ltorch.nll_loss, supported=_nll_loss_supported, fusible=False)
def nll_loss(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Differentiated:
    ignore = IGNORE if ignore_index is None else ignore_index
    loss, total = nll_loss_forward(a, target, weight, reduction, ignore)
    return loss, lambda grad: [(a, nll_loss_backward(grad, a, target, weight, total, reduction, ignore))]


def _smoothing_loss(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, ignore: int
) -> torch.Tensor:
    """The loss against labels that are equally probable: minus the (weighted) sum over classes."""
    dim = min(scores.ndim - 1, 1)
    ignored = target == ignore
    loss = scores.sum(dim) if weight is None else torch.tensordot(scores, weight, ([dim], [0]))
    loss.neg_().masked_fill_(ignored, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / _weight_of(target, ignored, weight).sum()


def _weight_of(target: torch.Tensor, ignored: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The weight of each label in the mean; 0 if it is ignored."""
    if weight is None:
        return ignored.logical_not()
    return weight[target.masked_fill(ignored, 0)].masked_fill_(ignored, 0)


def _smoothing_loss_backward(
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    ignore: int,
) -> torch.Tensor:
    dim = min(scores.ndim - 1, 1)
    ignored = target == ignore
    if reduction == "mean":
        grad = grad / _weight_of(target, ignored, weight).sum()
    rows = grad.expand(target.shape).neg().masked_fill_(ignored, 0).unsqueeze(dim)
    if weight is None:
        return rows.expand(scores.shape).contiguous()
    return rows * weight.view(-1, *(1 for _ in range(scores.ndim - dim - 1)))


smoothing_loss_forward = kernel(
    "smoothing_loss",
    lambda scores, target, weight, reduction, ignore: _reduced(scores, reduction, target.shape),
    _smoothing_loss,
)
smoothing_loss_backward = kernel(
    "smoothing_loss_backward",
    lambda grad, scores, target, weight, reduction, ignore: like(scores),
    _smoothing_loss_backward,
)


def _cross_entropy_supported(
    a: TensorProxy,
    target: TensorProxy,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = IGNORE,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    return size_average is None and reduce is None and _nll_loss_supported(a, target, weight, ignore_index, reduction)


@implements(ltorch.cross_entropy, supported=_cross_entropy_supported, fusible=False)
def cross_entropy(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: None = None,
    ignore_index: int = IGNORE,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Differentiated:
    dim = min(a.ndim - 1, 1)
    scores = log_softmax_forward(a, dim)
    loss, gradient = nll_loss(scores, target, weight, ignore_index, reduction)
    if not label_smoothing:
        return loss, lambda grad: [(a, log_softmax_backward(_only(gradient(grad)), scores, dim))]
    classes = a.shape[dim]
    smooth = smoothing_loss_forward(scores, target, weight, reduction, ignore_index)
    smoothed = loss * (1 - label_smoothing) + smooth * (label_smoothing / classes)

    def gradients(grad: TensorProxy) -> Gradients:
        of_loss = _only(gradient(grad * (1 - label_smoothing)))
        of_smooth = smoothing_loss_backward(
            grad * (label_smoothing / classes), scores, target, weight, reduction, ignore_index
        )
        return [(a, log_softmax_backward(of_loss + of_smooth, scores, dim))]

    return smoothed, gradients


def _only(gradients: Gradients) -> TensorProxy:
    ((_, gradient),) = gradients
    assert gradient is not None
    return gradient


# ---- mse_loss ----

mse_loss_forward = kernel(
    "mse_loss",
    lambda a, target, reduction: _reduced(a, reduction),
    lambda a, target, reduction: F.mse_loss(a, target, reduction=reduction),
)
mse_loss_backward = kernel(
    "mse_loss_backward",
    lambda grad, a, target, reduction: like(a),
    lambda grad, a, target, reduction: aten.mse_loss_backward(grad, a, target, REDUCTIONS[reduction]),
)


def _mse_supported(
    a: TensorProxy, target: TensorProxy, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> bool:
    return size_average is None and reduce is None and reduction in REDUCTIONS and _alike(a, target)


def _alike(a: TensorProxy, b: TensorProxy) -> bool:
    return isinstance(b, TensorProxy) and is_floating(a, b) and tuple(a.shape) == tuple(b.shape)


@implements(ltorch.mse_loss, supported=_mse_supported)
def mse_loss(
    a: TensorProxy, target: TensorProxy, size_average: None = None, reduce: None = None, reduction: str = "mean"
) -> Differentiated:
    return mse_loss_forward(a, target, reduction), lambda grad: [
        (a, mse_loss_backward(grad, a, target, reduction)),
        (target, mse_loss_backward(grad, target, a, reduction)),
    ]


# ---- binary_cross_entropy_with_logits ----


def _bce_backward(
    grad: torch.Tensor,
    a: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    pos_weight: torch.Tensor | None,
    reduction: str,
) -> torch.Tensor:
    """With p = pos_weight * target: (p + 1 - target) * sigmoid(a) - p, times the weight."""
    if pos_weight is None:
        found = torch.sigmoid(a).sub_(target)
    else:
        positive = pos_weight * target
        found = (positive + 1).sub_(target).mul_(torch.sigmoid(a)).sub_(positive)
    return _weighted(found, grad, weight, reduction)


def _bce_backward_target(
    grad: torch.Tensor, a: torch.Tensor, weight: torch.Tensor | None, pos_weight: torch.Tensor | None, reduction: str
) -> torch.Tensor:
    """log(sigmoid(-a)) - pos_weight * log(sigmoid(a)), which is -a without pos_weight, times the weight."""
    found = a.neg() if pos_weight is None else F.logsigmoid(-a).sub_(F.logsigmoid(a).mul_(pos_weight))
    return _weighted(found, grad, weight, reduction)


def _weighted(found: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor | None, reduction: str) -> torch.Tensor:
    """The gradient of the loss, from that of each element before weights and the reduction. In place."""
    if weight is not None:
        found.mul_(weight)
    return found.mul_(grad / found.numel() if reduction == "mean" else grad)


bce_forward = kernel(
    "binary_cross_entropy_with_logits",
    lambda a, target, weight, pos_weight, reduction: _reduced(a, reduction),
    lambda a, target, weight, pos_weight, reduction: F.binary_cross_entropy_with_logits(
        a, target, weight, reduction=reduction, pos_weight=pos_weight
    ),
)
bce_backward = kernel(
    "binary_cross_entropy_with_logits_backward",
    lambda grad, a, target, weight, pos_weight, reduction: like(a),
    _bce_backward,
)
bce_backward_target = kernel(
    "binary_cross_entropy_with_logits_backward_target",
    lambda grad, a, weight, pos_weight, reduction: like(a),
    _bce_backward_target,
)


def _bce_supported(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: TensorProxy | None = None,
) -> bool:
    constant = not any(isinstance(t, TensorProxy) and t.requires_grad for t in (weight, pos_weight))
    deprecated = size_average is not None or reduce is not None
    return (
        constant
        and not deprecated
        and reduction in REDUCTIONS
        and _alike(a, target)
        and is_floating(a, weight, pos_weight)
    )


@implements("torch.nn.functional.binary_cross_entropy_with_logits", supported=_bce_supported)
def binary_cross_entropy_with_logits(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: TensorProxy | None = None,
) -> Differentiated:
    loss = bce_forward(a, target, weight, pos_weight, reduction)
    return loss, lambda grad: [
        (a, bce_backward(grad, a, target, weight, pos_weight, reduction)),
        (target, bce_backward_target(grad, a, weight, pos_weight, reduction)),
    ]
