"""Pass (ZeRO-3): where a fusion would have a gathered parameter saved for backward, its shard is saved.

Thunder moves cheap lines from a fusion of forward into one of backward (thunder.core.rematerialization), and with them
what they read: the parameter as forward gathered it, as it knows nothing of the gather in backward. Here backward reads
what its own gather brings; where it has none for that parameter, it gets one.

Forward and backward are seen in turn: what the first one swaps, the second is told.
"""

from __future__ import annotations

from typing import NamedTuple

from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_deletion,
    is_gather,
    is_issue,
    is_return,
    is_unpack,
    is_wait,
    names,
)
from passes.comm.symbols import unshard
from passes.plan import Bucket

from thunder.core.proxies import TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace, tracectx
from thunder.executors.passes import del_last_used


class Swapped(NamedTuple):
    """A gathered parameter in whose place its shard is saved: a member of a bucket."""

    bucket: Bucket
    place: int
    shard: TensorProxy


def save_shards(trace: TraceCtx, *, swapped: dict[str, Swapped]) -> TraceCtx:
    """Returns the trace with shards saved, or read; ``swapped`` is filled by a forward, by the names of parameters."""
    if is_backward(trace):
        return _read_shards(trace, swapped) if swapped else trace
    swapped.clear()
    if TraceTag.AUGMENTED_FORWARD not in trace.tags or not is_return(trace.bound_symbols[-1]):
        return trace
    *lines, last = trace.bound_symbols
    result, (saved, other) = last.args
    issues = {b.output.name: b for b in lines if is_issue(b)}
    only_saved = names(saved) - names(result["output"])
    for bsym in lines:
        if is_wait(bsym) and is_gather(bsym) and bucket_of(bsym).plan.regather:
            shards = issues[bsym.args[0].name].args[0]
            for i, (full, shard) in enumerate(zip(bsym.flat_proxy_outs, shards, strict=True)):
                if full.name in only_saved:
                    swapped[full.name] = Swapped(bucket_of(bsym), i, shard)
    if not swapped:
        return trace
    new = from_trace(trace)
    saved = tuple(swapped[p.name].shard if p.name in swapped else p for p in saved)
    new.bound_symbols = [b for b in lines if not is_deletion(b)] + [last.from_bsym(args=(result, (saved, other)))]
    return del_last_used(new)


def _read_shards(trace: TraceCtx, swapped: dict[str, Swapped]) -> TraceCtx:
    new = from_trace(trace)
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    unpacked = {o.name: o for b in lines if is_unpack(b) for o in b.flat_proxy_outs if o.name in swapped}
    if not unpacked:
        return trace
    shards: dict[Variable, TensorProxy] = {}
    with tracectx(new):
        for name, full in unpacked.items():
            shard = swapped[name].shard
            shards[variableify(full)] = TensorProxy(like=shard, requires_grad=False)
    full_of, gathers = _unsharded(new, lines, unpacked, swapped, shards)
    for b in lines:
        if is_unpack(b):
            new.bound_symbols.append(b.from_bsym_swap_proxies(shards, skip_inputs=True))
        else:
            new.bound_symbols += gathers
            gathers = []
            new.bound_symbols.append(b.from_bsym_swap_proxies(full_of, skip_output=True))
    return del_last_used(new, clear_mutable_collections=True)


def _unsharded(
    trace: TraceCtx,
    lines: list[BoundSymbol],
    unpacked: dict[str, TensorProxy],
    swapped: dict[str, Swapped],
    shards: dict[Variable, TensorProxy],
) -> tuple[dict[Variable, TensorProxy], list[BoundSymbol]]:
    """For each parameter that backward was to be given, what its gathers bring; and the gathers that it lacks."""
    brought = {
        m.parameter: full
        for b in lines
        if is_wait(b) and is_gather(b)
        for m, full in zip(bucket_of(b).members, b.flat_proxy_outs, strict=True)
    }
    found: dict[Variable, TensorProxy] = {}
    missing: dict[Bucket, list[str]] = {}
    for name, full in unpacked.items():
        bucket, place, _ = swapped[name]
        parameter = bucket.members[place].parameter
        if parameter in brought:
            found[variableify(full)] = brought[parameter]
        else:
            missing.setdefault(bucket, []).append(name)
    trace.push_scope([])
    with tracectx(trace):
        for bucket, members in missing.items():
            part = Bucket(
                bucket.label,
                f"{bucket.name}_saved",
                bucket.plan,
                tuple(bucket.members[swapped[name].place] for name in members),
                bucket.dtype,
            )
            outputs = unshard(tuple(shards[variableify(unpacked[name])] for name in members), part)
            found |= {variableify(unpacked[name]): full for name, full in zip(members, outputs, strict=True)}
    return found, trace.pop_scope()
