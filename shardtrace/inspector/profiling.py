"""``profile``: how long each line of a compiled step takes on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from passes.compat import symbol_that_calls

import thunder
import torch
from thunder.common import transform_to_torch_types
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace


class LineTimes(NamedTuple):
    """Median ``seconds`` of each line over so many ``steps``: of the executed forward, then of the backward if there
    is one."""

    steps: int
    seconds: tuple[tuple[float, ...], ...]


class Profile:
    """What :func:`profile` yields, for ``inspect(cmodel, profile=...)``."""

    def __init__(self) -> None:
        self._timed: list[_Timed] = []

    @property
    def steps(self) -> int:
        """Calls whose lines were timed."""
        return sum(len(timed.forward.runs) for timed in self._timed)

    def times(self, traces: Sequence[TraceCtx]) -> LineTimes:
        """Of the compilation that has these forward traces.

        Raises:
            ValueError: if it did not run in the context, or if it has a backward that did not.
        """
        timed = next((t for t in self._timed if t.traces is traces), None)
        if timed is None or not timed.forward.runs:
            raise ValueError("what is to be shown did not run inside profile(): call it there as it is called here")
        if timed.backward is not None and not timed.backward.runs:
            raise ValueError("its backward did not run inside profile(): call .backward() there too")
        watches = [watch for watch in (timed.forward, timed.backward) if watch is not None]
        return LineTimes(len(timed.forward.runs), tuple(watch.medians() for watch in watches))


@contextmanager
def profile(cmodel: Any) -> Iterator[Profile]:
    """Times each line of the steps that run inside, on this rank; ``inspect`` then shows these times.

        with shardtrace.profile(cmodel) as p:
            for x, y in batches: ...  # ordinary steps, some ten of them
        shardtrace.inspect(cmodel, profile=p)

    What was compiled runs as it is, with the clock read between its lines: on the CPU the processor's, on CUDA that of
    events on the current stream. Nothing is compiled again, and results are the same. All ranks may profile, or one
    alone. A line that waits for a collective takes as long as the collective keeps compute idle, and as long as it
    takes to put what arrived in its place. What runs between forward and backward, and after them, is not timed.

    Args:
        cmodel: what ``thunder.jit`` returned, called before: what is compiled inside is not timed.

    Raises:
        TypeError: if ``cmodel`` was not made by ``thunder.jit``.
        RuntimeError: if it has compiled nothing yet.
    """
    stats = thunder.compile_stats(cmodel)
    if stats is None:
        raise TypeError(f"profile takes what thunder.jit returned, not {type(cmodel).__name__}")
    entries = list(stats.interpreter_cache)
    if not entries:
        raise RuntimeError("nothing is compiled yet (or jit was told to keep nothing): call it once before profile()")
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
    """A compilation, known by its list of forward traces."""

    traces: Sequence[TraceCtx]
    forward: _Stopwatch
    backward: _Stopwatch | None


def _stopwatches(entry: Any) -> tuple[_Stopwatch, _Stopwatch | None]:
    forward = _Stopwatch(transform_to_torch_types(entry.computation_traces[-1]))  # as thunder.jit makes it callable
    return forward, _Stopwatch(entry.backward_traces[-1]) if entry.backward_fn is not None else None


class _Stopwatch:
    """The function of a trace, called in its place; ``runs`` has a mark before each line of each run, and at its end.

    A mark is seconds of the processor's clock, or an event on the current CUDA stream.
    """

    def __init__(self, trace: TraceCtx) -> None:
        self.runs: list[list[Any]] = []
        self._marks: list[Any] = []
        tensors = [p for p in trace.args or () if isinstance(p, TensorProxy)]
        self._on_cuda = any(p.device.type == "cuda" for p in tensors)
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
        """Seconds of each line."""
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
