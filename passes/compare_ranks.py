"""Pass: compares across ranks the collectives that they have compiled, and inserts a check of each step before it runs.

    check_ranks(ranks_0)        before a forward computes anything
    note(forward_ends_0)        the last line of a forward
    note(backward_begins_0)     the first line of a backward
    note(backward_ends_0)       the last line of a backward

The notes tell the next forward if an exception has left this rank in the middle of a step, or if the rank has skipped a
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_deletion,
    is_issue,
    is_return,
    is_unpack,
    names,
    part_at,
)
from passes.analysis.traffic import collectives, issues
from passes.comm.symbols import check_ranks, note
from passes.plan import Runtime, Step, TracedParameters

from thunder.core.codeutils import ContextObject
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace


def compare_ranks(trace: TraceCtx, *, parameters: TracedParameters) -> TraceCtx:
    """Compares the collectives of all ranks, when they are compiled and before they are sent.

    Takes: a forward or backward with its final collectives.
    Gives: the lines above for each model whose steps are compared. Adds the collectives, and the parameters that
    backward reads again, to the steps in ``parameters``.
    No-op when: no model has more than one rank.

    Raises:
        Exception: on every rank of a model, if its ranks have compiled different collectives.
    """
    for runtime, lines in _sent(trace).items():
        parameters.step_of(runtime).collectives.extend(lines)
        runtime.compare_trace(lines)
    if not is_backward(trace) and TraceTag.AUGMENTED_FORWARD in trace.tags:
        saved = names(trace.bound_symbols[-1].args[1][0])
        for p in trace.args:
            if p.name in saved and (parameter := parameters.get(p)) is not None:
                parameters.step_of(parameter.plan.runtime).rereads.add(p.name)
    return insert_checks(trace, {runtime: parameters.step_of(runtime) for runtime in parameters.runtimes})


def _sent(trace: TraceCtx) -> dict[Runtime, list[str]]:
    """The collectives of each model as texts, in order."""
    sent: dict[Runtime, list[str]] = {}
    for bsym, row in zip(issues(trace), collectives(trace), strict=True):
        plan = bucket_of(bsym).plan if is_issue(bsym) else part_at(bsym).plan
        sent.setdefault(plan.runtime, []).append(f"{row.phase}: {row}")
    return sent


def insert_checks(trace: TraceCtx, steps: Mapping[Runtime, Step]) -> TraceCtx:
    """Returns the trace with checks and notes for each model whose steps are compared."""
    compared = [(runtime, step) for runtime, step in steps.items() if runtime.compares]
    if not compared:
        return trace
    new = from_trace(trace)
    lines = trace.bound_symbols
    first = next(i for i, b in enumerate(lines) if not is_unpack(b) and not is_deletion(b))
    last = next(i for i, b in enumerate(lines) if is_return(b))
    around = _around_backward if is_backward(trace) else _around_forward
    before, after = zip(*(around(i, *model) for i, model in enumerate(compared)), strict=True)
    new.bound_symbols = [*lines[:first], *before, *lines[first:last], *after, *lines[last:]]
    return new


def _around_forward(i: int, runtime: Runtime, step: Step) -> Iterator[BoundSymbol]:
    assert runtime.progress is not None
    yield _line(check_ranks, f"ranks_{i}", partial(runtime.compare_step, step))
    yield _line(note, f"forward_ends_{i}", partial(runtime.progress.end, step))


def _around_backward(i: int, runtime: Runtime, step: Step) -> Iterator[BoundSymbol]:
    assert runtime.progress is not None
    yield _line(note, f"backward_begins_{i}", partial(runtime.progress.begin, step, "backward"))
    yield _line(note, f"backward_ends_{i}", partial(runtime.progress.end, step))


def _line(symbol: Symbol, name: str, call: Callable[[], None]) -> BoundSymbol:
    return symbol.bind(ContextObject(name, call), output=None)
