"""Pass over the epilogue: after each step the model's state is set as its forward has set it.

    set_state(state_0, (t3, t4))        before the epilogue returns

The tensors are results of the step, so that gradients flow through them. Tracing passes them by a line that packs a
buffer (:func:`passes.compat.jit.pack_tensors`), which this pass replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from passes.comm.symbols import symbol

import torch
from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.trace import TraceCtx, from_trace

Setter = Callable[[tuple[torch.Tensor, ...]], None]


def set_state(epilogue: TraceCtx, *, setters: Mapping[str, Setter]) -> TraceCtx:
    """Sets after each step what forward sets on modules.

    Takes: an epilogue in which tracing has packed the tensors.
    Gives: a call of each setter in the place of the line that packed its tensors, by its name.
    No-op when: there are no setters.
    """
    if not setters:
        return epilogue
    new = from_trace(epilogue)
    for bsym in epilogue.bound_symbols:
        name = str(bsym.args[1]).lstrip(".") if bsym.sym is prims.pack_buffer else ""
        if name in setters:
            bsym = run_setter.bind(ContextObject(name, setters[name]), tuple(bsym.args[2]), output=None)
        new.bound_symbols.append(bsym)
    return new


def _run(setter: ContextObject, tensors: tuple[Any, ...]) -> None:
    setter.obj(tensors)


run_setter = symbol("set_state", lambda setter, tensors: None, _run, tags=[OpTags.DONT_DCE])
