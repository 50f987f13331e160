"""Passes over parameters and their gradients.

``shard_parameters``, over the prologue and the computation: parameters enter the trace as shards. The model was traced
with its full shapes. The pass gives the proxies of sharded parameters their shard's shape, device and dtype among the
inputs of the computation. In the prologue, which fetches and checks DTensors of the whole shape, a line takes this
rank's rows of them. The body of the computation is unchanged.

``insert_synchronize``: one ``synchronize`` for each bucket, before its first use, gives the computation its full
parameters back. By the grad rule of ``synchronize``, Thunder's autodiff then turns each into an all_gather in forward
and a reduce_scatter in backward, so that both have the same buckets.

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

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from passes.analysis.calls import NOTHING, Flow, block_of, unique_name
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
    names,
    waits_for_future,
)
from passes.comm.sequence import Part, cut
from passes.comm.symbols import Folds, Property, accumulate, accumulated, symbol, synchronize
from passes.kernels.torch_call import Line
from passes.plan import (
    Bucket,
    BucketPlan,
    Gradients,
    Level,
    Member,
    Placement,
    Runtime,
    ShardedParameter,
    Step,
    TracedParameters,
)
from passes.plan.bucket import Group, Use, group_uses
from passes.plan.runtime import Sources, Unused

import torch
from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.devices import cpu
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_iter, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import dce
from thunder.core.transforms import is_constant_for_vjp
from thunder.executors.passes import del_last_used

UNPACKS = (prims.unpack_parameter, prims.unpack_trivial)  # in a prologue, in a computation


def shard_parameters(trace: TraceCtx, *, parameters: TracedParameters) -> TraceCtx:
    """Gives parameters the shape, device and dtype of this rank's shard.

    Takes: a prologue or a computation as it was traced, with whole parameters.
    Gives: its lines on shards.
    No-op when: no parameter of the trace is sharded.
    """
    full = [b.output for b in trace.bound_symbols if b.sym in UNPACKS and parameters.get(b.output) is not None]
    if not full:
        return trace
    new = from_trace(trace)
    shards = {p.name: _as_shard(p, new, parameters) for p in full}
    if trace.args is not None:
        new.args = tuple(shards.get(p.name, p) for p in trace.args)
        new.bound_symbols = [_with_shards(b, shards, parameters) for b in trace.bound_symbols]
        return new
    fetched = {p.name: _as_fetched(p, shards[p.name], new, parameters) for p in full}
    *lines, last = (_with_shards(b, fetched, parameters) for b in trace.bound_symbols)
    new.bound_symbols = [*lines, *_take_rows(fetched, shards, parameters), _with_shards(last, shards, parameters)]
    return new


def _as_fetched(proxy: TensorProxy, shard: TensorProxy, trace: TraceCtx, parameters: TracedParameters) -> TensorProxy:
    """The proxy of what a module holds: the shard itself, or a DTensor of the whole shape."""
    parameter = parameters.get(proxy)
    assert parameter is not None
    if not parameter.is_distributed:
        return shard
    with tracectx(trace):
        return shard.replace(name=f"{proxy.name}_dtensor", shape=parameter.full_shape)


def _take_rows(
    fetched: dict[str, TensorProxy], shards: dict[str, TensorProxy], parameters: TracedParameters
) -> list[BoundSymbol]:
    """A line for each model that takes the rows of its DTensors."""
    names = [name for name, p in fetched.items() if p is not shards[name]]
    lines: list[BoundSymbol] = []
    for runtime, group in groupby(names, lambda name: _runtime(shards[name], parameters)):
        mine = list(group)
        model = ContextObject(f"model_{len(lines)}", _Model(runtime, parameters.step_of(runtime), mine))
        lines.append(rows_of.bind(model, *(fetched[n] for n in mine), output=tuple(shards[n] for n in mine)))
    return lines


def _runtime(shard: TensorProxy, parameters: TracedParameters) -> Runtime:
    parameter = parameters.get(shard)
    assert parameter is not None
    return parameter.plan.runtime


class _Model(NamedTuple):
    """The model of a line that takes rows, its step, and the names of the rows."""

    runtime: Runtime
    step: Step
    names: list[str]


class _Rows(torch.autograd.Function):
    """This rank's rows of DTensors. Their gradients are laid out like the DTensors."""

    @staticmethod
    def forward(ctx: Any, model: _Model, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        runtime, step, names = model
        ctx.like, ctx.parameters = runtime.like, parameters
        again = [p for p, name in zip(parameters, names, strict=True) if name in step.rereads]
        ctx.versions = [(p, p._version) for p in again]
        rows = tuple(runtime.rows_of(p).data for p in parameters)
        ctx.mark_non_differentiable(*(r for r, p in zip(rows, parameters, strict=True) if not p.requires_grad))
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # torch does not see it, because the rows have versions of their own
        if any(p._version != version for p, version in ctx.versions):
            raise RuntimeError(
                "one of the parameters needed for gradient computation has been modified by an inplace operation "
                "since forward: step the optimizer after the last backward of what was computed before"
            )
        return None, *(None if g is None else ctx.like(p, g) for p, g in zip(ctx.parameters, grads, strict=True))


def _run_rows_of(model: ContextObject, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        found: tuple[torch.Tensor, ...] = _Rows.apply(model.obj, *parameters)
        return found
    return tuple(map(model.obj.runtime.rows_of, parameters))


rows_of = symbol("rows_of", lambda model, *parameters: None, _run_rows_of)


def _as_shard(proxy: TensorProxy, trace: TraceCtx, parameters: TracedParameters) -> TensorProxy:
    """Returns the proxy with its shard's shape: a new one that takes over the name in ``trace``."""
    parameter = parameters.get(proxy)
    assert parameter is not None
    trace.names.discard(proxy.name)
    device = proxy.device if parameter.plan.host is None else cpu
    with tracectx(trace):
        return proxy.replace(shape=parameter.shard_shape, dtype=parameter.dtype or proxy.dtype, device=device)


def _with_shards(bsym: BoundSymbol, shards: dict[str, TensorProxy], parameters: TracedParameters) -> BoundSymbol:
    """The line on shards, if it unpacks a parameter or checks its metadata: these are then a shard's."""
    if bsym.sym is prims.check_tensor_shape_and_metadata and (p := shards.get(bsym.args[0].name)) is not None:
        parameter = parameters.get(p)
        assert parameter is not None
        device = parameter.rest_device or p.device.device_str()
        return bsym.from_bsym(args=(p, tuple(p.shape), device, to_torch_dtype(p.dtype), bsym.args[4]))
    if bsym.sym is prims.unpack_parameter and (p := shards.get(bsym.output.name)) is not None:
        return bsym.from_bsym(output=p)
    if bsym.sym is prims.unpack_trivial and isinstance(bsym.output, TensorProxy) and bsym.output.name in shards:
        return bsym.from_bsym(args=(shards[bsym.output.name],), output=shards[bsym.output.name])
    if bsym.sym is prims.python_return:
        return bsym.from_bsym_swap_proxies({Variable(p): p for p in shards.values()})
    return bsym


# ---- synchronize ----


def insert_synchronize(computation: TraceCtx, *, parameters: TracedParameters) -> TraceCtx:
    """Gives the computation whole parameters, in buckets.

    Takes: a computation with shards as inputs.
    Gives: a ``synchronize`` for each bucket of the parameters that it uses, before the first use.
    No-op when: it uses no sharded parameter.

    A parameter that is unpacked under several names (tied weights) is gathered once. One of which only a part is used
    (tensor parallelism) is gathered as that part. A parameter that is never used
    has no collective. One that is used only where no gradient flows (``no_grad``, ``detach``) is gathered and not
    reduced.
    """
    if not any(parameters.get(p) for p in computation.args):
        return computation
    # Lines without effect do not count as uses. Thunder iterates over named_parameters() in the order of a set, which
    # differs between ranks: if a model only asks for a dtype there, ranks would gather in different orders.
    computation = dce(computation)
    first_use, canonical, trainable = _find_uses(computation, parameters)
    if not first_use:
        return computation
    cuts = _find_cuts(computation, parameters)
    members = {
        parameter: Member(
            replace(parameter, cut=cuts[parameter].args[1]) if parameter in cuts else parameter, parameter in trainable
        )
        for parameter in first_use
    }
    known = {member.parameter: parameter for parameter, member in members.items()}
    uses = [Use(m, canonical[p].dtype, canonical[p].device.device_str()) for p, m in members.items()]
    new = from_trace(computation)
    before: dict[int, list[BoundSymbol]] = {}
    full: dict[ShardedParameter, TensorProxy] = {}
    for group in group_uses(uses):
        line = min(first_use[known[u.parameter]] for u in group.uses)
        inserted, outputs = _synchronize(new, group, [canonical[known[u.parameter]] for u in group.uses])
        before.setdefault(line, []).append(inserted)
        full.update(zip((known[u.parameter] for u in group.uses), outputs, strict=True))

    swap = {
        variableify(p): full[parameter]
        for p in computation.args
        if (parameter := parameters.get(p)) is not None and parameter in full
    }
    swap |= {variableify(line.output): full[parameter] for parameter, line in cuts.items()}
    gone = set(map(id, cuts.values()))
    for i, bsym in enumerate(computation.bound_symbols):
        new.bound_symbols += before.get(i, [])
        if id(bsym) in gone:
            continue
        if bsym.sym is prims.python_return:
            new.bound_symbols += _return(new, bsym, swap)
        elif bsym.sym is prims.unpack_trivial or swap.keys().isdisjoint(bsym.flat_variableified_proxy_args):
            new.bound_symbols.append(bsym)
        else:
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(swap))
    return new


def _find_uses(
    computation: TraceCtx, parameters: TracedParameters
) -> tuple[dict[ShardedParameter, int], dict[ShardedParameter, TensorProxy], set[ShardedParameter]]:
    """The line of first use and the first proxy of each parameter, in order of first use; and those with a gradient."""
    known = {p.name: parameter for p in computation.args if (parameter := parameters.get(p)) is not None}
    inputs = {p.name: p for p in computation.args if p.name in known}
    first_use: dict[ShardedParameter, int] = {}
    canonical: dict[ShardedParameter, TensorProxy] = {}
    trainable: set[ShardedParameter] = set()
    for i, bsym in enumerate(computation.bound_symbols):
        if bsym.sym is prims.unpack_trivial:
            continue
        is_return = bsym.sym is prims.python_return
        block = block_of(bsym)
        used = names([bsym.args[i] for i in block.differentiable]) if block else None  # None: all
        proxies = _outputs(bsym) if is_return else bsym.flat_proxy_args
        for p in proxies:
            parameter = known.get(p.name)
            if parameter is None:
                continue
            first_use.setdefault(parameter, i)
            canonical.setdefault(parameter, inputs[p.name])
            if used is not None and p.name not in used:
                continue
            if inputs[p.name].requires_grad and (is_return or not is_constant_for_vjp(bsym)):
                trainable.add(parameter)
    return first_use, canonical, trainable


def _outputs(bsym: BoundSymbol) -> list[Proxy]:
    """The proxies that the traced function returns (its return line also lists all its inputs)."""
    return [p for p in tree_iter(bsym.args[0]["output"]) if isinstance(p, Proxy)]


def _find_cuts(computation: TraceCtx, parameters: TracedParameters) -> dict[ShardedParameter, BoundSymbol]:
    """The lines that cut a parameter of which nothing else is used, and whose parts can be gathered alone."""
    readers: dict[ShardedParameter, list[BoundSymbol]] = {}
    for bsym in computation.bound_symbols:
        if bsym.sym is prims.unpack_trivial:
            continue
        for p in _outputs(bsym) if bsym.sym is prims.python_return else bsym.flat_proxy_args:
            if (parameter := parameters.get(p)) is not None:
                readers.setdefault(parameter, []).append(bsym)
    return {
        parameter: lines[0]
        for parameter, lines in readers.items()
        if len(lines) == 1 and lines[0].sym.id == cut.id and _travels_in_parts(parameter.plan, lines[0].args[1])
    }


def _travels_in_parts(plan: BucketPlan, part: Part) -> bool:
    """Whether a rank can receive its part of a parameter without the others: single chunks, without padding."""
    single = part.split.length == part.plan.pieces * part.plan.ranks
    plain = plan.outer is None and plan.host is None and plan.gather is None and plan.reduction is None
    return single and plain and plan.placement is Placement.SHARD and len(part.plan.seats) == plan.world_size


def _synchronize(
    trace: TraceCtx, group: Group, shards: Sequence[TensorProxy]
) -> tuple[BoundSymbol, tuple[TensorProxy, ...]]:
    plan = group.uses[0].parameter.plan
    members = tuple(u.member for u in group.uses)
    plain = Bucket(
        group.label, _identifier(trace, group.label), plan, members, plan.unsharded_dtype(group.uses[0].dtype)
    )
    bucket = plain.carried_by(plan.gather)
    trace.push_scope([])
    with tracectx(trace):
        outputs = synchronize(tuple(shards), bucket)
    (bsym,) = trace.pop_scope()
    for p in outputs:  # the tag is set if tracing ended inside no_grad; here the uses tell whether a gradient flows
        p.tags.discard(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return bsym, outputs


def _identifier(trace: TraceCtx, label: str) -> str:
    """A Python name for a bucket, unique in the trace."""
    return unique_name(trace, "b_" + re.sub(r"\W+", "_", label).strip("_"), first=1)


def _return(trace: TraceCtx, bsym: BoundSymbol, swap: dict[Variable, TensorProxy]) -> list[BoundSymbol]:
    """The return line, with a copy of each parameter that the model returns.

    The copy is an output, which later passes may not recompute. The inputs that are listed for autograd stay shards.
    """
    trace.push_scope([])
    with tracectx(trace):

        def copy_if_parameter(x: Any) -> Any:
            full = swap.get(variableify(x)) if isinstance(x, Proxy) else None
            return prims.shallow_copy(full) if full is not None else x

        output = tree_map(copy_if_parameter, bsym.args[0]["output"])
    copies = trace.pop_scope()
    return [*copies, bsym.from_bsym(args=({**bsym.args[0], "output": output},))]


# ---- gradients ----


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
    """The changes to a backward: lines that are inserted, replaced, or left out."""

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
    """How a step treats the gradients of a bucket. Raises RuntimeError if it is to keep only some of them."""
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
