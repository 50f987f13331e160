"""What is measured beside what is predicted: the time of each line, and the memory of a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from passes.compat.jit import symbol_that_calls

import thunder
import torch
import torch.distributed as dist
from thunder.common import transform_to_torch_types
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace

# ---- time ----


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


# ---- memory ----


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
