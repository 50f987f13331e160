"""When each line of a step runs, and how much memory is used: predicted, or measured on this rank.

The cost model has one clock for compute, and one for each group's link.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

from passes.analysis.liveness import sequence_bytes
from passes.analysis.recognise import (
    AWAITED,
    ISSUED,
    away_at,
    bucket_of,
    is_gather,
    is_offload,
    is_sequence_issue,
    is_trip,
    part_at,
)
from passes.analysis.seconds import Clock, Flight, compute_seconds, link_of, seconds_within
from passes.compat.jit import symbol_that_calls
from passes.plan import CostModel, HostMemory

import thunder
import torch
import torch.distributed as dist
from thunder.common import transform_to_torch_types
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

# ---- predicted ----


HOST = "host"  # the name of the link that carries copies to the host


class Span(NamedTuple):
    """A collective, or a copy to the host, on its link. Times are seconds since the step began; ``issue`` and ``wait``
    are lines of its trace, and both the line that calls a block if it is one of that block.

    Compute is idle for ``exposed`` seconds before ``wait`` returns. A measured span lasts from its issue to the end of
    its wait, because the time of its arrival is not known.
    """

    kind: str  # "all_gather", "reduce_scatter", "offload", ...
    gathers: bool  # parameters; else it reduces gradients
    bucket: str
    link: int
    start: float
    stop: float
    issue: int
    wait: int
    exposed: float
    bytes: int  # of the unsharded bucket; for a copy, the bytes that it moves
    sent: int  # bytes that each rank sends, and receives

    @property
    def in_block(self) -> bool:
        """Whether it is a collective of a block."""
        return self.issue == self.wait


class Timeline(NamedTuple):
    """``starts[i]`` is the time in seconds at which line i begins; the last element is the end. ``spans`` are the
    collectives, ``links`` the names of the groups that had collectives so far in the step."""

    starts: list[float]
    spans: list[Span]
    links: list[str]

    @property
    def end(self) -> float:
        return self.starts[-1]

    @property
    def exposed(self) -> float:
        """The seconds in which compute waits."""
        return sum(span.exposed for span in self.spans)


def predicted(traces: Sequence[TraceCtx], cost: CostModel) -> list[Timeline]:
    """Simulates the executed traces of a step. The collectives of a group run one after another on its link."""
    links, clocks = _Links(), list[Timeline]()
    for trace in traces:
        clocks.append(_predict(trace, cost, clocks[-1].end if clocks else 0.0, links))
    return clocks


def measured(traces: Sequence[TraceCtx], seconds: Sequence[Sequence[float]], cost: CostModel) -> list[Timeline]:
    """The timelines of traces whose lines took ``seconds`` each. Within a block they are in proportion to those that
    ``cost`` predicts."""
    links, clocks = _Links(), list[Timeline]()
    for trace, taken in zip(traces, seconds, strict=True):
        clocks.append(_lay_out(trace, taken, clocks[-1].end if clocks else 0.0, links, cost))
    return clocks


def _predict(trace: TraceCtx, cost: CostModel, begin: float, links: _Links) -> Timeline:
    clock, starts, spans = Clock(cost, begin), list[float](), list[Span]()
    in_flight: dict[str, Span] = {}
    for i, bsym in enumerate(trace.bound_symbols):
        starts.append(clock.now)
        if bsym.sym.id in ISSUED:
            in_flight[bsym.output.name] = links.span(bsym, i, *clock.issue(bsym))
            continue
        if bsym.sym.id in AWAITED:
            span = in_flight.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, exposed=clock.wait(Flight(span.start, span.stop))))
        else:
            spans += _inside(bsym, i, clock.now, cost, links)
        clock.compute(compute_seconds(cost, bsym))
    return Timeline([*starts, clock.now], sorted(spans, key=lambda span: span.start), links.names)


def _inside(
    bsym: BoundSymbol, line: int, begin: float, cost: CostModel, links: _Links, seconds: float | None = None
) -> Iterator[Span]:
    """The collectives inside of a line. ``seconds`` is what it took, if known."""
    if (within := seconds_within(cost, bsym)) is None:
        return
    total, sent = within
    scale = 1.0 if seconds is None or not total else seconds / total
    for s in sent:
        span = links.span(s.issue, line, begin + s.start * scale, begin + s.stop * scale)
        yield span._replace(exposed=s.exposed * scale)


def _lay_out(trace: TraceCtx, seconds: Sequence[float], begin: float, links: _Links, cost: CostModel) -> Timeline:
    starts, spans = list(accumulate(seconds, initial=begin)), list[Span]()
    in_flight: dict[str, Span] = {}
    for i, bsym in enumerate(trace.bound_symbols):
        if bsym.sym.id in ISSUED:
            in_flight[bsym.output.name] = links.span(bsym, i, starts[i], starts[i + 1])
        elif bsym.sym.id in AWAITED:
            span = in_flight.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, stop=starts[i + 1], exposed=seconds[i]))
        else:
            spans += _inside(bsym, i, starts[i], cost, links, seconds[i])
    return Timeline(starts, sorted(spans, key=lambda span: span.start), links.names)


class _Links:
    """The groups of a step's collectives and the bus to the host, numbered in order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def span(self, issue: BoundSymbol, line: int, start: float, stop: float) -> Span:
        link = self._numbers.setdefault(link_of(issue), len(self._numbers))
        label, size, sent = _sizes(issue)
        return Span(
            kind=issue.sym.name,
            gathers=is_gather(issue),
            bucket=label,
            link=link,
            start=start,
            stop=stop,
            issue=line,
            wait=line,
            exposed=0.0,
            bytes=size,
            sent=sent,
        )

    @property
    def names(self) -> list[str]:
        return [_name(link, number) for link, number in self._numbers.items()]


