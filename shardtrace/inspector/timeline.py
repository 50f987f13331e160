"""When each line of a step runs, as the cost model predicts it: one clock of the compute, one of each group's link."""

from __future__ import annotations

from typing import NamedTuple

from passes.cost import CostModel
from passes.recognise import bucket_of, is_gather, is_issue, is_wait

from thunder.core.trace import TraceCtx


class Span(NamedTuple):
    """A collective on its link, in seconds since the step began. ``issue`` and ``wait`` are lines of its trace.

    For ``exposed`` seconds before ``wait`` returns compute has nothing else to do.
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
    """``starts[i]`` is when line i begins, in seconds; one more is the end. ``spans`` are the collectives."""

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


def timeline(trace: TraceCtx, cost: CostModel, *, begin: float = 0.0) -> Timeline:
    """Runs an executed trace by the clock, from ``begin`` on. Collectives of a group follow each other on its link."""
    now, starts, spans = begin, list[float](), list[Span]()
    is_free: dict[object, float] = {}
    link_of: dict[object, int] = {}
    under_way: dict[str, Span] = {}
    for i, bsym in enumerate(trace.bound_symbols):
        starts.append(now)
        if is_issue(bsym):
            bucket = bucket_of(bsym)
            group = bucket.plan.group
            start = max(now, is_free.get(group, 0.0))
            is_free[group] = stop = start + bucket.plan.cost.collective_seconds(bucket)
            link, ranks = link_of.setdefault(group, len(link_of)), bucket.plan.world_size
            sent = bucket.trips * bucket.bytes * (ranks - 1) // ranks
            under_way[bsym.output.name] = Span(
                bsym.sym.name, is_gather(bsym), bucket.label, link, start, stop, i, i, 0.0, bucket.bytes, sent
            )
        elif is_wait(bsym):
            span = under_way.pop(bsym.args[0].name)
            spans.append(span._replace(wait=i, exposed=max(0.0, span.stop - now)))
            now = max(now, span.stop)
        else:
            now += cost.compute_seconds(bsym)
    links = [f"{group.size()} ranks" if hasattr(group, "size") else f"link {i}" for group, i in link_of.items()]
    return Timeline([*starts, now], sorted(spans, key=lambda span: span.start), links)
