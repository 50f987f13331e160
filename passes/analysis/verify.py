"""Proves the invariants of a trace, or raises an error that shows the line that breaks one.

1. Each future is waited for exactly once, and nothing else reads it. No value is used before it exists or after its
   ``del``.
2. No parameter is gathered twice in one trace, nor reduced twice. ZeRO-2 gathers nothing in backward; with second
   shards, backward gathers only from these. Each collective moves exactly the bytes of its bucket's members. A wire for
   parameters never carries gradients, nor the reverse.
3. Memory is bounded once the trace is scheduled. At each line, the unsharded buckets of a plan are at most those whose
   gathered values the line needs, and ``prefetch`` more. Bytes in flight are at most ``max_inflight_bytes``, or those
   of one bucket.
4. ZeRO-3: no unsharded parameter is saved for backward, nor a view, slice, transpose or cast of one. Any other saved
   value that is computed only from parameters causes a warning.
5. If parameters are at rest in host memory, each reduced gradient is copied there once.
6. No value is saved if the line that computes it is recomputed in backward. (A fusion may save parts of its own if
   Thunder finds that no more is saved by it.)
7. Once the trace is scheduled: each read, write or free of memory is ordered after those before it, whatever the speed
   of the streams that they run on (:mod:`passes.analysis.happens_before`).

For what a called block saves, 4 and 6 hold too.

A trace knows nothing of other ranks. :mod:`passes.guards` checks that all ranks issue the same collectives in
the same order.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

from passes.analysis.calls import part_of, parts_in
from passes.analysis.happens_before import races
from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_collective,
    is_deletion,
    is_gather,
    is_issue,
    is_offload,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    issues_future,
    names,
    parameter_aliases,
    unsharded_values,
    waits_for_future,
)
from passes.analysis.symbols import properties
from passes.plan import Bucket, BucketPlan, ShardedParameter, inflight_limits

from thunder.core import prims
from thunder.core.proxies import FutureTensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceTag


class VerificationError(AssertionError):
    """A compiled trace breaks an invariant: a bug in a pass, never in the model. The message shows the lines."""


def verify(trace: TraceCtx) -> None:
    """Raises :class:`VerificationError` unless all invariants hold in a scheduled trace."""
    _verify_secondary(trace)
    verify_lines(trace)
    verify_schedule(trace)


def verify_lines(trace: TraceCtx) -> None:
    """Raises :class:`VerificationError` unless the invariants 1, 2, 4, 5 and 6 hold, which no pass may break. Autodiff
    and fusions leave collectives in any order: the others hold once a trace is scheduled."""
    lines = trace.bound_symbols
    for part in parts_in(trace):
        _verify_futures(part.trace.bound_symbols)
    if not any(is_collective(b) or is_sequence_issue(b) for b in lines):
        return
    _verify_values(lines)
    _verify_futures(lines)
    _verify_traffic(trace)
    _verify_offloads(lines)
    _verify_saved(trace)


def verify_schedule(trace: TraceCtx) -> TraceCtx:
    """Proves the limits of memory and the order of all reads and writes.

    Takes: a forward or backward that is scheduled. The other invariants were proven after each pass before this one.
    Gives: the same trace. Raises :class:`VerificationError`.
    No-op when: always.
    """
    lines = trace.bound_symbols
    if any(is_collective(b) for b in lines):
        _verify_secondary(trace)
        _verify_live_buckets(lines, unsharded_values(trace))
        _verify_inflight(lines)
    for each in (trace, *(part.trace for part in parts_in(trace))):
        if any(is_collective(b) or is_sequence_issue(b) for b in each.bound_symbols):
            for race in races(each):
                _fail(each.bound_symbols, race.line, race.message)
    return trace


def _fail(lines: list[BoundSymbol], at: int, message: str) -> NoReturn:
    shown = [
        f"{'>' if i == at else ' '} {i:5d}  {str(lines[i].from_bsym(header='')).splitlines()[0]}"
        for i in range(max(0, at - 3), min(len(lines), at + 4))
    ]
    raise VerificationError("\n".join([f"{message} (line {at})", *shown]))


def _verify_values(lines: list[BoundSymbol]) -> None:
    defined: set[str] = set()
    deleted: set[str] = set()
    for i, bsym in enumerate(lines):
        used = names(bsym.args) if is_return(bsym) else {a.name for a in bsym.flat_proxy_args}
        if bsym.sym.id != prims.PrimIDs.UNPACK_TRIVIAL:
            if used & deleted:
                _fail(lines, i, f"{sorted(used & deleted)[0]} is used after it was deleted")
            for a in bsym.flat_proxy_args if is_collective(bsym) else ():
                if a.name not in defined:
                    _fail(lines, i, f"{a.name} is used before it exists")
        if bsym.sym.id == prims.PrimIDs.DEL:
            deleted |= used
        defined.update(o.name for o in bsym.flat_proxy_outs)


def _verify_futures(lines: list[BoundSymbol]) -> None:
    issued: dict[str, int] = {}
    waited: set[str] = set()
    for i, bsym in enumerate(lines):
        if issues_future(bsym) or is_sequence_issue(bsym):
            issued[bsym.output.name] = i
        elif waits_for_future(bsym) or is_sequence_wait(bsym):
            future = bsym.args[0].name
            if future in waited:
                _fail(lines, i, f"future {future} is waited for twice")
            if future not in issued:
                _fail(lines, i, f"future {future} is waited for before it is issued")
            if bsym.args[1] is not lines[issued[future]].args[1]:
                _fail(lines, i, f"future {future} is of another bucket")
            waited.add(future)
        elif not is_deletion(bsym):
            for a in bsym.flat_proxy_args:
                if isinstance(a, FutureTensorProxy):
                    _fail(lines, i, f"future {a.name} is read without a wait")
    for future in issued.keys() - waited:
        _fail(lines, issued[future], f"future {future} is never waited for")


def _verify_traffic(trace: TraceCtx) -> None:
    lines, seen = trace.bound_symbols, set[tuple[str, ShardedParameter]]()
    for i, bsym in enumerate(lines):
        if not is_issue(bsym):
            continue
        bucket, gathers = bucket_of(bsym), is_gather(bsym)
        if gathers and is_backward(trace) and not bucket.plan.regather:
            _fail(lines, i, f"bucket {bucket.label} is gathered again in backward, where it is to be kept")
        if bucket.wire is not None and bucket.wire.reduces == gathers:
            verbs = ("gathered", "reduce") if gathers else ("reduced", "gather")
            what = f"is {verbs[0]}, but its wire can only {verbs[1]}: keep the plan's bucket"
            _fail(lines, i, f"bucket {bucket.label} {what}")
        if len(bsym.args[0]) != len(bucket.members):
            _fail(lines, i, f"bucket {bucket.label} has {len(bucket.members)} members, {len(bsym.args[0])} are passed")
        for value, m in zip(bsym.args[0], bucket.members, strict=True):
            expected = m.parameter.shard_shape if gathers else m.parameter.full_shape
            fits = tuple(value.shape) == expected or (not gathers and not expected)  # see layout.summed_to
            rest = bucket.rest_dtype
            dtype = rest if gathers else bucket.plan.unsharded_dtype(rest)
            # gradients that were kept, or that another group has reduced before
            other = not gathers and value.dtype in (bucket.plan.summed_dtype(rest), bucket.dtype)
            if not fits or not (value.dtype == dtype or other):
                wanted = f"shape {expected} and dtype {dtype} as {m.parameter.name}"
                _fail(lines, i, f"{value.name} should have {wanted}")
            if (bsym.sym.id, m.parameter) in seen:
                verb = "gathered" if gathers else "reduced"
                _fail(lines, i, f"parameter {m.parameter.name} is {verb} twice")
            seen.add((bsym.sym.id, m.parameter))


def _verify_secondary(trace: TraceCtx) -> None:
    lines = trace.bound_symbols
    for i, bsym in enumerate(lines if is_backward(trace) else ()):
        if is_issue(bsym) and is_gather(bsym) and (bucket := bucket_of(bsym)).plan.secondary is not None:
            _fail(lines, i, f"bucket {bucket.label} is gathered from all ranks in backward, in spite of second shards")


def _verify_inflight(lines: list[BoundSymbol]) -> None:
    """At each line: bytes in flight <= the plan's limit."""
    limits = inflight_limits(bucket_of(b) for b in lines if is_issue(b))
    inflight = dict.fromkeys(limits, 0)
    for i, bsym in enumerate(lines):
        if not is_collective(bsym):
            continue
        bucket = bucket_of(bsym)
        inflight[bucket.plan] += bucket.bytes if is_issue(bsym) else -bucket.bytes
        if inflight[bucket.plan] > max(limits[bucket.plan], bucket.bytes):
            most = f"max_inflight_bytes is {limits[bucket.plan]}"
            _fail(lines, i, f"{inflight[bucket.plan]} bytes are in flight with bucket {bucket.label}, {most}")


