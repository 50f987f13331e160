"""Finds the steps of a model that are worth their memory.

The space is large (each block keeps its parameters or gathers them again; it saves its activations, or recomputes the
cheap ones, or all), but blocks of a class are alike, so that only their numbers count. For each of ``LEVELS`` amounts
of memory an integer program over these numbers finds the combination that should be fastest, from the seconds and bytes
of single lines. Each is then composed and predicted exactly, beside what people choose by hand. The budget takes no
part in this: it picks a point of the result. So more memory never gives a slower plan, and no plan is slower than a
recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap
from typing import Any, NamedTuple

from passes.analysis.recognise import bucket_of, is_collective, is_gather, is_issue
from passes.analysis.seconds import compute_seconds, latency_seconds, link_seconds
from passes.plan import Bucket, CostModel, Wire
from shardtrace.options.wires import NO_WIRES, Allowed
from shardtrace.planner.compose import Call, Choice, Compiled, Pair, Step, compose
from shardtrace.planner.estimate import Estimate, Setting, estimate

import numpy as np
from thunder.core.proxies import TensorProxy

LEVELS = 16  # amounts of memory, up to that of the device or the most that any combination takes
BEYOND = 3  # more of them, up to the latter
PREFETCHES = (1, 2, 3)
NOTHING = "nothing"  # is recomputed
NOT_WORTH_IT = 0.01  # of a step's seconds


class Rounding(NamedTuple):
    """The chosen values of ``gather_dtype`` and ``reduce_wire``; empty: not chosen."""

    gather: str = ""
    reduction: str = ""

    def __str__(self) -> str:
        if self.gather == self.reduction:
            return f"{self.gather} both" if self.gather else ""
        named = (self.gather, "gathers"), (self.reduction, "reductions")
        return ", ".join(f"{value} {what}" for value, what in named if value)


EXACT = Rounding()


class Candidate(NamedTuple):
    """A combination: a family of strategies ("zero", "hybrid", "secondary" or "ddp"), what each block recomputes
    ("cheap" or "full", none if it is not there), which buckets are kept, the prefetch, and how messages are rounded."""

    family: str
    recomputed: tuple[tuple[str, str], ...] = ()
    kept: frozenset[str] = frozenset()
    prefetch: int = 1
    rounding: Rounding = EXACT


class Point(NamedTuple):
    """A combination and what it costs. ``name`` is that of a recipe, or empty."""

    candidate: Candidate
    estimate: Estimate
    name: str = ""


class Messages(NamedTuple):
    """The collectives of a step: the seconds for the ``bytes`` of the ``longest`` that carries several layers, and the
    ``latencies`` of all."""

    longest: float
    latencies: float
    bytes: int


@dataclass(frozen=True)
class Class:
    """Blocks that call the same functions, in order of forward, and the labels of their buckets."""

    calls: tuple[Call, ...]
    labels: tuple[str, ...]


class Family:
    """The steps of one family of strategies.

    Args:
        kind: "zero", "hybrid", "secondary", "ddp", or "given" for a strategy that is not to be changed.
        base: a compiled step that gathers all buckets again, if the family does so.
        variants: the functions of each call of a block, by what they recompute; those that recompute nothing first.
        keeps: whether buckets are kept until backward: True, False, or None if that is to be decided.
        prefetches: the numbers to choose from.
        options: those of ``fsdp`` that all its steps have beside what other families of its kind have; ``note`` says
            them in words.
        allowed: the wires that may be chosen.
    """

    def __init__(
        self,
        kind: str,
        base: Compiled,
        variants: Mapping[str, Mapping[Call, Pair]],
        setting: Setting,
        *,
        keeps: bool | None = None,
        prefetches: Sequence[int] = PREFETCHES,
        options: Mapping[str, Any] | None = None,
        note: str = "",
        allowed: Allowed = NO_WIRES,
    ) -> None:
        self.kind, self.name, self.options, self.allowed = kind, kind + note, dict(options or {}), allowed
        self.base, self.variants, self.setting = base, variants, setting
        self.keeps, self.prefetches, self.note = keeps, prefetches, note
        self._points: dict[Candidate, Point] = {}
        self._facts: dict[Any, Any] = {}

    # ---- what is known of it ----

    @cached_property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets that backward gathers again, by label, in order of forward."""
        again = {bucket_of(b).label for b in self.base.step.backward.bound_symbols if is_issue(b) and is_gather(b)}
        issues = (b for b in self.base.step.forward.bound_symbols if is_issue(b) and is_gather(b))
        return {bucket_of(b).label: bucket_of(b) for b in issues if bucket_of(b).label in again}

    @cached_property
    def messages(self) -> Messages:
        """The collectives of a step."""
        issues = [b for trace in self.base.step for b in trace.bound_symbols if is_issue(b)]
        several = [b for b in issues if len({m.parameter.layer for m in bucket_of(b).members}) > 1]
        longest = max((link_seconds(b) - latency_seconds(b) for b in several), default=0.0)
        latencies = sum(latency_seconds(b) for b in issues)
        return Messages(longest, latencies, max((_whole_bytes(bucket_of(b)) for b in several), default=0))

    @cached_property
    def classes(self) -> list[Class]:
        """The blocks that may recompute something, by class."""
        found: dict[int, list[Call]] = {}
        if len(self.variants) > 1:
            for call, pair in self.variants[NOTHING].items():
                found.setdefault(id(pair.forward.id), []).append(call)
        return [Class(tuple(calls), self._buckets_of(calls)) for calls in found.values()]

    def _buckets_of(self, calls: Sequence[Call]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in calls if name in self.buckets))

    @cached_property
    def outside(self) -> list[str]:
        """The buckets that belong to no class."""
        inside = {label for c in self.classes for label in c.labels}
        return [label for label in self.buckets if label not in inside]

    # ---- points ----

    def point(self, candidate: Candidate, name: str = "") -> Point:
        if candidate not in self._points:
            found = estimate(self.step(candidate), self.setting, self._facts)
            self._points[candidate] = Point(candidate, found, name)
        return self._points[candidate]

    def step(self, candidate: Candidate) -> Step:
        """The executed traces of a candidate."""
        chosen = dict(candidate.recomputed)
        pairs = {call: self.variants[chosen.get(call[0], NOTHING)][call] for call in self.variants.get(NOTHING, {})}
        gather = self.allowed.gathers.get(candidate.rounding.gather)
        reduction = self.allowed.reductions.get(candidate.rounding.reduction)
        return compose(self.base, pairs, Choice(candidate.kept, candidate.prefetch, gather, reduction))

    def recipes(self, rounding: Rounding = EXACT) -> None:
        """Adds what people choose by hand: all buckets alike, all blocks alike, with the prefetch of ``fsdp``."""
        everything = frozenset(self.buckets)
        for variant in self.variants or (NOTHING,):
            recomputed = self.in_order((c[0], variant) for k in self.classes for c in k.calls if variant != NOTHING)
            for kept in self._kept([frozenset(), everything]):
                usual = 3 if kept else 1
                prefetch = usual if usual in self.prefetches else self.prefetches[0]
                self.point(Candidate(self.name, recomputed, kept, prefetch, rounding), "by hand")

    def in_order(self, recomputed: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Pairs of a block and what it recomputes, in order of forward."""
        chosen = dict(recomputed)
        return tuple((name, chosen[name]) for name in dict.fromkeys(c[0] for c in self.base.calls) if name in chosen)

    def _kept(self, sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
        """The sets of kept buckets that are allowed."""
        if self.keeps is None:
            return list(dict.fromkeys(sets))
        return [frozenset(self.buckets) if self.keeps else frozenset()]

    def points(self) -> list[Point]:
        """The recipes, and the fastest steps for amounts of memory between the least and the most that they need."""
        self._search(EXACT)
        return self.found

    @property
    def found(self) -> list[Point]:
        """All points so far."""
        return list(self._points.values())

    def _search(self, rounding: Rounding) -> None:
        self.recipes(rounding)
        if self.classes or self.buckets:
            program = _Program(self, rounding)
            for solved in filter(None, map(program.solve, self._levels(program.most))):
                (kept,) = self._kept([solved.kept])
                for prefetch in self.prefetches if self.buckets else self.prefetches[:1]:
                    found = self.point(solved._replace(kept=kept, prefetch=prefetch)).estimate
                    if found.exposed < NOT_WORTH_IT * found.seconds:  # which is all that more of it could save
                        break

    def rounded_points(self) -> list[Point]:
        """Adds steps whose messages are rounded as is allowed, if compute waits for communication: the recipes, and a
        search with each way to round that is worth it in a recipe. If compute does not wait, only the step with the
        least memory, which may be the only one that fits."""
        exact = front(self.found)
        if not any(p.estimate.exposed >= NOT_WORTH_IT * p.estimate.seconds for p in exact):
            for rounding in self.roundings:
                self.point(exact[0].candidate._replace(rounding=rounding))
            return self.found
        for rounding in self.roundings:
            self.recipes(rounding)
        worth_it = {p.candidate.rounding for p in front(p for p in self.found if p.name)}
        for rounding in sorted(worth_it - {EXACT}):
            self._search(rounding)
        return self.found

    @cached_property
    def roundings(self) -> list[Rounding]:
        """The allowed ways to round, of those that have something to round in this family."""
        issues = [b for trace in self.base.step for b in trace.bound_symbols if is_issue(b)]

        def values(wires: Mapping[str, Wire], *, gathers: bool) -> list[str]:
            buckets = [bucket_of(b) for b in issues if is_gather(b) == gathers]
            return ["", *(name for name, wire in wires.items() if any(wire.takes(b) for b in buckets))]

        found = product(values(self.allowed.gathers, gathers=True), values(self.allowed.reductions, gathers=False))
        return [rounding for rounding in starmap(Rounding, found) if rounding != EXACT]

    def _levels(self, most: float) -> list[float]:
        """Amounts of memory up to ``most``. They do not depend on the budget, so that budgets can be compared."""
        inside = min(most, self.setting.hardware.memory)
        beyond = np.linspace(inside, most, BEYOND + 1)[1:] if most > inside else np.array([])
        return [float(level) for level in (*np.linspace(0.0, inside, LEVELS), *beyond)]


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


def _whole_bytes(bucket: Bucket) -> int:
    """The bytes of the unsharded parameters, however they travel."""
    return (bucket.plain or bucket).bytes


# ---- the integer program ----


class _Program:
    """How many blocks of each class recompute what, and how many buckets are kept.

    Minimises the seconds of backward, the longer of compute and communication, under a limit of the bytes that forward
    leaves for it. Variables: for each class and variant a number of blocks; for each class, and each bucket outside, a
    number of kept buckets; the seconds.
    """

    def __init__(self, family: Family, rounding: Rounding) -> None:
        self.family, self.empty = family, Candidate(family.name, rounding=rounding)
        self.variants = list(family.variants)
        cost, backward = family.setting.cost, family.step(self.empty).backward.bound_symbols
        pairs = [[family.variants[v][c.calls[0]] for v in self.variants] for c in family.classes]
        self.seconds = [[_seconds(cost, pair.backward) for pair in row] for row in pairs]
        self.bytes = [[_saved_bytes(pair.forward.id) for pair in row] for row in pairs]
        self.groups = [c.labels for c in family.classes] + [(label,) for label in family.outside]
        self.compute = sum(compute_seconds(cost, b) for b in backward)
        self.link = sum(link_seconds(b) for b in backward if is_issue(b))
        gathers = [b for b in backward if is_collective(b) and is_gather(b)]
        issues = {bucket_of(b).label: b for b in gathers if is_issue(b)}
        self.gather = [link_seconds(issues[labels[0]]) if labels else 0.0 for labels in self.groups]
        firsts = {labels[0] for labels in self.groups if labels}
        load = dict.fromkeys(firsts, 0.0)  # seconds that a gather and its wait take from compute
        for b in gathers:
            if bucket_of(b).label in load:
                load[bucket_of(b).label] += compute_seconds(cost, b)
        self.load = [load[labels[0]] if labels else 0.0 for labels in self.groups]
        self.whole = [_whole_bytes(family.buckets[labels[0]]) if labels else 0 for labels in self.groups]

    @cached_property
    def most(self) -> float:
        """The bytes of the combination that saves and keeps everything."""
        blocks = sum(max(row) * len(c.calls) for row, c in zip(self.bytes, self.family.classes, strict=True))
        return float(blocks + sum(w * len(labels) for w, labels in zip(self.whole, self.groups, strict=True)))

    def solve(self, memory: float) -> Candidate | None:
        """The fastest combination whose saved and kept bytes are at most ``memory``."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        classes, v = self.family.classes, len(self.variants)
        blocks = len(classes) * v
        n = blocks + len(self.groups) + 1
        extra = np.array([s - row[0] for row in self.seconds for s in row])
        gather, load, whole = np.array(self.gather), np.array(self.load), np.array(self.whole, dtype=float)
        scale = 1 / max(self.compute, self.link, 1e-12)
        # beside the seconds, a little for all work and all messages, which choose among equals
        objective = scale * np.concatenate([0.01 * extra, -0.01 * gather, [1.0]])
        limit = np.concatenate([[b for row in self.bytes for b in row], whole, [0.0]])
        rules = [
            LinearConstraint(limit / max(self.most, 1.0), -np.inf, memory / max(self.most, 1.0)),
            LinearConstraint(scale * np.concatenate([-extra, load, [1.0]]), scale * self.compute, np.inf),
            LinearConstraint(scale * np.concatenate([0 * extra, gather, [1.0]]), scale * self.link, np.inf),
        ]
        for k, c in enumerate(classes):
            row = np.zeros(n)
            row[k * v : (k + 1) * v] = 1
            rules.append(LinearConstraint(row, len(c.calls), len(c.calls)))
        keeps = self.family.keeps is not False
        most = [len(c.calls) for c in classes for _ in self.variants]
        most += [len(labels) if keeps else 0 for labels in self.groups]
        found = milp(
            objective,
            integrality=[*[1] * (n - 1), 0],
            bounds=Bounds(0, np.array([*most, np.inf])),
            constraints=rules,
        )
        return self._candidate(np.rint(found.x[:-1]).astype(int)) if found.success else None

    def _candidate(self, numbers: Sequence[int]) -> Candidate:
        """The first blocks recompute, because their backward comes last, when memory is free again. The last buckets
        are kept, because their backward comes first."""
        v = len(self.variants)
        recomputed: list[tuple[str, str]] = []
        for k, c in enumerate(self.family.classes):
            names = list(dict.fromkeys(name for name, _ in c.calls))
            for variant, number in zip(
                reversed(self.variants[1:]), numbers[k * v + 1 : (k + 1) * v][::-1], strict=True
            ):
                recomputed += [(name, variant) for name in names[:number]]
                names = names[number:]
        counts = numbers[len(self.family.classes) * v :]
        kept = (labels[len(labels) - n :] for labels, n in zip(self.groups, counts, strict=True) if n)
        labels = frozenset(label for found in kept for label in found)
        return self.empty._replace(recomputed=self.family.in_order(recomputed), kept=labels)


def _seconds(cost: CostModel, function: Any) -> float:
    return sum(compute_seconds(cost, b) for b in function.id.trace.bound_symbols)


def _saved_bytes(part: Any) -> int:
    """The bytes of what a block's forward saves. Values that share memory count twice."""
    lists = (r for r in part.trace.bound_symbols[-1].args[0] if isinstance(r, list))
    return sum(p.numel * p.dtype.bytes for saved in lists for p in saved if isinstance(p, TensorProxy))
