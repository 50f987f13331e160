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
   of the streams that they run on.

For what a called block saves, 4 and 6 hold too.

A trace knows nothing of other ranks. :mod:`passes.borders` checks that all ranks issue the same collectives in
the same order.

Invariant 7 in detail. A device works on several streams at once: compute, collectives, copies to and from the host. A
stream begins its work when the work that it waits for is done, and in no other order. :func:`actions` lists the work of
each line and the waits between streams, and :func:`races` finds pairs of accesses to the same memory, at least one of
them a write, that no chain of waits orders. A freed tensor is written: its memory belongs to the next tensor of the
stream of compute.

Each collective and each copy has a stream of its own here. The streams of a process group and of a direction run their
work in order of issue, but no proof rests on that.

What this file says of a transport is tested: a recorder in the place of streams and process groups (tests/streams.py)
runs each one, and the transport makes every order that is assumed here, and no access that is unknown here.

Source: Lamport, Time, clocks, and the ordering of events in a distributed system (1978), with vector clocks.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

from passes.analysis.calls import block_function, block_functions
from passes.analysis.printing import line_text
from passes.analysis.recognise import (
    AWAITED,
    ISSUED,
    TRIP_WAITS,
    bucket_of,
    ends_copies,
    is_backward,
    is_collective,
    is_deletion,
    is_gather,
    is_issue,
    is_offload,
    is_products,
    is_return,
    is_sequence_issue,
    is_trip,
    is_unpack,
    issues_future,
    names,
    parameter_aliases,
    properties,
    unsharded_values,
    updated_by,
)
from passes.plan import Bucket, BucketPlan, ShardedParameter, inflight_limits

from thunder.core import prims
from thunder.core.proxies import AnyProxy, FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceTag

# ---- the order of work on streams ----


COMPUTE, HOST = "compute", "host"
NONE = frozenset[str]()


class Work(NamedTuple):
    """Work of a line on a stream, with the memory that it reads and writes."""

    line: int
    stream: str
    reads: frozenset[str]
    writes: frozenset[str]


class Wait(NamedTuple):
    """Work that is enqueued on ``stream`` from now on begins after all work that is on ``other`` already."""

    line: int
    stream: str
    other: str


class Race(NamedTuple):
    """Work of ``line`` uses ``memory`` that other work uses, too, and nothing orders the two."""

    line: int
    message: str


def races(trace: TraceCtx) -> list[Race]:
    """All races of a lowered trace; empty if every read, write or free of memory is ordered after those before it."""
    return unordered(actions(trace))


def unordered(work: Iterable[Work | Wait]) -> list[Race]:
    """The races of a list of actions, which the program enqueues one after the other."""
    clocks: dict[str, dict[str, int]] = {HOST: {}}  # for each stream, how much of each stream precedes its next work
    written: dict[str, tuple[str, int]] = {}  # for each memory, its last write: a stream and the time there
    read: dict[str, dict[str, int]] = {}  # the reads since then
    found = []

    def join(stream: str, other: str) -> None:
        clock = clocks.setdefault(stream, {})
        for name, time in clocks.get(other, {}).items():
            clock[name] = max(clock.get(name, 0), time)

    for action in work:
        join(action.stream, HOST)  # the program has done what precedes a line when it enqueues the line's work
        if isinstance(action, Wait):
            join(action.stream, action.other)
            continue
        line, stream, reads, writes = action
        clock = clocks[stream]
        clock[stream] = now = clock.get(stream, 0) + 1
        for memory in sorted(reads | writes):
            before = {"written": [written[memory]] if memory in written else []}
            before["read"] = list(read.get(memory, {}).items()) if memory in writes else []
            for verb, accesses in before.items():
                for other, time in accesses:
                    if clock.get(other, 0) < time:
                        mine = "written or freed" if memory in writes else "read"
                        found.append(Race(line, f"{memory} is {mine} by {stream}, and may still be {verb} by {other}"))
        for memory in reads:
            read.setdefault(memory, {})[stream] = now
        for memory in writes:
            written[memory] = stream, now
            read.pop(memory, None)
    return found


