"""Passes over gradients: what stays None, and what is kept for later steps.

``drop_unused``: no gradient, instead of zeros, for a parameter or an input that no gradient reaches.

    t30 = mark_unused(t29, uses0)           before a gradient is reduced or kept: minus zero if none has reached it
    t32 = unless_unused(t31, uses1)         the last lines of a backward: None if none has reached it on any rank

Zeros would move an optimizer's momentum and decay the parameter. The sources of a gradient are outputs of the step, of
which a loss may use some, and what torch's backward of a line returns, which may be None.

Note [Minus zero]. It is the only number that leaves every other one, also plus zero, as it is when it is added. A
reduced gradient is all minus zero only if every rank has added that. So ranks agree without another collective (DDP
has one), and sums that ``no_sync`` keeps remember it. A wire may lose the sign: then zero counts as such.

``accumulate_gradients``: keeps gradients unreduced for later steps, or adds the kept ones to them.

    accumulate(grads, bucket)               replaces their reduction: adds them to the kept ones
    grads = accumulated(grads, bucket)      precedes their reduction: adds the kept ones and clears them

Works on a lowered backward. The tracing of forward decides which of the two a model needs, if any
(:class:`passes.plan.Step`). Thunder keeps a compiled step for each. Under a hybrid strategy, gradients may be kept
between the reduction that leaves shards and the one over replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from passes.analysis.calls import NOTHING, Flow
from passes.analysis.recognise import (
    OFFLOAD_WAITS,
    OFFLOADS,
    REDUCTION_WAITS,
    REDUCTIONS,
    bucket_of,
    is_backward,
    is_deletion,
    is_gather,
    is_offload,
    is_sequence_wait,
    is_unpack,
    issues_future,
    waits_for_future,
)
from passes.comm.symbols import Folds, Property, accumulate, accumulated, symbol
from passes.kernels.torch_call import Line
from passes.plan import Bucket, Gradients, Level, Runtime, Step, TracedParameters
from passes.plan.runtime import Sources, Unused

import torch
from thunder.core.codeutils import ContextObject
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import del_last_used

ALWAYS = Sources([-1])  # of what has a gradient in each backward
TAKES = {*REDUCTIONS, *OFFLOADS, accumulate.id, accumulated.id}
GIVES = {*REDUCTION_WAITS, *OFFLOAD_WAITS, accumulated.id}


class Uses(NamedTuple):
    """The sources of the gradient of a parameter of this shape. ``sign``: whether its minus zero would arrive; None if
    it is not reduced."""

    sources: Sources
    unused: Unused
    shape: Sequence[int]
    sign: bool | None

    @property
    def absent(self) -> bool:
        return self.sources <= self.unused.absent


def drop_unused(trace: TraceCtx, *, unused: Unused) -> TraceCtx:
    """Gives no gradient, instead of zeros, to what no gradient reaches.

    Takes: a lowered backward, in which gradients are waited for. ``unused`` is filled when it runs.
    Gives: lines for each gradient that is not always there. Tells ``unused`` which lines of torch may return none.
    No-op when: every gradient is always there; in a forward.
    """
    *lines, last = (b for b in trace.bound_symbols if not is_deletion(b))
    cotangents = next((b for b in lines if is_unpack(b) and b.args and _name(b.args[0]) == "cotangents"), None)
    if not is_backward(trace) or cotangents is None:
        return trace
    flow = _Flow(len(cotangents.output), unused)
    found = {_name(o): flow.joined([Sources([i])]) for i, o in enumerate(cotangents.output)}
    flow.follow(lines, found)
    unused.calls = flow.calls
    certain = {name for name, sources in found.items() if sources == ALWAYS}
    taken = (g for b in lines if b.sym.id in TAKES for g in b.args[0])
    if all(g.name in certain for g in (*last.flat_proxy_args, *taken)):
        return trace
    new = from_trace(trace)
    signs: dict[str, bool] = {}  # of what is reduced or kept already

    def uses(name: str, shape: Sequence[int]) -> ContextObject:
        sources = found.get(name, NOTHING)
        return ContextObject(new.make_name(prefix="uses"), Uses(sources, unused, shape, signs.get(name)))

    with tracectx(new):
        for bsym in lines:
            if bsym.sym.id in TAKES:
                grads = tuple(
                    g if g.name in certain or g.name in signs else mark_unused(g, uses(g.name, m.parameter.used_shape))
                    for g, m in zip(bsym.args[0], bucket_of(bsym).members, strict=True)
                )
                bsym = bsym.from_bsym(args=(grads, *bsym.args[1:]))
            if bsym.sym.id in GIVES:
                signs |= {o.name: bucket_of(bsym).wire is None for o in bsym.flat_proxy_outs}
            new.bound_symbols.append(bsym)
        kept = {g.name: unless_unused(g, uses(g.name, g.shape)) for g in last.flat_proxy_args if g.name not in certain}
    new.bound_symbols.append(last.from_bsym(args=tree_map(lambda x: kept.get(_name(x), x), last.args)))
    return del_last_used(new, clear_mutable_collections=True)


class _Flow(Flow):
    """The sources of values of a backward. ``calls`` are torch's backwards of lines, in the order in which they run."""

    def __init__(self, outputs: int, unused: Unused) -> None:
        super().__init__()
        self.outputs, self._unused, self._next = Sources(range(outputs)), unused, outputs
        self.calls: list[tuple[Sequence[Sources], int]] = []
        self._in_flight: dict[str, list[Sources]] = {}  # by the future: of each member of a bucket

    def joined(self, sources: Iterable[Sources]) -> Sources:
        read = super().joined(sources)
        return ALWAYS if read >= ALWAYS or read >= self.outputs else read

    def of_results(self, bsym: BoundSymbol, found: dict[str, Sources], own: Mapping[str, Sources]) -> list[Sources]:
        given = [found.get(_name(a), NOTHING) for a in bsym.flat_proxy_args]
        if issues_future(bsym):
            self._in_flight[bsym.output.name] = given
            return []
        if waits_for_future(bsym):
            return self._in_flight[bsym.args[0].name]
        if bsym.sym.id == accumulated.id:
            return given
        if isinstance(bsym.sym.id, Line) and bsym.sym.id.kind == "_backward" and not bsym.sym.id.call.is_certain:
            call = bsym.sym.id.call
            call.unused, first = self._unused, self._next
            self._next += len(call.wanted)
            self.calls.append((given[len(given) - len(call.returned) :], first))
            return [Sources([i]) for i in range(first, self._next)]
        results = super().of_results(bsym, found, own)
        # another rank's part of a value may have a gradient that torch gives this one's not
        return [ALWAYS if is_sequence_wait(bsym) and not r <= self.outputs else r for r in results]


