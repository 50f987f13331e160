"""Collectives in flight while a trace runs, as the cost model predicts: when the link is free, how many bytes are in
flight, and which collectives still lack inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from passes.analysis.recognise import bucket_of, is_gather
from passes.analysis.seconds import link_seconds, wire_seconds
from passes.plan import Bucket, BucketPlan

from thunder.core.symbol import BoundSymbol


class Flight(NamedTuple):
    """A collective in flight: the link works on it from ``start`` to ``done``, in seconds."""

    start: float
    done: float


class Clock:
    """The time of compute, ``now``, and the time at which each group's link is free, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._link_is_free: dict[object, float] = {}  # by group

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def issue(self, bsym: BoundSymbol) -> Flight:
        plan = bucket_of(bsym).plan
        group = plan.group
        self.now += wire_seconds(plan.cost, bsym)
        start = max(self.now, self._link_is_free.get(group, 0.0))
        self._link_is_free[group] = done = start + link_seconds(bsym)
        return Flight(start, done)

    def wait(self, flight: Flight) -> float:
        """Makes compute wait until a collective is done. Returns the seconds for which compute is idle."""
        idle, self.now = max(0.0, flight.done - self.now), max(self.now, flight.done)
        return idle

    def is_done(self, flight: Flight, *, margin: float) -> bool:
        """True if a collective is done by now, even if it takes ``margin`` times as long."""
        return self.now >= flight.start + margin * (flight.done - flight.start)


class Window:
    """The bytes in flight and the buckets gathered ahead of use, for each plan, and their limits."""

    def __init__(self, limits: Mapping[BucketPlan, int]) -> None:
        self._limits = limits
        self._bytes: Counter[BucketPlan] = Counter()
        self._ahead: Counter[BucketPlan] = Counter()

    def enter(self, issue: BoundSymbol) -> None:
        self._count(issue, 1)

    def leave(self, wait: BoundSymbol) -> None:
        self._count(wait, -1)

    def has_room(self, bucket: Bucket) -> bool:
        inflight = self._bytes[bucket.plan]
        return not inflight or inflight + bucket.bytes <= self._limits[bucket.plan]

    def no_room(self, bucket: Bucket) -> str:
        """The reason why the bucket has no room."""
        return f"more than {self._limits[bucket.plan]} bytes would be in flight"

    def obstacle(self, bucket: Bucket, leaving: BucketPlan | None) -> str:
        """The reason why the bucket may not be gathered now; empty if it may. ``leaving`` is the plan of a bucket that
        is being waited for and is no longer ahead of use."""
        plan = bucket.plan
        if self._ahead[plan] - (plan is leaving) >= plan.prefetch:
            return f"more than prefetch={plan.prefetch} would be gathered ahead of use"
        return "" if self.has_room(bucket) else self.no_room(bucket)

    def _count(self, bsym: BoundSymbol, sign: int) -> None:
        bucket = bucket_of(bsym)
        self._bytes[bucket.plan] += sign * bucket.bytes
        self._ahead[bucket.plan] += sign * is_gather(bsym)


class Pending:
    """Reductions and copies whose inputs are not computed yet."""

    def __init__(self, lines: Iterable[BoundSymbol]) -> None:
        self._missing: dict[str, set[str]] = {}  # by future
        self._users: dict[str, list[BoundSymbol]] = {}
        for b in lines:
            names = self._missing[b.output.name] = {a.name for a in b.flat_proxy_args}
            for name in names:
                self._users.setdefault(name, []).append(b)

    def ready(self, name: str) -> list[BoundSymbol]:
        """The lines for which ``name`` was the last missing input."""
        users = self._users.pop(name, [])
        for b in users:
            self._missing[b.output.name].discard(name)
        return [b for b in users if not self._missing[b.output.name]]
