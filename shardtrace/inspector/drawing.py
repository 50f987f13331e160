"""The timeline as HTML and SVG: lanes on a common time axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from shardtrace.inspector.curve import STACK, WIDTH, Lane, draw_memory, place
from shardtrace.inspector.modules import Name
from shardtrace.inspector.rows import duration, size
from shardtrace.inspector.step_data import Phase, StepData
from shardtrace.inspector.timeline import HOST, stacked


class Bar(NamedTuple):
    """A bar from ``start`` to ``stop`` seconds. ``phase`` and ``line`` are its place in the traces."""

    start: float
    stop: float
    label: str
    css: str
    title: str
    phase: str
    line: int


def draw_timeline(record: StepData) -> str:
    """Lanes for compute, each link, gathered buckets and memory; empty if nothing runs."""
    end = record.end
    if not end:
        return ""
    lanes = [_phases(record, end), _axis(record, end), _bars("compute", "compute", [list(_compute(record))], end)]
    for link, name in enumerate(_links(record)):
        lanes.append(_bars(name, "network", stacked(_collectives(record, link)), end))
    held = stacked(_held(record))
    if held:
        lanes.append(_bars("gathered", "held", held + [[]] * (3 - len(held)), end))
    lanes.append(draw_memory(record, end))
    names = "".join(f'<div class="lane {lane.css}">{escape(lane.name)}</div>' for lane in lanes)
    return (
        f'<div class="gutter">{names}</div>'
        f'<div class="scroller"><div class="track" data-end="{end!r}">{"".join(map(str, lanes))}</div></div>'
    )


def _links(record: StepData) -> list[str]:
    links = record.phases[-1].timeline.links
    networks = len(links) - links.count(HOST)
    return [
        "to host" if name == HOST else "network" if networks == 1 else f"network {i}" for i, name in enumerate(links)
    ]


def legend(record: StepData) -> str:
    """The legend of the lanes, then that of the memory."""
    travel = "in flight, from issue to wait" if record.measured_steps else "on the wire"
    lanes = (
        ("compute", "compute"),
        ("idle", "exposed: compute waits for communication"),
        ("gather", f"parameters {travel}"),
        ("reduce", f"gradients {travel}"),
    )
    memory = [*((f"m-{kind}", label) for kind, label in STACK), ("during", "needed while a line runs")]
    return "".join(
        "<ul>" + "".join(f'<li><span class="key {css}"></span>{escape(label)}</li>' for css, label in entries) + "</ul>"
        for entries in (lanes, memory)
    )


# ---- bars ----


def block_of(module: Name | None) -> str:
    """The repeated block that contains a module ("h.3" for "h.3.attn.qkv"), else the module itself."""
    parts = (module or "").split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: at + 1])


def _compute(record: StepData) -> Iterator[Bar]:
    """Compute by block, and its idle times."""
    for phase in record.phases:
        starts, idle = phase.timeline.starts, {s.wait: s for s in phase.timeline.spans if s.exposed and not s.in_block}
        busy = [i for i in range(len(phase.lines)) if starts[i + 1] > starts[i]]
        block, pieces = "", list[tuple[int, str | None]]()  # None where compute is idle
        for i in busy:
            block = block_of(phase.modules[i]) if phase.modules[i] is not None else block
            pieces.append((i, None if i in idle else block))
        for name, run in groupby(pieces, key=lambda piece: piece[1]):
            first, *rest = [i for i, _ in run]
            for i in [first, *rest] if name is None else []:
                title = f"exposed: {duration(idle[i].exposed)} for {idle[i].kind} of {idle[i].bucket}"
                yield Bar(starts[i], starts[i + 1], "", css="idle", title=title, phase=phase.name, line=i)
            if name is not None:
                stop = starts[(rest or [first])[-1] + 1]
                label = name or record.setup.model
                title = f"{label}: {duration(stop - starts[first])}"
                yield Bar(starts[first], stop, label, css="compute", title=title, phase=phase.name, line=first)


def _collectives(record: StepData, link: int) -> Iterator[Bar]:
    for phase in record.phases:
        for s in phase.timeline.spans:
            if s.link == link:
                exposed = f", {duration(s.exposed)} of it exposed" if s.exposed else ""
                within = "within" if record.measured_steps else "in"
                title = f"{s.kind} of {s.bucket}: {size(s.bytes)} {within} {duration(s.stop - s.start)}{exposed}"
                css = "gather" if s.gathers else "reduce"
                yield Bar(s.start, s.stop, s.bucket, css=css, title=title, phase=phase.name, line=s.issue)


def _held(record: StepData) -> Iterator[Bar]:
    """The time for which each bucket is unsharded: from the issue of its gather until its last value is freed."""
    freed = [_freed(phase) for phase in record.phases]
    for k, phase in enumerate(record.phases):
        last: dict[int, float] = {}  # by line of the wait
        for b in phase.buffers:
            if b.kind == "unsharded":
                # a value saved for backward is freed there
                stop = max(times[b.name] for times in freed[k:] if b.name in times)
                last[b.born] = max(last.get(b.born, 0.0), stop)
        starts = phase.timeline.starts
        for s in phase.timeline.spans:
            if s.gathers:
                stop = last.get(s.wait, starts[s.wait + 1])
                title = f"{s.bucket}: issued, waited for after {duration(starts[s.wait + 1] - starts[s.issue])}, "
                title += f"freed after {duration(stop - starts[s.issue])}"
                yield Bar(starts[s.issue], stop, "", css="gather", title=title, phase=phase.name, line=s.wait)


def _freed(phase: Phase) -> dict[str, float]:
    """The time at which each value's memory is freed, at the latest the end of the phase."""
    clock = phase.timeline
    return {b.name: clock.end if b.freed is None else clock.starts[b.freed + 1] for b in phase.buffers}


