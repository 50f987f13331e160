"""Passes over the prologue, which checks whether a compiled step is still right, and across ranks.

``insert_guards``: guards that tell whether a compiled step is still right.

A guard that raises makes Thunder look for another compiled step, and compile one if there is none. Guards run ahead of
the checks of tensors.

``merge_checks``: it fetches all parameters of a module in one line, and checks all tensors in another.

Thunder writes two lines for each parameter. They cost more to compile than the call of a block that has a dozen: a
tenth of the first step of a GPT.

``compare_ranks``: compares across ranks the collectives that they have compiled, and inserts a check of each step
before it runs.

    check_ranks(ranks_0)        before a forward computes anything
    note(forward_ends_0)        the last line of a forward
    note(backward_begins_0)     the first line of a backward
    note(backward_ends_0)       the last line of a backward

The notes tell the next forward if an exception has left this rank in the middle of a step, or if the rank has skipped a
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from passes.analysis.liveness import collectives, issues
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
from passes.comm.symbols import check_ranks, note, symbol
from passes.plan import Runtime, Step, TracedParameters

import torch
from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace

Guard = Callable[[], None]


def insert_guards(
    prologue: TraceCtx, *, parameters: TracedParameters, guards: Sequence[Guard] = (), last_guards: Sequence[Guard] = ()
) -> TraceCtx:
    """Lets a call run only a step that is valid for it.

    Takes: a prologue.
    Gives: a line for the step of each sharded model and for each guard, ahead of the checks of tensors, and one for
    each last guard, which runs if all checks have passed.
    No-op when: there is neither a model nor a guard.
    """
    guards = [*(partial(r.check_step, parameters.step_of(r)) for r in parameters.runtimes), *guards]
    if not guards and not last_guards:
        return prologue
    lines = list(prologue.bound_symbols)
    first = next(i for i, b in enumerate(lines) if b.sym is prims.unpack_trivial)
    args = lines[first].output

    # it reads the call's arguments only because Thunder's PrunePrologueChecks takes a line that reads nothing for wrong
    def line(name: str, guard: Guard) -> BoundSymbol:
        return check_value.bind(ContextObject(name, lambda args: guard()), args, output=None)

    lines[-1:-1] = [line(f"last_guard_{i}", guard) for i, guard in enumerate(last_guards)]
    lines[first + 1 : first + 1] = [line(f"guard_{i}", guard) for i, guard in enumerate(guards)]
    new = from_trace(prologue)
    new.bound_symbols = lines
    return new


def _run_check(check: ContextObject, value: Any) -> None:
    check.obj(value)


# A line of the prologue: raises if the compiled step is not right for a value, or not right any more.
check_value = symbol("check_value", lambda check, value: None, _run_check, tags=[OpTags.DONT_DCE])


class Metadata(NamedTuple):
    """What a tensor must be for the compiled step to fit."""

    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    requires_grad: bool


def merge_checks(prologue: TraceCtx) -> TraceCtx:
    """Merges the prologue's fetches of parameters, and its checks of tensors, into one line each.

    Takes: a prologue.
    Gives: one line for the parameters of each module, where the first of them was fetched, and one for all tensors,
    where the last was checked.
    No-op when: fewer than two tensors are checked.
    """
    lines = prologue.bound_symbols
    fetches: dict[str, list[BoundSymbol]] = {}
    for bsym in lines:
        if bsym.sym is prims.unpack_parameter:
            fetches.setdefault(bsym.args[0].name, []).append(bsym)
    checks = [b for b in lines if b.sym is prims.check_tensor_shape_and_metadata and _is_plain(b)]
    if len(checks) < 2:
        return prologue
    merged = {id(b): None for b in (*checks, *(b for found in fetches.values() for b in found))}
    instead = {id(found[0]): _fetch(i, found) for i, found in enumerate(fetches.values())}
    instead[id(checks[-1])] = _check(checks)
    new = from_trace(prologue)
    new.bound_symbols = [instead.get(id(b), b) for b in lines if id(b) in instead or id(b) not in merged]
    return new


def _is_plain(check: BoundSymbol) -> bool:
    """False if a dimension is symbolic."""
    return all(isinstance(d, int) for d in check.args[1])


def _fetch(i: int, fetches: Sequence[BoundSymbol]) -> BoundSymbol:
    names = ContextObject(f"names_{i}", tuple(b.args[1] for b in fetches))
    return fetch.bind(fetches[0].args[0], names, output=tuple(b.output for b in fetches))


def _check(checks: Sequence[BoundSymbol]) -> BoundSymbol:
    expected = (b.args[1:] for b in checks)
    metadata = [Metadata(tuple(shape), torch.device(d), dtype, grad) for shape, d, dtype, grad in expected]
    return check.bind(tuple(b.args[0] for b in checks), ContextObject("metadata", metadata), output=None)


def _run_fetch(module: Any, names: ContextObject) -> tuple[torch.Tensor, ...]:
    return tuple(map(module.get_parameter, names.obj))


_metadata = attrgetter(*Metadata._fields)  # at the speed of C


def _run_check_tensors(tensors: tuple[torch.Tensor, ...], metadata: ContextObject) -> None:
    found = list(map(_metadata, tensors))
    if found != metadata.obj:
        raise RuntimeError(f"expected tensors with {metadata.obj}, got {found}")  # Thunder then compiles another step


fetch = symbol("fetch_parameters", lambda module, names: None, _run_fetch)
check = symbol("check_tensors", lambda tensors, metadata: None, _run_check_tensors, tags=[OpTags.DONT_DCE])


def compare_ranks(trace: TraceCtx, *, parameters: TracedParameters) -> TraceCtx:
    """Compares the collectives of all ranks, when they are compiled and before they are sent.

    Takes: a forward or backward with its final collectives.
    Gives: the lines above for each model whose steps are compared. Adds the collectives, and the parameters that
    backward reads again, to the steps in ``parameters``.
    No-op when: no model has more than one rank.

    Raises:
        Exception: on every rank of a model, if its ranks have compiled different collectives.
    """
    for runtime, lines in sent(trace).items():
        parameters.step_of(runtime).collectives.extend(lines)
        runtime.compare_trace(lines)
    if not is_backward(trace) and TraceTag.AUGMENTED_FORWARD in trace.tags:
        saved = names(trace.bound_symbols[-1].args[1][0])
        for p in trace.args:
            if p.name in saved and (parameter := parameters.get(p)) is not None:
                parameters.step_of(parameter.plan.runtime).rereads.add(p.name)
    return insert_checks(trace, {runtime: parameters.step_of(runtime) for runtime in parameters.runtimes})


def sent(trace: TraceCtx) -> dict[Runtime, list[str]]:
    """The collectives of each model as texts, in order."""
    found: dict[Runtime, list[str]] = {}
    for bsym, row in zip(issues(trace), collectives(trace), strict=True):
        plan = bucket_of(bsym).plan if is_issue(bsym) else part_at(bsym).plan
        found.setdefault(plan.runtime, []).append(f"{row.phase}: {row}")
    return found


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
    why = "raises if another rank is about to run a different step" if symbol is check_ranks else "noted for that check"
    return symbol.bind(ContextObject(name, call), output=None).from_bsym(header=why)
