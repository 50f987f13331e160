"""Pass over the epilogue: watches the backward of a step.

    watch_backward((t0, t1), backward)      before an epilogue returns the outputs

The line puts a hook on the autograd node that calls the compiled backward. The hook runs before anything is sent, in
the mode of ``torch.autograd.grad``. It notes for :mod:`passes.drop_unused` the outputs that the backward does not come
from, and refuses what would be dropped or wrong silently:

- ``create_graph=True``, because autograd cannot differentiate a compiled backward: a gradient penalty;
- a hook on an output, or its ``retain_grad``, if this backward also comes from an output that is computed from it: all
  outputs belong to one node, so that no gradient passes from one to another.

The node calls what :mod:`passes.choose_backward` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from passes.analysis.gradients import Flow, results_of_step, stops_gradients
from passes.comm.symbols import symbol
from passes.compat.jit import nodes_of_thunder, without_meta
from passes.plan.step import Unused

import torch
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace
from torch.utils.hooks import unserializable_hook

Choose = Callable[[Callable[..., Any], list[Any], list[Any]], Any]  # runs one for a compiled backward


class Watch(NamedTuple):
    """The model, what its backward fills, what chooses it, and of each output the numbers of others that are computed
    from it."""

    model: str
    unused: Unused
    choose: Choose | None
    others: Sequence[frozenset[int]]


def watch_backward(
    epilogue: TraceCtx, *, models: Collection[str], unused: Unused, record: Sequence[TraceCtx], choose: Choose | None
) -> TraceCtx:
    """Refuses a backward of which something would be dropped, notes which outputs it does not come from, and lets
    ``choose`` run it.

    Takes: an epilogue, and the computation whose outputs it gets, last in ``record``.
    Gives: a line that watches their backward, and fills ``unused`` when it runs.
    No-op when: no model was traced, or it computes no tensor.
    """
    outputs = results_of_step(epilogue, record[-1])
    if not outputs or not models:
        return epilogue
    *lines, last = epilogue.bound_symbols
    new = from_trace(epilogue)
    hook = ContextObject("backward", Watch(" and ".join(models), unused, choose, _others(record[-1], outputs)))
    new.bound_symbols = [*lines, watch.bind(outputs, hook, output=None), last]
    return new


def _others(computation: TraceCtx, outputs: Sequence[TensorProxy]) -> list[frozenset[int]]:
    """Of each output, the numbers of the others that are computed from it."""
    own = {o.name: frozenset([i]) for i, o in enumerate(outputs)}
    found: dict[str, frozenset[int]] = {}
    Flow(stops_gradients).follow(computation.bound_symbols, found, own)
    return [
        frozenset(
            i
            for i, other in enumerate(outputs)
            if other is not o and own[o.name] <= found.get(other.name, own[other.name])
        )
        for o in outputs
    ]


def _watch(outputs: tuple[torch.Tensor, ...], hook: ContextObject) -> None:
    model, unused, choose, others = hook.obj
    if any(others):  # first those from which the fewest are computed: each one follows all that are computed from it
        used: set[int] = set()
        for i in sorted(range(len(outputs)), key=lambda i: len(others[i])):
            if outputs[i].requires_grad:
                _observe(outputs[i], i, others[i], used, model)

    def begin(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward of {model} was called with create_graph=True, but a compiled backward cannot be "
                "differentiated and a gradient penalty would be dropped: call it with create_graph=False, or "
                "compute that loss without Thunder"
            )
        unused.begin(gradients)

    for node in nodes_of_thunder(outputs):
        node.register_prehook(begin)
        node.register_hook(without_meta)
    for node in nodes_of_thunder(outputs, of_backward=True) if choose is not None else ():
        node.compiled_backward = partial(choose, node.compiled_backward)


def _observe(output: torch.Tensor, number: int, others: frozenset[int], used: set[int], model: str) -> None:
    """Refuses a backward that comes from ``others``, too, if someone looks at the gradient of ``output``."""
    tensor = ref(output)

    def see(gradient: torch.Tensor | None) -> None:
        (used.discard if gradient is None else used.add)(number)
        watched = any(hook is not see and _sees_gradient(hook) for hook in (hooks() or {}).values())
        if not used.isdisjoint(others) and (watched or getattr(tensor(), "retains_grad", False)):
            raise RuntimeError(
                f"a result of {model} has a hook or retain_grad, and the loss also uses another result that is "
                "computed from it, whose part of the gradient it would not see: pass it in forward through a "
                "torch.autograd.Function that returns it, and do in its backward what the hook does"
            )

    output.register_hook(unserializable_hook(see))
    hooks = ref(output._backward_hooks)  # also those that are registered later


def _sees_gradient(hook: Any) -> bool:
    """False for the hooks by which Lightning only sees that a backward is its own."""
    return not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("lightning")


watch = symbol("watch_backward", lambda outputs, hook: None, _watch, tags=[OpTags.DONT_DCE])
