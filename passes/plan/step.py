"""The compiled steps of a model: what each does with gradients and sends, and where this rank is in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any


class Gradients(Enum):
    """What a compiled step does with the gradients of a plan: reduces them; keeps them, to be reduced by a later step;
    or adds those that were kept, if any, and reduces the sum."""

    REDUCED = "reduced"
    KEPT = "kept"
    ADDED = "added"


@dataclass(eq=False)
class Step:
    """One compiled step of a model.

    Args:
        gradients: what it does with gradients; None: it computes none.
        collectives: those that it sends, in order, a text for each; complete once it is compiled.
        generation: how often the model's modules had changed before it was compiled.
    """

    gradients: Gradients | None
    collectives: list[str] = field(default_factory=list)
    generation: int = 0

    @cached_property
    def sends(self) -> str:
        """What it sends as one text, to be asked for when it runs, once all of it is compiled."""
        return "\n".join(self.collectives)


class Progress:
    """Where this rank is in the steps of a model. A step that sends nothing leaves it where it was."""

    def __init__(self) -> None:
        self.phase = "start"  # or "forward", or "backward"
        self.under_way = False  # in it, or after it
        self.sent = 0  # its collectives that were issued
        self._in_flight: dict[int, Callable[[], Any]] = {}  # what waits for them, by the id of the future

    def begin(self, step: Step, phase: str) -> None:
        if step.collectives:
            self.phase, self.under_way, self.sent = phase, True, 0

    def end(self, step: Step) -> None:
        if step.collectives:
            self.under_way = False

    def issued(self, future: Any, finish: Callable[[], Any]) -> None:
        self.sent += 1
        self._in_flight[id(future)] = finish  # which holds the future

    def finished(self, future: Any) -> None:
        self._in_flight.pop(id(future), None)

    def drain(self) -> None:
        """Waits for what an exception has left in flight; every rank must have left the same."""
        for finish in list(self._in_flight.values()):
            finish()

    def __str__(self) -> str:
        """ "after backward"; or "in backward, 3 collectives sent", if an exception has left it there."""
        return f"in {self.phase}, {self.sent} collectives sent" if self.under_way else f"after {self.phase}"
