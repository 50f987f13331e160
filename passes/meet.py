"""Pass: before anything is sent, the ranks may check that they are about to run the same step."""

from __future__ import annotations

import functools

from passes.collectives import check_ranks
from passes.plan import Enlisted
from passes.recognise import is_backward, is_unpack

from thunder.core.codeutils import ContextObject
from thunder.core.trace import TraceCtx, from_trace


def meet(trace: TraceCtx, *, enlisted: Enlisted) -> TraceCtx:
    """Returns a forward with one line more for each model that wants it (``Plan.meet``), ahead of all that is computed;
    a backward as it is."""
    meetings = dict.fromkeys((plan.meet, enlisted.step_of(plan)) for plan in enlisted.plans if plan.meet is not None)
    if is_backward(trace) or not meetings:
        return trace
    new = from_trace(trace)
    first = next(i for i, b in enumerate(trace.bound_symbols) if not is_unpack(b))
    lines = [
        check_ranks.bind(ContextObject(f"ranks_{i}", functools.partial(meeting, step)), output=None)
        for i, (meeting, step) in enumerate(meetings)
    ]
    new.bound_symbols = [*trace.bound_symbols[:first], *lines, *trace.bound_symbols[first:]]
    return new
