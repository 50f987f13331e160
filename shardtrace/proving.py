"""``prove``: shows that the compiled step of a sharded model is the unsharded program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from passes.compat.jit import attention_of_gpus
from passes.pipeline import FirstStage
from passes.proof.prove import Difference, Proof, needs_backward
from passes.proof.prove import prove as prove_traces
from shardtrace.record.arguments import is_absent

import thunder
from thunder.core.devices import to_torch_device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

__all__ = ["Difference", "Proof", "prove"]


def prove(cmodel: Callable[..., Any]) -> Proof:
    """Proves that the last call of a sharded model, or of a jitted function, computes the unsharded program.

    Collectives are erased by their laws. What is left, forward and backward, is compared with what Thunder makes of the
    recorded calls without any pass of shardtrace: the outputs, the gradient of each parameter, and all writes into
    memory that outlives the step. Nothing runs, and no other rank is needed.

    Returns:
        A :class:`Proof`. Its ``verdict`` is "proven", "rounding" (proven up to what travels with less precision) or
        "unproven"; it prints with the reasons.

    Raises:
        TypeError: if ``cmodel`` is not jitted or was not called yet.
        ValueError: if the call had no sharded model.
    """
    data, stats = thunder.compile_data(cmodel), thunder.compile_stats(cmodel)
    if data is None or not stats.last_traces:
        raise TypeError("prove() needs a call: call the sharded model, or the jitted function that calls it, first")
    forward, backward = executed(cmodel)
    assert forward is not None
    proof = prove_compiled(data, stats.last_traces, forward, backward, _functions(stats, forward, backward))
    if proof is None:
        raise ValueError("prove() found no sharded model in the last call: call shardtrace.fsdp(model) before it")
    return proof


Functions = Sequence[tuple[TraceCtx, Callable[..., Any]]]  # traces that run, with the functions that run them


def prove_compiled(
    data: Any, stages: Sequence[TraceCtx], forward: TraceCtx, backward: TraceCtx | None, functions: Functions = ()
) -> Proof | None:
    """Proves a step that Thunder has compiled with ``data``; None if it has no sharded model.

    Args:
        stages: the traces of its forward, one for each pass.
        forward: the one that runs.
        backward: likewise.
        functions: that run, each with its trace, whose texts are read.
    """
    compiled = [t.compilation for t in data.transforms if isinstance(t, FirstStage)]
    for facts in (facts for one in compiled for facts in one.finished):
        record, variables = facts.record, facts.variables
        if record is None or variables is None or not any(trace is record.traced for trace in stages):
            continue
        before, data.is_grad_enabled = data.is_grad_enabled, needs_backward(record.first)
        if facts.choose is not None:
            functions = [(t, facts.choose.function_of(t) or function) for t, function in functions]
        devices = {to_torch_device(p.device) for p in forward.args if isinstance(p, TensorProxy)}
        try:
            with attention_of_gpus() if any(map(is_absent, devices)) else nullcontext():  # as it was compiled
                contexts = facts.tensors, facts.context
                return variables.run(
                    prove_traces, record, facts.parameters, forward, backward, contexts, facts.border, functions
                )
        finally:
            data.is_grad_enabled = before
    return None


def _functions(stats: Any, forward: TraceCtx, backward: TraceCtx | None) -> Functions:
    """The functions of the compiled step that has these traces. Another backward than Thunder's own has none here."""
    found: list[tuple[TraceCtx, Callable[..., Any]]] = []
    for entry in stats.interpreter_cache:
        if entry.computation_traces[-1] is not forward:
            continue
        stages = (entry.computation_traces, entry.epilogue_traces, entry.backward_traces)
        for traces, function in zip(stages, (entry.computation_fn, entry.epilogue_fn, entry.backward_fn), strict=True):
            if function is not None and traces and (traces is not entry.backward_traces or traces[-1] is backward):
                found.append((traces[-1], function))
    return found


def executed(cmodel: Callable[..., Any]) -> tuple[TraceCtx | None, TraceCtx | None]:
    """The executed trace of the last forward, and that of its backward."""
    forward = thunder.last_traces(cmodel)
    # on a cache hit Thunder updates only last_traces: the matching backward is in the cache
    entries = thunder.compile_stats(cmodel).interpreter_cache
    uncached = thunder.last_backward_traces(cmodel)
    backward: list[Any] = next((e.backward_traces for e in entries if e.computation_traces is forward), uncached)
    last = next((t for t in reversed(forward) if t.bound_symbols), None)
    return last, backward[-1] if backward else None
