"""Pass (gradient accumulation): keeps gradients unreduced for later steps, or adds the kept ones to them.

    accumulate(grads, bucket)               replaces their reduction: adds them to the kept ones
    grads = accumulated(grads, bucket)      precedes their reduction: adds the kept ones and clears them

Works on a lowered backward. The tracing of forward decides which of the two a model needs, if any
(:class:`passes.plan.Step`). Thunder keeps a compiled step for each. Under a hybrid strategy, gradients may be kept
between the reduction that leaves shards and the one over replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from passes.analysis.recognise import (
    is_backward,
    is_deletion,
    is_gather,
    is_offload,
    is_unpack,
    issues_future,
    waits_for_future,
)
from passes.comm.kept_gradients import accumulate, accumulated
from passes.plan import Bucket, Gradients, Level, Runtime, Step, TracedParameters

from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import del_last_used


def accumulate_gradients(trace: TraceCtx, *, parameters: TracedParameters, lowered: list[TraceCtx]) -> TraceCtx:
    """Keeps gradients for a later step, or adds the kept ones, as each model's step says (no_sync).

    Takes: a lowered backward.
    Gives: lines that keep gradients, for which it returns None, or lines that add the kept ones before a reduction.
    Notes the backward in ``lowered``, for another treatment of gradients (:mod:`passes.choose_backward`).
    No-op when: every model reduces its gradients in each step; in a forward.
    """
    steps = parameters.steps
    if is_backward(trace):
        lowered[:] = [trace]
    if not is_backward(trace) or not {s.gradients for s in steps.values()} & {Gradients.KEPT, Gradients.ADDED}:
        return trace
    new = from_trace(trace)
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    changes = _changes(new, lines, steps)
    for i, bsym in enumerate(lines):
        new.bound_symbols += changes.inserted.get(i, [])
        if issues_future(bsym):
            if bsym.output.name not in changes.kept:
                new.bound_symbols.append(changes.replaced.get(bsym.output.name, bsym))
        elif not (waits_for_future(bsym) and bsym.args[0].name in changes.kept):
            new.bound_symbols.append(bsym)
    last = new.bound_symbols.pop()
    args = tree_map(lambda x: None if isinstance(x, Proxy) and x.name in changes.kept else x, last.args)
    new.bound_symbols.append(last.from_bsym(args=args))
    return del_last_used(new, clear_mutable_collections=True)


class Changes(NamedTuple):
    """What becomes of a backward."""

    inserted: dict[int, list[BoundSymbol]]  # by the line that they precede, as soon as the gradients exist
    replaced: dict[str, BoundSymbol]  # reductions, by their future
    kept: set[str]  # futures and gradients that this step no longer has


def _changes(trace: TraceCtx, lines: Sequence[BoundSymbol], steps: Mapping[Runtime, Step]) -> Changes:
    inserted, replaced, kept = changes = Changes({}, {}, set())
    made = {o.name: i for i, b in enumerate(lines) for o in b.flat_proxy_outs}
    first = sum(is_unpack(b) for b in lines)  # a gradient may be an input of backward
    reduced: set[str] = set()  # may be reduced again (hybrid strategies) or copied to the host
    for bsym in lines:
        if is_gather(bsym):
            continue
        if waits_for_future(bsym):
            outputs = {o.name for o in bsym.flat_proxy_outs}
            reduced |= outputs
            kept.update(outputs if bsym.args[0].name in kept else ())
        if not issues_future(bsym):
            continue
        grads, bucket = bsym.args
        at = max(first, 1 + max(made[g.name] for g in grads))
        if grads[0].name in kept:
            kept.add(bsym.output.name)
            continue
        if is_offload(bsym):
            continue
        again = grads[0].name in reduced
        mode = _treatment(steps.get(bucket.plan.runtime), bucket, Level.REPLICAS if again else Level.WHOLE)
        if mode is Gradients.KEPT:
            kept.add(bsym.output.name)
            inserted.setdefault(at, []).append(accumulate.bind(grads, bucket, output=None))
        elif mode is Gradients.ADDED:
            with tracectx(trace):
                sums = accumulated.meta(grads, bucket)
            inserted.setdefault(at, []).append(accumulated.bind(grads, bucket, output=sums))
            replaced[bsym.output.name] = bsym.from_bsym(args=(sums, bucket))
    return changes


def _treatment(step: Step | None, bucket: Bucket, level: Level) -> Gradients | None:
    """What a step does with the gradients of a bucket. Raises RuntimeError if it is to keep only some of them."""
    if step is None or step.gradients is Gradients.REDUCED:
        return None
    if step.gradients is Gradients.ADDED or step.keep is None:
        return Gradients.ADDED if level in step.adds else None
    if step.keep.level is not level:
        return None
    chosen = step.keep.parameters
    names = {m.parameter.name: chosen is None or m.parameter.index in chosen for m in bucket.members}
    if len(set(names.values())) > 1:
        inside, outside = (next(name for name, kept in names.items() if kept is wanted) for wanted in (True, False))
        raise RuntimeError(
            f"no_sync keeps the gradient of {inside!r} and not that of {outside!r}, which travel in one bucket: call "
            'it for the whole block or model, or call fsdp(bucketing_strategy="layer")'
        )
    return Gradients.KEPT if all(names.values()) else None
