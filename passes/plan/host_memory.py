"""Parameters and gradients at rest in host memory: copies to and from the device that computes.

A bucket is copied as one flat row. Each direction has a stream of its own, so that copies overlap compute. A copy
begins when the device has finished the work enqueued before the line that issues it. A copy to the device is the first
part of a gather, and is over when its trace ends. A copy to the host follows the reduction of gradients, and is over
when the line that waits for it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class HostMemory:
    """Host memory for parameters that are used on ``device``.

    Args:
        device: the device that computes.
        pinned: page-lock the memory, so that copies do not block the program. (torch allocates such memory in powers
            of two.)

    A device without streams (CPU, meta, one that is absent) copies synchronously.
    """

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self.device = device
        absent = device.type in ("cpu", "meta") or not torch.get_device_module(device).is_available()
        self._streams = None if absent else _Streams(device)
        self.pinned = pinned and self._streams is not None

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """Puts values into host memory, where they stay."""
        kept = values.to("cpu")
        return kept.pin_memory() if self.pinned else kept

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Runs the work inside on the stream of copies to the device, after the work enqueued on the compute stream.

        Allocate nothing inside: compute cannot reuse another stream's memory, and another stream must not free memory
        that compute still reads.
        """
        if self._streams is None:
            yield
            return
        self._streams.inward.wait_stream(self._streams.current)
        with self._streams.module.stream(self._streams.inward):
            yield

    def load(self, kept: torch.Tensor, place: torch.Tensor) -> None:
        """Starts to copy values to their place on the device, on the current stream."""
        place.copy_(kept, non_blocking=self.pinned)

    def finish_loads(self) -> None:
        """Blocks the program until all copies to the device are over."""
        if self._streams is not None:
            self._streams.inward.synchronize()

    def send(self, values: torch.Tensor) -> Sent:
        """Starts to copy values from the device to the host. Their memory may be freed at once: it is reused only
        after the copy."""
        if self._streams is None:
            return Sent(values.to("cpu"), DONE)
        outward = self._streams.outward
        outward.wait_stream(self._streams.current)
        with self._streams.module.stream(outward):
            copy = values.to("cpu", non_blocking=self.pinned)  # into pinned memory if non-blocking
            values.record_stream(outward)
            return Sent(copy, self.mark())

    def mark(self) -> Any:
        """Marks the end of the work enqueued on the current stream so far: ``wait()`` makes another stream wait for it,
        ``synchronize()`` the program."""
        if self._streams is None:
            return DONE
        event = self._streams.module.Event()
        event.record()
        return event


class Sent(NamedTuple):
    """A copy in flight to the host: ``row`` is complete once ``copied`` is over."""

    row: torch.Tensor
    copied: Any


class _Streams:
    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.device = device
        self.inward, self.outward = self.module.Stream(device), self.module.Stream(device)

    @property
    def current(self) -> Any:
        return self.module.current_stream(self.device)


class _Done:
    """A mark already reached: the end of a copy without a stream, or of a collective of one rank."""

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


DONE = _Done()
