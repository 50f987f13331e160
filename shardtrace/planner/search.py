"""Finds the steps of a model that are worth their memory.

The space is large (each block keeps its parameters or gathers them again; it saves its activations, or recomputes the
cheap ones, or all), but blocks of a class are alike, so that only their numbers count. For each of ``LEVELS`` amounts
of memory an integer program over these numbers (how many blocks of each class recompute what, how many buckets are
kept) finds the combination that should be fastest, from the seconds and bytes of single lines. Each is then composed
and predicted exactly, beside what people choose by hand. The budget takes no part in this: it picks a point of the
result. So more memory never gives a slower plan, and no plan is slower than a recipe.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle, product, starmap
from typing import Any, NamedTuple

from passes.analysis.calls import HOST, way_of
from passes.analysis.recognise import bucket_of, is_collective, is_gather, is_issue, nbytes
from passes.analysis.seconds import block_seconds, compute_seconds, latency_seconds, link_seconds
from passes.plan import Bucket, CostModel, Wire
from passes.plan.bucket import MB
from passes.plan.cost import HOST_MEMORY
from shardtrace.options.strategy import RECOMPUTED, repeated_blocks
from shardtrace.planner.compose import Call, Choice, Compiled, ComposedStep, Pair, compose
from shardtrace.planner.estimate import OVER_MACHINES, STRATEGIES, Estimate, Task, estimate

import numpy as np
from thunder.core.symbol import BoundSymbol
from torch.distributed.fsdp import CPUOffloadPolicy

# ---- an integer program ----


class Program:
    """Minimises the seconds of backward, the longer of compute and communication, under a limit of the bytes that
    forward leaves for it. Variables: for each class and variant a number of blocks; for each class, and each bucket
    outside, a number of kept buckets; the seconds.
    """

    def __init__(self, family: Family, rounding: Rounding) -> None:
        self.family, self.empty = family, Candidate(family.name, rounding=rounding)
        self.variants = list(family.variants)
        cost, backward = family.task.setting.cost, family.step(self.empty).backward.bound_symbols
        pairs = [[family.variants[v][c.calls[0]] for v in self.variants] for c in family.classes]
        on_host = [way_of(v)[1] for v in self.variants]
        self.seconds = [
            [
                block_seconds(cost, pair.backward.id).total + (_waits_for_copies(cost, pair) if away else 0.0)
                for pair, away in zip(row, on_host, strict=True)
            ]
            for row in pairs
        ]
        self.bytes = [
            [0 if away else _saved_bytes(pair.forward.id) for pair, away in zip(row, on_host, strict=True)]
            for row in pairs
        ]
        self.groups = [c.labels for c in family.classes] + [(label,) for label in family.outside]
        self.compute = sum(compute_seconds(cost, b) for b in backward)
        self.link = sum(link_seconds(b) for b in backward if is_issue(b))
        gathers = [b for b in backward if is_collective(b) and is_gather(b)]
        issues = _largest(b for b in gathers if is_issue(b))
        self.gather = [link_seconds(issues[labels[0]]) if labels else 0.0 for labels in self.groups]
        firsts = {labels[0] for labels in self.groups if labels}
        load = dict.fromkeys(firsts, 0.0)  # seconds that a gather and its wait take from compute
        for b in gathers:
            if bucket_of(b).label in load:
                load[bucket_of(b).label] += compute_seconds(cost, b)
        self.load = [load[labels[0]] if labels else 0.0 for labels in self.groups]
        self.whole = [whole_bytes(family.buckets[labels[0]]) if labels else 0 for labels in self.groups]

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
        with _without_stdout():
            found = milp(
                objective,
                integrality=[*[1] * (n - 1), 0],
                bounds=Bounds(0, np.array([*most, np.inf])),
                constraints=rules,
                options={"mip_rel_gap": 0.0},  # the best, not the first good one that the solver meets
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


@contextmanager
def _without_stdout() -> Iterator[None]:
    """Drops what libraries print by C's printf, as HiGHS does whatever its options are (HiGHS, issue 2734)."""
    sys.stdout.flush()
    flush, kept = ctypes.CDLL(None).fflush, os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
        flush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _waits_for_copies(cost: CostModel, pair: Pair) -> float:
    """The seconds that a step waits for the copies of what a block saves, if all its blocks are alike."""
    copy = cost.copy_seconds(_saved_bytes(pair.forward.id))
    return sum(max(0.0, copy - block_seconds(cost, part).total) for part in (pair.forward.id, pair.backward.id))


