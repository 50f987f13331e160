"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from passes.kernels.registration import Differentiated, Gradients, Shapes, implements, is_floating, kernel, like

import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

aten = torch.ops.aten


def convolution_flops(tensors: Shapes, outs: Shapes) -> int:
    """(n, c, ...) * (o, c / groups, kernel...) -> (n, o, ...)"""
    return 2 * math.prod(outs[0]) * math.prod(tensors[1][1:])


def _backward_flops(tensors: Shapes, outs: Shapes) -> int:
    """The output's gradient, the input and the weight. A bias's gradient, which is no product, has one dimension."""
    grad, _, weight = tensors
    return sum(2 * math.prod(grad) * math.prod(weight[1:]) for o in outs if len(o) > 1)


convolution_forward = kernel("convolution", prims.convolution_meta, torch.convolution, flops=convolution_flops)
convolution_backward = kernel(
    "convolution_backward",
    lambda grad, a, weight, options, wanted: (like(a), like(weight), like(weight, weight.shape[:1])),
    lambda grad, a, weight, options, wanted: aten.convolution_backward(
        grad, a, weight, weight.shape[:1], *options, wanted
    ),
    masked=True,
    flops=_backward_flops,
)


@implements(prims.convolution, supported=lambda a, weight, bias, **options: is_floating(a, weight, bias), fusible=False)
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
