"""Pass over the epilogue: watches the backward of a step.

    watch_backward((t0, t1), backward)      before an epilogue returns the outputs

The line puts a hook on the autograd node that calls the compiled backward. The hook runs before anything is sent, in
the mode of ``torch.autograd.grad``. It refuses ``create_graph=True``, because autograd cannot differentiate a compiled
backward: without an error a gradient penalty would be dropped silently. It also notes for :mod:`passes.drop_unused` the
outputs that the backward does not come from.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from passes.comm.symbols import symbol
from passes.compat.jit import nodes_of_thunder
from passes.plan.step import Unused

import torch
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.trace import TraceCtx, from_trace


def watch_backward(epilogue: TraceCtx, *, models: Collection[str], unused: Unused) -> TraceCtx:
    """Makes a backward with ``create_graph=True`` raise, and notes which outputs it does not come from.

    Takes: an epilogue that returns tensors.
    Gives: a line that watches their backward, and fills ``unused`` when it runs.
    No-op when: no model was traced, or no tensor is returned.
    """
    *lines, last = epilogue.bound_symbols
    outputs = tuple(x for x in tree_flatten((last.args, last.kwargs))[0] if isinstance(x, TensorProxy))
    if not outputs or not models:
        return epilogue
    new = from_trace(epilogue)
    hook = ContextObject("backward", partial(_begin, " and ".join(models), unused))
    new.bound_symbols = [*lines, watch.bind(outputs, hook, output=None), last]
    return new


def _begin(model: str, unused: Unused, gradients: tuple[torch.Tensor | None, ...]) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backward of {model} was called with create_graph=True, but a compiled backward cannot be differentiated "
            "and a gradient penalty would be dropped: call it with create_graph=False, or "
            "compute that loss without Thunder"
        )
    unused.begin(gradients)


def _watch(outputs: tuple[torch.Tensor, ...], hook: ContextObject) -> None:
    for node in nodes_of_thunder(outputs):
        node.register_prehook(hook.obj)


watch = symbol("watch_backward", lambda outputs, hook: None, _watch, tags=[OpTags.DONT_DCE])
