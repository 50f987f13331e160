"""Pass over the epilogue: makes a backward with ``create_graph=True`` raise.

    refuse_double_backward((t0,), "GPT")        before an epilogue returns the outputs

Autograd cannot differentiate a compiled backward: without an error a gradient penalty would be dropped silently. The
compiled backward itself runs without grad mode. Therefore the line puts a hook on the autograd node that calls it. The
hook runs in the mode of ``torch.autograd.grad``, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from passes.comm.symbols import symbol
from passes.compat.jit import nodes_of_thunder

import torch
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.trace import TraceCtx, from_trace


def refuse_double_backward(epilogue: TraceCtx, *, models: Collection[str]) -> TraceCtx:
    """Makes a backward with ``create_graph=True`` raise.

    Takes: an epilogue that returns tensors.
    Gives: a line that watches their backward.
    No-op when: no model was traced, or no tensor is returned.
    """
    *lines, last = epilogue.bound_symbols
    outputs = tuple(x for x in tree_flatten((last.args, last.kwargs))[0] if isinstance(x, TensorProxy))
    if not outputs or not models:
        return epilogue
    new = from_trace(epilogue)
    new.bound_symbols = [*lines, refusal.bind(outputs, " and ".join(models), output=None), last]
    return new


def _watch(outputs: tuple[torch.Tensor, ...], model: str) -> None:
    for node in nodes_of_thunder(outputs):
        node.register_prehook(partial(_refuse, model))


def _refuse(model: str, gradients: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backward of {model} was called with create_graph=True, but a compiled backward cannot be differentiated "
            "and a gradient penalty would be dropped: call it with create_graph=False, or "
            "compute that loss without Thunder"
        )


refusal = symbol("refuse_double_backward", lambda outputs, model: None, _watch, tags=[OpTags.DONT_DCE])
