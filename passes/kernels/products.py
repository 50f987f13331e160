"""Products of elements in half precision. Thunder computes them in fp32, and saves the factors in fp32 for backward."""

from __future__ import annotations

from passes.compat.lines import shape_of
from passes.kernels.registration import HALF, Differentiated, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
from thunder.core.proxies import TensorProxy


def _meta(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    return like(a, torch.broadcast_shapes(shape_of(a), shape_of(b)))


mul_forward = kernel("mul", _meta, torch.mul)


@implements(ltorch.mul, supported=lambda a, b: is_floating(a, b) and a.dtype in HALF)
def mul(a: TensorProxy, b: TensorProxy) -> Differentiated:
    return mul_forward(a, b), lambda grad: [
        (a, _summed_to(a, mul_forward(grad, b))),
        (b, _summed_to(b, mul_forward(grad, a))),
    ]


def _summed_to(a: TensorProxy, grad: TensorProxy) -> TensorProxy:
    """The gradient of ``a``, which was broadcast to the shape of ``grad``."""
    shape, new = shape_of(a), len(shape_of(grad)) - len(shape_of(a))
    dims = [i for i, d in enumerate(shape_of(grad)) if i < new or shape[i - new] != d]
    return ltorch.reshape(ltorch.sum(grad, dims), shape) if dims else grad
