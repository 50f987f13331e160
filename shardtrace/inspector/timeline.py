"""When each line of a step runs: as the cost model predicts it (one clock of the compute, one of each group's link), or
as it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

from passes.cost import CostModel
from passes.recognise import bucket_of, is_gather, is_issue, is_wait

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class Span(NamedTuple):
    """A collective on its link, in seconds since the step began. ``issue`` and ``wait`` are lines of its trace.

    For ``exposed`` seconds before ``wait`` returns compute has nothing else to do. A measured one lasts from its issue
    to the end of its wait: when it arrived in between, nothing tells.
    """

    kind: str  # "all_gather", "reduce_scatter", ...
    gathers: bool  # parameters; else it reduces gradients
    bucket: str
    link: int
    start: float
    stop: float
    issue: int
    wait: int
    exposed: float
    bytes: int  # of the unsharded bucket
    sent: int  # of them by each rank, which receives as many


class Timeline(NamedTuple):
    """``starts[i]`` is when line i begins, in seconds; one more is the end. ``spans`` are the collectives, ``links``
    the names of the groups that had any so far in the step."""

    starts: list[float]
    spans: list[Span]
    links: list[str]

    @property
    def end(self) -> float:
        return self.starts[-1]

    @property
    def exposed(self) -> float:
        """Seconds for which compute waits."""
        return sum(span.exposed for span in self.spans)


def predicted(traces: Sequence[TraceCtx], cost: CostModel) -> list[Timeline]:
    """Runs the executed traces of a step by the clock. Collectives of a group follow each other on its link."""
    links, clocks = _Links(), list[Timeline]()
    for trace in traces:
        clocks.append(_predict(trace, cost, clocks[-1].end if clocks else 0.0, links))
    return clocks


def measured(traces: Sequence[TraceCtx], seconds: Sequence[Sequence[float]]) -> list[Timeline]:
    """The same of lines that took so many ``seconds`` each, one after another."""
    links, clocks = _Links(), list[Timeline]()
    for trace, taken in zip(traces, seconds, strict=True):
        clocks.append(_lay_out(trace, taken, clocks[-1].end if clocks else 0.0, links))
    return clocks


def _predict(trace: TraceCtx, cost: CostModel, begin: float, links: _Links) -> Timeline:
    now, starts, spans = begin, list[float](), list[Span]()
    is_free: dict[object, float] = {}
    under_way: dict[str, Span] = {}
    for i, bsym in enumerate(trace.bound_symbols):
        starts.append(now)
        if is_issue(bsym):
            bucket = bucket_of(bsym)
            start = max(now, is_free.get(bucket.plan.group, 0.0))
            is_free[bucket.plan.group] = stop = start + bucket.plan.cost.collective_seconds(bucket)
            under_way[bsym.output.name] = links.span(bsym, i, start, stop)
        elif is_wait(bsym):
            span = under_way.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, exposed=max(0.0, span.stop - now)))
            now = max(now, span.stop)
        else:
            now += cost.compute_seconds(bsym)
    return Timeline([*starts, now], sorted(spans, key=lambda span: span.start), links.names)


def _lay_out(trace: TraceCtx, seconds: Sequence[float], begin: float, links: _Links) -> Timeline:
    starts, spans = list(accumulate(seconds, initial=begin)), list[Span]()
    under_way: dict[str, Span] = {}
    for i, bsym in enumerate(trace.bound_symbols):
        if is_issue(bsym):
            under_way[bsym.output.name] = links.span(bsym, i, starts[i], starts[i + 1])
        elif is_wait(bsym):
            span = under_way.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, stop=starts[i + 1], exposed=seconds[i]))
    return Timeline(starts, sorted(spans, key=lambda span: span.start), links.names)


class _Links:
    """The groups of a step's collectives, numbered in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def span(self, issue: BoundSymbol, line: int, start: float, stop: float) -> Span:
        bucket = bucket_of(issue)
        link, ranks = self._numbers.setdefault(bucket.plan.group, len(self._numbers)), bucket.plan.world_size
        sent = bucket.trips * bucket.bytes * (ranks - 1) // ranks
        where = (bucket.label, link, start, stop, line, line, 0.0)
        return Span(issue.sym.name, is_gather(issue), *where, bucket.bytes, sent)

    @property
    def names(self) -> list[str]:
        numbers = self._numbers.items()
        return [f"{group.size()} ranks" if hasattr(group, "size") else f"link {i}" for group, i in numbers]


class Interval(Protocol):
    @property
    def start(self) -> float: ...

    @property
    def stop(self) -> float: ...


T = TypeVar("T", bound=Interval)


def stacked(intervals: Iterable[T]) -> list[list[T]]:
    """In as few rows as it takes that none overlap."""
    rows: list[list[T]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        row = next((row for row in rows if row[-1].stop <= interval.start), None)
        if row is None:
            rows.append([interval])
        else:
            row.append(interval)
    return rows
