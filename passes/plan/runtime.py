"""The process behind a plan: the calls that a compiled step makes to the rank that runs it.

A plan is data. Everything that acts or changes from step to step is reached through its :class:`Runtime`: process
groups, checks, comparisons with other ranks, and kept gradients. A model has one runtime. All of its plans refer to
it, and passes tell models apart by it.

Parameters and gradients at rest in host memory: copies to and from the device that computes.

A bucket is copied as one flat row. Each direction has a stream of its own, so that copies overlap compute. A copy
begins when the device has finished the work enqueued before the line that issues it. A copy to the device is the
first part of a gather, one to the host follows the reduction of gradients. Both are over when their trace ends: the
program waits once, before an optimizer can read and change what was copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, Protocol

from passes.plan.step import Progress, Step

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


class Axis(Enum):
    """One of a model's process groups: all of its ranks, those that share one copy of its shards, those that hold the
    same shard, or those that hold the parts of one sequence."""

    ALL = "all"
    SHARD = "shard"
    REPLICATE = "replicate"
    CONTEXT = "context"


class Runtime(Protocol):
    """The rank on which the steps of one model run. ``shardtrace`` implements it; :class:`PlainRuntime` does nothing.

    ``compares`` tells whether steps are compared across ranks. ``progress`` tells where this rank is in a step, and is
    None if there is no other rank. ``kept`` holds unreduced gradients from step to step
    (:class:`passes.comm.kept_gradients.KeptGradients`), ``errors`` what rounded reductions have lost, by axis and index
    of the parameter.
    """

    compares: bool
    progress: Progress | None
    kept: Any
    errors: dict[tuple[Axis, int], torch.Tensor]

    def group(self, axis: Axis) -> Any:
        """Returns the process group of an axis. Only the functions of collectives use it."""

    def rows_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a parameter that is a DTensor, padding included, in the same memory."""
        ...

    def like(self, parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns ``rows``, such as a gradient's, as a tensor that is laid out like a parameter."""
        ...

    def check_step(self, step: Step) -> None:
        """Raises unless ``step`` is the one to run now and all parameters are still those that were sharded.
        Called before each step; an error makes Thunder try another compiled step, or compile one."""

    def compare_step(self, step: Step, *, changed: bool | None = None) -> None:
        """Raises on every rank if the ranks are about to run different steps. Called before a step sends anything, and
        before its backward, which may have been ``changed`` since forward."""

    def begin_backward(self, step: Step) -> Step:
        """Returns ``step``, or the one to run from here on if gradients are treated otherwise by now."""
        ...

    def compare_trace(self, collectives: list[str]) -> None:
        """Raises on every rank if the ranks have compiled different collectives. Called with those of each trace."""

    def announce(self, error: str) -> None:
        """Makes the other ranks raise ``error`` when they reach :meth:`compare_trace`."""

    def communicating(self, bucket: str) -> AbstractContextManager[Any]:
        """Surrounds a collective of ``bucket``. Raises a better error if another rank is the cause that it failed, or
        that it was aborted and gave no results."""
        ...


class PlainRuntime:
    """A bare process group, for plans that are made by hand: no model to check, no other ranks to ask."""

    compares = False
    progress: Progress | None = None
    kept: Any = None

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.errors: dict[tuple[Axis, int], torch.Tensor] = {}

    def group(self, axis: Axis) -> Any:
        return self._group

    def rows_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def like(self, parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def check_step(self, step: Step) -> None: ...

    def compare_step(self, step: Step, *, changed: bool | None = None) -> None: ...

    def begin_backward(self, step: Step) -> Step:
        return step

    def compare_trace(self, collectives: list[str]) -> None: ...

    def announce(self, error: str) -> None: ...

    def communicating(self, bucket: str) -> AbstractContextManager[Any]:
        return nullcontext()
