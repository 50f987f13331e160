"""Pass over the epilogue: what the model returns is made of the tensors of the step.

    result = rebuild(model_output, (t3, t4))

Thunder itself can return tensors in tuples, lists and dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from passes.comm.symbols import symbol

import torch
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx

Rebuild = Callable[[Sequence[torch.Tensor]], Any]


def rebuild_result(epilogue: TraceCtx, *, rebuild: Rebuild | None) -> TraceCtx:
    """Returns what the model returns, made of the tensors of the step.

    Takes: an epilogue that returns a tuple of tensors.
    Gives: ``rebuild(tensors)`` as its result.
    No-op when: Thunder itself can return what the model returns.
    """
    if rebuild is None:
        return epilogue
    *lines, last = epilogue.bound_symbols
    new = from_trace(epilogue)
    with tracectx(new):
        result = AnyProxy(None, prefix="result")
    line = run_rebuild.bind(ContextObject("model_output", rebuild), tuple(last.args[0]), output=result)
    new.bound_symbols = [*lines, line, last.from_bsym(args=(result,))]
    return new


def _run(rebuild: ContextObject, tensors: tuple[Any, ...]) -> Any:
    return rebuild.obj(tensors)


run_rebuild = symbol("rebuild", lambda rebuild, tensors: None, _run, tags=[OpTags.DONT_DCE])
