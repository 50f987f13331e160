"""The collectives of a trace, as plain rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from passes.analysis.calls import part_of
from passes.analysis.recognise import bucket_of, is_backward, is_issue, is_sequence_issue, part_at
from passes.comm.sequence import issue_gather, issue_scatter, issue_sum

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class Collective(NamedTuple):
    """One collective of a trace.

    ``bytes`` counts the whole unsharded bucket as it travels, padding included, or the whole value of which ranks hold
    parts of the sequence. Each rank sends and receives ``bytes * (N - 1) / N``, twice for an "all_reduce". ``dtype`` is
    the one on the wire, or the name of a :class:`passes.Wire`. ``phase`` is "forward" or "backward"; ``kind`` is
    "all_gather", "reduce_scatter", "broadcast", "reduce" or "all_reduce", with "_sequence" if parts of a sequence
    travel, or "all_to_all_heads" and "all_to_all_positions"; ``bucket`` then says which dimension is split.
    ``parameters`` are the names of the bucket's members.
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
    return [_row(bsym, phase) for bsym in issues(trace)]


def issues(trace: TraceCtx) -> Iterator[BoundSymbol]:
    """The lines that issue the collectives of a trace, in order, with those of the blocks that it calls."""
    for bsym in trace.bound_symbols:
        if is_issue(bsym) or is_sequence_issue(bsym):
            yield bsym
        elif (part := part_of(bsym)) is not None:
            yield from issues(part.trace)


def _row(bsym: BoundSymbol, phase: str) -> Collective:
    if is_sequence_issue(bsym):
        dtype = str(bsym.args[0].dtype.shortname())
        return Collective(bsym.sym.name, phase, part_at(bsym).label, dtype, sequence_bytes(bsym), ())
    bucket = bucket_of(bsym)
    parameters = tuple(m.parameter.name for m in bucket.members)
    return Collective(bsym.sym.name, phase, bucket.label, bucket.travels_as, bucket.bytes, parameters)


def sequence_crossings(bsym: BoundSymbol) -> int:
    """How often each byte of a collective of a sequence is sent: twice in a sum."""
    return 2 if bsym.sym.id == issue_sum.id else 1


def sequence_bytes(bsym: BoundSymbol) -> int:
    """The bytes of the whole value that a collective of a sequence moves, padding included."""
    x, part = bsym.args[0], part_at(bsym)
    whole = x.numel
    if bsym.sym.id == issue_gather.id:
        whole = x.numel * part.plan.ranks
    elif bsym.sym.id == issue_scatter.id:
        whole = math.prod(part.local_shape(tuple(x.shape))) * part.plan.ranks
    return int(whole * x.dtype.bytes)
