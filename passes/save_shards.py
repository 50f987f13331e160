"""Pass (ZeRO-3): saves the shard if a fusion would save a gathered parameter for backward.

Thunder moves cheap lines from a fusion of forward into one of backward (thunder.core.rematerialization), together with
their inputs. These include parameters that forward gathered, because Thunder does not know of the gather in backward.
This pass lets backward read what its own gather brings, and adds a gather for a parameter that has none.

The pass sees forward first. It tells the backward that follows what was swapped.
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
    """A gathered parameter, the ``place``-th member of a bucket, that is replaced by its shard among what is saved."""

    bucket: Bucket
    place: int
    shard: TensorProxy


def save_shards(trace: TraceCtx, *, swapped: dict[str, Swapped]) -> TraceCtx:
    """Saves the shard where a fusion would save a gathered parameter (ZeRO-3).

    Takes: a lowered forward, then its backward.
    Gives: a forward that saves shards, a backward that reads them. Forward fills ``swapped``, by the names of gathered
    parameters, for backward.
    No-op when: no gathered parameter is saved.
    """
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
    """Returns what replaces each parameter that forward would have saved, and the gathers that backward lacks."""
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
                bucket.wire,
            )
            outputs = unshard(tuple(shards[variableify(unpacked[name])] for name in members), part)
            found |= {variableify(unpacked[name]): full for name, full in zip(members, outputs, strict=True)}
    return found, trace.pop_scope()
