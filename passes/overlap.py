"""Pass: collectives of values run beside compute.

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

All of it is a function of the trace and its plans. These are equal on all ranks, and so is the order of collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from passes.analysis.recognise import (
    changes_values,
    is_backward,
    is_collective,
    is_deletion,
    is_foreign,
    is_random,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    is_unpack,
    names,
    part_at,
)
from passes.analysis.seconds import Clock, Flight, compute_seconds, sequence_seconds
from passes.kernels.aten import operator_of
from passes.plan import CostModel

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used


def overlap_sequence(trace: TraceCtx) -> TraceCtx:
    """Lets collectives of values run beside compute.

    Takes: a lowered forward or backward, or that of a block.
    Gives: each collective of a value issued right after the line that makes its operand, and waited for right before
    the first line that reads its result; lines in between as Note [Moved lines] says.
    No-op when: the trace has none.
    """
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    first = next(filter(is_sequence_issue, lines), None)
    if first is None:
        return trace
    new = from_trace(trace)
    placed = _apart(lines)
    new.bound_symbols = placed if any(map(is_collective, lines)) else _Walk(part_at(first).plan.cost).run(placed)
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


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


class _Walk:
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
