"""The steps of one family of strategies, composed and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product, starmap
from typing import Any, NamedTuple

from passes.analysis.flops import work
from passes.analysis.recognise import bucket_of, is_gather, is_issue
from passes.plan import Bucket, Wire
from shardtrace.options.blocks import RECOMPUTED
from shardtrace.planner.compose import Call, Choice, Compiled, ComposedStep, Pair, compose
from shardtrace.planner.estimate import Estimate, estimate
from shardtrace.planner.task import STRATEGIES, Task

from thunder.core.symbol import BoundSymbol

PREFETCHES = (1, 2, 3)
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
    """A combination: a family by name, what each block recomputes ("cheap" or "full", nothing if it is not there),
    which buckets are kept, the prefetch, and how messages are rounded."""

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
    _facts: dict[Any, Any] = field(default_factory=dict)

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
            found = estimate(self.step(candidate), self.task.setting, self._facts)
            self._points[candidate] = Point(candidate, found, name)
        return self._points[candidate]

    def step(self, candidate: Candidate) -> ComposedStep:
        """The executed traces of a candidate."""
        chosen, allowed = dict(candidate.recomputed), self.task.allowed
        pairs = {call: self.variants[chosen.get(call[0], NOTHING)][call] for call in self.variants[NOTHING]}
        gather = allowed.gathers.get(candidate.rounding.gather)
        reduction = allowed.reductions.get(candidate.rounding.reduction)
        return compose(self.base, pairs, Choice(candidate.kept, candidate.prefetch, gather, reduction))

    @property
    def useful_flops(self) -> float:
        """FLOPs of a forward and a backward that recomputes nothing: a backward has twice the products of its
        forward."""
        return 3.0 * sum(work(b).flops for b in self.base.step.forward.bound_symbols)

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
        return {bucket_of(b).label: bucket_of(b) for b in first if bucket_of(b).label in labels}

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
            name += self.note
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
        for what in reversed(RECOMPUTED):
            calls = task.compile(sharding_strategy=again, activation_checkpointing=what, **options).calls
            variants[what] = {call: calls.get(call, pair) for call, pair in base.calls.items()}
    return Family(task, kind, base, variants, False if kind == "secondary" else keeps, options, note)