def _verify_offloads(lines: list[BoundSymbol]) -> None:
    copied = Counter(m.parameter for b in lines if issues_future(b) and is_offload(b) for m in bucket_of(b).members)
    for i, bsym in enumerate(lines):
        bucket = bucket_of(bsym) if is_issue(bsym) and not is_gather(bsym) else None
        if bucket is None or bucket.plan.host is None:
            continue
        for m in bucket.members:
            if copied[m.parameter] != 1:
                times = f"{copied[m.parameter]} times, not once"
                _fail(lines, i, f"the gradient of {m.parameter.name} is copied to the host {times}")


def _verify_live_buckets(lines: list[BoundSymbol], values: dict[str, frozenset[Bucket]]) -> None:
    """At each line, for each plan: live buckets <= those that compute around it needs at once + prefetch."""
    first, last = _needs(lines, values)
    compute = [i for i, b in enumerate(lines) if not is_collective(b) and not is_offload(b) and not is_deletion(b)]
    firsts, lasts = _by_plan(first), _by_plan(last)
    for i, live in _live_buckets(lines, values):
        # a collective or a del counts as the next compute line; a bucket is needed from its first to its last use
        at = compute[min(bisect_left(compute, i), len(compute) - 1)]
        for plan, buckets in live.items():
            needed = bisect_left(firsts.get(plan, []), at + 1) - bisect_left(lasts.get(plan, []), at)
            if len(buckets) > max(needed, 1) + plan.prefetch:
                held = ", ".join(sorted(b.label for b in buckets))
                rule = f"{needed} needed, prefetch {plan.prefetch}"
                _fail(lines, i, f"{len(buckets)} buckets are unsharded at once, {rule}: {held}")