def _name(value: Any) -> str:
    return value.name if isinstance(value, Proxy) else ""


def _mark(gradient: torch.Tensor, uses: ContextObject) -> torch.Tensor:
    return gradient.new_zeros(uses.obj.shape).neg_() if uses.obj.absent else gradient


def _unless_unused(gradient: torch.Tensor, uses: ContextObject) -> torch.Tensor | None:
    if not uses.obj.absent or (uses.obj.sign is not None and gradient.any()):
        return gradient
    parts = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return None if not uses.obj.sign or parts.signbit().all() else gradient


def _like(gradient: TensorProxy, uses: ContextObject) -> TensorProxy:
    return TensorProxy(like=gradient)


MARKED, GIVEN = Folds("minus zero if no gradient has come"), Folds("None if no gradient has come on any rank")
mark_unused = symbol("mark_unused", _like, _mark, properties=Property.VIEW, tags=[MARKED])
unless_unused = symbol("unless_unused", _like, _unless_unused, properties=Property.VIEW, tags=[GIVEN])


# ---- accumulation ----


def accumulate_gradients(trace: TraceCtx, *, parameters: TracedParameters, lowered: list[TraceCtx]) -> TraceCtx:
    """Keeps gradients for a later step, or adds the kept ones, as each model's step says (no_sync).

    Takes: a lowered backward.
    Gives: lines that keep gradients, for which it returns None, or lines that add the kept ones before a reduction.
    Notes the backward in ``lowered``, for another treatment of gradients (:mod:`passes.pipeline`).
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
