"""The process behind a plan: what a compiled step asks of the rank that runs it.

A plan is data. Everything that acts or changes from step to step is reached through its :class:`Runtime`: process
groups, checks, comparisons with other ranks, and gradients that are kept. A model has one runtime, which all of its
plans refer to and by which passes tell models apart.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from passes.plan.step import Progress, Step


class Axis(Enum):
    """One of a model's process groups: all of its ranks, those that share one copy of its shards, or those that hold
    the same shard."""

    ALL = "all"
    SHARD = "shard"
    REPLICATE = "replicate"


class Runtime(Protocol):
    """The rank on which the steps of one model run. ``shardtrace`` implements it; :class:`PlainRuntime` does nothing.

    ``progress`` tells where this rank is in a step, and is None if steps are not compared with other ranks'. ``kept``
    holds unreduced gradients from step to step (:class:`passes.comm.kept_gradients.KeptGradients`).
    """

    progress: Progress | None
    kept: Any

    def group(self, axis: Axis) -> Any:
        """The process group of an axis. Only the functions of collectives look into it."""

    def check_step(self, step: Step) -> None:
        """Raises unless ``step`` is the one that is wanted now and all parameters are still those that were sharded.
        Called before each step; an error makes Thunder try another compiled step, or compile one."""

    def compare_step(self, step: Step) -> None:
        """Raises on every rank if the ranks are about to run different steps. Called before a step sends anything."""

    def compare_trace(self, collectives: list[str]) -> None:
        """Raises on every rank if the ranks have compiled different collectives. Called with those of each trace."""

    def announce(self, error: str) -> None:
        """Makes the other ranks raise ``error`` where they come to :meth:`compare_trace`."""

    def raise_if_rank_failed(self, error: Exception, bucket: str) -> None:
        """Raises a better error if another rank caused ``error``, which a collective of ``bucket`` raised."""


class PlainRuntime:
    """A process group and nothing else, for plans that are made by hand: no model to check, no other ranks to ask."""

    progress: Progress | None = None
    kept: Any = None

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def group(self, axis: Axis) -> Any:
        return self._group

    def check_step(self, step: Step) -> None: ...

    def compare_step(self, step: Step) -> None: ...

    def compare_trace(self, collectives: list[str]) -> None: ...

    def announce(self, error: str) -> None: ...

    def raise_if_rank_failed(self, error: Exception, bucket: str) -> None: ...
