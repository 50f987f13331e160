"""linear and convolutions. Thunder's own rule takes nine lines for the gradients that are three here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from passes.kernels.registration import Differentiated, Flops, Gradients, Shapes, implements, is_floating, kernel, like

import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.proxies import TensorProxy


def _rows(a: torch.Tensor) -> torch.Tensor:
    return a.reshape(-1, a.shape[-1])


def product(left: int) -> Flops:
    """Of a matrix product whose left factor is tensor number ``left``: (..., m, k) x (..., k, n) -> (..., m, n).

    Adding a bias or another tensor is not counted.
    """
    return lambda tensors, outs: 2 * math.prod(outs[0]) * tensors[left][-1]


linear_forward = kernel(
    "linear", lambda a, weight, bias: like(a, (*a.shape[:-1], weight.shape[0])), F.linear, flops=product(0)
)
# (..., out) x (out, in) -> (..., in)
linear_backward_input = kernel(
    "linear_backward_input",
    lambda grad, weight: like(grad, (*grad.shape[:-1], weight.shape[1])),
    torch.matmul,
    flops=product(0),
)
# (rows, out)^T x (rows, in) -> (out, in)
linear_backward_weight = kernel(
    "linear_backward_weight",
    lambda grad, a: like(a, (grad.shape[-1], a.shape[-1])),
    lambda grad, a: _rows(grad).t() @ _rows(a),
    flops=lambda tensors, outs: 2 * math.prod(tensors[0]) * tensors[1][-1],
)
# (rows, out) -> (out). A sum over several dimensions would depend on the strides of the gradient.
linear_backward_bias = kernel(
    "linear_backward_bias", lambda grad: like(grad, grad.shape[-1:]), lambda grad: _rows(grad).sum(0)
)


@implements(prims.linear, supported=lambda a, weight, bias: is_floating(a, weight, bias) and a.ndim > 0)
def linear(a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None) -> Differentiated:
    def gradients(grad: TensorProxy) -> Gradients:
        yield a, linear_backward_input(grad, weight)
        yield weight, linear_backward_weight(grad, a)
        if bias is not None:
            yield bias, linear_backward_bias(grad) if grad.ndim > 1 else grad

    return linear_forward(a, weight, bias), gradients


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