def _saved_bytes(part: Any) -> int:
    """The bytes of what a block's forward saves. Values that share memory count twice."""
    return sum(nbytes(r) for r in part.trace.bound_symbols[-1].args[0] if isinstance(r, list))


def _largest(gathers: Iterable[BoundSymbol]) -> dict[str, BoundSymbol]:
    """The lines that issue gathers, by label. A block's parameters that are cut travel apart from the others. The
    larger bucket stands for both."""
    found: dict[str, BoundSymbol] = {}
    for b in gathers:
        label = bucket_of(b).label
        if label not in found or whole_bytes(bucket_of(b)) > whole_bytes(bucket_of(found[label])):
            found[label] = b
    return found


def whole_bytes(bucket: Bucket) -> int:
    """The bytes of the unsharded parameters, however they travel."""
    return (bucket.plain or bucket).bytes


# ---- families of strategies ----


PREFETCHES = (1, 2, 3)
AWAY = " with activations on the host"  # the note of a family
NOTHING = "nothing"  # is recomputed


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
    """A combination: a family by name, what each block recomputes or keeps in host memory (nothing if it is
    not there), which buckets are kept, the prefetch, and how messages are rounded."""

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


class Class(NamedTuple):
    """Blocks that call the same functions, in order of forward, and the labels of their buckets."""

    calls: tuple[Call, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Family:
    """The steps of one family of strategies.

    Args:
        task: what is planned.
        kind: "zero", "hybrid", "secondary", "ddp", or "given" for a strategy that is not to be changed.
        base: a compiled step that gathers all buckets again, if the family does so.
        variants: the functions of each call of a block, by what they recompute; those that recompute nothing first.
        keeps: whether buckets are kept until backward: True, False, or None if that is to be decided.
        options: those of ``fsdp`` that all its steps have beside what other families of its kind have; ``note`` says
            them in words.
    """

    task: Task
    kind: str
    base: Compiled
    variants: Mapping[str, Mapping[Call, Pair]]
    keeps: bool | None
    options: Mapping[str, Any]
    note: str
    _points: dict[Candidate, Point] = field(default_factory=dict)
    facts: dict[Any, Any] = field(default_factory=dict)  # as in ``step_liveness``

    @property
    def name(self) -> str:
        return self.kind + self.note

    @property
    def prefetches(self) -> Sequence[int]:
        """The numbers to choose from."""
        pinned = self.task.fixed.get("prefetch")
        return PREFETCHES if pinned is None else (pinned,)

    # ---- its steps ----

    @property
    def points(self) -> list[Point]:
        """All that were predicted so far."""
        return list(self._points.values())

    def point(self, candidate: Candidate, name: str = "") -> Point:
        """Predicts a candidate. ``name``: of a recipe."""
        if candidate not in self._points:
            found = estimate(self.step(candidate), self.task.setting, self.facts)
            self._points[candidate] = Point(candidate, found, name)
        return self._points[candidate]

    def step(self, candidate: Candidate) -> ComposedStep:
        """The executed traces of a candidate."""
        chosen, allowed = dict(candidate.recomputed), self.task.allowed
        pairs = {call: self.variants[chosen.get(call[0], NOTHING)][call] for call in self.variants[NOTHING]}
        gather = allowed.gathers.get(candidate.rounding.gather)
        reduction = allowed.reductions.get(candidate.rounding.reduction)
        on_host = frozenset(name for name, what in chosen.items() if way_of(what)[1])
        return compose(self.base, pairs, Choice(candidate.kept, candidate.prefetch, gather, reduction, on_host))

    # ---- what is known of them ----

    @cached_property
    def issues(self) -> list[BoundSymbol]:
        """The lines of the base that issue collectives."""
        return [b for trace in self.base.step for b in trace.bound_symbols if is_issue(b)]

    @cached_property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets that backward gathers again, by label, in order of forward."""
        first, again = ([b for b in t.bound_symbols if is_issue(b) and is_gather(b)] for t in self.base.step)
        labels = {bucket_of(b).label for b in again}
        return {label: bucket_of(b) for label, b in _largest(first).items() if label in labels}

    @cached_property
    def classes(self) -> list[Class]:
        """The blocks that may recompute something, by class."""
        found: dict[int, list[Call]] = {}
        if len(self.variants) > 1:
            for call, pair in self.variants[NOTHING].items():
                found.setdefault(id(pair.forward.id), []).append(call)
        labels = [tuple(dict.fromkeys(name for name, _ in calls if name in self.buckets)) for calls in found.values()]
        return [Class(tuple(calls), own) for calls, own in zip(found.values(), labels, strict=True)]

    @cached_property
    def outside(self) -> list[str]:
        """The buckets that belong to no class."""
        inside = {label for c in self.classes for label in c.labels}
        return [label for label in self.buckets if label not in inside]

    @cached_property
    def roundings(self) -> list[Rounding]:
        """The allowed ways to round, of those that have something to round."""

        def values(wires: Mapping[str, Wire], *, gathers: bool) -> list[str]:
            buckets = [bucket_of(b) for b in self.issues if is_gather(b) == gathers]
            return ["", *(name for name, wire in wires.items() if any(wire.takes(b) for b in buckets))]

        gathers = values(self.task.allowed.gathers, gathers=True)
        found = product(gathers, values(self.task.allowed.reductions, gathers=False))
        return [rounding for rounding in starmap(Rounding, found) if rounding != EXACT]

    def allowed_kept(self, kept: frozenset[str]) -> frozenset[str]:
        """``kept``, or the set of kept buckets that is not to be changed."""
        if self.keeps is None:
            return kept
        return frozenset(self.buckets) if self.keeps else frozenset()

    def in_order(self, recomputed: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Pairs of a block and what it recomputes, in order of forward."""
        chosen = dict(recomputed)
        return tuple((name, chosen[name]) for name in dict.fromkeys(c[0] for c in self.base.calls) if name in chosen)

    # ---- candidates as options and in words ----

    def options_of(self, candidate: Candidate) -> dict[str, Any]:
        """The options of ``fsdp`` that make a candidate, without the fixed ones."""
        fixed, rounding = self.task.fixed, candidate.rounding
        found = dict(self.options)
        if "sharding_strategy" not in fixed:
            found["sharding_strategy"] = self._strategy(candidate)
        if "activation_checkpointing" not in fixed:
            found["activation_checkpointing"] = self._checkpointing(candidate)
        if fixed.get("prefetch") is None and self.buckets:
            found["prefetch"] = candidate.prefetch
        if rounding.gather:
            found["gather_dtype"] = rounding.gather
        if rounding.reduction:
            found["reduce_wire"] = rounding.reduction
            found |= {"error_feedback": True} if self.task.allowed.error_feedback else {}
        return found

    def words_of(self, candidate: Candidate) -> str:
        """The strategy of a candidate, and how it rounds."""
        name = "given"
        if self.kind in STRATEGIES:
            keeping, again = STRATEGIES[self.kind]
            some = f"{again} and {keeping}"
            name = again if not candidate.kept else keeping if candidate.kept == self.buckets.keys() else some
            name += self.note.removesuffix(AWAY)
        return ", ".join(filter(None, [name, str(candidate.rounding)]))

    def _strategy(self, candidate: Candidate) -> Any:
        keeping, again = STRATEGIES[self.kind]
        if not candidate.kept:
            return again
        if candidate.kept == self.buckets.keys():
            return keeping
        rules: dict[str, str] = {}
        for label in self.buckets:
            if label in candidate.kept:
                members = [m.parameter for m in self.buckets[label].members]
                whole_block = all(p.block == label for p in members)
                rules |= {f"{label}.*": keeping} if whole_block else {p.name: keeping for p in members}
        return rules | {"*": again}

    def _checkpointing(self, candidate: Candidate) -> Any:
        chosen = dict(candidate.recomputed)
        whats = set(chosen.values())
        blocks = {name for c in self.classes for name, _ in c.calls}
        if len(whats) == 1 and chosen.keys() == blocks:
            return whats.pop()
        return chosen or None


def make_family(
    task: Task,
    kind: str,
    first: Family | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    note: str = "",
    recomputes: bool = True,
) -> Family:
    """Compiles a family of a ``kind``. Call it as a fake rank.

    Its blocks call the functions that were compiled for ``first``, if that has the same ones. ``options`` and ``note``
    are its own. ``recomputes``: whether its blocks may recompute something.
    """
    strategy, options = task.strategies()[kind], dict(options or {})
    keeping, again = STRATEGIES.get(kind, (None, strategy))
    keeps = strategy == keeping if "sharding_strategy" in task.fixed else None
    base = task.compile(sharding_strategy=again, **options)
    variants: dict[str, Mapping[Call, Pair]] = {NOTHING: base.calls}
    if first is not None and recomputes and base.calls.keys() <= first.variants[NOTHING].keys():
        variants = {what: {call: pairs[call] for call in base.calls} for what, pairs in first.variants.items()}
    elif recomputes and base.calls and "activation_checkpointing" not in task.fixed:
        variants |= recomputing(base, partial(task.compile, sharding_strategy=again, **options))
    return Family(task, kind, base, variants, False if kind == "secondary" else keeps, options, note)


def recomputing(base: Compiled, compile_step: Callable[..., Compiled]) -> dict[str, Mapping[Call, Pair]]:
    """The functions of blocks that recompute something. One step has those of all variants, if blocks of each class can
    take turns: a block that is the only one of its kind has no functions."""
    alike: dict[int, list[Call]] = {}
    for call, pair in base.calls.items():
        alike.setdefault(id(pair.forward.id), []).append(call)
    variants = RECOMPUTED[::-1]
    turns: dict[str, str] = {}
    for calls in alike.values():
        turns |= zip(dict.fromkeys(name for name, _ in calls if name not in turns), cycle(variants), strict=False)
    members = [[c for c in calls if turns[c[0]] == what] for calls in alike.values() for what in variants]
    if all(len({name for name, _ in calls}) > 1 for calls in members):
        found = compile_step(activation_checkpointing=turns).calls
        shared = [{id(found[c].forward.id) if c in found else None for c in calls} for calls in members]
        if all(len(functions) == 1 and None not in functions for functions in shared):
            first = (found[calls[0]] for calls in members)
            pairs = {(kind, what): next(first) for kind in alike for what in variants}
            return {what: {c: pairs[kind, what] for kind, calls in alike.items() for c in calls} for what in variants}
    steps = {what: compile_step(activation_checkpointing=what).calls for what in variants}
    return {what: {c: calls.get(c, pair) for c, pair in base.calls.items()} for what, calls in steps.items()}


def on_host(variants: Mapping[str, Mapping[Call, Pair]]) -> dict[str, Mapping[Call, Pair]]:
    """The same functions, of blocks that keep in host memory what they save."""
    return {HOST if what == NOTHING else f"{what}+{HOST}": pairs for what, pairs in variants.items()}


# ---- the search ----


LEVELS = 12  # amounts of memory that a step may use, beside the least: up to that of the device
BEYOND = 3  # more of them, up to the most that any combination takes
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
    recipes(family, rounding)
    if not (family.classes or family.buckets):
        return
    program = Program(family, rounding)
    levels = _levels(family, program.most, few="offload_policy" in family.options or HOST in family.variants)
    for solved in filter(None, map(program.solve, levels)):
        prefetched(family, solved._replace(kept=family.allowed_kept(solved.kept)), math.inf)


HALVINGS = 7


def explore_near(family: Family, budget: float) -> None:
    """Predicts the recipes, and by halving what a step may save the fastest steps that just fit into a budget."""
    recipes(family)
    if not (family.classes or family.buckets):
        return
    program = Program(family, EXACT)
    low, high = 0.0, program.most
    for _ in range(HALVINGS):
        solved = program.solve(middle := (low + high) / 2)
        if solved is None:  # blocks save more whatever they recompute
            low = middle
            continue
        found = prefetched(family, solved._replace(kept=family.allowed_kept(solved.kept)), budget)
        low, high = (middle, high) if found.estimate.peak <= budget else (low, middle)
    for _ in range(FEW):  # a peak does not always grow with what is saved, so that the halving may end too low
        best, known = fastest(family.points, budget), {p.candidate for p in family.points}
        more = [c for c in _lighter(family, best.candidate) if c not in known] if best is not None else []
        if not more:
            break
        for candidate in more:
            family.point(candidate)


def _lighter(family: Family, candidate: Candidate) -> Iterator[Candidate]:
    """Candidates in which one block recomputes less: of those that recompute the same, the last one."""
    chosen, order = dict(candidate.recomputed), list(family.variants)  # nothing comes first, then less before more
    for what in dict.fromkeys(chosen.values()):
        last = [name for name, own in chosen.items() if own == what][-1]
        for less in order[: order.index(what)]:
            others = chosen | {last: less} if less != NOTHING else {n: w for n, w in chosen.items() if n != last}
            yield candidate._replace(recomputed=family.in_order(others.items()))


def prefetched(family: Family, candidate: Candidate, budget: float) -> Point:
    """Predicts a candidate with the least prefetch, which it returns, and with more as long as that is faster and
    fits."""
    first, *others = (candidate._replace(prefetch=n) for n in family.prefetches)
    point = best = family.point(first)
    for more in others if family.buckets else ():
        if best.estimate.gathering < NOT_WORTH_IT * best.estimate.seconds or best.estimate.peak > budget:
            break
        found = family.point(more)
        if found.estimate.seconds > (1 - NOT_WORTH_IT) * best.estimate.seconds:
            break
        best = found
    return point


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
        recipes(family, rounding)
    worth_it = {p.candidate.rounding for p in front(p for p in family.points if p.name)}
    for rounding in sorted(worth_it - {EXACT}):
        explore(family, rounding)


def recipes(family: Family, rounding: Rounding = EXACT) -> None:
    """What people choose by hand: all buckets alike, all blocks alike, with the prefetch of ``fsdp``."""
    both = frozenset[str](), frozenset(family.buckets)
    away = [variant for variant in family.variants if way_of(variant)[1]]
    for variant in away or family.variants:  # the others are those of another family
        recomputed = family.in_order((c[0], variant) for k in family.classes for c in k.calls if variant != NOTHING)
        for kept in dict.fromkeys(map(family.allowed_kept, both)):
            usual = 3 if kept else 1
            prefetch = usual if usual in family.prefetches else family.prefetches[0]
            family.point(Candidate(family.name, recomputed, kept, prefetch, rounding), "by hand")


def _levels(family: Family, most: float, *, few: bool = False) -> list[float]:
    """Amounts of memory for what blocks save, from 0 to ``most``. Most of them fit into the device beside the
    least step of those by hand. They do not depend on the budget, so that budgets can be compared. ``few``: half
    as many, up to that of the device, for steps that are slow, or need less."""
    room = family.task.setting.hardware.memory - min(p.estimate.peak for p in family.points)
    inside = min(most, max(0.0, room))
    levels = np.linspace(0.0, inside, LEVELS // 2 if few else LEVELS)
    beyond = np.linspace(inside, most, BEYOND + 1)[1:] if not few and most > inside else np.array([])
    return list(dict.fromkeys(map(float, (*levels, *beyond))))


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
        for family in list(self._with_activations_on_host(bases)):
            self._add(family)
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
        if "bucketing_strategy" in task.fixed or family.kind not in STRATEGIES or not few or task.together > 1:
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

    def _with_activations_on_host(self, bases: Iterable[Family]) -> Iterator[Family]:
        """The families whose blocks may keep in host memory what they save. None if a step fits that is as fast as any:
        copies only replace what is recomputed and gathered again for lack of memory. None if nothing would fit, even if
        blocks saved nothing."""
        hardware, best = self.task.setting.hardware, fastest(self.points, self.budget)
        if best is not None and best.estimate.seconds <= min(p.estimate.seconds for p in self.points):
            return
        least = min((p.estimate for p in self.points), key=lambda e: e.peak)
        if hardware.name == "cpu" or least.peak - (1 + hardware.allocator) * least.memory["saved"] > self.budget:
            return
        for family in bases:
            if family.kind in ("zero", "hybrid") and len(family.variants) > 1:
                variants = {**family.variants, **on_host(family.variants)}
                yield replace(family, variants=variants, note=f"{family.note}{AWAY}", _points={})

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
        least = bound.seconds - bound.optimizer + optimizer.on_host.moved * words / HOST_MEMORY
        if best is not None and best.estimate.seconds <= least:
            return
        for family in bases:
            if family.kind in ("zero", "hybrid"):
                there = {"offload_policy": CPUOffloadPolicy()}
                yield make_family(task, family.kind, family, options=there, note=" on the host")
