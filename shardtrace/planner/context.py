"""Context degrees: over how many ranks each sequence is split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from shardtrace.inspector.rows import size
from shardtrace.options.values import parse_count
from shardtrace.planner.family import Point
from shardtrace.planner.search import NOT_WORTH_IT, Search, fastest
from shardtrace.planner.task import Task

Context = int | Literal["auto"] | None


class Degree(NamedTuple):
    """The steps of one degree, and the fastest of them that fits."""

    search: Search
    best: Point | None

    @property
    def ranks(self) -> int:
        """Over how many ranks it splits each sequence."""
        return self.search.task.context

    @property
    def cost(self) -> float:
        """The seconds in which a rank does the work of a whole sequence."""
        return self.ranks * self.best.estimate.seconds if self.best is not None else float("inf")

    def __str__(self) -> str:
        if self.best is None:
            return f"context {self.ranks} does not fit: the least is {size(self.search.front[0].estimate.peak)}."
        found = self.best.estimate
        return f"context {self.ranks} takes {self.cost:.4g} s a rank for each sequence, and {size(found.peak)}."


def explore_degrees(task: Task, context: Context, budget: float) -> list[Degree]:
    """Searches the steps of the given degree, or of 1, 2, 4, ... as long as one may be faster: the last did not fit, or
    recomputed activations or used the memory of the host, and took less time than the one before it. The fastest comes
    first, or if none fits the one that needs the least. Call it as a fake rank."""
    found: list[Degree] = []
    for ranks in degrees(task, context):
        search = Search(task._replace(context=ranks), budget)
        found.append(Degree(search, fastest(search.points, budget)))
        best, before = found[-1].best, min((d.cost for d in found[:-1]), default=float("inf"))
        saves_all = best is not None and not best.candidate.recomputed and not best.estimate.host
        if saves_all or (best is not None and found[-1].cost > (1 - NOT_WORTH_IT) * before):
            break
    return sorted(found, key=lambda d: (d.cost, d.search.front[0].estimate.peak))


def degrees(task: Task, context: Context) -> Iterator[int]:
    """The degrees to try.

    Raises:
        ValueError: if there is no such degree for these ranks, inputs and options.
    """
    if context is None:
        if task.fixed.get("context_parallel") is not None:
            raise ValueError('context_parallel is fixed: say over how many ranks, with context=8 or context="auto"')
        yield 1
        return
    if task.mesh_shape is not None:
        raise ValueError("mesh_shape is for hybrid strategies, and context makes the mesh: pass one of them")
    world, positions = task.world_size, task.positions
    if context != "auto":
        ranks = parse_count("context", context, 'a number of ranks, 1 or more, or "auto"', least=1)
        if world % ranks:
            raise ValueError(f"context={ranks} does not divide the {world} ranks")
        if ranks > 1 and 2 * ranks > positions:
            raise ValueError(f"context={ranks} needs sequences of {2 * ranks} positions: the inputs have {positions}")
        yield ranks
        return
    ranks = 1
    while ranks == 1 or (world % ranks == 0 and 2 * ranks <= positions):
        yield ranks
        ranks *= 2
