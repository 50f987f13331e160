"""Normalizations. Each saves its input and its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from passes.comm.properties import Property
from passes.kernels.registration import HALF, Differentiated, Gradients, implements, is_floating, kernel, like, present

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy

aten = torch.ops.aten

Mask = tuple[bool, ...]


def _same(*results: TensorProxy | None) -> tuple[TensorProxy | None, ...]:
    """Gradients have the shapes of what they are gradients of."""
    return tuple(like(r) if r is not None else None for r in results)


def _accepts(a: TensorProxy, weight: TensorProxy | None, bias: TensorProxy | None, **others: Any) -> bool:
    """One dtype for all; on CPUs also 16-bit inputs with parameters in fp32."""
    parameters = [p for p in (weight, bias) if p is not None]
    if not is_floating(a, *parameters):
        mixed = bool(parameters) and all(p.dtype is dtypes.float32 for p in parameters)
        return mixed and a.dtype in HALF and is_floating(a) and is_floating(*parameters) and a.device.type == "cpu"
    return True


def _with_statistics(a: TensorProxy, shape: Sequence[int], *parameters: TensorProxy | None) -> Any:
    """The result, means and deviations. Statistics are in fp32 at least on CUDA; on CPUs in the parameters' dtype."""
    given = next((p.dtype for p in parameters if p is not None), a.dtype)
    dtype = dtypes.float32 if a.dtype in HALF and a.device.type != "cpu" else given
    return like(a), like(a, shape, dtype), like(a, shape, dtype)


