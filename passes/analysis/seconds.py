"""What the cost model of a plan predicts of a trace: the seconds that a line takes, and the collectives in flight.

Of these it tells when the link is free, how many bytes are in flight, and which collectives still lack inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from passes.analysis.calls import BlockFunction, block_function
from passes.analysis.flops import bytes_made, bytes_moved, is_free, work
from passes.analysis.liveness import sequence_bytes
from passes.analysis.recognise import (
    ISSUED,
    away_at,
    bucket_of,
    is_gather,
    is_issue,
    is_offload,
    is_products,
    is_sequence_issue,
    is_sequence_wait,
    is_trip,
    is_wait,
    part_at,
)
from passes.plan import Axis, Bucket, BucketPlan, CostModel

from thunder.core.symbol import BoundSymbol


class Flight(NamedTuple):
    """A collective in flight: the link works on it from ``start`` to ``done``, in seconds."""

    start: float
    done: float


class Clock:
    """The time of compute, ``now``, and when the link of each group and the bus to the host are free, in seconds."""

    def __init__(self, cost: CostModel, now: float = 0.0) -> None:
        self.cost, self.now = cost, now
        self._is_free: dict[object, float] = {}  # by link

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def issue(self, bsym: BoundSymbol) -> Flight:
        """Lets a bucket, a value, or a copy travel. A bucket's message leaves as soon as it is packed for its wire."""
        seconds, link = compute_seconds(self.cost, bsym), link_of(bsym)
        leaves = self.now + (wire_seconds(self.cost, bsym) if is_issue(bsym) else seconds)
        start = max(leaves, self._is_free.get(link, 0.0))
        self._is_free[link] = done = start + seconds_on_link(self.cost, bsym)
        self.now += seconds
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


def compute_seconds(cost: CostModel, bsym: BoundSymbol) -> float:
    """One line of compute. 0 for a line that computes nothing (``del``, return, unpacking). A collective takes
    :func:`link_seconds`; its share of the device is counted where it is issued, and :func:`wire_seconds` where they are
    spent. A call of a block takes :func:`block_seconds`."""
    if is_issue(bsym):
        return cost.busy_seconds(**_message(bucket_of(bsym))) + wire_seconds(cost, bsym)
    if is_wait(bsym):
        return wire_seconds(cost, bsym)
    busy = cost.busy_seconds(**_sequence(bsym)) if is_sequence_issue(bsym) else 0.0
    if is_free(bsym):
        return busy
    if (within := seconds_within(cost, bsym)) is not None:
        return within.total
    return busy + cost.compute_seconds(work(bsym), bytes_moved(bsym), bytes_made(bsym))


class Sent(NamedTuple):
    """A collective of a sequence in a block: its line, and its start and end in seconds since the block began. Compute
    waits for it for ``exposed`` of them."""

    issue: BoundSymbol
    start: float
    stop: float
    exposed: float


class BlockSeconds(NamedTuple):
    """The seconds of a line that has collectives inside, and these in order of issue."""

    total: float
    sent: Sequence[Sent]


def block_seconds(cost: CostModel, part: BlockFunction) -> BlockSeconds:
    """A call of a block, whose collectives of sequences follow each other on an otherwise idle link."""
    if cost not in part.facts:
        part.facts[cost] = _in_order(cost, part.trace.bound_symbols)
    found: BlockSeconds = part.facts[cost]
    return found


def _in_order(cost: CostModel, lines: Iterable[BoundSymbol]) -> BlockSeconds:
    clock = Clock(cost)
    sent: list[Sent] = []
    places: dict[str, int] = {}  # in ``sent``, by future
    for bsym in lines:
        if is_sequence_issue(bsym):
            places[bsym.output.name] = len(sent)
            sent.append(Sent(bsym, *clock.issue(bsym), 0.0))
            continue
        if is_sequence_wait(bsym):
            at = places[bsym.args[0].name]
            sent[at] = sent[at]._replace(exposed=clock.wait(Flight(sent[at].start, sent[at].stop)))
        elif (within := seconds_within(cost, bsym)) is not None:
            sent += [s._replace(start=clock.now + s.start, stop=clock.now + s.stop) for s in within.sent]
        clock.compute(compute_seconds(cost, bsym))
    return BlockSeconds(clock.now, sent)


def seconds_within(cost: CostModel, bsym: BoundSymbol) -> BlockSeconds | None:
    """A line that calls a block, or computes products while their rows travel; None for other lines."""
    if (called := block_function(bsym)) is not None:
        return block_seconds(cost, called)
    return products_seconds(cost, bsym.subsymbols, bsym.args[2].pieces) if is_products(bsym) else None


