"""Pass ("zero3_secondary"): forward keeps a second shard inside the node, from which backward gathers.

    second = keep_shards(full, b_0_secondary)       forward: this rank's part of the gathered parameters, in the node
    future = all_gather(second, b_0_secondary)      backward: gathers from the ranks of the node, not from all

Autodiff has made a backward that gathers from all ranks again, and a forward that saves this rank's shards for it. The
pass saves the second shards in their place. They hold the values that forward has used, in the dtype of their use.

The pass sees forward first. It tells the backward that follows what was kept.

Source: ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209), hpZ.
"""

from __future__ import annotations

from typing import NamedTuple

from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_collective,
    is_deletion,
    is_gather,
    is_issue,
    is_return,
    is_unpack,
    is_wait,
    names,
)
from passes.comm.symbols import keep_shards
from passes.plan import Bucket

from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace, tracectx
from thunder.executors.passes import del_last_used


class Kept(NamedTuple):
    """The second shards of some members of a bucket, by the names of the first ones that forward would have saved."""

    bucket: Bucket
    second: dict[str, TensorProxy]


def keep_secondary(trace: TraceCtx, *, kept: list[Kept]) -> TraceCtx:
    """Keeps a second shard inside the node, from which backward gathers ("zero3_secondary").

    Takes: a lowered forward, then its backward.
    Gives: a forward that saves second shards, a backward that gathers from them. Forward fills ``kept`` for backward.
    No-op when: no plan has second shards.
    """
    if is_backward(trace):
        return _gather_second(trace, kept) if kept else trace
    kept.clear()
    if TraceTag.AUGMENTED_FORWARD not in trace.tags or not is_return(trace.bound_symbols[-1]):
        return trace
    *lines, last = [b for b in trace.bound_symbols if not is_deletion(b)]
    result, (saved, other) = last.args
    only_saved = names(saved) - names(result["output"])
    issues = {b.output.name: b for b in lines if is_issue(b)}
    new = from_trace(trace)
    inserted: dict[int, list[BoundSymbol]] = {}  # by the line that they precede
    for at, wait in enumerate(lines):
        if not (is_wait(wait) and is_gather(wait)) or bucket_of(wait).plan.secondary is None:
            continue
        shards = issues[wait.args[0].name].args[0]
        places = [i for i, shard in enumerate(shards) if shard.name in only_saved]
        if not places:
            continue
        second = bucket_of(wait).secondary_of(places)
        new.push_scope([])
        with tracectx(new):
            outputs = keep_shards(tuple(wait.flat_proxy_outs[i] for i in places), second)
        kept.append(Kept(second, {shards[i].name: o for i, o in zip(places, outputs, strict=True)}))
        inserted.setdefault(_first_use(lines, at), []).extend(new.pop_scope())
    if not kept:
        return trace
    seconds = {name: second for k in kept for name, second in k.second.items()}
    saved = tuple(seconds.get(p.name, p) for p in saved)
    for i, bsym in enumerate([*lines, last.from_bsym(args=(result, (saved, other)))]):
        new.bound_symbols += [*inserted.get(i, []), bsym]
    return del_last_used(new)


def _first_use(lines: list[BoundSymbol], wait: int) -> int:
    """The first line of compute that uses what a line waits for; the end if there is none."""
    made = names(lines[wait].flat_proxy_outs)
    uses = (i for i in range(wait + 1, len(lines)) if not is_collective(lines[i]))
    return next((i for i in uses if made & names(lines[i].flat_proxy_args)), len(lines))


def _gather_second(trace: TraceCtx, kept: list[Kept]) -> TraceCtx:
    new = from_trace(trace)
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    unpacked = {o.name: o for b in lines if is_unpack(b) for o in b.flat_proxy_outs}
    seconds = {variableify(unpacked[n]): second for k in kept for n, second in k.second.items() if n in unpacked}
    bucket_of_shard = {name: k.bucket for k in kept for name in k.second}
    futures: dict[str, Bucket] = {}
    for b in lines:
        if is_issue(b) and is_gather(b) and b.args[0][0].name in bucket_of_shard:
            bucket = futures[b.output.name] = bucket_of_shard[b.args[0][0].name]
            assert len(b.args[0]) == len(bucket.members)
            b = b.from_bsym(args=(b.args[0], bucket))
        elif is_wait(b) and b.args[0].name in futures:
            b = b.from_bsym(args=(b.args[0], futures[b.args[0].name]))
        new.bound_symbols.append(b.from_bsym_swap_proxies(seconds))
    return del_last_used(new, clear_mutable_collections=True)
