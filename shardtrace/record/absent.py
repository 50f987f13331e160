"""Steps that are compiled and never run, such as a GPU's on a laptop: shards are on the meta device. The stand-ins,
inputs and buffers of a trace claim to be on the device of the step."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def is_absent(device: torch.device) -> bool:
    """True for a CUDA device on a machine without CUDA."""
    return device.type == "cuda" and not torch.cuda.is_available()


def claim(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor without memory that is like ``values`` and claims to be on another device. Compute nothing with it:
    torch without CUDA may abort the process."""
    return FakeTensor(FakeTensorMode(), values.detach().to("meta"), device)


def never_runs(module: nn.Module) -> None:
    """As ``param_init_fn``: the model will be compiled and not run, so that nothing of it needs memory."""
