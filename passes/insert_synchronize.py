"""Pass: one ``synchronize`` for each bucket, before its first use, gives the computation its full parameters back.

By the grad rule of ``synchronize``, Thunder's autodiff then turns each into an all_gather in forward and a
reduce_scatter in backward, so that both have the same buckets.
"""

from __future__ import annotations

import re
from typing import Any

from passes.analysis.calls import block_of, unique_name
from passes.analysis.recognise import names
from passes.comm.symbols import synchronize
from passes.plan import Bucket, Member, ShardedParameter, TracedParameters
from passes.plan.bucketing import Group, Use, group_uses

from thunder.core import prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_iter, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import dce
from thunder.core.transforms import is_constant_for_vjp


def insert_synchronize(computation: TraceCtx, *, parameters: TracedParameters) -> TraceCtx:
    """Gives the computation whole parameters, in buckets.

    Takes: a computation with shards as inputs.
    Gives: a ``synchronize`` for each bucket of the parameters that it uses, before the first use.
    No-op when: it uses no sharded parameter.

    A parameter that is unpacked under several names (tied weights) is gathered once. A parameter that is never used
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
    members = {parameter: Member(parameter, parameter in trainable) for parameter in first_use}
    uses = [Use(m, canonical[p].dtype, canonical[p].device.device_str()) for p, m in members.items()]
    new = from_trace(computation)
    before: dict[int, list[BoundSymbol]] = {}
    full: dict[ShardedParameter, TensorProxy] = {}
    for group in group_uses(uses):
        line = min(first_use[u.parameter] for u in group.uses)
        inserted, outputs = _synchronize(new, group, canonical)
        before.setdefault(line, []).append(inserted)
        full.update(zip((u.parameter for u in group.uses), outputs, strict=True))

    swap = {
        variableify(p): full[parameter]
        for p in computation.args
        if (parameter := parameters.get(p)) is not None and parameter in full
    }
    for i, bsym in enumerate(computation.bound_symbols):
        new.bound_symbols += before.get(i, [])
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


def _synchronize(
    trace: TraceCtx, group: Group, canonical: dict[ShardedParameter, TensorProxy]
) -> tuple[BoundSymbol, tuple[TensorProxy, ...]]:
    plan = group.uses[0].parameter.plan
    members = tuple(u.member for u in group.uses)
    plain = Bucket(
        group.label, _identifier(trace, group.label), plan, members, plan.unsharded_dtype(group.uses[0].dtype)
    )
    bucket = plain.carried_by(plan.gather)
    shards = tuple(canonical[m.parameter] for m in members)
    trace.push_scope([])
    with tracectx(trace):
        outputs = synchronize(shards, bucket)
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