def _by_plan(at: dict[Bucket, int]) -> dict[BucketPlan, list[int]]:
    """Sorted line numbers of the buckets of each plan."""
    found: dict[BucketPlan, list[int]] = {}
    for bucket, line in at.items():
        found.setdefault(bucket.plan, []).append(line)
    return {plan: sorted(numbers) for plan, numbers in found.items()}


def _needs(
    lines: list[BoundSymbol], values: dict[str, frozenset[Bucket]]
) -> tuple[dict[Bucket, int], dict[Bucket, int]]:
    """The first and the last compute line at which each bucket's gathered values are used."""
    first: dict[Bucket, int] = {}
    last: dict[Bucket, int] = {}
    for i, bsym in enumerate(lines):
        if is_collective(bsym) or is_deletion(bsym):
            continue
        for name in names(bsym.args) if is_return(bsym) else {a.name for a in bsym.flat_proxy_args}:
            for bucket in values.get(name, ()):
                first.setdefault(bucket, i)
                last[bucket] = i
    return first, last


def _live_buckets(
    lines: list[BoundSymbol], values: dict[str, frozenset[Bucket]]
) -> Iterator[tuple[int, dict[BucketPlan, Counter[Bucket]]]]:
    """At each line that adds to them, the buckets whose memory is held: from issue until no value is left."""
    alive: dict[str, frozenset[Bucket]] = {}  # futures and values
    live: dict[BucketPlan, Counter[Bucket]] = {}  # how many of them hold each bucket

    def drop(name: str) -> None:
        for bucket in alive.pop(name, ()):
            live[bucket.plan][bucket] -= 1
            if not live[bucket.plan][bucket]:
                del live[bucket.plan][bucket]

    for i, bsym in enumerate(lines):
        if bsym.sym.id == prims.PrimIDs.DEL:
            for a in bsym.flat_proxy_args:
                drop(a.name)
            continue
        added = False
        for o in bsym.flat_proxy_outs:
            buckets = frozenset([bucket_of(bsym)]) if is_issue(bsym) and is_gather(bsym) else values.get(o.name)
            if buckets and o.name not in alive:
                alive[o.name] = buckets
                added = True
                for bucket in buckets:
                    live.setdefault(bucket.plan, Counter())[bucket] += 1
        if added:
            yield i, live


