"""Pass 4: where each collective is issued, where it is waited for, and when gathered parameters die.

Works on the lowered forward and backward in turn. Compute lines keep their order; only collectives move, so that the
result of a step is the same bit for bit.

Note [Placement]. The pass walks through the compute lines and keeps two clocks that the plan's cost model drives: one
of the compute, one of each group's link, on which collectives follow each other. At each line:

- A gather is waited for right before its first use. It is issued as late as the cost model says that it still arrives
  in time, with a margin; if one would not, all are issued as early as the limits allow. Gathers go in order of first
  use.
- A reduce_scatter is issued as soon as its gradients exist and there is room for it. It is waited for where the cost
  model says that it is done, with a margin, or where its room is needed.
- A copy of gradients to the host is issued when they are reduced, and waited for at the end.
- The limits: no more than ``prefetch`` buckets are gathered ahead of use, and no more than ``max_inflight_bytes`` are
  issued and not waited for (one bucket alone may be larger).

All of it is a function of the trace and of its plans, which are equal on all ranks: so is the order of collectives.

Each collective's line says why it stands where it stands, in its header: Thunder prints that as a comment above it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate

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
    is_wait,
    issues_future,
    waits_for_future,
)
from passes.analysis.seconds import compute_seconds, link_seconds
from passes.plan import Bucket, Plan, inflight_limits

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used

# A collective may take so many times what the cost model says before compute has to wait for it.
MARGIN = 2.0
COMPLETE = "its gradients are complete"


def schedule(trace: TraceCtx) -> TraceCtx:
    """Returns the trace with its collectives placed as Note [Placement] says, and gathered parameters deleted after
    their last use."""
    if not any(is_collective(b) for b in trace.bound_symbols):
        return trace
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    cost = next(bucket_of(b).plan.cost for b in lines if is_issue(b))  # of the first plan: compute belongs to none
    compute = [(b, compute_seconds(cost, b)) for b in lines if not is_collective(b) and not is_offload(b)]
    placed = _Placement(lines, compute, late=True)
    if placed.idles:
        placed = _Placement(lines, compute, late=False)
    new = from_trace(trace)
    new.bound_symbols = placed.result
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


@dataclass(frozen=True)
class _Flight:
    """A collective that is issued and not waited for; the link works on it from ``start`` to ``done``, in seconds."""

    issue: BoundSymbol
    start: float
    done: float


class _Placement:
    """One walk. Lines are emitted in order, each with what it needs before it. ``timed`` are those of compute, each
    with the seconds that it takes.

    ``late`` issues gathers just in time; ``idles`` tells that compute then waits for one that could have come earlier.
    """

    def __init__(self, lines: list[BoundSymbol], timed: list[tuple[BoundSymbol, float]], *, late: bool) -> None:
        compute, self.seconds = [b for b, _ in timed], [seconds for _, seconds in timed]
        issues = [b for b in lines if is_issue(b)]
        self.issue_of = {b.output.name: b for b in issues}  # by the name of the future
        self.wait_of = {o.name: b for b in lines if waits_for_future(b) for o in b.flat_proxy_outs}
        self.wait_for = {b.args[0].name: b for b in lines if is_wait(b)}
        self.limits = inflight_limits(bucket_of(b) for b in issues)

        uses = self._first_uses(compute)
        self.gathers = deque(self.issue_of[future] for future in uses)
        self.order = {future: k for k, future in enumerate(uses)}
        self.latest = dict.fromkeys(uses, 0.0)
        if late:
            self.latest = self._latest_starts(compute, uses, [b for b in issues if not is_gather(b)])
        self.pending = _Pending([b for b in issues if not is_gather(b)])
        self.ready: deque[BoundSymbol] = deque()  # reduces whose gradients exist
        # by the name of the future
        self.offload_of = {b.output.name: b for b in lines if issues_future(b) and is_offload(b)}
        self.offloads = _Pending(list(self.offload_of.values()))

        self.now = 0.0
        self.coming = 0.0  # seconds of the compute line that is next
        self.link_is_free: dict[object, float] = {}  # by group
        self.reducing: deque[_Flight] = deque()
        self.gathering: dict[str, _Flight] = {}  # by future
        self.inflight: Counter[Plan] = Counter()  # bytes
        self.ahead: Counter[Plan] = Counter()  # gathers that are issued and not waited for
        self.available: set[str] = set()
        self.held_back: int | None = None  # the first gather that was not issued although it could have been
        self.obstacle: dict[str, str] = {}  # by future: why it could not be issued when that was last tried
        self.idles = False
        self.result: list[BoundSymbol] = []
        for bsym, seconds in timed:
            self._compute(bsym, seconds)

    def _compute(self, bsym: BoundSymbol, seconds: float) -> None:
        self.coming = seconds
        if is_return(bsym):
            self._wait_for_all()
        for a in bsym.flat_proxy_args:
            if a.name in self.wait_of and a.name not in self.available:
                self._wait(self.wait_of[a.name], "the next line uses it")
        if not is_unpack(bsym):  # the first gathers go ahead of compute, after the signature's lines
            self._wait_for_done()
            self._issue_reduces()
            self._issue_gathers()
        self._emit(bsym)
        self.now += seconds
        while self.ready and self._make_room(bucket_of(self.ready[0])):
            self._issue_reduces()
        for waiting in self.ready:
            self.obstacle[waiting.output.name] = self._no_room(bucket_of(waiting).plan)

    # ---- what is known before the walk ----

    def _first_uses(self, compute: list[BoundSymbol]) -> dict[str, int]:
        """The futures of gathers in the order in which compute needs them, with the line that does."""
        uses: dict[str, int] = {}
        for i, bsym in enumerate(compute):
            for a in bsym.flat_proxy_args:
                wait = self.wait_of.get(a.name)
                if wait is not None and is_gather(wait):
                    uses.setdefault(wait.args[0].name, i)
        unused = (future for future, b in self.issue_of.items() if is_gather(b))
        return uses | {future: len(compute) - 1 for future in unused if future not in uses}

    def _latest_starts(
        self, compute: list[BoundSymbol], uses: dict[str, int], reduces: list[BoundSymbol]
    ) -> dict[str, float]:
        """When each gather must be issued so that compute, which never waits, finds it arrived: in seconds.

        What is reduced between its use and the use before shares the link with it.
        """
        clock = [0.0, *accumulate(self.seconds)]
        made = {o.name: i for i, b in enumerate(compute) for o in b.flat_proxy_outs}
        load = [0.0] * (len(compute) + 1)  # seconds of the reduces that become ready at each line
        for b in reduces:
            load[max((made.get(a.name, 0) for a in b.flat_proxy_args), default=0)] += link_seconds(b)
        total = [0.0, *accumulate(load)]
        latest: dict[str, float] = {}
        following = clock[-1]
        order = list(uses.items())
        for k in range(len(order) - 1, -1, -1):
            future, use = order[k]
            before = order[k - 1][1] if k else 0
            work = link_seconds(self.issue_of[future]) + total[use] - total[before]
            following = latest[future] = min(clock[use], following) - MARGIN * work
        return latest

    # ---- gathers ----

    def _issue_gathers(self, leaving: Plan | None = None) -> None:
        """Issues what may be; ``leaving`` is the plan of a bucket that is waited for, and so not ahead any more."""
        while self.gathers:
            obstacle = self._obstacle_to(self.gathers[0], leaving)
            if obstacle:
                self.obstacle[self.gathers[0].output.name] = obstacle
                return
            self._issue_gather()

    def _obstacle_to(self, gather: BoundSymbol, leaving: Plan | None) -> str:
        """Why a gather is not to be issued now; empty if it is."""
        bucket = bucket_of(gather)
        if self.ahead[bucket.plan] - (bucket.plan is leaving) >= bucket.plan.prefetch:
            return f"more than prefetch={bucket.plan.prefetch} would be gathered ahead of use"
        if not self._has_room(bucket):
            return self._no_room(bucket.plan)
        if any(a.name not in self.available for a in gather.flat_proxy_args):
            return "its shards did not exist"
        if self.now + self.coming < self.latest[gather.output.name]:  # there is time after the coming line too
            self.held_back = self.order[gather.output.name] if self.held_back is None else self.held_back
            return "from here it still arrives in time"
        return ""

    def _issue_gather(self) -> None:
        gather = self.gathers.popleft()
        self.ahead[bucket_of(gather).plan] += 1
        self.gathering[gather.output.name] = self._issue(gather, "in order of first use, as early as the limits allow")

    # ---- reduces ----

    def _issue_reduces(self) -> None:
        while self.ready and self._has_room(bucket_of(self.ready[0])):
            self.reducing.append(self._issue(self.ready.popleft(), COMPLETE))

    def _wait_for_done(self) -> None:
        while self.reducing:
            first = self.reducing[0]
            if self.now < first.start + MARGIN * (first.done - first.start):
                return
            self._wait(self.wait_for[first.issue.output.name], "it should be done by now")

    def _make_room(self, bucket: Bucket) -> bool:
        """Waits for reduces, the first first, until the bucket may be issued; False if gathers leave no room."""
        while not self._has_room(bucket):
            if not self.reducing:
                return False
            self._wait(self.wait_for[self.reducing[0].issue.output.name], f"it makes room for {bucket.name}")
        return True

    # ---- both ----

    def _has_room(self, bucket: Bucket) -> bool:
        inflight = self.inflight[bucket.plan]
        return not inflight or inflight + bucket.bytes <= self.limits[bucket.plan]

    def _no_room(self, plan: Plan) -> str:
        return f"more than {self.limits[plan]} bytes would be in flight"

    def _issue(self, bsym: BoundSymbol, why: str) -> _Flight:
        bucket = bucket_of(bsym)
        group = bucket.plan.group
        start = max(self.now, self.link_is_free.get(group, 0.0))
        self.link_is_free[group] = done = start + link_seconds(bsym)
        self.inflight[bucket.plan] += bucket.bytes
        obstacle = self.obstacle.get(bsym.output.name)
        self._emit(bsym, "issued here: " + (f"not earlier, as {obstacle}" if obstacle else why))
        return _Flight(bsym, start, done)

    def _wait(self, wait: BoundSymbol, why: str) -> None:
        """Waits for a collective, and before that for what must have been issued or waited for before it."""
        if is_offload(wait):
            self._wait_for_copy(wait, why)
            return
        future, bucket = wait.args[0].name, bucket_of(wait)
        if is_gather(wait):
            while future not in self.available:
                self._make_room(bucket_of(self.gathers[0]))
                self._issue_gather()
            self._issue_gathers(leaving=bucket.plan)  # the one waited for leaves its place to the next
            flight = self.gathering.pop(future)
            self.ahead[bucket.plan] -= 1
            held_back = self.held_back is not None and self.held_back <= self.order[future]
            self.idles |= held_back and flight.done > self.now
        else:
            while future not in self.available:
                if self.ready:
                    self._make_room(bucket_of(self.ready[0]))
                    self.reducing.append(self._issue(self.ready.popleft(), COMPLETE))
                else:  # its own inputs are being reduced
                    self._wait(self.wait_for[self.reducing[0].issue.output.name], "what is reduced next needs it")
            flight = next(f for f in self.reducing if f.issue.output.name == future)
            self.reducing.remove(flight)
        idle, self.now = max(0.0, flight.done - self.now), max(self.now, flight.done)
        self.inflight[bucket.plan] -= bucket.bytes
        self._emit(wait, f"waited for here: {why}" + (f"; compute is idle for {idle * 1e3:.3g} ms" if idle else ""))

    def _wait_for_copy(self, wait: BoundSymbol, why: str) -> None:
        for grad in self.offload_of[wait.args[0].name].flat_proxy_args:
            if grad.name not in self.available:
                self._wait(self.wait_of[grad.name], "it is to be copied to the host")
        self._emit(wait, f"waited for here: {why}")

    def _wait_for_all(self) -> None:
        """What is still under way at the end: gathers whose values are returned, reduces, and copies to the host."""
        for future in self.order:
            if self.wait_for[future].flat_proxy_outs[0].name not in self.available:
                self._wait(self.wait_for[future], "it is returned")
        while self.ready or self.reducing:
            self._issue_reduces()
            self._wait(self.wait_for[self.reducing[0].issue.output.name], "the trace ends")
        for wait in dict.fromkeys(self.wait_of.values()):
            if is_offload(wait) and wait.flat_proxy_outs[0].name not in self.available:
                self._wait(wait, "the trace ends")

    def _emit(self, bsym: BoundSymbol, why: str = "") -> None:
        self.result.append(bsym.from_bsym(header=why) if why else bsym)
        for o in bsym.flat_proxy_outs:
            self.available.add(o.name)
            self.ready.extend(self.pending.ready(o.name))
        for copy in [b for o in bsym.flat_proxy_outs for b in self.offloads.ready(o.name)]:
            self._emit(copy, "issued here: its gradients are reduced")


class _Pending:
    """Collectives and copies that wait for their inputs to be computed."""

    def __init__(self, lines: list[BoundSymbol]) -> None:
        self.missing = {id(b): {a.name for a in b.flat_proxy_args} for b in lines}
        self.users: dict[str, list[BoundSymbol]] = {}
        for b in lines:
            for name in self.missing[id(b)]:
                self.users.setdefault(name, []).append(b)

    def ready(self, name: str) -> list[BoundSymbol]:
        """Those for which ``name`` was the last input to come."""
        users = self.users.pop(name, [])
        for b in users:
            self.missing[id(b)].discard(name)
        return [b for b in users if not self.missing[id(b)]]
