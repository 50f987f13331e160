"""Pass over the prologue: guards that tell whether a compiled step is still right.

A guard that raises makes Thunder look for another compiled step, and compile one if there is none. Guards run ahead of
the checks of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from passes.comm.symbols import symbol
from passes.plan import TracedParameters

from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

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
