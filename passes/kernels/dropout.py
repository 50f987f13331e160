"""dropout. It saves its mask, one byte for each element.

The mask is a line of its own, so that a checkpointed block saves nothing else.
"""

from __future__ import annotations

from passes.comm.properties import Property
from passes.kernels.registration import Differentiated, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.devices import DeviceType, to_device
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy

dropout_mask = kernel(
    "dropout_mask",
    lambda shape, p, device: TensorProxy(
        shape=shape, dtype=dtypes.bool8, device=to_device(device), requires_grad=False
    ),
    lambda shape, p, device: torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p),
    tags=(Property.RANDOM, OpTags.RANDOM_OP),
)
# a * mask * scale; its gradient is the same function of the result's gradient
dropout_forward = kernel(
    "dropout", lambda a, mask, scale: like(a), lambda a, mask, scale: torch.mul(a, mask).mul_(scale)
)


@implements(dropout_forward, supported=lambda a, mask, scale: True)
def masked(a: TensorProxy, mask: TensorProxy, scale: float) -> Differentiated:
    return dropout_forward(a, mask, scale), lambda grad: [(a, dropout_forward(grad, mask, scale))]


def _supported(a: TensorProxy, p: float, training: bool, inplace: bool) -> bool:
    return is_floating(a) and training and not inplace and isinstance(p, float) and 0 < p < 1


@implements(ltorch.dropout, supported=_supported)
def dropout(a: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> Differentiated:
    return masked(a, dropout_mask(tuple(a.shape), p, a.device.device_str()), _scale(a, p))


def _scale(a: TensorProxy, p: float) -> float:
    """The factor of the elements that are kept. On a CPU, torch rounds it to the dtype."""
    if a.device.devicetype is not DeviceType.CPU:
        return 1 / (1 - p)
    return torch.ones((), dtype=dtypes.to_torch_dtype(a.dtype)).div_(1 - p).item()
