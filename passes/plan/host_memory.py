"""Parameters and gradients at rest in host memory: copies to and from the device that computes.

A bucket is copied as one flat row. Each direction has a stream of its own, so that copies overlap compute. A copy
begins when the device has finished the work enqueued before the line that issues it. A copy to the device is the first
part of a gather, one to the host follows the reduction of gradients. Both are over when their trace ends: the program
waits once, before an optimizer can read and change what was copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

        Allocate as little as possible inside: compute cannot reuse another stream's memory. What is freed is reused
        inside of the next one, after all work that compute has been given by then.
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

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Starts to copy values from the device to the host. Their memory may be freed at once: it is reused only
        after the copy."""
        if self._streams is None:
            return values.to("cpu")
        outward = self._streams.outward
        outward.wait_stream(self._streams.current)
        with self._streams.module.stream(outward):
            copy = values.to("cpu", non_blocking=self.pinned)  # into pinned memory if non-blocking
            values.record_stream(outward)
            return copy

    def finish(self) -> None:
        """Blocks the program until all copies, in both directions, are over."""
        if self._streams is not None:
            self._streams.inward.synchronize()
            self._streams.outward.synchronize()

    def mark(self) -> Any:
        """Marks the end of the work enqueued on the current stream so far: ``wait()`` makes another stream wait for
        it."""
        if self._streams is None:
            return DONE
        event = self._streams.module.Event()
        event.record()
        return event


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


DONE = _Done()