def actions(trace: TraceCtx, streams: Streams | None = None) -> Iterator[Work | Wait]:
    """The work of each line and its waits, in the order in which the program enqueues them. ``streams`` learns the
    memory behind the names of the trace."""
    streams = streams or Streams()
    for i, bsym in enumerate(trace.bound_symbols):
        if is_unpack(bsym):
            streams.inputs |= names(bsym.flat_proxy_outs)
        elif is_deletion(bsym):
            yield Work(i, COMPUTE, NONE, streams.freed(a.name for a in bsym.flat_proxy_args))
        elif is_return(bsym):
            yield from streams.leave(i, bsym)
        elif is_trip(bsym):
            yield from streams.depart(i, bsym)
        elif bsym.sym.id in TRIP_WAITS:
            yield from streams.arrive(i, bsym)
        elif bsym.sym.id in ISSUED:
            yield from streams.issue(i, bsym)
        elif bsym.sym.id in AWAITED:
            yield from streams.wait(i, bsym)
        elif is_products(bsym):
            yield from streams.products(i, bsym)
        elif ends_copies(bsym):
            yield from (Wait(i, HOST, copy) for copy in streams.copies)
            streams.copies.clear()
        else:
            yield streams.compute(i, bsym)


class Streams:
    """The memory behind the names of a trace, and what its lines enqueue.

    Views share the memory of the tensor that they show. A future has memory for what is sent and for what is received.
    """

    def __init__(self) -> None:
        self.inputs: set[str] = set()
        self.copies: list[str] = []  # to and from the host, that the program has not waited for
        self._behind: dict[str, str] = {}  # for each name, its memory, if that has another name
        self._names: dict[str, set[str]] = {}  # for memory with names of its own, those that are left
        self._own: dict[str, frozenset[str]] = {}  # for each direct future, memory with this rank's own part
        self._kept = set[str]()  # memory that the lines of the trace do not free
        self._shards_on_host = set[str]()
        self._grads_on_host = set[str]()

    def compute(self, i: int, bsym: BoundSymbol) -> Work:
        sources = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy | AnyProxy)]
        if sources and properties(bsym.sym).is_alias:
            self._name(bsym, *self.memory(sources[:1]))
        read, written = self.memory(sources), self.memory(names(bsym.flat_proxy_outs))
        return Work(i, COMPUTE, read, (written - read) | self.memory(updated_by(bsym)))

    def products(self, i: int, bsym: BoundSymbol) -> Iterator[Work | Wait]:
        """A line that sends what it reads and makes, and waits for all that is sent."""
        work, messages = self.compute(i, bsym), f"products.{i}"
        yield Wait(i, messages, COMPUTE)
        yield Work(i, messages, work.reads, work.writes)
        yield Wait(i, COMPUTE, messages)
        yield work

    def freed(self, values: Iterable[str]) -> frozenset[str]:
        found = set()
        for name in values:
            (memory,) = self.memory([name])
            left = self._names.get(memory, set())
            left.discard(name)
            if not left and memory not in self._kept:
                found.add(memory)
        return frozenset(found)

    def leave(self, i: int, bsym: BoundSymbol) -> Iterator[Work]:
        """Results are read. Parameters may be changed by an optimizer, where they are."""
        results, inputs = self.memory(names(bsym.args)), self.memory(self.inputs)
        yield Work(i, COMPUTE, results - inputs - self._grads_on_host, NONE)
        yield Work(i, COMPUTE, NONE, inputs - self._shards_on_host)
        yield Work(i, HOST, results & self._grads_on_host, frozenset(self._shards_on_host))

    def issue(self, i: int, bsym: BoundSymbol) -> Iterator[Work | Wait]:
        op, of = ISSUED[bsym.sym.id], bsym.args[1]
        of_bucket = isinstance(of, Bucket)
        future, given = bsym.output.name, self.memory(names(bsym.args[0]))
        sent, received = frozenset([f"{future}.sent"]), frozenset([f"{future}.received"])
        self._name(bsym, f"{future}.received")
        direct = of_bucket and of.plan.direct
        in_order = op.carries == "value" and of.is_in_order(tuple(bsym.args[0].shape))
        in_place = op.takes == "part" or direct or in_order  # may be sent from where it is
        if in_place:
            self._kept |= given  # by the caller, the future, or the allocator (Tensor.record_stream)
        if op.carries == "copy":
            yield Work(i, COMPUTE, given, sent)
            yield Wait(i, future, COMPUTE)
            yield Work(i, future, given | sent, received)
            self.copies.append(future)
            self._grads_on_host |= received
        elif op.carries == "parameters" and of.plan.host is not None:
            self._shards_on_host |= given
            yield Work(i, COMPUTE, NONE, sent | received)  # allocated on this stream
            copy = f"{future}.copy"
            self.copies.append(copy)
            yield Wait(i, copy, COMPUTE)
            yield Work(i, copy, given, sent | received)  # and casts, or what a wire does
            yield Wait(i, future, copy)
            yield Work(i, future, sent, received)
        else:
            yield Work(i, HOST, given & self._grads_on_host, NONE)
            yield Work(i, COMPUTE, given - self._grads_on_host, sent | received)
            yield Wait(i, future, COMPUTE)
            yield Work(i, future, sent | given if in_place else sent, received)
            if direct:
                self._own[future] = given

    def wait(self, i: int, bsym: BoundSymbol) -> Iterator[Work | Wait]:
        future = bsym.args[0].name
        received = self.memory([future])
        self._name(bsym, *received)
        if is_offload(bsym):
            return
        yield Wait(i, COMPUTE, future)
        # a mean may be divided where it is; what was sent is freed
        read = received | self._own.get(future, NONE)
        yield Work(i, COMPUTE, read, received | {f"{future}.sent"})

    def depart(self, i: int, bsym: BoundSymbol) -> Iterator[Work | Wait]:
        """Activations are copied where they are. The future holds them until it is waited for."""
        future, given = bsym.output.name, self.memory(names(bsym.args[0]))
        received = frozenset([f"{future}.received"])
        self._name(bsym, f"{future}.received")
        self._own[future] = given - self.memory(self.inputs) - self._kept
        self._kept |= given
        yield Work(i, COMPUTE, NONE, received)  # memory of the device is allocated on this stream
        yield Wait(i, future, COMPUTE)
        yield Work(i, future, given, received)

    def arrive(self, i: int, bsym: BoundSymbol) -> Iterator[Work | Wait]:
        future = bsym.args[0].name
        received, left = self.memory([future]), self._own.pop(future)
        self._name(bsym, *received)
        self._kept -= left
        yield Wait(i, COMPUTE, future)
        yield Work(i, COMPUTE, received, left)

    def memory(self, values: Iterable[str]) -> frozenset[str]:
        """The memory behind names."""
        return frozenset(self._behind.get(name, name) for name in values)

    def _name(self, bsym: BoundSymbol, memory: str) -> None:
        """Makes the results of a line names of ``memory``."""
        results = names(bsym.flat_proxy_outs)
        known = self._names.setdefault(memory, set() if "." in memory else {memory})
        known |= results
        self._behind |= dict.fromkeys(results, memory)


