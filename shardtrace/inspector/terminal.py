"""The inspector as text: the summary, the passes, and the step drawn in characters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardtrace.inspector.rows import columns, count, duration, size
from shardtrace.inspector.step_data import Phase, Stage, StepData
from shardtrace.inspector.summary import largest_saved, peak, totals, traffic

WIDTH = 72  # characters of the drawing
HEIGHTS = " ▁▂▃▄▅▆▇█"


def render(record: StepData) -> str:
    """The summary of a step in a few dozen lines."""
    rates = [record.setup.rates] if record.phases else []
    parts = [f"{record.setup.model}: {record.setup.description}", *rates, *record.notes]
    top = peak(record)
    if top is not None:
        step = totals(record)
        share = f" ({step.share})" if step.share else ""
        expected = f"; predicted: {duration(record.predicted_seconds)}" if record.measured_steps else ""
        parts += [
            "",
            f"step, {record.times:9}       {duration(step.seconds)}, of which {duration(step.exposed)}{share} wait for "
            f"communication{expected}",
            f"peak memory           {size(top.bytes)} at line {top.line} of {top.phase}: {_cut(top.code, 60)}",
            f"sent by each rank     {size(step.sent)} in {count(step.collectives, 'collective')}",
            *_section("time", _drawing(record)),
            *_section("collectives of a step, in bytes of unsharded buckets", _traffic(record)),
            *_section("largest tensors saved for backward", _saved(record)),
        ]
    return "\n".join([*parts, *_section("passes", _passes(record.stages))])


def _section(title: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _cut(text: str, width: int) -> str:
    text = text.partition("\n")[0]
    return text if len(text) <= width else text[: width - 1] + "…"


def _traffic(record: StepData) -> list[str]:
    rows = [(f"{phase} {kind}", *cells) for phase, kind, *cells in (row.cells for row in traffic(record))]
    return columns(rows) if rows else []


def _saved(record: StepData) -> list[str]:
    rows = [(f"{s.name} {s.type}", size(s.bytes), s.module) for s in largest_saved(record)]
    return columns(rows) if rows else []


def _passes(stages: Sequence[Stage]) -> list[str]:
    rows = []
    for s in stages:
        changes = s.changes
        signs = (
            f"{sign}{changes[name]}"
            for name, sign in (("added", "+"), ("removed", "-"), ("moved", "↕"))
            if changes[name]
        )
        what = "unchanged" if s.is_unchanged else " ".join(signs)
        took = duration(s.seconds) if s.seconds is not None else ""
        rows.append((f"{s.phase:8}  {s.name}", f"{len(s.lines)} lines", what, took))
    return columns(rows) if rows else []


# ---- the step in characters ----


def _drawing(record: StepData) -> list[str]:
    end = record.end
    if not end:
        return []
    split = round(WIDTH * record.phases[0].timeline.end / end)
    busy, idle = (_lane(record.phases, end, kind) for kind in (_computing, _waiting))
    gathers = _lane(record.phases, end, lambda phase: _links(phase, gathers=True))
    reduces = _lane(record.phases, end, lambda phase: _links(phase, gathers=False))
    names = f"{'forward':<{split}}" + ("backward" if len(record.phases) > 1 else "")
    lanes = [("", names), ("compute", busy), ("exposed", idle)]
    if gathers.strip() or reduces.strip():
        lanes += [("parameters", gathers), ("gradients", reduces)]
    lanes.append(("memory", _memory(record, end)))
    return [f"{name:15}{lane}".rstrip() for name, lane in lanes]


Spans = Iterable[tuple[float, float]]


def _computing(phase: Phase) -> Spans:
    starts = phase.timeline.starts
    return ((starts[i], starts[i + 1]) for i in range(len(phase.lines)) if not phase.buckets[i])


def _waiting(phase: Phase) -> Spans:
    starts = phase.timeline.starts
    return ((starts[s.wait], starts[s.wait + 1]) for s in phase.timeline.spans if not s.in_block)


def _links(phase: Phase, *, gathers: bool) -> Spans:
    return ((s.start, s.stop) for s in phase.timeline.spans if s.gathers == gathers)


def _lane(phases: Sequence[Phase], end: float, spans: Callable[[Phase], Spans]) -> str:
    """The part of each character's time that the spans fill."""
    filled = [0.0] * WIDTH
    for phase in phases:
        for start, stop in spans(phase):
            a, b = WIDTH * start / end, WIDTH * stop / end
            for k in range(int(a), min(WIDTH, int(b) + 1)):
                filled[k] += max(0.0, min(b, k + 1) - max(a, k))
    return "".join(_height(part) for part in filled)


def _memory(record: StepData, end: float) -> str:
    top = [0] * WIDTH
    for phase in record.phases:
        for row, start, stop in zip(phase.memory, phase.timeline.starts, phase.timeline.starts[1:], strict=False):
            for k in range(int(WIDTH * start / end), min(WIDTH - 1, int(WIDTH * stop / end)) + 1):
                top[k] = max(top[k], row.during)
    most = max(top)
    return "".join(_height(value / most) for value in top) if most else ""


def _height(part: float) -> str:
    return HEIGHTS[min(8, max(int(part > 0.01), round(8 * part)))]
