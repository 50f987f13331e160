"""Finds the steps of a model that are worth their memory.

The space is large (each block keeps its parameters or gathers them again; it saves its activations, or recomputes the
cheap ones, or all), but blocks of a class are alike, so that only their numbers count. For each of ``LEVELS`` amounts
of memory an integer program over these numbers finds the combination that should be fastest, from the seconds and bytes
of single lines. Each is then composed and predicted exactly, beside what people choose by hand. The budget takes no
part in this: it picks a point of the result. So more memory never gives a slower plan, and no plan is slower than a
recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from passes.analysis.recognise import bucket_of
from passes.analysis.seconds import latency_seconds, link_seconds
from passes.plan.bucketing import MB
from passes.plan.hardware import HOST_MEMORY
from shardtrace.options.blocks import repeated_blocks
from shardtrace.planner.family import EXACT, NOTHING, Candidate, Family, Point, Rounding, make_family
from shardtrace.planner.program import Program, whole_bytes
from shardtrace.planner.task import OVER_MACHINES, STRATEGIES, Task

import numpy as np
from torch.distributed.fsdp import CPUOffloadPolicy

LEVELS = 16  # amounts of memory, up to that of the device or the most that any combination takes
BEYOND = 3  # more of them, up to the latter
NOT_WORTH_IT = 0.01  # of a step's seconds
WAITS = 0.05  # of a step's seconds: if compute waits longer for what other buckets would save, they are tried
FEW = 8  # blocks that may have several buckets each


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both seconds and memory, from the least memory to the most."""
    found: list[Point] = []
    for point in sorted(points, key=_order):
        if not found or point.estimate.seconds < found[-1].estimate.seconds:
            found.append(point)
    return found


def fastest(points: Iterable[Point], memory: float) -> Point | None:
    """The fastest point that fits, of equally fast ones that with the least memory."""
    fitting = [p for p in points if p.estimate.peak <= memory]
    return min(fitting, key=lambda p: (p.estimate.seconds, *_order(p)), default=None)


def _order(point: Point) -> tuple[Any, ...]:
    c = point.candidate
    e = point.estimate
    return e.peak, e.seconds, c.rounding, c.family, c.recomputed, sorted(c.kept), c.prefetch  # exact before rounded


# ---- the steps of one family ----


def explore(family: Family, rounding: Rounding = EXACT) -> None:
    """Predicts the recipes, and the fastest steps for amounts of memory from the least to the most they need."""
    _recipes(family, rounding)
    if not (family.classes or family.buckets):
        return
    program = Program(family, rounding)
    for solved in filter(None, map(program.solve, _levels(program.most, family.task.setting.hardware.memory))):
        kept = family.allowed_kept(solved.kept)
        for prefetch in family.prefetches if family.buckets else family.prefetches[:1]:
            found = family.point(solved._replace(kept=kept, prefetch=prefetch)).estimate
            if found.exposed < NOT_WORTH_IT * found.seconds:  # which is all that more of it could save
                break


def explore_rounded(family: Family) -> None:
    """Predicts steps whose messages are rounded as is allowed, if compute waits for communication: the recipes, and a
    search with each way to round that is worth it in a recipe. If compute does not wait, only the step with the least
    memory, which may be the only one that fits."""
    exact = front(family.points)
    if not any(p.estimate.exposed >= NOT_WORTH_IT * p.estimate.seconds for p in exact):
        for rounding in family.roundings:
            family.point(exact[0].candidate._replace(rounding=rounding))
        return
    for rounding in family.roundings:
        _recipes(family, rounding)
    worth_it = {p.candidate.rounding for p in front(p for p in family.points if p.name)}
    for rounding in sorted(worth_it - {EXACT}):
        explore(family, rounding)


def _recipes(family: Family, rounding: Rounding) -> None:
    """What people choose by hand: all buckets alike, all blocks alike, with the prefetch of ``fsdp``."""
    both = frozenset[str](), frozenset(family.buckets)
    for variant in family.variants:
        recomputed = family.in_order((c[0], variant) for k in family.classes for c in k.calls if variant != NOTHING)
        for kept in dict.fromkeys(map(family.allowed_kept, both)):
            usual = 3 if kept else 1
            prefetch = usual if usual in family.prefetches else family.prefetches[0]
            family.point(Candidate(family.name, recomputed, kept, prefetch, rounding), "by hand")