def _sizes(issue: BoundSymbol) -> tuple[str, int, int]:
    """The label of what travels, its bytes, and those that each rank sends."""
    if is_trip(issue):
        return away_at(issue).label, away_at(issue).nbytes, 0
    if is_sequence_issue(issue):
        part, size = part_at(issue), sequence_bytes(issue)
        return part.label, size, ISSUED[issue.sym.id].crossings * size * (part.plan.ranks - 1) // part.plan.ranks
    bucket, ranks = bucket_of(issue), bucket_of(issue).plan.world_size
    if is_offload(issue):
        return bucket.label, bucket.numel * bucket.rest_dtype.bytes, 0
    return bucket.label, bucket.bytes, bucket.crossings * bucket.bytes * (ranks - 1) // ranks


def _name(link: Any, number: int) -> str:
    if isinstance(link, HostMemory):
        return HOST
    return f"{link.size()} ranks" if hasattr(link, "size") else f"link {number}"


class Interval(Protocol):
    @property
    def start(self) -> float: ...

    @property
    def stop(self) -> float: ...


T = TypeVar("T", bound=Interval)


def stacked(intervals: Iterable[T]) -> list[list[T]]:
    """The fewest rows in which no two intervals overlap."""
    rows: list[list[T]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        row = next((row for row in rows if row[-1].stop <= interval.start), None)
        if row is None:
            rows.append([interval])
        else:
            row.append(interval)
    return rows


# ---- measured time ----


class LineTimes(NamedTuple):
    """Median ``seconds`` of each line over ``steps`` steps: of the executed forward, then of backward if any."""

    steps: int
    seconds: tuple[tuple[float, ...], ...]


class Profile:
    """The result of :func:`profile`, for ``inspect(cmodel, profile=...)``."""

    def __init__(self) -> None:
        self._timed: list[_Timed] = []

    @property
    def steps(self) -> int:
        """Number of calls that were timed."""
        return sum(len(timed.forward.runs) for timed in self._timed)

    def times(self, traces: Sequence[TraceCtx]) -> LineTimes:
        """The times of the compilation with these forward traces.

        Raises:
            ValueError: if it, or its backward, did not run inside the context.
        """
        timed = next((t for t in self._timed if t.traces is traces), None)
        if timed is None or not timed.forward.runs:
            raise ValueError("this compilation did not run inside profile(): call the model there with the same shapes")
        if timed.backward is not None and not timed.backward.runs:
            raise ValueError("its backward did not run inside profile(): call .backward() there too")
        watches = [watch for watch in (timed.forward, timed.backward) if watch is not None]
        return LineTimes(len(timed.forward.runs), tuple(watch.medians() for watch in watches))


@contextmanager
def profile(cmodel: Any) -> Iterator[Profile]:
    """Times each line of the steps that run inside, on this rank; ``inspect`` then shows these times.

        with shardtrace.profile(cmodel) as p:
            for x, y in batches: ...  # about ten ordinary steps
        shardtrace.inspect(cmodel, profile=p)

    The compiled traces run unchanged, with a clock read between their lines: the processor's clock on the CPU, events
    on the current stream on CUDA. Nothing is compiled again, and the results are the same. Any number of ranks may
    profile. The time of a line that waits for a collective is the time that compute is idle, plus the time to unpack
    the received data. Code between forward and backward, and after them, is not timed.

    Args:
        cmodel: the result of ``thunder.jit``, called before. Calls that compile inside the context are not timed.

    Raises:
        TypeError: if ``cmodel`` is not a result of ``thunder.jit``.
        RuntimeError: if it has not compiled anything yet.
    """
    stats = thunder.compile_stats(cmodel)
    if stats is None:
        raise TypeError(f"profile takes what thunder.jit returned, not {type(cmodel).__name__}")
    entries = list(stats.interpreter_cache)
    if not entries:
        raise RuntimeError("nothing is compiled yet (or thunder.jit caches nothing): call it once before profile()")
    result = Profile()
    for k, entry in enumerate(entries):
        timed = _Timed(entry.computation_traces, *_stopwatches(entry))
        result._timed.append(timed)
        stats.interpreter_cache[k] = entry._replace(computation_fn=timed.forward, backward_fn=timed.backward)
    try:
        yield result
    finally:
        stats.interpreter_cache[: len(entries)] = entries


class _Timed(NamedTuple):
    """A compilation, identified by its list of forward traces."""

    traces: Sequence[TraceCtx]
    forward: _Stopwatch
    backward: _Stopwatch | None


def _stopwatches(entry: Any) -> tuple[_Stopwatch, _Stopwatch | None]:
    forward = _Stopwatch(transform_to_torch_types(entry.computation_traces[-1]))  # as in thunder.jit
    return forward, _Stopwatch(entry.backward_traces[-1]) if entry.backward_fn is not None else None


class _Stopwatch:
    """Replaces the function of a trace. ``runs`` has, for each run, a mark before each line and one at the end.

    A mark is a time of the processor's clock in seconds, or an event on the current CUDA stream.
    """

    def __init__(self, trace: TraceCtx) -> None:
        self.runs: list[list[Any]] = []
        self._marks: list[Any] = []
        # the arguments of a backward are lists of tensors, which its first lines unpack
        made = (o for bsym in trace.bound_symbols for o in bsym.flat_proxy_outs)
        self._on_cuda = any(isinstance(o, TensorProxy) and o.device.type == "cuda" for o in made)
        self._function = _with_marks(trace, self._mark).python_callable()

    def __call__(self, *args: Any) -> Any:
        self._marks = []
        result = self._function(*args)
        self._mark()
        self.runs.append(self._marks)
        return result

    def _mark(self) -> None:
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def medians(self) -> tuple[float, ...]:
        """The median seconds of each line."""
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds = [[self._between(a, b) for a, b in pairwise(marks)] for marks in self.runs]
        return tuple(median(line) for line in zip(*seconds, strict=True))

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1e3 if self._on_cuda else b - a


def _with_marks(trace: TraceCtx, mark: Any) -> TraceCtx:
    """The same trace with a call of ``mark`` before each line."""
    line = symbol_that_calls("mark", lambda: None, mark, is_prim=True).bind(output=None)
    marked = from_trace(trace)
    marked.bound_symbols = [b for bsym in trace.bound_symbols for b in (line, bsym)]
    return marked


# ---- measured memory ----


@dataclass
class MemorySnapshot:
    """Bytes of tensors on the GPU: when the context was entered, and at most until it was left (``peak``). ``path`` is
    the file of this rank, for https://pytorch.org/memory_viz."""

    path: Path
    before: int
    peak: int = 0


@contextmanager
def memory_snapshot(path: str | os.PathLike[str], *, max_entries: int = 100_000) -> Iterator[MemorySnapshot]:
    """Record each allocation and free inside the context, with its stack, and write them to a file. ::

        with shardtrace.memory_snapshot("step.pickle") as measured:
            cmodel(x, y).backward()
        print(measured.peak - measured.before, shardtrace.memory(cmodel).peak)

    The file is also written if an exception leaves the context, such as out of memory. Recording costs time: leave it
    out of a benchmark.

    Args:
        path: each rank writes its own file: ``step.pickle`` becomes ``step-rank0.pickle`` if there are several ranks.
        max_entries: the number of allocations and frees to keep, the latest ones.

    Raises:
        RuntimeError: torch sees no GPU. :func:`shardtrace.memory` predicts the memory on a CPU, too.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "memory_snapshot records the memory of a GPU, and torch sees none: shardtrace.memory(cmodel) predicts the "
            "memory of a step on any device"
        )
    file = Path(path)
    if dist.is_initialized() and dist.get_world_size() > 1:
        file = file.with_stem(f"{file.stem}-rank{dist.get_rank()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.reset_peak_memory_stats()
    snapshot = MemorySnapshot(file, torch.cuda.memory_allocated())
    torch.cuda.memory._record_memory_history(max_entries=max_entries)
    try:
        yield snapshot
    finally:
        snapshot.peak = torch.cuda.max_memory_allocated()
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
