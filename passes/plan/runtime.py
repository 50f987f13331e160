"""The process behind a plan: its compiled steps, and the calls that they make to the rank that runs them.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import torch

# ---- steps ----


class Gradients(Enum):
    """The treatment of a plan's gradients in a compiled step: reduce them; keep them for a later step to reduce; or add
    those that were kept, if any, and reduce the sum."""

    REDUCED = "reduced"
    KEPT = "kept"
    ADDED = "added"


class Level(Enum):
    """How far kept gradients are reduced. WHOLE: not at all, they are those of whole parameters. REPLICAS: to shards,
    but not over the replicas of a hybrid strategy."""

    WHOLE = "whole"
    REPLICAS = "replicas"


@dataclass(frozen=True)
class Keep:
    """The gradients that a step keeps: of the parameters with these indices (None: all), on this level.
    ``by_forward``: forward has decided it, as with Thunder's own no_sync, which a thread of autograd does not see."""

    level: Level = Level.WHOLE
    parameters: frozenset[int] | None = None
    by_forward: bool = False


@dataclass(eq=False)
class Step:
    """One compiled step of a model.

    Args:
        gradients: its treatment of gradients; None: it computes none.
        keep: what it keeps, if it keeps gradients. The others are reduced.
        adds: the levels on which it adds kept gradients.
        collectives: the collectives that it sends, as texts, in order; complete once it is compiled.
        generation: how often the model's modules had changed before it was compiled.
        rereads: the names of parameters whose rows backward reads again; complete once it is compiled.
    """

    gradients: Gradients | None
    collectives: list[str] = field(default_factory=list)
    generation: int = 0
    keep: Keep | None = None
    adds: frozenset[Level] = frozenset()
    rereads: set[str] = field(default_factory=set)

    def treats_as(self, other: Step) -> bool:
        """Whether it treats gradients as ``other`` is to; it may add those of more levels."""
        if self.gradients is not other.gradients:
            return False
        return self.keep == other.keep if self.gradients is Gradients.KEPT else other.adds <= self.adds

    @cached_property
    def sends(self) -> str:
        """Its collectives as one text. Cached: read it only when the whole step is compiled."""
        return "\n".join(self.collectives)


Sources = frozenset[int]


@dataclass
class Unused:
    """The sources that give the backward which is running no gradient.

    Outputs of the step are sources, by their number, and so is each gradient that torch's backward of a line returns.
    ``calls`` are these lines, in the order in which they run: the sources of each gradient that a line is given, and
    the number of the first one that it returns. ``coming`` are those that have not run yet.
    """

    absent: set[int] = field(default_factory=set)
    calls: Sequence[tuple[Sequence[Sources], int]] = ()
    coming: Iterator[tuple[Sequence[Sources], int]] = field(default_factory=lambda: iter(()))

    def begin(self, gradients: Sequence[Any]) -> None:
        """A backward begins, with these gradients of the outputs; None for one that it does not come from."""
        self.absent = {i for i, gradient in enumerate(gradients) if gradient is None}
        self.coming = iter(self.calls)


class Progress:
    """The position of this rank in the steps of a model. A step that sends nothing leaves it unchanged."""

    def __init__(self) -> None:
        self.phase = "start"  # or "forward", or "backward"
        self.under_way = False  # True in the phase, False after it
        self.sent = 0  # collectives issued in the phase
        self._in_flight: dict[int, tuple[Callable[..., Any], Any, Any]] = {}  # by the id of the future

    def begin(self, step: Step, phase: str) -> None:
        if step.collectives:
            self.phase, self.under_way, self.sent = phase, True, 0

    def end(self, step: Step) -> None:
        if step.collectives:
            self.under_way = False

    def issued(self, future: Any, finish: Callable[..., Any], bucket: Any) -> None:
        """Notes a future for which ``finish(future, bucket)`` waits."""
        self.sent += 1
        self._in_flight[id(future)] = finish, future, bucket  # holds the future, so that its id is not reused

    def finished(self, future: Any) -> None:
        self._in_flight.pop(id(future), None)

    def drain(self) -> None:
        """Waits for the collectives that an exception has left in flight. They must be the same on every rank."""
        for finish, future, bucket in list(self._in_flight.values()):
            finish(future, bucket)

    def __str__(self) -> str:
        """ "after backward"; or "in backward, 3 collectives sent", if an exception has left it there."""
        return f"in {self.phase}, {self.sent} collectives sent" if self.under_way else f"after {self.phase}"


# ---- the runtime ----


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

    @contextmanager
    def back(self) -> Iterator[None]:
        """Runs the work inside on the stream of copies to the host, after the work enqueued on the compute stream."""
        if self._streams is None:
            yield
            return
        self._streams.outward.wait_stream(self._streams.current)
        with self._streams.module.stream(self._streams.outward):
            yield

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        """Starts to copy values to the host, on the current stream. Their memory may be freed when the copy is over."""
        if self._streams is None:
            return values.clone()
        return values.to("cpu", non_blocking=self.pinned)  # into pinned memory if non-blocking

    def load(self, kept: torch.Tensor, place: torch.Tensor) -> None:
        """Starts to copy values to their place on the device, on the current stream."""
        place.copy_(kept, non_blocking=self.pinned)

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Starts to copy values from the device to the host. Their memory may be freed at once: it is reused only
        after the copy."""
        if self._streams is None:
            return values.to("cpu")
        with self.back():
            values.record_stream(self._streams.outward)
            return self.copy(values)

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
    same shard, those that hold the parts of one sequence, or those that compute with parts of parameters."""

    ALL = "all"
    SHARD = "shard"
    REPLICATE = "replicate"
    CONTEXT = "context"
    TENSOR = "tensor"


class Runtime(Protocol):
    """The rank on which the steps of one model run. ``shardtrace`` implements it; :class:`PlainRuntime` does nothing.

    ``compares`` tells whether steps are compared across ranks. ``progress`` tells where this rank is in a step, and is
    None if there is no other rank. ``kept`` holds unreduced gradients from step to step
    (:class:`passes.comm.symbols.KeptGradients`), ``errors`` what rounded reductions have lost, by axis and index
    of the parameter.
    """

    compares: bool
    progress: Progress | None
    kept: Any
    errors: dict[tuple[Axis, int], torch.Tensor]
    divisor: float | None  # of the sum of all ranks' gradients, by the mesh and the user's factor; None: not known

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

    def in_backward(self) -> AbstractContextManager[Any]:
        """Surrounds a backward."""
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
    divisor: float | None = None

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

    def in_backward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def compare_trace(self, collectives: list[str]) -> None: ...

    def announce(self, error: str) -> None: ...

    def communicating(self, bucket: str) -> AbstractContextManager[Any]:
        return nullcontext()
