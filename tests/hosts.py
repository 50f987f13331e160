"""Host memory on machines without an accelerator: slow copies, and traces for a device that is absent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from passes.plan.runtime import HostMemory
from shardtrace.record.arguments import claim

import torch


class SlowHost(HostMemory):
    """Host memory of the CPU that behaves like that of a device with streams: a copy is NaN until it is waited for.

    With ``loads_late``, copies to the device are late, too. This is only for a world of one and for buckets whose shards
    lie side by side. A collective or a concatenation would follow the copy on its stream, and the CPU has no streams.
    """

    def __init__(self, *, loads_late: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.loads = self.sends = 0
        self._loads_late = loads_late
        self._last: _Copy | None = None
        self._sent: list[_Copy] = []

    def load(self, kept: torch.Tensor, place: torch.Tensor) -> None:
        self.loads += 1
        if self._loads_late:
            self._last = _copy_late(kept, place)
        else:
            place.copy_(kept)

    def finish(self) -> None:
        for copy in [self._last, *self._sent]:
            if copy is not None:
                copy.join()
        self._sent.clear()

    def mark(self) -> Any:
        return self._last or super().mark()

    def send(self, values: torch.Tensor) -> torch.Tensor:
        self.sends += 1
        row = torch.empty_like(values)
        self._sent.append(_copy_late(values, row))
        return row


class _Copy(threading.Thread):
    def wait(self) -> None:
        self.join()


def _copy_late(values: torch.Tensor, place: torch.Tensor) -> _Copy:
    values = values.clone()
    place.fill_(float("nan"))

    def run() -> None:
        time.sleep(0.01)
        place.copy_(values)

    thread = _Copy(target=run)
    thread.start()
    return thread


@contextmanager
def slow_host(*, loads_late: bool = False, direct: bool = False) -> Iterator[None]:
    """Let ``offload_policy`` count on the CPU, too. Collectives are the process group's, or messages if ``direct``."""
    from shardtrace.model import distribute, state
    from shardtrace.ranks.mesh import Transport

    def host(policy: Any, device: torch.device) -> SlowHost | None:
        return SlowHost(loads_late=loads_late) if policy else None

    with (
        mock.patch.object(distribute, "host_memory", host),
        mock.patch.object(state, "transport", return_value=Transport(direct=direct, averages=False)),
    ):
        yield


def on_absent_cuda(*shape: int) -> torch.Tensor:
    """A tensor to compile with that claims to be on cuda:0."""
    return claim(torch.empty(shape), torch.device("cuda:0"))
