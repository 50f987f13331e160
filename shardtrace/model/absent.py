"""Devices that are absent: a laptop compiles the step of a GPU, on a fake rank, where nothing runs.

Shards are then on the meta device. The stand-ins, inputs and buffers of a trace claim to be on the absent device.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def is_absent(device: torch.device) -> bool:
    """True for a CUDA device on a machine without CUDA."""
    return device.type == "cuda" and not torch.cuda.is_available()


def claim(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor without memory that is like ``values`` and claims to be on an absent device. Compute nothing with it:
    torch without CUDA may abort the process."""
    return FakeTensor(FakeTensorMode(), values.detach().to("meta"), device)
