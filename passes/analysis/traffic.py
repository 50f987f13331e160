"""The collectives of a trace, as plain rows."""

from __future__ import annotations

from typing import NamedTuple

from passes.analysis.recognise import bucket_of, is_backward, is_issue

from thunder.core.trace import TraceCtx


class Collective(NamedTuple):
    """One collective of a trace.

    ``bytes`` counts the whole unsharded bucket as it travels, padding included. Each rank sends and receives
    ``bytes * (N - 1) / N``, twice for an "all_reduce". ``dtype`` is the one on the wire, or the name of a
    :class:`passes.Wire`. ``phase`` is "forward" or "backward"; ``kind`` is "all_gather", "reduce_scatter", "broadcast",
    "reduce" or "all_reduce"; ``parameters`` are the names of the bucket's members.
    """

    kind: str
    phase: str
    bucket: str
    dtype: str
    bytes: int
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        parameters = f": {', '.join(self.parameters)}" if self.parameters else ""
        return f"{self.kind} of {self.bucket} ({self.dtype}, {self.bytes} bytes{parameters})"


def collectives(trace: TraceCtx) -> list[Collective]:
    """The collectives of ``trace``, in the order in which it issues them."""
    phase = "backward" if is_backward(trace) else "forward"
    rows = []
    for bsym in trace.bound_symbols:
        if is_issue(bsym):
            bucket = bucket_of(bsym)
            parameters = tuple(m.parameter.name for m in bucket.members)
            rows.append(Collective(bsym.sym.name, phase, bucket.label, bucket.travels_as, bucket.bytes, parameters))
    return rows