def _levels(most: float, memory: float) -> list[float]:
    """Amounts of memory up to ``most``. They do not depend on the budget, so that budgets can be compared."""
    inside = min(most, memory)
    beyond = np.linspace(inside, most, BEYOND + 1)[1:] if most > inside else np.array([])
    return [float(level) for level in (*np.linspace(0.0, inside, LEVELS), *beyond)]


# ---- the families ----


class Search:
    """All families of a task that may have the fastest step, and their points. Make it as a fake rank.

    ``exact`` are the points that round nothing; ``front`` is that of all points.
    """

    def __init__(self, task: Task, budget: float) -> None:
        self.task, self.budget = task, budget
        self.families: dict[str, Family] = {}
        bases: list[Family] = []
        for kind in task.strategies():
            if self._may_be_better(kind):
                bases.append(self._add(make_family(task, kind, bases[0] if bases else None)))
                for family in list(self._with_other_buckets(bases[-1])):
                    self._add(family)
        for family in list(self.families.values()):
            explore_rounded(family)
        for family in list(self._on_host(bases)):
            explore_rounded(self._add(family))
        self.exact = [p for p in self.points if p.candidate.rounding == EXACT]
        self.front = front(self.points)

    @property
    def points(self) -> list[Point]:
        return [point for family in self.families.values() for point in family.points]

    def _add(self, family: Family) -> Family:
        self.families[family.name] = family
        explore(family)
        return family

    def _may_be_better(self, kind: str) -> bool:
        """False for a family that cannot fit, or that only saves communication which the points so far hide. ZeRO,
        which takes the least memory, comes first."""
        points = self.points
        if kind == "ddp" and points:
            return self.task.at_rest <= self.budget
        waiting = (p.estimate.exposed >= NOT_WORTH_IT * p.estimate.seconds for p in front(points))
        return kind not in OVER_MACHINES or not points or any(waiting)

    def _with_other_buckets(self, family: Family) -> Iterator[Family]:
        """The same strategies with other buckets, if their size is not given and communication is what some steps wait
        for. A bucket for each layer arrives earlier; one for two blocks has fewer latencies. Nothing is recomputed.

        Only for few blocks, which are then compiled one by one, and whole sequences. With many blocks, smaller buckets
        save little."""
        task, few = self.task, len(repeated_blocks(self.task.model)) <= FEW
        if "bucketing_strategy" in task.fixed or family.kind not in STRATEGIES or not few or task.context > 1:
            return
        several = [b for b in family.issues if len({m.parameter.layer for m in bucket_of(b).members}) > 1]
        longest = max((link_seconds(b) - latency_seconds(b) for b in several), default=0.0)
        latencies = sum(map(latency_seconds, family.issues))
        steps = [point.estimate for point in front(family.points)]

        def gains(most: float) -> bool:
            return any(min(step.exposed, most) > WAITS * step.seconds for step in steps)

        found = list[tuple[str, str | float]]()
        if gains(2 * longest):  # of the first and last; the others travel behind compute, or not at all
            found.append((" by layer", "layer"))
        if several and gains(latencies / 2):
            found.append(
                (" by two blocks", math.ceil(200 * max(whole_bytes(bucket_of(b)) for b in several) / MB) / 100)
            )
        for note, size in found:
            yield make_family(task, family.kind, options={"bucketing_strategy": size}, note=note, recomputes=False)

    def _on_host(self, bases: Iterable[Family]) -> Iterator[Family]:
        """The families that shard, with shards and the optimizer in the memory of the host. None if they cannot be
        faster than the fastest step that fits: at best they are as fast as a step that has the memory which they free,
        with the optimizer of a host. So more memory never makes a plan slower."""
        task, setting = self.task, self.task.setting
        if "offload_policy" in task.fixed or setting.hardware.name == "cpu":
            return
        optimizer, best = setting.optimizer, fastest(self.points, self.budget)
        words = task.trained / task.world_size / 4
        freed = (1 + setting.hardware.allocator) * (8 + optimizer.state) * words
        steps = front(self.points)
        bound = next((p for p in steps if p.estimate.peak > self.budget + freed), steps[-1]).estimate
        least = bound.seconds - bound.optimizer + optimizer.moved * words / HOST_MEMORY
        if best is not None and best.estimate.seconds <= least:
            return
        for family in bases:
            if family.kind in ("zero", "hybrid"):
                there = {"offload_policy": CPUOffloadPolicy()}
                yield make_family(task, family.kind, family, options=there, note=" on the host")
