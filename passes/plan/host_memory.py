"""Parameters and gradients at rest in host memory: the copies to and from the device that computes.

Both ways a bucket is one copy of one flat row, on a stream of its own for each direction, so that it runs beside
compute: it begins when the device has done what it was asked for before the line that issues it, and it is over when
the line that waits for it returns. A copy to the device is the first part of a gather; one to the host follows the
reduction of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class HostMemory:
    """The memory of the host beside that of ``device``.

    Args:
        device: where parameters are computed with.
        pinned: page-lock what is kept: only such memory is copied while the program goes on. (torch takes such memory
            in powers of two.)

    A device without streams (CPU, meta) copies at once.
    """

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self.device = device
        self._streams = None if device.type in ("cpu", "meta") else _Streams(device)
        self.pinned = pinned and self._streams is not None

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """The values in host memory, for good."""
        kept = values.to("cpu")
        return kept.pin_memory() if self.pinned else kept

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """What is asked for inside runs on the stream of copies to the device, after what compute was asked for.

        Nothing is to be allocated inside: memory of another stream than compute's is of no use to compute afterwards,
        and what compute still reads must not be given back by another stream.
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

    def send(self, values: torch.Tensor) -> Sent:
        """Starts to copy values of the device to the host. Their memory may be freed at once: it is used again only
        when the copy is over."""
        if self._streams is None:
            return Sent(values.to("cpu"), DONE)
        outward = self._streams.outward
        outward.wait_stream(self._streams.current)
        with self._streams.module.stream(outward):
            copy = values.to("cpu", non_blocking=self.pinned)  # pinned, if so
            values.record_stream(outward)
            return Sent(copy, self.mark())

    def mark(self) -> Any:
        """All that the current stream was asked for so far: ``wait()`` makes another stream wait for it,
        ``synchronize()`` the program."""
        if self._streams is None:
            return DONE
        event = self._streams.module.Event()
        event.record()
        return event


class Sent(NamedTuple):
    """A copy on its way to the host: ``row`` holds it when ``copied`` is over."""

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
    """What is over when it begins: a copy without a stream, a collective of one rank."""

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


DONE = _Done()
