"""Pass over the epilogue: watches the backward of a step.

    watch_backward((t0, t1), backward)      before an epilogue returns the outputs

The line puts a hook on the autograd node that calls the compiled backward. The hook runs before anything is sent, in
the mode of ``torch.autograd.grad``. It notes for :mod:`passes.drop_unused` the outputs that the backward does not come
from, and refuses what would be dropped or wrong silently:

- ``create_graph=True``, because autograd cannot differentiate a compiled backward: a gradient penalty;
- a hook on an output, or its ``retain_grad``, if this backward also comes from an output that is computed from it: all
  outputs belong to one node, so that no gradient passes from one to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from passes.analysis.gradients import computed_from, results_of_step
from passes.comm.symbols import symbol
from passes.compat.jit import hooks_of, nodes_of_thunder, without_meta
from passes.plan.step import Unused

import torch
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.trace import TraceCtx, from_trace


class Watch(NamedTuple):
    """What the hook needs: the model, what it fills, and of each tensor the numbers of outputs computed from it."""

    model: str
    unused: Unused
    behind: Sequence[frozenset[int]]


class Inner(NamedTuple):
    """An output from which others, with these numbers, are computed; and the hooks on it."""

    output: ref[torch.Tensor]
    hooks: Mapping[int, Callable[..., Any]]
    others: frozenset[int]

    def is_watched(self) -> bool:
        output = self.output()
        return any(map(_sees_gradient, self.hooks.values())) or (output is not None and output.retains_grad)


def watch_backward(
    epilogue: TraceCtx, *, models: Collection[str], unused: Unused, record: Sequence[TraceCtx]
) -> TraceCtx:
    """Refuses a backward of which something would be dropped, and notes which outputs it does not come from.

    Takes: an epilogue, and the computation whose outputs it gets, last in ``record``.
    Gives: a line that watches their backward, and fills ``unused`` when it runs.
    No-op when: no model was traced, or it computes no tensor.
    """
    outputs = results_of_step(epilogue, record[-1])
    if not outputs or not models:
        return epilogue
    *lines, last = epilogue.bound_symbols
    found = computed_from(record[-1])
    new = from_trace(epilogue)
    hook = ContextObject("backward", Watch(" and ".join(models), unused, [found[o.name] for o in outputs]))
    new.bound_symbols = [*lines, watch.bind(outputs, hook, output=None), last]
    return new


def _sees_gradient(hook: Callable[..., Any]) -> bool:
    """False for the hooks by which Lightning sees that a backward is its own."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] not in ("lightning", "lightning_fabric")


def _begin(watch: Watch, inner: Sequence[Inner], gradients: tuple[torch.Tensor | None, ...]) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backward of {watch.model} was called with create_graph=True, but a compiled backward cannot be "
            "differentiated and a gradient penalty would be dropped: call it with create_graph=False, or "
            "compute that loss without Thunder"
        )
    used = {i for i, gradient in enumerate(gradients) if gradient is not None}
    if any(not used.isdisjoint(one.others) and one.is_watched() for one in inner):
        raise RuntimeError(
            f"a result of {watch.model} has a hook, or retain_grad was called, and the loss also uses another result "
            "that is computed from it, whose part of the gradient it would not see: let a torch.autograd.Function in "
            "forward, which returns its input, look at the gradient in its backward"
        )
    watch.unused.begin(gradients)


def _watch(outputs: tuple[torch.Tensor, ...], hook: ContextObject) -> None:
    watch: Watch = hook.obj
    pairs = zip(outputs, watch.behind, strict=True)
    inner = [Inner(ref(t), hooks_of(t), others) for t, others in pairs if others and t.requires_grad]
    for node in nodes_of_thunder(outputs):
        node.register_prehook(partial(_begin, watch, inner))
        node.register_hook(without_meta)


watch = symbol("watch_backward", lambda outputs, hook: None, _watch, tags=[OpTags.DONT_DCE])
