"""The memory curve as SVG, on the time axis of the timeline: live memory by kind, with its peak."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from passes.analysis.liveness import Kind
from shardtrace.inspector.rows import size
from shardtrace.inspector.step_data import Phase, StepData
from shardtrace.inspector.summary import peak

WIDTH = 100_000  # of an SVG, in its own units
COLUMNS = 2_000  # resolution of the curve
# From bottom to top.
STACK: tuple[tuple[Kind, str], ...] = (
    ("inputs", "shards, batch"),
    ("saved", "saved for backward"),
    ("activations", "activations"),
    ("gradients", "gradients"),
    ("unsharded", "gathered parameters"),
    ("in_flight", "in flight"),
)


class Lane(NamedTuple):
    """A strip of the drawing and its name in the left margin. ``css`` gives both the same height."""

    name: str
    css: str
    body: str

    def __str__(self) -> str:
        return f'<div class="lane {self.css}">{self.body}</div>'


def place(seconds: float, end: float) -> int:
    """The position of a time on the axis, in units of the SVG."""
    return round(WIDTH * seconds / end)


class Column(NamedTuple):
    """Memory from ``x`` on: bytes by kind in the order of STACK, and the bytes needed while the line runs."""

    x: int
    bytes: tuple[int, ...]
    during: int


def draw_memory(record: StepData, end: float) -> Lane:
    """Stacked areas, one for each kind, and a curve of the memory that is needed while a line runs."""
    top = peak(record)
    assert top is not None
    full = 1.12 * top.bytes  # headroom for the label of the peak
    columns = _thinned(list(_columns(record.phases, end)))
    areas = []
    for k in reversed(range(len(STACK))):
        points = [(c.x, 1000 - 1000 * sum(c.bytes[: k + 1]) / full) for c in columns]
        areas.append(f'<path class="m-{STACK[k][0]}" d="{_steps(points)}"/>')
    line = _steps([(c.x, 1000 - 1000 * c.during / full) for c in columns], closed=False)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} 1000" preserveAspectRatio="none" role="img" aria-label="memory of tensors, peak '
        f'{size(top.bytes)}">{"".join(areas)}<path class="during" d="{line}"/></svg>'
    )
    phase = next(p for p in record.phases if p.name == top.phase)
    left = 100 * phase.timeline.starts[top.line] / end
    side = "right" if left > 70 else "left"
    marker = (
        f'<button class="peak {side}" style="left:{left:.3f}%" data-at="{top.phase}:{top.line}">'
        f"peak {size(top.bytes)}</button>"
    )
    step = round_size(top.bytes / 4)
    grid = "".join(
        f'<span class="rule" style="bottom:{100 * k * step / full:.2f}%"><small>{size(k * step)}</small></span>'
        for k in range(1, int(0.97 * top.bytes / step) + 1)
    )
    return Lane("memory", "memory", svg + grid + marker)


def round_size(least: float) -> float:
    """The smallest power of two that is at least ``least`` bytes: the spacing of the grid."""
    return max(1.0, 2.0 ** math.ceil(math.log2(least)))


def _columns(phases: Sequence[Phase], end: float) -> Iterator[Column]:
    for phase in phases:
        for row, start in zip(phase.memory, phase.timeline.starts, strict=False):
            yield Column(place(start, end), tuple(getattr(row, kind) for kind, _ in STACK), row.during)


def _thinned(columns: list[Column]) -> list[Column]:
    """At most two columns for each of COLUMNS equal parts of the axis: the highest and the last."""
    kept: list[Column] = []
    for _, group in groupby(columns, key=lambda c: c.x * COLUMNS // WIDTH):
        part = list(group)
        highest = max(part, key=lambda c: c.during)
        kept += [highest] if highest is part[-1] else [highest, part[-1]]
    return kept


def _steps(points: Sequence[tuple[int, float]], *, closed: bool = True) -> str:
    """A step function through the points, which keeps its last height up to the right end."""
    path, height = [f"M{points[0][0]},{points[0][1]:.0f}"], f"{points[0][1]:.0f}"
    for x, y in points[1:]:
        if f"{y:.0f}" != height:
            height = f"{y:.0f}"
            path.append(f"H{x}V{height}")
    path.append(f"H{WIDTH}" + (f"V1000H{points[0][0]}Z" if closed else ""))
    return "".join(path)