# ---- lanes ----


def _bars(name: str, css: str, rows: Sequence[Sequence[Bar]], end: float) -> Lane:
    height = 100 / max(1, len(rows))
    shapes = "".join(
        f'<rect class="{bar.css}" x="{place(bar.start, end)}" y="{k * height:.4g}" '
        f'width="{max(1, place(bar.stop, end) - place(bar.start, end))}" height="{height * 0.9:.4g}" '
        f'data-at="{bar.phase}:{bar.line}"><title>{escape(bar.title)}</title></rect>'
        for k, row in enumerate(rows)
        for bar in row
    )
    labels = "".join(_labels(rows[0], end)) if len(rows) == 1 else ""
    svg = f'<svg viewBox="0 0 {WIDTH} 100" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'
    return Lane(name, css, svg + labels)


def _labels(bars: Iterable[Bar], end: float) -> Iterator[str]:
    for bar in bars:
        if bar.label:
            left, width = 100 * bar.start / end, 100 * (bar.stop - bar.start) / end
            where = f"left:{left:.3f}%;width:{width:.3f}%"
            yield f'<span class="label" style="{where}"><span>{escape(bar.label)}</span></span>'


def _phases(record: StepData, end: float) -> Lane:
    spans = []
    for p in record.phases:
        start, seconds = p.timeline.starts[0], p.timeline.end - p.timeline.starts[0]
        where = f"left:{100 * start / end:.3f}%;width:{100 * seconds / end:.3f}%"
        spans.append(f'<span style="{where}"><b>{p.name} <small>{duration(seconds)}</small></b></span>')
    return Lane("", "phases", "".join(spans))


def _axis(record: StepData, end: float) -> Lane:
    """About eight round times; the script draws more after zooming in."""
    return Lane(f"{record.times} time", "axis", "".join(_ticks(end)))


def _ticks(end: float) -> Iterator[str]:
    step = round_step(end / 8)
    for k in range(int(end / step) + 1):
        yield f'<span style="left:{100 * k * step / end:.3f}%">{duration(k * step)}</span>'


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** len(str(int(least))) if least >= 1 else 1.0
    while power / 10 >= least:
        power /= 10
    return next(power * factor for factor in (0.2, 0.5, 1.0) if power * factor >= least)
