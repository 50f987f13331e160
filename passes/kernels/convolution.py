"""Convolutions and poolings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes.kernels.registration import Differentiated, Gradients, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.dtypes import int64
from thunder.core.proxies import TensorProxy

aten = torch.ops.aten


convolution_forward = kernel("convolution", prims.convolution_meta, torch.convolution)
convolution_backward = kernel(
    "convolution_backward",
    lambda grad, a, weight, options, wanted: (like(a), like(weight), like(weight, weight.shape[:1])),
    lambda grad, a, weight, options, wanted: aten.convolution_backward(
        grad, a, weight, weight.shape[:1], *options, wanted
    ),
    masked=True,
)


def _convolution_supported(a: TensorProxy, weight: TensorProxy, bias: Any, *options: Any, **named: Any) -> bool:
    return is_floating(a, weight, bias) and not named


@implements(prims.convolution, supported=_convolution_supported, fusible=False)
def convolution(
    a: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Differentiated:
    rank = a.ndim - 2
    each = (_each(stride, rank), _each(padding, rank), _each(dilation, rank))
    options = (*each, bool(transposed), _each(output_padding, rank), groups)
    out = convolution_forward(a, weight, bias, *options)

    def gradients(grad: TensorProxy) -> Gradients:
        return zip((a, weight, bias), convolution_backward(grad, a, weight, options, (True, True, True)), strict=True)

    return out, gradients


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """A number, or a sequence of one, for each spatial dimension."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * rank if len(values) == 1 else values


# ---- pooling: Thunder has kernels for max_pool2d and max_pool3d ----


def _pooled(a: TensorProxy, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: int) -> Any:
    rank = len(size)
    spatial = zip(a.shape[-rank:], size, stride, padding, strict=True)
    return like(a, (*a.shape[:-rank], *((n + 2 * p - dilation * (k - 1) - 1) // s + 1 for n, k, s, p in spatial)))


def _avg_pool(rank: int) -> None:
    """Implements avg_pool1d, avg_pool2d or avg_pool3d. In one dimension it is an avg_pool2d of height 1."""
    name, pad = f"avg_pool{rank}d", (1,) * max(2 - rank, 0)
    zero = tuple(0 for _ in pad)
    backward_fn = aten.avg_pool3d_backward if rank == 3 else aten.avg_pool2d_backward

    def fn_backward(grad: torch.Tensor, a: torch.Tensor, size: Any, stride: Any, padding: Any, *rest: Any) -> Any:
        if rank == 1:
            grad, a = grad.unsqueeze(-2), a.unsqueeze(-2)
        found = backward_fn(grad, a, (*pad, *size), (*pad, *stride), (*zero, *padding), False, *rest)
        return found.squeeze(-2) if rank == 1 else found

    def fn_forward(a: torch.Tensor, size: Any, stride: Any, padding: Any, include_pad: bool, divisor: Any) -> Any:
        more = () if rank == 1 else (divisor,)
        return getattr(F, name)(a, size, stride, padding, False, include_pad, *more)

    forward = kernel(name, lambda a, size, stride, padding, *rest: _pooled(a, size, stride, padding, 1), fn_forward)
    backward = kernel(f"{name}_backward", lambda grad, a, *options: like(a), fn_backward)

    def supported(a: TensorProxy, *args: Any, **kwargs: Any) -> bool:
        return is_floating(a) and a.ndim in (rank + 1, rank + 2)

    def avg_pool(
        a: TensorProxy,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,  # Thunder refuses True when it traces the call
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Differentiated:
        sizes = (kernel_size, kernel_size if stride is None else stride, padding)
        options = (*(_each(s, rank) for s in sizes), count_include_pad, None if rank == 1 else divisor_override)
        return forward(a, *options), lambda grad: [(a, backward(grad, a, *options))]

    implements(getattr(ltorch, name), supported=supported, fusible=False)(avg_pool)


for rank in (1, 2, 3):
    _avg_pool(rank)


max_pool1d_forward = kernel(
    "max_pool1d",
    lambda a, size, stride, padding, dilation: (
        _pooled(a, size, stride, padding, *dilation), like(_pooled(a, size, stride, padding, *dilation), None, int64)
    ),
    lambda a, size, stride, padding, dilation: F.max_pool1d_with_indices(a, size, stride, padding, dilation),
)  # fmt: skip
max_pool1d_backward = kernel(
    "max_pool1d_backward",
    lambda grad, a, indices, *options: like(a),
    lambda grad, a, indices, *options: aten.max_pool2d_with_indices_backward(
        grad.unsqueeze(-2), a.unsqueeze(-2), *((first, *o) for first, o in zip((1, 1, 0, 1), options, strict=True)),
        False, indices.unsqueeze(-2),
    ).squeeze(-2),
)  # fmt: skip


def _max_pool1d_supported(a: TensorProxy, *args: Any, **kwargs: Any) -> bool:
    return is_floating(a) and a.ndim in (2, 3)


@implements(ltorch.max_pool1d, supported=_max_pool1d_supported, fusible=False)
def max_pool1d(
    a: TensorProxy,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    return_indices: bool = False,  # Thunder refuses True when it traces the call, here and next
    ceil_mode: bool = False,
) -> Differentiated:
    sizes = (kernel_size, kernel_size if stride is None else stride, padding, dilation)
    options = tuple(_each(s, 1) for s in sizes)
    out, indices = max_pool1d_forward(a, *options)
    return out, lambda grad: [(a, max_pool1d_backward(grad, a, indices, *options))]