def _kept(a: TensorProxy, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of statistics over the last dimensions, which have this ``shape``."""
    return (*a.shape[: a.ndim - len(shape)], *(1 for _ in shape))


# ---- layer_norm ----

layer_norm_forward = kernel(
    "layer_norm",
    lambda a, shape, weight, bias, eps: _with_statistics(a, _kept(a, shape), weight, bias),
    aten.native_layer_norm,
)
layer_norm_backward = kernel(
    "layer_norm_backward",
    lambda grad, a, shape, mean, rstd, weight, bias, wanted: _same(a, weight, bias),
    aten.native_layer_norm_backward,
    masked=True,
)


@implements(ltorch.layer_norm, supported=_accepts)
def layer_norm(
    a: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> Differentiated:
    shape = tuple(normalized_shape)
    out, mean, rstd = layer_norm_forward(a, shape, weight, bias, eps)

    def gradients(grad: TensorProxy) -> Gradients:
        found = layer_norm_backward(grad, a, shape, mean, rstd, weight, bias, present(a, weight, bias))
        return zip((a, weight, bias), found, strict=True)

    return out, gradients


# ---- rms_norm ----


def _rms_norm_backward(
    grad: torch.Tensor, a: torch.Tensor, shape: Any, rstd: torch.Tensor, weight: torch.Tensor | None, wanted: Mask
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """With ``n = a * rstd``, ``r = rstd`` and ``g = grad * weight``: da = r (g - n mean(g n)), dw = sum(grad n)."""
    if a.device.type == "cuda":
        found: tuple[torch.Tensor | None, torch.Tensor | None] = aten._fused_rms_norm_backward(
            grad, a, shape, rstd, weight, wanted
        )
        return found
    dims = tuple(range(a.ndim - len(shape), a.ndim))
    grad = grad.to(rstd.dtype)
    normalized = a * rstd
    of_weight = None
    if wanted[1] and weight is not None:
        product = grad * normalized
        of_weight = product.sum(tuple(range(a.ndim - len(shape)))).to(weight.dtype) if len(shape) < a.ndim else product
        del product
    if not wanted[0]:
        return None, of_weight
    scaled = grad * weight if weight is not None else grad.clone()
    mean = (scaled * normalized).mean(dims, keepdim=True)
    return scaled.addcmul_(normalized, mean, value=-1).mul_(rstd).to(a.dtype), of_weight


rms_norm_forward = kernel(
    "rms_norm",
    lambda a, shape, weight, eps: (
        like(a), like(a, _kept(a, shape), dtypes.float32 if a.dtype in HALF else a.dtype),
    ),
    lambda a, shape, weight, eps: aten._fused_rms_norm(a, shape, weight, eps),
)  # fmt: skip
rms_norm_backward = kernel(
    "rms_norm_backward",
    lambda grad, a, shape, rstd, weight, wanted: _same(a, weight),
    _rms_norm_backward,
    masked=True,
)


@implements(
    ltorch.rms_norm,
    supported=lambda a, weight, **others: hasattr(aten, "_fused_rms_norm") and is_floating(a, weight),
)
def rms_norm(
    a: TensorProxy, normalized_shape: Sequence[int], weight: TensorProxy | None = None, eps: float | None = None
) -> Differentiated:
    shape = tuple(normalized_shape)
    out, rstd = rms_norm_forward(a, shape, weight, eps)

    def gradients(grad: TensorProxy) -> Gradients:
        return zip((a, weight), rms_norm_backward(grad, a, shape, rstd, weight, present(a, weight)), strict=True)

    return out, gradients


# ---- group_norm ----


def _sizes(a: torch.Tensor) -> tuple[int, int, int]:
    """Batch, channels, elements of a channel."""
    return a.shape[0], a.shape[1], math.prod(a.shape[2:])


group_norm_forward = kernel(
    "group_norm",
    lambda a, groups, weight, bias, eps: _with_statistics(a, (a.shape[0], groups), weight, bias),
    lambda a, groups, weight, bias, eps: aten.native_group_norm(a.contiguous(), weight, bias, *_sizes(a), groups, eps),
)
group_norm_backward = kernel(
    "group_norm_backward",
    lambda grad, a, groups, mean, rstd, weight, bias, wanted: _same(a, weight, bias),
    lambda grad, a, groups, mean, rstd, weight, bias, wanted: aten.native_group_norm_backward(
        grad.contiguous(), a.contiguous(), mean, rstd, weight, *_sizes(a), groups, wanted
    ),
    masked=True,
)


@implements(ltorch.group_norm, supported=_accepts)
def group_norm(
    a: TensorProxy,
    num_groups: int,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> Differentiated:
    out, mean, rstd = group_norm_forward(a, num_groups, weight, bias, eps)

    def gradients(grad: TensorProxy) -> Gradients:
        found = group_norm_backward(grad, a, num_groups, mean, rstd, weight, bias, present(a, weight, bias))
        return zip((a, weight, bias), found, strict=True)

    return out, gradients


# ---- batch_norm ----

batch_norm_forward = kernel(
    "batch_norm",
    lambda a, weight, bias, mean, var, training, momentum, eps: _with_statistics(
        a, (a.shape[1],) if training else (0,), weight, bias, mean, var
    ),
    aten.native_batch_norm,
    tags=(Property.IN_PLACE, OpTags.IN_PLACE, OpTags.DONT_DCE),  # updates the running statistics
)
batch_norm_backward = kernel(
    "batch_norm_backward",
    lambda grad, a, weight, bias, mean, var, saved_mean, saved_rstd, training, eps, wanted: _same(a, weight, bias),
    lambda grad, a, weight, bias, mean, var, saved_mean, saved_rstd, training, eps, wanted: (
        aten.native_batch_norm_backward(grad, a, weight, mean, var, saved_mean, saved_rstd, training, eps, wanted)
    ),
    masked=True,
)


@implements(
    ltorch.batch_norm,
    supported=lambda a, weight, bias, running_mean, **others: (
        _accepts(a, weight, bias) and is_floating(weight, running_mean)
    ),
    fusible=False,
)
def batch_norm(
    a: TensorProxy,
    running_mean: TensorProxy | None = None,
    running_var: TensorProxy | None = None,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Differentiated:
    out, mean, rstd = batch_norm_forward(a, weight, bias, running_mean, running_var, training, momentum, eps)

    def gradients(grad: TensorProxy) -> Gradients:
        running = (None, None) if training else (running_mean, running_var)
        found = batch_norm_backward(
            grad, a, weight, bias, *running, mean, rstd, training, eps, present(a, weight, bias)
        )
        return zip((a, weight, bias), found, strict=True)

    return out, gradients
