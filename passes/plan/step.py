"""The compiled steps of a model: their gradients and collectives, and the position of this rank in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any


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
