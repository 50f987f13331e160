"""The order of the work of a trace on the streams of a device, and a proof that no memory is used too early.

A device works on several streams at once: compute, collectives, copies to and from the host. A stream begins its work
when the work that it waits for is done, and in no other order. :func:`actions` lists the work of each line and the
waits between streams, and :func:`races` finds pairs of accesses to the same memory, at least one of them a write, that
no chain of waits orders. A freed tensor is written: its memory belongs to the next tensor of the stream of compute.

Each collective and each copy has a stream of its own here. The streams of a process group and of a direction run their
work in order of issue, but no proof rests on that.

What this file says of a transport is tested: a recorder in the place of streams and process groups (tests/streams.py)
runs each one, and the transport makes every order that is assumed here, and no access that is unknown here.

Source: Lamport, Time, clocks, and the ordering of events in a distributed system (1978), with vector clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from passes.analysis.recognise import (
    bucket_of,
    ends_copies,
    is_deletion,
    is_gather,
    is_offload,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    is_unpack,
    issues_future,
    names,
    updated_by,
    waits_for_future,
)
from passes.analysis.symbols import properties
from passes.comm.sequence import issue_gather, issue_to_heads

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

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
        elif is_sequence_issue(bsym):
            yield from streams.issue_sequence(i, bsym)
        elif is_sequence_wait(bsym):
            yield from streams.wait(i, bsym)
        elif issues_future(bsym):
            yield from streams.issue(i, bsym)
        elif waits_for_future(bsym):
            yield from streams.wait(i, bsym)
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
        sources = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        if sources and properties(bsym.sym).is_alias:
            self._name(bsym, *self.memory(sources[:1]))
        read, written = self.memory(sources), self.memory(names(bsym.flat_proxy_outs))
        return Work(i, COMPUTE, read, (written - read) | self.memory(updated_by(bsym)))

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
        future, given = bsym.output.name, self.memory(a.name for a in bsym.args[0])
        sent, received = frozenset([f"{future}.sent"]), frozenset([f"{future}.received"])
        self._name(bsym, f"{future}.received")
        direct = bucket_of(bsym).plan.direct
        in_place = is_gather(bsym) or direct  # may be sent from where they are
        if in_place or is_offload(bsym):
            self._kept |= given  # by the caller, the future, or the allocator (Tensor.record_stream)
        if is_offload(bsym):
            yield Work(i, COMPUTE, given, sent)
            yield Wait(i, future, COMPUTE)
            yield Work(i, future, given | sent, received)
            self.copies.append(future)
            self._grads_on_host |= received
        elif is_gather(bsym) and bucket_of(bsym).plan.host is not None:
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

    def issue_sequence(self, i: int, bsym: BoundSymbol) -> Iterator[Work | Wait]:
        future, given = bsym.output.name, self.memory([bsym.args[0].name])
        sent, received = frozenset([f"{future}.sent"]), frozenset([f"{future}.received"])
        self._name(bsym, f"{future}.received")
        in_place = bsym.sym.id in (issue_gather.id, issue_to_heads.id)  # may be sent from where it is
        if in_place:
            self._kept |= given  # by the future
        yield Work(i, COMPUTE, given, sent | received)
        yield Wait(i, future, COMPUTE)
        yield Work(i, future, sent | given if in_place else sent, received)

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

    def memory(self, values: Iterable[str]) -> frozenset[str]:
        """The memory behind names."""
        return frozenset(self._behind.get(name, name) for name in values)

    def _name(self, bsym: BoundSymbol, memory: str) -> None:
        """Makes the results of a line names of ``memory``."""
        results = names(bsym.flat_proxy_outs)
        known = self._names.setdefault(memory, set() if "." in memory else {memory})
        known |= results
        self._behind |= dict.fromkeys(results, memory)
