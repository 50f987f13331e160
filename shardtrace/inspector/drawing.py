"""The timeline drawn: as HTML and SVG, with the curve of memory, and in the Trace Event Format."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

from passes.analysis.liveness import KINDS, Kind
from shardtrace.inspector.lines import Name
from shardtrace.inspector.step_data import Phase, StepData, duration, size
from shardtrace.inspector.summary import peak
from shardtrace.inspector.timeline import HOST, Span, stacked

# ---- lanes ----


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


RANGE = ".."  # in the label of a bucket, between its first and its last module


def block_of(module: Name | None) -> str:
    """The repeated block that contains a module ("h.3" for "h.3.attn.qkv"), else the module itself."""
    parts = (module or "").split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: at + 1])


def _short_names(record: StepData) -> dict[str, str]:
    """The names that bars show, for those of blocks and of buckets: "layers.5" for "model.layers.5"."""
    modules = {block_of(m) for p in record.phases for m in p.modules if m}
    buckets = {s.bucket for p in record.phases for s in p.timeline.spans}
    short = shortened({*modules, *(part for bucket in buckets for part in bucket.split(RANGE))})
    return short | {bucket: RANGE.join(short[part] for part in bucket.split(RANGE)) for bucket in buckets}


def shortened(names: Collection[Name]) -> dict[Name, Name]:
    """The shortest end of each name that no other one has. A number stays with the name of its list."""
    ends = {name: [*_ends(name)] for name in names}
    number = Counter(end for found in ends.values() for end in found)
    return {name: next((end for end in found if number[end] == 1), name) for name, found in ends.items()}


def _ends(name: Name) -> Iterator[Name]:
    parts = name.split(".")
    return (".".join(parts[k:]) for k in reversed(range(len(parts))) if not parts[k].isdigit())


def _compute(record: StepData) -> Iterator[Bar]:
    """Compute by block, and its idle times."""
    short = _short_names(record)
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
                shown = short.get(label, label)
                yield Bar(starts[first], stop, shown, css="compute", title=title, phase=phase.name, line=first)


def _collectives(record: StepData, link: int) -> Iterator[Bar]:
    short = _short_names(record)
    for phase in record.phases:
        for s in phase.timeline.spans:
            if s.link == link:
                exposed = f", {duration(s.exposed)} of it exposed" if s.exposed else ""
                within = "within" if record.measured_steps else "in"
                title = f"{s.kind} of {s.bucket}: {size(s.bytes)} {within} {duration(s.stop - s.start)}{exposed}"
                css = "gather" if s.gathers else "reduce"
                yield Bar(s.start, s.stop, short[s.bucket], css=css, title=title, phase=phase.name, line=s.issue)


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
            front, _, last = bar.label.rpartition(".")
            text = f"<i>{escape(front)}.</i>{last}" if last.isdigit() and front else escape(bar.label)
            yield f'<span class="label" style="{where}"><span>{text}</span></span>'


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


# ---- the curve of memory ----


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


# ---- the Trace Event Format ----


COMPUTE = 0  # thread ids: compute, then one per link, and another row of links wherever collectives overlap
Event = dict[str, Any]


def render(record: StepData) -> str:
    """JSON with an event for each line of compute and each collective, and a counter of the memory by kind. Times are
    microseconds, memory is bytes."""
    setup = record.setup
    name = f"{setup.model}, {setup.strategy} over {setup.world_size} ranks" if setup.strategy else setup.model
    events = [_metadata("process_name", f"{name}, {record.times}"), _metadata("thread_name", "compute", COMPUTE)]
    links = record.phases[-1].timeline.links if record.phases else []
    for phase in record.phases:
        events += [*_lines(phase), *_memory(phase)]
        for k, link in enumerate(links):
            for row, spans in enumerate(stacked(s for s in phase.timeline.spans if s.link == k)):
                thread = 1 + k + row * len(links)
                events.append(_metadata("thread_name", f"link, {link}", thread))
                events += (_collective(phase, s, thread) for s in spans)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _metadata(kind: str, name: str, thread: int = COMPUTE) -> Event:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}


def _span(name: str, kind: str, thread: int, start: float, stop: float, about: Event) -> Event:
    times = {"ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {"ph": "X", "pid": 0, "tid": thread, "name": name, "cat": kind, **times, "args": about}


def _lines(phase: Phase) -> Iterator[Event]:
    starts = phase.timeline.starts
    for i, line in enumerate(phase.lines):
        if starts[i + 1] > starts[i]:
            if phase.buckets[i]:
                name, kind = f"wait for {phase.buckets[i]}", "exposed"
            else:
                name, kind = line.code.partition(" = ")[2].partition("(")[0] or line.code, phase.name
            about: Event = {"line": i, "code": line.code, "module": phase.modules[i] or "", "why": phase.why[i]}
            yield _span(name, kind, COMPUTE, starts[i], starts[i + 1], about)


def _collective(phase: Phase, s: Span, thread: int) -> Event:
    why = {"why": phase.why[s.issue], "waited": phase.why[s.wait]}
    about: Event = {"bytes": s.bytes, "exposed_us": s.exposed * 1e6, **why}
    return _span(f"{s.kind} {s.bucket}", s.kind, thread, s.start, s.stop, about)


def _memory(phase: Phase) -> Iterator[Event]:
    before = None
    for row, start in zip(phase.memory, phase.timeline.starts, strict=False):
        now = {kind: getattr(row, kind) for kind in KINDS}
        if now != before:
            yield {"ph": "C", "pid": 0, "name": "memory", "ts": start * 1e6, "args": now}
        before = now