# ---- the invariants ----


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
    for called in block_functions(trace):
        _verify_futures(called.trace.bound_symbols)
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
    for each in (trace, *(called.trace for called in block_functions(trace))):
        if any(is_collective(b) or is_sequence_issue(b) for b in each.bound_symbols):
            for race in races(each):
                _fail(each.bound_symbols, race.line, race.message)
    return trace


def _fail(lines: list[BoundSymbol], at: int, message: str) -> NoReturn:
    shown = [
        f"{'>' if i == at else ' '} {i:5d}  {line_text(lines[i])}"
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
        if bsym.sym.id in ISSUED:
            issued[bsym.output.name] = i
        elif bsym.sym.id in AWAITED:
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
            expected = m.parameter.shard_shape if gathers else m.parameter.used_shape
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


BUG = "but ZeRO-3 saves only shards. Report this model, and train it with sharding_strategy='zero2'"


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
            _fail(lines, len(lines) - 1, f"{what}, is saved for backward, {BUG}")
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
        called = block_function(bsym)
        inside = called.trace.bound_symbols if called is not None else []
        if called is None or not is_return(inside[-1]) or not isinstance(inside[-1].args[0][-1], list):
            continue
        pairs = zip(called.trace.args, bsym.args, strict=True)
        unsharded = frozenset(p.name for p, a in pairs if any(b.plan.regather for b in values.get(a.name, ())))
        if (id(called), unsharded) in verified:
            continue
        verified.add((id(called), unsharded))
        aliases, kept = set(unsharded), names(inside[-1].args[0][-1])
        for line in inside:
            outs = names(line.flat_proxy_outs)
            if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in line.tags and kept & outs:
                _fail(lines, i, f"{called.name} saves {min(kept & outs)}, which its backward is to compute again")
            if names(line.flat_proxy_args[:1]) & aliases and properties(line.sym).is_alias:
                aliases |= outs
        if kept & aliases:
            _fail(lines, i, f"{called.name} saves {min(kept & aliases)}, an unsharded parameter, {BUG}")
