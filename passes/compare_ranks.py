"""Pass: before anything is sent, the ranks may check that they are about to run the same step, from the same place.

    check_ranks(ranks_0)        ahead of all that a forward computes
    note(forward_ends_0)        where it has come to its end
    note(backward_begins_0)     the first and the last line of a backward
    note(backward_ends_0)

A rank that was left in the middle by an exception, or that skips a backward, so is known by its next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from passes.analysis.recognise import is_backward, is_deletion, is_return, is_unpack
from passes.comm.symbols import check_ranks, note
from passes.plan import Enlisted, Progress, Step

from thunder.core.codeutils import ContextObject
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace

Meeting = tuple[Callable[[Step], None], Progress, Step]


def meet(trace: TraceCtx, *, enlisted: Enlisted) -> TraceCtx:
    """Returns the trace with these lines for each model that wants it (``Plan.meet``)."""
    meetings: list[Meeting] = list(
        dict.fromkeys(
            (plan.meet, plan.progress, enlisted.step_of(plan))
            for plan in enlisted.plans
            if plan.meet is not None and plan.progress is not None
        )
    )
    if not meetings:
        return trace
    new = from_trace(trace)
    lines = trace.bound_symbols
    first = next(i for i, b in enumerate(lines) if not is_unpack(b) and not is_deletion(b))
    last = next(i for i, b in enumerate(lines) if is_return(b))
    before, after = zip(
        *map(_backward if is_backward(trace) else _forward, range(len(meetings)), meetings), strict=True
    )
    new.bound_symbols = [*lines[:first], *before, *lines[first:last], *after, *lines[last:]]
    return new


def _forward(i: int, meeting: Meeting) -> Iterator[BoundSymbol]:
    compare, progress, step = meeting
    yield _line(check_ranks, f"ranks_{i}", partial(compare, step))
    yield _line(note, f"forward_ends_{i}", partial(progress.end, step))


def _backward(i: int, meeting: Meeting) -> Iterator[BoundSymbol]:
    _, progress, step = meeting
    yield _line(note, f"backward_begins_{i}", partial(progress.begin, step, "backward"))
    yield _line(note, f"backward_ends_{i}", partial(progress.end, step))


def _line(symbol: Symbol, name: str, call: Callable[[], None]) -> BoundSymbol:
    return symbol.bind(ContextObject(name, call), output=None)