def products_seconds(cost: CostModel, lines: Iterable[BoundSymbol], pieces: int) -> BlockSeconds:
    """Products beside the collective of their rows, of which each rank's travel in so many pieces. ``lines`` are both.
    Each piece is copied to its place: of the results, and of rows that do not lie one behind the other."""
    (issue,), (wait,) = (list(filter(f, lines)) for f in (is_sequence_issue, is_sequence_wait))
    ranks, gathers = part_at(issue).plan.ranks, not ISSUED[issue.sym.id].adds
    count, overhead = ranks * pieces, cost.device.overhead
    # an all_gather of so many bytes takes as long as one piece from its rank to all, or from all to its rank
    size = sequence_bytes(issue) // ((ranks - 1) * pieces)
    travels, each = cost.collective_seconds(size, ranks), cost.busy_seconds(size, ranks)
    for bsym in lines:
        if not (is_sequence_issue(bsym) or is_sequence_wait(bsym) or is_free(bsym)):
            made, moved = bytes_made(bsym), bytes_moved(bsym)
            copied = 2 * made if gathers else 0 if is_free(issue) else 2 * (moved - made)
            each += overhead + (cost.compute_seconds(work(bsym), moved + copied, made) - overhead) / count
    if gathers:  # a rank's own pieces are there
        each += compute_seconds(cost, wait) / count
        now, start, stop = pieces * each, 0.0, count * travels
        for n in range(count):
            now = max(now, (n + 1) * travels) + each if n % ranks else now
    else:
        start, stop = each, 0.0
        for n in range(count):
            stop = max(stop, (n + 1) * each) + travels
        now = stop
    return BlockSeconds(now, [Sent(issue, start, stop, now - count * each)])


def wire_seconds(cost: CostModel, bsym: BoundSymbol) -> float:
    """Seconds in which the device works for the wire of a collective: in the line that issues it, before it is sent, or
    in the line that waits for it, after it has arrived. The latter also sends what the wire sends late, and the device
    is idle. 0 without a wire, and for any other line."""
    if is_issue(bsym):
        return cost.kernel_seconds(bucket_of(bsym).work.issue)
    if not is_wait(bsym):
        return 0.0
    bucket = bucket_of(bsym)
    late = bucket.work.late
    sent = cost.collective_seconds(**_message(bucket) | {"nbytes": late}) if late else 0.0
    return cost.kernel_seconds(bucket.work.finish) + sent


def link_of(issue: BoundSymbol) -> object:
    """The link of a collective or a copy: the process group, or the bus to the host."""
    if is_trip(issue):
        return away_at(issue).host
    if is_sequence_issue(issue):
        context = part_at(issue).plan
        return context.runtime.group(context.axis)
    plan = bucket_of(issue).plan
    return plan.host if is_offload(issue) else plan.group


def seconds_on_link(cost: CostModel, issue: BoundSymbol) -> float:
    """A collective or a copy, from its issue to its arrival on an otherwise idle link."""
    if is_trip(issue):
        return cost.copy_seconds(away_at(issue).nbytes)
    return sequence_seconds(cost, issue) if is_sequence_issue(issue) else link_seconds(issue)


def link_seconds(issue: BoundSymbol) -> float:
    """A collective or a copy to the host, from its issue to its arrival on an otherwise idle link.

    If parameters are at rest in host memory, their gather begins with a copy to the device.
    """
    bucket = bucket_of(issue)
    cost = bucket.plan.cost
    if is_offload(issue):
        return copy_seconds(cost, bucket)
    copy = copy_seconds(cost, bucket) if bucket.plan.host is not None and is_gather(issue) else 0.0
    return collective_seconds(cost, bucket) + copy


def sequence_seconds(cost: CostModel, issue: BoundSymbol) -> float:
    """A collective of a sequence, from its issue to its arrival on an otherwise idle link. Its ranks are taken to
    follow each other, as those of the inner dimension of a mesh do."""
    return cost.collective_seconds(**_sequence(issue), exchanged=ISSUED[issue.sym.id].exchanges)


def _sequence(issue: BoundSymbol) -> dict[str, Any]:
    """The bytes of a collective of a sequence, and the ranks among which they travel."""
    return {"nbytes": ISSUED[issue.sym.id].crossings * sequence_bytes(issue), "ranks": part_at(issue).plan.ranks}


def latency_seconds(issue: BoundSymbol) -> float:
    """The part of :func:`link_seconds` that does not depend on the bytes."""
    bucket = bucket_of(issue)
    return 0.0 if is_offload(issue) else bucket.plan.cost.collective_seconds(**_message(bucket) | {"nbytes": 0})


def collective_seconds(cost: CostModel, bucket: Bucket) -> float:
    """One collective of a bucket, without what its wire sends late. An all_reduce sends each byte twice."""
    message = _message(bucket)
    return cost.collective_seconds(**message | {"nbytes": message["nbytes"] - bucket.work.late})


def _message(bucket: Bucket) -> dict[str, Any]:
    """The bytes of a bucket's collective, and the ranks among which they travel."""
    plan = bucket.plan
    apart = plan.axis is Axis.REPLICATE
    return {"nbytes": bucket.crossings * bucket.bytes, "ranks": plan.world_size, "apart": apart}


def copy_seconds(cost: CostModel, bucket: Bucket) -> float:
    """A copy of this rank's shards of a bucket, or of their gradients, between host memory and device memory."""
    return cost.copy_seconds(bucket.numel * bucket.rest_dtype.bytes)