def _verify_saved(trace: TraceCtx) -> None:
    lines = trace.bound_symbols
    if TraceTag.AUGMENTED_FORWARD not in trace.tags or not is_return(lines[-1]):
        return
    result, (saved, _) = lines[-1].args
    values = unsharded_values(trace)
    _verify_lists(lines, values)
    outputs = names(result["output"])
    for p in saved:
        kept = [b for b in values.get(p.name, ()) if b.plan.regather]
        if not kept or p.name in outputs:
            continue
        members = ", ".join(m.parameter.name for m in kept[0].members)
        if p.name in parameter_aliases(trace):
            what = f"{p.name}, unsharded, of bucket {kept[0].label} ({members})"
            _fail(lines, len(lines) - 1, f"{what}, is saved for backward: use ZeRO-2 until this is mended")
        warnings.warn(
            f"{p.name} of shape {tuple(p.shape)} is computed only from parameters (bucket {kept[0].label}: {members}) "
            "and saved for backward unsharded, because Thunder's autodiff hides how to recompute it",
            stacklevel=2,
        )
    kept_names = names(saved)
    for i, bsym in enumerate(lines):
        tagged = BoundSymbolTag.RECOMPUTE_IN_BACKWARD in bsym.tags
        if tagged and (again := kept_names & names(bsym.flat_proxy_outs)):
            _fail(lines, i, f"{min(again)} is saved for backward, where it is to be computed again")


def _verify_lists(lines: list[BoundSymbol], values: dict[str, frozenset[Bucket]]) -> None:
    """What called blocks save: no unsharded parameter that backward gathers again, nothing that it computes again."""
    verified: set[tuple[int, frozenset[str]]] = set()  # calls of a function differ in its inputs alone
    for i, bsym in enumerate(lines):
        part = part_of(bsym)
        inside = part.trace.bound_symbols if part is not None else []
        if part is None or not is_return(inside[-1]) or not isinstance(inside[-1].args[0][-1], list):
            continue
        pairs = zip(part.trace.args, bsym.args, strict=True)
        unsharded = frozenset(p.name for p, a in pairs if any(b.plan.regather for b in values.get(a.name, ())))
        if (id(part), unsharded) in verified:
            continue
        verified.add((id(part), unsharded))
        aliases, kept = set(unsharded), names(inside[-1].args[0][-1])
        for line in inside:
            outs = names(line.flat_proxy_outs)
            if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in line.tags and kept & outs:
                _fail(lines, i, f"{part.name} saves {min(kept & outs)}, which its backward is to compute again")
            if names(line.flat_proxy_args[:1]) & aliases and properties(line.sym).is_alias:
                aliases |= outs
        if kept & aliases:
            _fail(
                lines,
                i,
                f"{part.name} saves {min(kept & aliases)}, an unsharded parameter: use ZeRO-2 until this is mended",
            )
