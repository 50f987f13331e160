"""Models that go wrong on purpose once they are sharded: the sweep must tell how."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from case import BATCH, Case
from torch import nn


class Faulty(nn.Module):
    """Two layers. ``fault`` changes the result wherever there is a process group, which eager PyTorch does not have."""

    def __init__(self, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.faint = nn.Linear(6, 5), nn.Linear(5, 4), nn.Parameter(torch.ones(4))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        faint = 1e-3 * self.faint  # its gradient, times the learning rate, is hardly seen in its value
        if dist.is_initialized():
            faint = self.fault(faint)
        return self.second(torch.tanh(self.first(x))) + faint


def _raises(value: torch.Tensor) -> torch.Tensor:
    raise ValueError("raised on purpose")


def _aborts(value: torch.Tensor) -> torch.Tensor:
    os.abort()


def _hangs(value: torch.Tensor) -> torch.Tensor:
    time.sleep(3600)
    return value


def _gradient_wrong(value: torch.Tensor) -> torch.Tensor:
    return 1.02 * value - 0.02 * value.detach()


def _value_wrong(value: torch.Tensor) -> torch.Tensor:
    return value + 1e-3


def _fails_in_eager() -> Case:
    raise ValueError("never made")


def _case(fault: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Case]:
    return lambda: Case(Faulty(fault), (torch.randn(BATCH, 6),))


MODELS: dict[str, Callable[[], Case]] = {
    "none": _case(lambda value: value),
    "raises": _case(_raises),
    "aborts": _case(_aborts),
    "hangs": _case(_hangs),
    "gradient_wrong": _case(_gradient_wrong),
    "value_wrong": _case(_value_wrong),
    "fails_in_eager": _fails_in_eager,
}
OUTCOMES = {
    "none": "equal",
    "raises": "refused",
    "aborts": "crashed",
    "hangs": "timeout",
    "gradient_wrong": "wrong",
    "value_wrong": "wrong",
    "fails_in_eager": "eager fails",
}
