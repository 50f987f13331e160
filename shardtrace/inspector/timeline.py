"""When each line of a step runs: as the cost model predicts it (one clock of the compute, one of each group's link), or
as it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

from passes.analysis.recognise import bucket_of, is_gather, is_offload, issues_future, waits_for_future
from passes.analysis.seconds import compute_seconds, link_seconds
from passes.plan import CostModel, HostMemory

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

HOST = "host"  # the name of the link that carries copies to it


class Span(NamedTuple):
    """A collective, or a copy to the host, on its link, in seconds since the step began. ``issue`` and ``wait`` are
    lines of its trace.

    For ``exposed`` seconds before ``wait`` returns compute has nothing else to do. A measured one lasts from its issue
    to the end of its wait: when it arrived in between, nothing tells.
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
    bytes: int  # of the unsharded bucket; of a copy, what it moves
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
        if issues_future(bsym):
            link = _link(bsym)
            start = max(now, is_free.get(link, 0.0))
            is_free[link] = stop = start + link_seconds(bsym)
            under_way[bsym.output.name] = links.span(bsym, i, start, stop)
        elif waits_for_future(bsym):
            span = under_way.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, exposed=max(0.0, span.stop - now)))
            now = max(now, span.stop)
        else:
            now += compute_seconds(cost, bsym)
    return Timeline([*starts, now], sorted(spans, key=lambda span: span.start), links.names)


def _lay_out(trace: TraceCtx, seconds: Sequence[float], begin: float, links: _Links) -> Timeline:
    starts, spans = list(accumulate(seconds, initial=begin)), list[Span]()
    under_way: dict[str, Span] = {}
    for i, bsym in enumerate(trace.bound_symbols):
        if issues_future(bsym):
            under_way[bsym.output.name] = links.span(bsym, i, starts[i], starts[i + 1])
        elif waits_for_future(bsym):
            span = under_way.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, stop=starts[i + 1], exposed=seconds[i]))
    return Timeline(starts, sorted(spans, key=lambda span: span.start), links.names)


def _link(start: BoundSymbol) -> object:
    """What carries it: the process group, or the bus to the host."""
    plan = bucket_of(start).plan
    return plan.host if is_offload(start) else plan.group


class _Links:
    """The groups of a step's collectives, and the bus to the host, numbered in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def span(self, issue: BoundSymbol, line: int, start: float, stop: float) -> Span:
        bucket, ranks = bucket_of(issue), bucket_of(issue).plan.world_size
        link = self._numbers.setdefault(_link(issue), len(self._numbers))
        size, sent = bucket.bytes, bucket.trips * bucket.bytes * (ranks - 1) // ranks
        if is_offload(issue):
            size, sent = bucket.numel * bucket.rest_dtype.bytes, 0
        return Span(issue.sym.name, is_gather(issue), bucket.label, link, start, stop, line, line, 0.0, size, sent)

    @property
    def names(self) -> list[str]:
        numbers = self._numbers.items()
        return [HOST if isinstance(link, HostMemory) else self._name(link, i) for link, i in numbers]

    @staticmethod
    def _name(group: Any, number: int) -> str:
        return f"{group.size()} ranks" if hasattr(group, "size") else f"link {number}"


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
