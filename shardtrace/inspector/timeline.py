"""When each line of a step runs: predicted by the cost model (one clock for compute, one for each group's link), or
measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

from passes.analysis.calls import part_of
from passes.analysis.liveness import sequence_bytes, sequence_crossings
from passes.analysis.recognise import (
    bucket_of,
    is_gather,
    is_offload,
    is_sequence_issue,
    is_sequence_wait,
    issues_future,
    part_at,
    waits_for_future,
)
from passes.analysis.seconds import block_seconds, compute_seconds, link_seconds, sequence_seconds, wire_seconds
from passes.plan import CostModel, HostMemory

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

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
    now, starts, spans = begin, list[float](), list[Span]()
    is_free: dict[object, float] = {}
    in_flight: dict[str, Span] = {}
    for i, bsym in enumerate(trace.bound_symbols):
        starts.append(now)
        if issues_future(bsym) or is_sequence_issue(bsym):
            of_sequence, link = is_sequence_issue(bsym), _link(bsym)
            before = compute_seconds(cost, bsym) if of_sequence else wire_seconds(cost, bsym)
            start = max(now + before, is_free.get(link, 0.0))
            is_free[link] = stop = start + (sequence_seconds(cost, bsym) if of_sequence else link_seconds(bsym))
            in_flight[bsym.output.name] = links.span(bsym, i, start, stop)
            now += compute_seconds(cost, bsym)
        elif waits_for_future(bsym) or is_sequence_wait(bsym):
            span = in_flight.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, exposed=max(0.0, span.stop - now)))
            now = max(now, span.stop) + compute_seconds(cost, bsym)
        else:
            spans += _of_block(bsym, i, now, cost, links)
            now += compute_seconds(cost, bsym)
    return Timeline([*starts, now], sorted(spans, key=lambda span: span.start), links.names)


def _of_block(
    bsym: BoundSymbol, line: int, begin: float, cost: CostModel, links: _Links, seconds: float | None = None
) -> Iterator[Span]:
    """The collectives of the block that a line calls, if it calls one. ``seconds`` is what it took, if known."""
    if (part := part_of(bsym)) is None:
        return
    total, sent = block_seconds(cost, part)
    scale = 1.0 if seconds is None or not total else seconds / total
    for s in sent:
        span = links.span(s.issue, line, begin + s.start * scale, begin + s.stop * scale)
        yield span._replace(exposed=s.exposed * scale)


def _lay_out(trace: TraceCtx, seconds: Sequence[float], begin: float, links: _Links, cost: CostModel) -> Timeline:
    starts, spans = list(accumulate(seconds, initial=begin)), list[Span]()
    in_flight: dict[str, Span] = {}
    for i, bsym in enumerate(trace.bound_symbols):
        if issues_future(bsym) or is_sequence_issue(bsym):
            in_flight[bsym.output.name] = links.span(bsym, i, starts[i], starts[i + 1])
        elif waits_for_future(bsym) or is_sequence_wait(bsym):
            span = in_flight.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, stop=starts[i + 1], exposed=seconds[i]))
        else:
            spans += _of_block(bsym, i, starts[i], cost, links, seconds[i])
    return Timeline(starts, sorted(spans, key=lambda span: span.start), links.names)


def _link(start: BoundSymbol) -> object:
    """The link of a collective or copy: the process group, or the bus to the host."""
    if is_sequence_issue(start):
        context = part_at(start).plan
        return context.runtime.group(context.axis)
    plan = bucket_of(start).plan
    return plan.host if is_offload(start) else plan.group


class _Links:
    """The groups of a step's collectives and the bus to the host, numbered in order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def span(self, issue: BoundSymbol, line: int, start: float, stop: float) -> Span:
        link = self._numbers.setdefault(_link(issue), len(self._numbers))
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
    if is_sequence_issue(issue):
        part, size = part_at(issue), sequence_bytes(issue)
        return part.label, size, sequence_crossings(issue) * size * (part.plan.ranks - 1) // part.plan.ranks
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
