"""The numbers of a step, beside the predictions of theory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from passes.analysis.liveness import Buffer
from shardtrace.inspector.lines import Line
from shardtrace.inspector.record import Parameter, Phase, Record
from shardtrace.inspector.units import count, size


class Traffic(NamedTuple):
    """One kind of collective in one phase: their number, and their bytes of unsharded buckets.

    ``formula`` gives the ``expected`` bytes. Fewer bytes mean that a phase does not need some of the parameters.
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
    """The line at which a step needs the most memory, and the bytes that are needed while it runs."""

    phase: str
    line: int
    code: str
    bytes: int


class Saved(NamedTuple):
    """A buffer that forward saves for backward. If a block saves it, ``name`` is that within the block's function."""

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
    if s.host_bytes:
        limit += f" · {size(s.host_bytes)} of shards in host memory"
    if s.wires:
        limit += f" · {s.wires}"
    return (
        f"{s.strategy} over {count(s.world_size, 'rank')}, seen from rank {s.rank} · buckets by {s.bucketing} · {limit}"
    )


class _Rule(NamedTuple):
    """The traffic of a strategy: a kind of collective in a phase, and its bytes as a formula and for a parameter."""

    phase: str
    kind: str
    formula: str
    bytes: Callable[[Parameter], int]


def _whole(p: Parameter) -> int:
    return p.bytes


def _nothing(p: Parameter) -> int:
    return 0


def _gradient(p: Parameter) -> int:
    return p.reduced_bytes if p.trainable else 0


def _shard_of_gradient(p: Parameter) -> int:
    return p.outer_bytes if p.trainable else 0


_GATHER = _Rule("forward", "all_gather", "P", _whole)
_AGAIN, _KEPT = _Rule("backward", "all_gather", "P", _whole), _Rule("backward", "all_gather", "0", _nothing)
_SECOND = _Rule("backward", "all_gather", "P in the node", lambda p: p.second_bytes)
_REDUCE = _Rule("backward", "reduce_scatter", "G", _gradient)
_REPLICAS = _Rule("backward", "all_reduce", "G/N", _shard_of_gradient)
_RULES = {
    "ddp": [_Rule("backward", "all_reduce", "G", _gradient)],
    "zero1": [_GATHER, _KEPT, _REDUCE],
    "zero2": [_GATHER, _KEPT, _REDUCE],
    "zero3": [_GATHER, _AGAIN, _REDUCE],
    "hybrid_zero2": [_GATHER, _KEPT, _REDUCE, _REPLICAS],
    "hybrid_zero3": [_GATHER, _AGAIN, _REDUCE, _REPLICAS],
    "zero3_secondary": [_GATHER, _SECOND, _REDUCE],
    "owner": [
        _Rule("forward", "broadcast", "P", _whole),
        _Rule("backward", "broadcast", "P", _whole),
        _Rule("backward", "reduce", "G", _gradient),
    ],
}


def traffic(record: Record) -> list[Traffic]:
    """The bytes that the collectives of a step move, beside the closed formulas of ZeRO.

    P is the bytes of all parameters, G the bytes of the gradients of trained parameters, N the number of ranks that
    share a copy. ZeRO gathers P in forward and reduces G in backward. ZeRO-3 gathers P again in backward, hybrids
    reduce G/N once more over the replicas, and DDP all-reduces G. If parts of a model have different strategies, their
    bytes add up. With fp16 each model shares a flag of 4 bytes.
    """
    phases = {p.name for p in record.phases}
    expected: dict[tuple[str, str], int] = {}
    formulas: dict[tuple[str, str], list[str]] = {}
    for p in record.parameters:
        for rule in _RULES[p.strategy]:
            if rule.phase in phases:
                at = rule.phase, rule.kind
                expected[at] = expected.get(at, 0) + rule.bytes(p)
                formulas.setdefault(at, []).append(rule.formula)
    return [
        _traffic(record, phase, kind, size, " + ".join(sorted(set(formulas[phase, kind]))))
        for (phase, kind), size in sorted(expected.items(), key=lambda item: item[0][0] != "forward")
    ]


def _traffic(record: Record, phase: str, kind: str, expected: int, formula: str) -> Traffic:
    rows = [c for p in record.phases if p.name == phase for c in p.collectives if c.kind == kind]
    return Traffic(phase, kind, len(rows), sum(c.bytes for c in rows), expected, formula)


def peak(record: Record) -> Peak | None:
    """The line at which the most memory is needed; None if nothing was compiled."""
    if not record.phases:
        return None
    phase: Phase = max(record.phases, key=lambda p: p.peak.during)
    row = phase.peak
    return Peak(phase.name, row.line, phase.lines[row.line].code, row.during)


def largest_saved(record: Record, most: int = 8) -> list[Saved]:
    """The largest buffers that forward saves for backward, without shards and inputs."""
    if not record.phases:
        return []
    forward = record.phases[0]
    made = {name: i for i, line in enumerate(forward.lines) for name in line.results}
    kept = sorted((b for b in forward.buffers if b.kind == "saved"), key=lambda b: -b.bytes)
    rows = []
    for b in kept[:most]:
        line = made.get(b.name)
        if line is None:
            rows.append(Saved(b.name, b.bytes, "", ""))
        else:
            rows.append(_saved_by(forward.lines[line], forward.modules[line] or "", b))
    return rows


def _saved_by(line: Line, module: str, buffer: Buffer) -> Saved:
    name, function = buffer.inner or buffer.name, line.function
    if function is not None:
        at = next((k for k, part in enumerate(function.lines) if buffer.inner in part.results), None)
        if at is not None:
            line, inside = function.lines[at], function.modules[at]
            module = function.module_in(module, inside) if inside is not None else module
    found = line.template.types[line.results.index(name)] if name in line.results else None
    return Saved(name, buffer.bytes, found.text if found is not None else "", module)


def seconds(record: Record) -> float:
    """The seconds of the step: forward and backward."""
    return record.phases[-1].timeline.end if record.phases else 0.0


def exposed(record: Record) -> float:
    """The seconds of the step in which compute waits for communication."""
    return sum(p.timeline.exposed for p in record.phases)


def sent_bytes(record: Record) -> int:
    """The bytes that each rank sends, and receives, in a step: (N - 1) / N of each unsharded bucket, and twice that for
    an all_reduce."""
    return sum(span.sent for p in record.phases for span in p.timeline.spans)
