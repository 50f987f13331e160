"""Passes that decide where each collective is issued and waited for.

All of it is a function of the trace and its plans. These are equal on all ranks, and so is the order of collectives.

``schedule``: each collective gets its place, and gathered parameters are deleted.

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

The header of each collective's line says why it stands there. Thunder prints it as a comment above the line.

``wait_copies``: the program waits for copies from host memory at the end of a trace.

    wait_copies(memory_0)       the last line of a trace that copies to or from host memory

An optimizer may then read the gradients and change the shards there. The device waits for each copy by itself, when it
needs it.

``overlap_sequence``: collectives of values run beside compute.

A collective of a value, such as a part of a sequence or of a sum over ranks, is issued as early as its operand exists,
and waited for as late as its result is used:

    ft3 = all_gather_parts(k, dim2_of_16)        right after k
    ...                                             compute that needs no keys
    keys = wait_all_gather_parts(ft3, ...)       right before the attention

Where compute would have to wait, lines that it does not need yet are moved in between. In the backward of a product,
gradients of parameters are such lines:

    t5 = mm(t1, w)                               the gradient of the product's operand
    ft6 = reduce_scatter_parts(t5, ...)
    t4 = mm(t2, x)                               that of its parameter, moved here from above t5
    t7 = wait_reduce_scatter_parts(ft6, ...)

Note [Moved lines]. What a line needs still comes before it. Only lines of torch's own operators move, not those that
change a value in place or draw random numbers, and none moves past such a change. The cost model says how many move:
twice what the collective takes, the last ones first, for it and the next one. A line stays behind two collectives at
most, because its operands take memory until then. In a trace that reduces gradients itself none moves: they would be
in flight later, beside activations of the next block.

Note [Products in pieces]. Rows that are gathered for a product, or a product's that are summed and scattered, need not
wait for each other. One line stands for the collective and the products next to it:

    (h, y) = all_gather_products(x, part, products_y, w)      y = linear(h, w), h = all_gather_parts(x, part)
    t8 = reduce_scatter_products(x, part, products_t8, w)     t8 = reduce_scatter_parts(linear(x, w), part)

It broadcasts the rows of each rank, or reduces them to it, and multiplies some while others travel, in as many pieces
as the cost model says. The lines that it stands for are its subsymbols: the proof, FLOPs and the list of collectives
read these. It is put where it is ready sooner than these would be, one after the other. Source: Wang et al., Overlap
communication with dependent computation via decomposition in large deep learning models (2023,
https://doi.org/10.1145/3567955.3567959).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from passes.analysis.recognise import (
    ISSUED,
    InModule,
    bucket_of,
    changes_values,
    identity,
    is_backward,
    is_collective,
    is_deletion,
    is_foreign,
    is_gather,
    is_issue,
    is_offload,
    is_random,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    is_unpack,
    issues_future,
    names,
    part_at,
    waits_for_future,
)
from passes.analysis.seconds import (
    Clock,
    Flight,
    Pending,
    Window,
    compute_seconds,
    link_seconds,
    products_seconds,
    sequence_seconds,
    wire_seconds,
)
from passes.comm import symbols
from passes.comm.sequence import GATHER, SCATTER, Product, Products, gather_products, sum_products
from passes.compat.jit import function_of
from passes.kernels.aten import operator_of
from passes.kernels.torch_call import Line
from passes.plan import Bucket, BucketPlan, CostModel, inflight_limits

import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors import torchex
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


# ---- collectives of values ----


def overlap_sequence(trace: TraceCtx) -> TraceCtx:
    """Lets collectives of values run beside compute.

    Takes: a lowered forward or backward, or that of a block.
    Gives: products in pieces beside collectives of their rows, where that is sooner; each other collective of a value
    issued right after the line that makes its operand, and waited for right before the first line that reads its
    result; lines in between as Note [Moved lines] says.
    No-op when: the trace has none.
    """
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    first = next(filter(is_sequence_issue, lines), None)
    if first is None:
        return trace
    new, cost = from_trace(trace), part_at(first).plan.cost
    placed = _apart(_Pieces(lines, cost).run())
    new.bound_symbols = placed if any(map(is_collective, lines)) else _WalkOfValues(cost).run(placed)
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


# ---- collectives of values: products in pieces ----


PIECES = (1, 2, 4)  # of a rank's rows
# The argument that has the rows of a product, by function and by operator
ROWS: Mapping[Any, int] = {
    F.linear: 0, torch.mm: 0, torch.matmul: 0, torch.addmm: 1,
    torch.ops.aten.linear.default: 0, torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1,
}  # fmt: skip
# Lines that give a contiguous value other dimensions
RESHAPES = frozenset({
    prims.PrimIDs.RESHAPE, torchex.torch_prims_reshape_impl.id, "torch.flatten", "torch.reshape", "Tensor.view",
    torch.ops.aten.view.default, torch.ops.aten.reshape.default,
})  # fmt: skip


def rows_at(bsym: BoundSymbol) -> int | None:
    """The argument of a line of whose rows its result is a product; None if the line is no such product."""
    line = bsym.sym.id
    function = line.call.function if isinstance(line, Line) and not line.kind else operator_of(bsym.sym)
    at = ROWS.get(function)
    tensors = all(isinstance(a, TensorProxy) for a in bsym.args) and not bsym.kwargs
    if at is None or not tensors or not isinstance(bsym.output, TensorProxy):
        return None
    rows, others = bsym.args[at], [a for i, a in enumerate(bsym.args) if i != at]
    each = rows.ndim > 1 and bsym.output.shape[:-1] == rows.shape[:-1]
    return at if each and sorted(o.ndim for o in others) in ([2], [1, 2]) else None


class _Pieces:
    """Finds products that can be computed while their rows travel, and are ready sooner so."""

    def __init__(self, lines: Sequence[BoundSymbol], cost: CostModel) -> None:
        self.lines, self.cost = lines, cost
        self.makers = {o.name: i for i, b in enumerate(lines) for o in b.flat_proxy_outs}
        self.readers: dict[str, list[int]] = {}
        for i, b in enumerate(lines):
            for name in _read(b):
                self.readers.setdefault(name, []).append(i)
        self.gone: set[int] = set()  # lines that others stand for
        self.instead: dict[int, list[BoundSymbol]] = {}

    def run(self) -> list[BoundSymbol]:
        for i, bsym in enumerate(self.lines):
            if is_sequence_issue(bsym):
                op, of_rows = ISSUED[bsym.sym.id], part_at(bsym).is_of_rows(tuple(bsym.args[0].shape))
                if of_rows and op is SCATTER:
                    self._sum(i)
                elif of_rows and op is GATHER:
                    self._gather(i)
        lines = enumerate(self.lines)
        return [new for i, b in lines for new in self.instead.get(i, () if i in self.gone else (b,))]

    def _sum(self, issue: int) -> None:
        """Rows of a product that are sent."""
        (wait,), value, path = self.readers[self.lines[issue].output.name], self.lines[issue].args[0], list[int]()
        while self.readers[value.name] == [path[0] if path else issue]:
            maker = self.makers.get(value.name)
            if maker is None or maker in self.gone or any(map(changes_values, self.lines[maker:issue])):
                return
            path.insert(0, maker)
            line = self.lines[maker]
            if (at := rows_at(line)) is not None:
                self._put(issue, [*path, issue, wait], path[:1], line.args[at])
            if not _reshapes(line):
                return
            value = line.args[0]

    def _gather(self, issue: int) -> None:
        """Products of rows that arrive: the first one, and others whose operands are there by then."""
        (wait,) = self.readers[self.lines[issue].output.name]
        whole = self.lines[wait].output.name
        reads, views = self._products_of(whole)
        if not reads or (later := self._later(wait, first := min(reads))) is None:
            return
        late = names([self.lines[i].flat_proxy_outs for i in (wait, *later)])
        taken = [i for i in sorted(reads) if self._has_operands(i, reads[i], first, late)]
        path = sorted({v for i in taken for v in views[reads[i]]})
        if not self._put(first, [issue, wait, *path, *taken], taken, self.lines[issue].args[0]):
            return
        for v in reversed(path):  # others may read these, too
            if not self.gone.issuperset(self.readers[self.lines[v].output.name]):
                self.gone.discard(v)
        self.instead[first] += [self.lines[i] for i in later if i not in self.gone]
        self.gone |= set(later)

    def _products_of(self, whole: str) -> tuple[dict[int, str], dict[str, tuple[int, ...]]]:
        """The products of a value's rows, each with the name by which it reads them, and the reshapes that lead to
        each name."""
        reads, views = dict[int, str](), {whole: tuple[int, ...]()}
        left = [whole]
        while left:
            name = left.pop()
            for i in self.readers.get(name, ()):
                line = self.lines[i]
                if _reshapes(line):
                    views[line.output.name] = (*views[name], i)
                    left.append(line.output.name)
                elif i not in self.gone and (at := rows_at(line)) is not None and line.args[at].name == name:
                    reads[i] = name
        return reads, views

    def _has_operands(self, product: int, rows: str, first: int, late: Collection[str]) -> bool:
        """Whether all operands but its rows are there before the line ``first``, and not ``late``."""
        others = names(self.lines[product].args) - {rows}
        return others.isdisjoint(late) and all(self.makers.get(name, -1) < first for name in others)

    def _later(self, wait: int, first: int) -> list[int] | None:
        """The lines between the arrival of rows and the first product that depend on them: they come after it. None if
        one of them has to stay."""
        depends, found = names(self.lines[wait].output), list[int]()
        for i in range(wait + 1, first):
            line = self.lines[i]
            if changes_values(line):
                return None
            if not depends.isdisjoint(_read(line)):
                if not _moves(line):
                    return None
                found.append(i)
                depends |= names(line.flat_proxy_outs)
        return found

    def _put(self, at: int, covered: Sequence[int], products: Sequence[int], rows: TensorProxy) -> bool:
        """Puts a line that stands for those which are ``covered`` in the place of one, if it is ready sooner."""
        lines = [self.lines[i] for i in covered]
        (issue,) = filter(is_sequence_issue, lines)
        apart = sequence_seconds(self.cost, issue) + sum(compute_seconds(self.cost, b) for b in lines)
        count = part_at(issue).split.length // part_at(issue).plan.ranks
        seconds = {n: products_seconds(self.cost, lines, n).total for n in PIECES if count % n == 0}
        pieces = min(seconds, key=lambda n: seconds[n])
        if seconds[pieces] >= apart:
            return False
        self.instead[at] = [line_in_pieces(lines, [self.lines[i] for i in products], rows, pieces)]
        self.gone |= {*covered}
        return True


def _reshapes(bsym: BoundSymbol) -> bool:
    """Whether a line gives the rows of a value other dimensions."""
    if identity(bsym.sym) not in RESHAPES or not isinstance(bsym.output, TensorProxy):
        return False
    return bsym.output.ndim > 0 and bsym.output.shape[-1:] == bsym.args[0].shape[-1:]


def line_in_pieces(
    lines: Sequence[BoundSymbol], products: Sequence[BoundSymbol], rows: TensorProxy, pieces: int
) -> BoundSymbol:
    """The line that stands for ``lines``: the collective of ``rows``, and ``products``."""
    (issue,), (wait,) = filter(is_sequence_issue, lines), filter(is_sequence_wait, lines)
    gathers = ISSUED[issue.sym.id] is GATHER
    others = {a.name: a for b in products for i, a in enumerate(b.args) if i != rows_at(b)}
    made, results = list[Product](), [b.output for b in products] if gathers else [wait.output]
    for b in products:
        at, order = rows_at(b), list(others)
        assert at is not None
        numbers = [order.index(a.name) for i, a in enumerate(b.args) if i != at]
        made.append(Product(function_of(b), at, tuple(numbers)))
    name, shapes = "_".join(["products", *(o.name for o in results)]), [tuple(o.shape) for o in results]
    of = Products(name, made, shapes, pieces)
    sym, output = (gather_products, (wait.output, *results)) if gathers else (sum_products, wait.output)
    line = sym.bind(rows, part_at(issue), of, *others.values(), output=output, subsymbols=tuple(lines))
    first, place = products[0], {tag for tag in products[0].tags if isinstance(tag, InModule)}
    return line.from_bsym(tags=place, source_filename=first.source_filename, source_positions=first.source_positions)


def not_in_pieces(line: BoundSymbol) -> str:
    """Why a line with products does not compute, in pieces of rows, what its subsymbols do; empty if it does."""
    rows, part, of, *others = line.args
    products = [b for b in line.subsymbols if rows_at(b) is not None]
    (issue,), (wait,) = (list(filter(f, line.subsymbols)) for f in (is_sequence_issue, is_sequence_wait))
    gathers = ISSUED[issue.sym.id] is GATHER
    if len(products) != len(of.products):
        return f"it calls {len(of.products)} functions for {len(products)} products"
    if (line.sym.id == gather_products.id) is not gathers or (ISSUED[issue.sym.id] is not SCATTER and not gathers):
        return f"{issue.sym.name} is another collective"
    rows_of_piece = part.split.length % (part.plan.ranks * of.pieces) == 0
    if part_at(issue) != part or not part.is_of_rows(tuple(issue.args[0].shape)) or not rows_of_piece:
        return f"{part.name} is no part of rows"
    begins = wait.output if gathers else products[0].output
    same = {begins.name} | {b.output.name for b in line.subsymbols if _reshapes(b)}
    sent, results = issue.args[0], [wait.output, *(b.output for b in products)] if gathers else [wait.output]
    read = {b.args[rows_at(b)].name for b in products}
    if not (read <= same and rows.name == sent.name if gathers else sent.name in same and read == {rows.name}):
        return "rows are others"
    for product, b in zip(of.products, products, strict=True):
        called = [a.name for i, a in enumerate(b.args) if i != product.at]
        if product.function is not function_of(b) or product.at != rows_at(b):
            return f"{b.sym.name} is another function"
        if [others[i].name for i in product.others] != called:
            return f"{b.sym.name} has other operands"
    shapes, made = [tuple(o.shape) for o in results[gathers:]], [o.name for o in line.flat_proxy_outs]
    return "" if list(of.shapes) == shapes and made == [o.name for o in results] else "results are others"


def _apart(lines: list[BoundSymbol]) -> list[BoundSymbol]:
    """Collectives as early as their operands exist, and waits as late as results are used."""
    issues: dict[str, list[BoundSymbol]] = {}  # by operand
    for b in filter(is_sequence_issue, lines):
        issues.setdefault(b.args[0].name, []).append(b)
    waits = {b.output.name: b for b in lines if is_sequence_wait(b)}  # by result
    placed: list[BoundSymbol] = []
    ready: list[BoundSymbol] = []  # whose operands exist, before the first line of compute
    sent = {issue.output.name: issue.args[0].name for found in issues.values() for issue in found}

    def add(bsym: BoundSymbol) -> None:
        placed.append(bsym)
        for o in bsym.flat_proxy_outs:
            for issue in issues.pop(o.name, ()):
                if is_unpack(bsym):
                    ready.append(issue)
                else:
                    add(issue)

    def finish(name: str) -> None:
        wait = waits.pop(name)
        if (operand := sent[wait.args[0].name]) in waits:  # gathered over some ranks, then over others
            finish(operand)
        add(wait)

    for bsym in lines:
        if is_sequence_issue(bsym) or is_sequence_wait(bsym):
            continue
        if not is_unpack(bsym):
            while ready:
                add(ready.pop(0))
        read = _read(bsym)
        for name in [name for name in waits if name in read]:
            finish(name)
        add(bsym)
    return placed


def _read(bsym: BoundSymbol) -> set[str]:
    return names(bsym.args) if is_return(bsym) else names(bsym.flat_proxy_args)


class _WalkOfValues:
    """One walk over the lines, with the time of compute and that at which links are free."""

    def __init__(self, cost: CostModel) -> None:
        self.clock = Clock(cost)
        self.flights: dict[str, Flight] = {}  # by future
        self.lines: list[BoundSymbol] = []
        self.start = 0  # lines from here on may still be moved
        self.later: deque[BoundSymbol] = deque()  # lines that have been moved, and come after a collective's issue
        self.made_later: set[str] = set()
        self.left = 0  # how many of them have stayed behind one collective

    def run(self, lines: Iterable[BoundSymbol]) -> list[BoundSymbol]:
        for bsym in lines:
            if is_return(bsym) or changes_values(bsym):
                self._emit_later(len(self.later))
            read = _read(bsym) if self.later else set[str]()
            while not self.made_later.isdisjoint(read):
                self._emit_later(1)
            if is_sequence_wait(bsym):
                self._wait(self.flights[bsym.args[0].name])
            if is_sequence_issue(bsym):
                self._issue(bsym)
            else:
                self._emit(bsym)
            if changes_values(bsym) or is_sequence_wait(bsym):
                self.start = len(self.lines)
        return self.lines

    def _emit(self, bsym: BoundSymbol) -> None:
        self.lines.append(bsym)
        self.clock.compute(compute_seconds(self.clock.cost, bsym))

    def _emit_later(self, count: int) -> None:
        for _ in range(count):
            bsym = self.later.popleft()
            self.made_later -= {o.name for o in bsym.flat_proxy_outs}
            self.left -= 1
            self._emit(bsym)
            self.start = len(self.lines)  # it moves once

    def _issue(self, issue: BoundSymbol) -> None:
        self._move(issue, 2 * sequence_seconds(self.clock.cost, issue))
        self.lines.append(issue)
        self.flights[issue.output.name] = self.clock.issue(issue)
        self.start = len(self.lines)

    def _wait(self, flight: Flight) -> None:
        while self.later and self.clock.now < flight.done:
            self._emit_later(1)
        self._emit_later(max(self.left, 0))
        self.left = len(self.later)
        self.clock.wait(flight)

    def _move(self, issue: BoundSymbol, seconds: float) -> None:
        """Moves lines that a collective's operand does not need, for so many seconds, to ``later``."""
        kept, moved, needed = [], [], _read(issue)
        for bsym in reversed(self.lines[self.start :]):
            made = {o.name for o in bsym.flat_proxy_outs}
            if seconds > 0 and needed.isdisjoint(made) and _moves(bsym):
                moved.append(bsym)
                took = compute_seconds(self.clock.cost, bsym)
                seconds -= took
                self.clock.compute(-took)
                self.made_later |= made
            else:
                kept.append(bsym)
                needed |= _read(bsym)
        self.lines[self.start :] = reversed(kept)
        self.later.extend(reversed(moved))


def _moves(bsym: BoundSymbol) -> bool:
    """Whether a line may come later: an operator of ATen, or a function of torch or Thunder, that makes a value."""
    sym = bsym.sym
    known = operator_of(sym) is not None or sym.executor is None or sym.executor.name == "torch"
    makes = bool(bsym.flat_proxy_outs) and not is_unpack(bsym)
    return known and makes and not (is_foreign(sym) or changes_values(bsym) or is_random(bsym))
