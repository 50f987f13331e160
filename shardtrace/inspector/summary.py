"""The numbers of a step beside those that theory gives."""

from __future__ import annotations

from typing import NamedTuple

from shardtrace.inspector.record import Phase, Record
from shardtrace.inspector.units import count, size


class Traffic(NamedTuple):
    """One kind of collective in one phase: how many and how many bytes (of unsharded buckets) there are.

    ``formula`` is what ``expected`` bytes are; with fewer, some parameters are not needed there.
    """

    phase: str
    kind: str
    number: int
    bytes: int
    expected: int
    formula: str

    @property
    def agrees(self) -> bool:
        return self.bytes == self.expected


class Peak(NamedTuple):
    """Where a step needs most memory: a line of a phase, with the bytes that are needed while it runs."""

    phase: str
    line: int
    code: str
    bytes: int


class Saved(NamedTuple):
    """A piece of memory that forward keeps for backward."""

    name: str
    bytes: int
    type: str
    module: str


def describe(record: Record) -> str:
    """The setup in one line."""
    s = record.setup
    if not s.strategy:
        return "not sharded by shardtrace"
    limit = f"prefetch {s.prefetch}"
    if s.max_inflight_bytes is not None:
        limit += f", at most {size(s.max_inflight_bytes)} in flight"
    return (
        f"{s.strategy} over {count(s.world_size, 'rank')}, seen from rank {s.rank} · buckets by {s.bucketing} · {limit}"
    )


def traffic(record: Record) -> list[Traffic]:
    """Bytes that the collectives of a step move, against the closed formulas of ZeRO.

    With P bytes of parameters and G bytes of those that are trained: P are gathered in forward, P again in backward
    (ZeRO-3) or none (ZeRO-2), and G are reduced in backward.
    """
    if not record.parameters:
        return []
    params = sum(p.bytes for p in record.parameters)
    trained = sum(p.bytes for p in record.parameters if p.trainable)
    zero3 = record.setup.strategy == "ZeRO-3"
    rows = [_traffic(record, "forward", "all_gather", params, "P")]
    if any(p.name == "backward" for p in record.phases):
        rows.append(_traffic(record, "backward", "all_gather", params if zero3 else 0, "P" if zero3 else "0"))
        rows.append(_traffic(record, "backward", "reduce_scatter", trained, "G"))
    return rows


def _traffic(record: Record, phase: str, kind: str, expected: int, formula: str) -> Traffic:
    rows = [c for p in record.phases if p.name == phase for c in p.collectives if c.kind == kind]
    return Traffic(phase, kind, len(rows), sum(c.bytes for c in rows), expected, formula)


def peak(record: Record) -> Peak | None:
    """The line at which most memory is needed; None if nothing was compiled."""
    if not record.phases:
        return None
    phase: Phase = max(record.phases, key=lambda p: p.peak.during)
    row = phase.peak
    return Peak(phase.name, row.line, phase.lines[row.line].code, row.during)


def largest_saved(record: Record, most: int = 8) -> list[Saved]:
    """The largest pieces of memory that forward keeps for backward, shards and inputs not counted."""
    if not record.phases:
        return []
    forward = record.phases[0]
    made = {name: i for i, line in enumerate(forward.lines) for name in line.results}
    kept = sorted((b for b in forward.buffers if b.kind == "saved"), key=lambda b: -b.bytes)
    rows = []
    for b in kept[:most]:
        line = made.get(b.name)
        kind = module = ""
        if line is not None:
            found = forward.lines[line].template.types[forward.lines[line].results.index(b.name)]
            kind, module = found.text if found is not None else "", forward.modules[line] or ""
        rows.append(Saved(b.name, b.bytes, kind, module))
    return rows


def seconds(record: Record) -> float:
    """How long the step takes, as the cost model predicts it."""
    return record.phases[-1].timeline.end if record.phases else 0.0


def exposed(record: Record) -> float:
    """For how long of it compute waits for communication."""
    return sum(p.timeline.exposed for p in record.phases)


def sent_bytes(record: Record) -> int:
    """What each rank sends in a step, and receives: (N - 1) / N of each unsharded bucket."""
    ranks = record.setup.world_size
    return sum(c.bytes for p in record.phases for c in p.collectives) * (ranks - 1) // ranks
