"""Pass: decides where each collective is issued and waited for, and where gathered parameters are deleted.

Works on the lowered forward and backward in turn. Compute lines keep their order. Only collectives move.
The result of a step stays the same bit for bit.

Note [Walk]. The pass walks through the compute lines and keeps clocks that the plan's cost model drives: one for
compute, and one for each group's link, on which collectives follow each other. At each line:

- A gather is waited for right before its first use. It is issued as late as the cost model allows, with a margin. If
  compute would have to wait for one that could have come earlier, the walk is repeated with all gathers as early as the
  limits allow. Gathers are issued in order of first use.
- A reduction is issued as soon as its gradients exist and there is room for it. It is waited for when the cost model
  says that it is done, with a margin, or when its room is needed.
- A copy of gradients to the host is issued when they are reduced, and waited for at the end.
- The limits: no more than ``prefetch`` buckets are gathered ahead of use, and no more than ``max_inflight_bytes`` are
  in flight: issued and not waited for. A single bucket may be larger.

All of it is a function of the trace and its plans. These are equal on all ranks, and so is the order of collectives.

The header of each collective's line says why it stands there. Thunder prints it as a comment above the line.

``wait_copies``: the program waits for copies from host memory at the end of a trace.

    wait_copies(memory_0)       the last line of a trace that copies to or from host memory

An optimizer may then read the gradients and change the shards there. The device waits for each copy by itself, when it
needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_collective,
    is_deletion,
    is_gather,
    is_issue,
    is_offload,
    is_return,
    is_unpack,
    issues_future,
    waits_for_future,
)
from passes.analysis.seconds import Clock, Flight, Pending, Window, compute_seconds, link_seconds, wire_seconds
from passes.comm import symbols
from passes.plan import Bucket, BucketPlan, CostModel, inflight_limits

from thunder.core.codeutils import ContextObject
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used

# A collective may take this many times its predicted seconds before compute has to wait for it.
MARGIN = 2.0
COMPLETE = "its gradients are complete"


def schedule(trace: TraceCtx) -> TraceCtx:
    """Places each collective, and frees gathered parameters.

    Takes: a lowered forward or backward.
    Gives: its collectives as Note [Walk] says, and gathered parameters deleted after their last use.
    No-op when: the trace has no collective.
    """
    if not any(is_collective(b) for b in trace.bound_symbols):
        return trace
    facts = _facts([b for b in trace.bound_symbols if not is_deletion(b)])
    walked = _Walk(facts, late=True).run()
    if walked.idles:
        walked = _Walk(facts, late=False).run()
    new = from_trace(trace)
    new.bound_symbols = walked.lines
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


# ---- what is known before the walk ----


class _Compute(NamedTuple):
    """A line of compute, and the seconds that it takes."""

    line: BoundSymbol
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """Properties of a trace, computed before the walk. Futures and values are identified by name."""

    cost: CostModel
    compute: list[_Compute]
    issue_of: dict[str, BoundSymbol]  # by future: the line that issues the collective or the copy
    wait_for: dict[str, BoundSymbol]  # by future: the line that waits for it
    source_of: dict[str, BoundSymbol]  # by value: the line that waits for it
    gathers: dict[str, int]  # futures in order of first use, numbered
    latest: dict[str, float]  # by future: the latest time to issue a gather that arrives in time, in seconds
    limits: dict[BucketPlan, int]  # bytes in flight


def _facts(lines: list[BoundSymbol]) -> _Facts:
    cost = next(bucket_of(b).plan.cost for b in lines if is_issue(b))  # of the first plan: compute belongs to none
    compute = [_Compute(b, compute_seconds(cost, b)) for b in lines if not is_collective(b) and not is_offload(b)]
    issues = [b for b in lines if is_issue(b)]
    source_of = {o.name: b for b in lines if waits_for_future(b) for o in b.flat_proxy_outs}
    gathers = {b.output.name: b for b in issues if is_gather(b)}
    uses = _first_uses(compute, gathers, source_of)
    return _Facts(
        cost=cost,
        compute=compute,
        issue_of={b.output.name: b for b in lines if issues_future(b)},
        wait_for={b.args[0].name: b for b in lines if waits_for_future(b)},
        source_of=source_of,
        gathers={future: k for k, future in enumerate(uses)},
        latest=_latest_starts(compute, uses, gathers, [b for b in issues if not is_gather(b)]),
        limits=inflight_limits(bucket_of(b) for b in issues),
    )


def _first_uses(
    compute: list[_Compute], gathers: Iterable[str], source_of: Mapping[str, BoundSymbol]
) -> dict[str, int]:
    """The futures of gathers in the order in which compute uses them, with the index of the first line that does."""
    uses: dict[str, int] = {}
    for i, (bsym, _) in enumerate(compute):
        for a in bsym.flat_proxy_args:
            wait = source_of.get(a.name)
            if wait is not None and is_gather(wait):
                uses.setdefault(wait.args[0].name, i)
    return uses | {future: len(compute) - 1 for future in gathers if future not in uses}


def _latest_starts(
    compute: list[_Compute], uses: Mapping[str, int], gathers: Mapping[str, BoundSymbol], reduces: list[BoundSymbol]
) -> dict[str, float]:
    """The latest time, in seconds, to issue each gather so that it arrives before its use if compute never waits.

    The gather shares the link with the reductions that become ready between the previous gather's use and its own.
    """
    clock = [0.0, *accumulate(seconds for _, seconds in compute)]
    made = {o.name: i for i, (b, _) in enumerate(compute) for o in b.flat_proxy_outs}
    load = [0.0] * (len(compute) + 1)  # seconds of the reductions that become ready at each line
    for b in reduces:
        load[max((made.get(a.name, 0) for a in b.flat_proxy_args), default=0)] += link_seconds(b)
    total = [0.0, *accumulate(load)]
    latest: dict[str, float] = {}
    following = clock[-1]
    order = list(uses.items())
    for k in range(len(order) - 1, -1, -1):
        future, use = order[k]
        before = order[k - 1][1] if k else 0
        gather = gathers[future]
        rounding = wire_seconds(bucket_of(gather).plan.cost, gather)
        work = rounding + link_seconds(gather) + total[use] - total[before]
        following = latest[future] = min(clock[use], following) - MARGIN * work
    return latest


# ---- the walk ----


class _Walked(NamedTuple):
    """The lines in their new order. ``idles``: compute waits for a gather that could have been issued earlier."""

    lines: list[BoundSymbol]
    idles: bool


class _Walk:
    """One walk. Each line of compute comes after the collectives it needs. ``late`` issues gathers just in time."""

    def __init__(self, facts: _Facts, *, late: bool) -> None:
        self.facts = facts
        self.late = late
        self.clock = Clock(facts.cost)
        self.window = Window(facts.limits)
        self.pending = Pending(b for b in facts.issue_of.values() if not is_gather(b))
        self.gathers = deque(facts.gathers)  # futures that are not issued yet
        self.ready: deque[BoundSymbol] = deque()  # reductions whose gradients exist
        self.gathering: dict[str, Flight] = {}  # by future
        self.reducing: dict[str, Flight] = {}  # by future, in order of issue
        self.available: set[str] = set()
        self.coming = 0.0  # seconds of the next compute line
        self.obstacles: dict[str, str] = {}  # by future: why the last attempt to issue it failed
        self.held_back: int | None = None  # number of the first gather that was held back to arrive just in time
        self.idles = False
        self.lines: list[BoundSymbol] = []

    def run(self) -> _Walked:
        for bsym, seconds in self.facts.compute:
            self._prepare(bsym, seconds)
            self._emit(bsym)
            self.clock.compute(seconds)
            self._issue_ready()
        return _Walked(self.lines, self.idles)

    def _prepare(self, bsym: BoundSymbol, seconds: float) -> None:
        """Emits the lines that precede a line of compute."""
        self.coming = seconds
        if is_return(bsym):
            self._wait_for_all()
        for a in bsym.flat_proxy_args:
            if a.name in self.facts.source_of and a.name not in self.available:
                self._wait(self.facts.source_of[a.name], "the next line uses it")
        if not is_unpack(bsym):  # the first gathers go ahead of compute, after the signature's lines
            self._wait_for_done()
            self._issue_reduces()
            self._issue_gathers()

    def _emit(self, bsym: BoundSymbol, why: str = "") -> None:
        self.lines.append(bsym.from_bsym(header=why) if why else bsym)
        self.available.update(o.name for o in bsym.flat_proxy_outs)
        for b in [b for o in bsym.flat_proxy_outs for b in self.pending.ready(o.name)]:
            if is_offload(b):
                self._emit(b, "issued here: its gradients are reduced")
            else:
                self.ready.append(b)

    # ---- gathers ----

    def _issue_gathers(self, leaving: BucketPlan | None = None) -> None:
        """Issues gathers until one meets an obstacle. ``leaving`` is the plan of a bucket that is being waited for."""
        while self.gathers:
            obstacle = self._obstacle_to(self.gathers[0], leaving)
            if obstacle:
                self.obstacles[self.gathers[0]] = obstacle
                return
            self._issue_gather()

    def _obstacle_to(self, future: str, leaving: BucketPlan | None) -> str:
        """Why a gather is not issued now; empty if it is."""
        gather = self.facts.issue_of[future]
        if obstacle := self.window.obstacle(bucket_of(gather), leaving):
            return obstacle
        if any(a.name not in self.available for a in gather.flat_proxy_args):
            return "its shards did not exist"
        if (
            self.late and self.clock.now + self.coming < self.facts.latest[future]
        ):  # time enough after the next line too
            self.held_back = self.facts.gathers[future] if self.held_back is None else self.held_back
            return "from here it still arrives in time"
        return ""

    def _issue_gather(self) -> None:
        future = self.gathers.popleft()
        gather = self.facts.issue_of[future]
        self.gathering[future] = self._issue(gather, "in order of first use, as early as the limits allow")

    # ---- reductions ----

    def _issue_ready(self) -> None:
        """Issues reductions as long as there is room, or room can be made."""
        while self.ready and self._make_room(bucket_of(self.ready[0])):
            self._issue_reduces()
        for waiting in self.ready:
            self.obstacles[waiting.output.name] = self.window.no_room(bucket_of(waiting))

    def _issue_reduces(self) -> None:
        while self.ready and self.window.has_room(bucket_of(self.ready[0])):
            self._issue_reduce()

    def _issue_reduce(self) -> None:
        issue = self.ready.popleft()
        self.reducing[issue.output.name] = self._issue(issue, COMPLETE)

    def _wait_for_done(self) -> None:
        while self.reducing and self.clock.is_done(self.reducing[self._first_reduce()], margin=MARGIN):
            self._wait(self.facts.wait_for[self._first_reduce()], "it should be done by now")

    def _make_room(self, bucket: Bucket) -> bool:
        """Waits for reductions in order of issue until the bucket has room. Returns False if gathers leave none."""
        while not self.window.has_room(bucket):
            if not self.reducing:
                return False
            self._wait(self.facts.wait_for[self._first_reduce()], f"it makes room for {bucket.name}")
        return True

    def _first_reduce(self) -> str:
        return next(iter(self.reducing))

    # ---- both ----

    def _issue(self, bsym: BoundSymbol, why: str) -> Flight:
        flight = self.clock.issue(bsym)
        self.window.enter(bsym)
        obstacle = self.obstacles.get(bsym.output.name)
        self._emit(bsym, "issued here: " + (f"not earlier, as {obstacle}" if obstacle else why))
        return flight

    def _wait(self, wait: BoundSymbol, why: str) -> None:
        """Waits for a future. First issues and waits for everything that must precede it."""
        future = wait.args[0].name
        if is_offload(wait):
            self._wait_for_inputs(future)
            self._emit(wait, f"waited for here: {why}")
            return
        flight = self._land_gather(future) if is_gather(wait) else self._land_reduce(future)
        idle = self.clock.wait(flight)
        self.clock.compute(wire_seconds(self.clock.cost, wait))
        self.window.leave(wait)
        self._emit(wait, f"waited for here: {why}" + (f"; compute is idle for {idle * 1e3:.3g} ms" if idle else ""))

    def _land_gather(self, future: str) -> Flight:
        """The flight of a gather that is about to be waited for. Issues it if need be, and then those after it."""
        while future not in self.available:
            self._make_room(bucket_of(self.facts.issue_of[self.gathers[0]]))
            self._issue_gather()
        self._issue_gathers(leaving=bucket_of(self.facts.issue_of[future]).plan)
        flight = self.gathering.pop(future)
        held_back = self.held_back is not None and self.held_back <= self.facts.gathers[future]
        self.idles |= held_back and flight.done > self.clock.now
        return flight

    def _land_reduce(self, future: str) -> Flight:
        """The flight of a reduction that is about to be waited for. Issues it if need be."""
        while future not in self.available:
            if self.ready:
                self._make_room(bucket_of(self.ready[0]))
                self._issue_reduce()
            else:  # its own inputs are being reduced
                self._wait(self.facts.wait_for[self._first_reduce()], "what is reduced next needs it")
        return self.reducing.pop(future)

    def _wait_for_inputs(self, future: str) -> None:
        """Waits for the gradients that a copy sends to the host."""
        for grad in self.facts.issue_of[future].flat_proxy_args:
            if grad.name not in self.available:
                self._wait(self.facts.source_of[grad.name], "it is to be copied to the host")

    def _wait_for_all(self) -> None:
        """Waits for everything still in flight at the end: gathers whose values are returned, reductions, copies."""
        for future in self.facts.gathers:
            if self.facts.wait_for[future].flat_proxy_outs[0].name not in self.available:
                self._wait(self.facts.wait_for[future], "it is returned")
        self._wait_for_reduces()
        for wait in self.facts.wait_for.values():
            if is_offload(wait) and wait.flat_proxy_outs[0].name not in self.available:
                self._wait(wait, "the trace ends")

    def _wait_for_reduces(self) -> None:
        while self.ready or self.reducing:
            self._issue_reduces()
            self._wait(self.facts.wait_for[self._first_reduce()], "the trace ends")


def wait_copies(trace: TraceCtx) -> TraceCtx:
    """Lets the program wait for copies to and from host memory.

    Takes: a scheduled forward or backward.
    Gives: this line for each host memory that the trace copies to or from, before it returns.
    No-op when: the trace copies nothing to or from host memory.
    """
    copies = (b for b in trace.bound_symbols if issues_future(b) and (is_gather(b) or is_offload(b)))
    memories = dict.fromkeys(host for b in copies if (host := bucket_of(b).plan.host) is not None)
    if not memories:
        return trace
    new = from_trace(trace)
    at = next(i for i, b in enumerate(trace.bound_symbols) if is_return(b))
    lines = [
        symbols.wait_copies.bind(ContextObject(f"memory_{i}", memory), output=None) for i, memory in enumerate(memories)
    ]
    new.bound_symbols = [*trace.bound_symbols[:at], *lines, *trace.bound_symbols[at:]]
    return new
