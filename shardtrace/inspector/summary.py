"""The numbers of a step, beside the predictions of theory."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from passes.analysis.liveness import Buffer
from shardtrace.inspector.lines import Line
from shardtrace.inspector.rows import size
from shardtrace.inspector.step_data import Phase, StepData


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

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        verdict = "✓" if self.agrees else "fewer"
        return (
            self.phase,
            self.kind,
            f"{self.number}",
            size(self.bytes),
            f"{self.formula} = {size(self.expected)}",
            verdict,
        )


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


class Totals(NamedTuple):
    """A step in five numbers: its ``seconds`` (predicted or measured), the ``exposed`` seconds in which compute waits
    for communication, the ``peak`` bytes of tensors, the bytes ``sent`` by each rank, the number of ``collectives``."""

    seconds: float
    exposed: float
    peak: int
    sent: int
    collectives: int

    @property
    def share(self) -> str:
        """The exposed part of the step, in words; empty if the step takes no time."""
        return f"{100 * self.exposed / self.seconds:.0f} % of the step" if self.seconds else ""


def totals(record: StepData) -> Totals:
    """The step in five numbers. Each rank sends, and receives, (N - 1) / N of each unsharded bucket, and twice that for
    an all_reduce."""
    top = peak(record)
    return Totals(
        seconds=record.end,
        exposed=sum(p.timeline.exposed for p in record.phases),
        peak=top.bytes if top is not None else 0,
        sent=sum(span.sent for p in record.phases for span in p.timeline.spans),
        collectives=sum(len(p.collectives) for p in record.phases),
    )


_GATHER, _AGAIN, _REDUCE = (
    ("forward", "all_gather", "P"),
    ("backward", "all_gather", "P"),
    ("backward", "reduce_scatter", "G"),
)
_KEPT, _REPLICAS = ("backward", "all_gather", "0"), ("backward", "all_reduce", "G/N")
_RULES = {  # the traffic of a strategy: a kind of collective in a phase, and the formula of its bytes
    "ddp": [("backward", "all_reduce", "G")],
    "zero1": [_GATHER, _KEPT, _REDUCE],
    "zero2": [_GATHER, _KEPT, _REDUCE],
    "zero3": [_GATHER, _AGAIN, _REDUCE],
    "hybrid_zero2": [_GATHER, _KEPT, _REDUCE, _REPLICAS],
    "hybrid_zero3": [_GATHER, _AGAIN, _REDUCE, _REPLICAS],
    "zero3_secondary": [_GATHER, ("backward", "all_gather", "P in the node"), _REDUCE],
    "owner": [("forward", "broadcast", "P"), ("backward", "broadcast", "P"), ("backward", "reduce", "G")],
}


def traffic(record: StepData) -> list[Traffic]:
    """The bytes that the collectives of a step move, beside the closed formulas of ZeRO.

    P is the bytes of all parameters, G the bytes of the gradients of trained parameters, N the number of ranks that
    share a copy. ZeRO gathers P in forward and reduces G in backward. ZeRO-3 gathers P again in backward, hybrids
    reduce G/N once more over the replicas, and DDP all-reduces G. If parts of a model have different strategies, their
    bytes add up. With fp16 each model shares a flag of 4 bytes.
    """
    found: dict[tuple[str, str], Counter[str]] = {}
    for p in record.parameters:
        terms = {"P": p.bytes, "0": 0, "P in the node": p.second_bytes, "G": p.reduced_bytes, "G/N": p.outer_bytes}
        for name, kind, formula in _RULES[p.strategy]:
            found.setdefault((name, kind), Counter())[formula] += terms[formula]
    rows = []
    for phase in record.phases:
        for (name, kind), sums in found.items():
            if name == phase.name:
                sizes = [c.bytes for c in phase.collectives if c.kind == kind]
                formula = " + ".join(sorted(sums))
                rows.append(Traffic(name, kind, len(sizes), sum(sizes), sums.total(), formula))
    return rows


def peak(record: StepData) -> Peak | None:
    """The line at which the most memory is needed; None if nothing was compiled."""
    if not record.phases:
        return None
    phase: Phase = max(record.phases, key=lambda p: p.peak.during)
    row = phase.peak
    return Peak(phase.name, row.line, phase.lines[row.line].code, row.during)


def largest_saved(record: StepData, most: int = 8) -> list[Saved]:
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
