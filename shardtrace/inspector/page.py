"""The inspector as one self-contained HTML page, which is readable without its script too.

Its tables are readable without style and script. The script's data are tables that refer to each other by index, with
strings escaped for HTML. A template of code is coloured once for all of its lines.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from passes.analysis.liveness import KINDS
from passes.proof.prove import Proof
from shardtrace.inspector.drawing import draw_timeline, legend
from shardtrace.inspector.lines import Function, Line, Mark, Source, Table, Template, Type
from shardtrace.inspector.step_data import Phase, Stage, StepData, count, duration, modules_by_name, size
from shardtrace.inspector.summary import draw_modules, largest_saved, peak, totals, traffic
from shardtrace.planner.training_plan import palette

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String, _TokenType

# ---- the script's data ----


def page_data(record: StepData) -> str:
    """The data of a record as JSON."""
    tables = _Tables()
    stages = [_stage(k, record.stages, tables) for k in range(len(record.stages))]
    data = {
        "stages": stages,
        "phases": [_phase(phase, record.stages) for phase in record.phases],
        **tables.data(modules_by_name(record.phases), record.stages),
        "kinds": KINDS,
        "times": record.times,
    }
    return json.dumps(data, separators=(",", ":"))


def pack(text: str) -> str:
    """The text, compressed, in characters that HTML does not give a meaning."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


class _Tables:
    """Lines and their parts, without duplicates."""

    def __init__(self) -> None:
        self.lines = Table[Line]()
        self.templates = Table[Template]()
        self.types = Table[Type]()
        self.names = Table[str]()
        self.sources = Table[Source]()
        self.functions = Table[Function]()
        self.modules = Table[str]()

    def place(self, line: Line) -> int:
        """The index of a line. Its parts are added too."""
        if line.function is None or line.function not in self.functions:
            for part in line.parts:
                self.place(part)
        if line.function is not None:
            self.functions.place(line.function)
        return self.lines.place(line)

    def data(self, module_of: Mapping[str, str], stages: Sequence[Stage]) -> dict[str, Any]:
        lines = [self._line(line) for line in self.lines]
        parts = {i: list(map(self.lines.place, line.fused)) for i, line in enumerate(self.lines) if line.fused}
        calls = {i: self.functions.place(f) for i, line in enumerate(self.lines) if (f := line.function) is not None}
        functions = [self._function(f, stages) for f in self.functions]
        owners = [self.modules.place(module_of[name]) if name in module_of else -1 for name in self.names]
        templates = [[highlight(t), t.outputs, [self._type(kind) for kind in t.types]] for t in self.templates]
        return {
            "lines": lines,
            "parts": parts,
            "calls": calls,
            "functions": functions,
            "templates": templates,
            "types": [[escape(kind.text), kind.bytes] for kind in self.types],
            "names": [escape(name) for name in self.names],
            "owners": owners,
            "modules": [escape(module) for module in self.modules],
            "sources": [[escape(s.file), s.line, escape(s.text)] for s in self.sources],
        }

    def _line(self, line: Line) -> list[int]:
        source = self.sources.place(line.source) if line.source is not None else -1
        return [self.templates.place(line.template), source, *map(self.names.place, line.names)]

    def _function(self, f: Function, stages: Sequence[Stage]) -> dict[str, Any]:
        """A function. ``module``, ``modules`` and ``seconds`` are those of :class:`Function`; ``stage`` is the index of
        the stage that has its lines, or of the first stage of the function that came of it; -1 if there is none."""
        at = [k for k, s in enumerate(stages) if s.phase in (f.name, f"{f.name}_forward")]
        return {
            "name": escape(f.name),
            "module": self.modules.place(f.module),
            "lines": list(map(self.lines.place, f.lines)),
            "modules": [self.modules.place(m) if m is not None else -1 for m in f.modules],
            "seconds": f.seconds,
            "stage": next((k for k in at if stages[k].lines == f.lines), min(at, default=-1)),
        }

    def _type(self, kind: Type | None) -> int:
        return self.types.place(kind) if kind is not None else -1


def _stage(k: int, stages: tuple[Stage, ...], tables: _Tables) -> dict[str, Any]:
    """A stage; an element of ``rows`` is 4 * line + mark."""
    stage = stages[k]
    before = stages[k - 1].lines if k else ()
    rows = [
        4 * tables.place((before if mark is Mark.REMOVED else stage.lines)[place]) + mark for mark, place in stage.rows
    ]
    return {"phase": stage.phase, "name": escape(stage.name), "rows": rows}


def _phase(phase: Phase, stages: tuple[Stage, ...]) -> dict[str, Any]:
    """A phase. ``starts`` are nanoseconds since the previous line. ``memory`` has a row, of the line and the bytes by
    kind, for each line that changes them."""
    starts = [round(seconds * 1e9) for seconds in phase.timeline.starts]
    memory: list[list[int]] = []
    for row in phase.memory:
        now = [getattr(row, kind) for kind in KINDS]
        if not memory or now != memory[-1][1:]:
            memory.append([row.line, *now])
    return {
        "name": phase.name,
        "stage": max(k for k, stage in enumerate(stages) if stage.phase == phase.name),
        "starts": [b - a for a, b in zip([0, *starts], starts, strict=False)],
        "memory": memory,
        "peak": phase.peak.line,
        "why": {i: escape(why) for i, why in enumerate(phase.why) if why},
        "buckets": {i: escape(bucket) for i, bucket in enumerate(phase.buckets) if bucket},
    }


# ---- tables ----


LEXER = PythonLexer(stripnl=False, ensurenl=False)
CLASSES = {Comment: "c", Keyword: "k", Number: "m", String: "s"}
QUALIFIER = re.compile(r"(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_]\w*\()")  # "torch.nn." in "torch.nn.Linear("


def highlight(template: Template) -> tuple[str, ...]:
    """The pieces of a template as HTML. Each piece closes its own tags, so that names fit between them."""
    code = template.fill("x" * (len(template.pieces) - 1))
    classes = [""] * len(code)
    for start, css, length in _spans(code):
        classes[start : start + length] = [css] * length
    pieces, at = [], 0
    for piece in template.pieces:
        pieces.append("".join(_tagged(piece, classes[at : at + len(piece)])))
        at += len(piece) + 1
    return tuple(pieces)


def _spans(code: str) -> Iterator[tuple[int, str, int]]:
    for start, token, text in LEXER.get_tokens_unprocessed(code):
        css = _class(token)
        if css:
            yield start, css, len(text)
        elif token in Name and code[start + len(text) : start + len(text) + 1] == "(":
            yield start, "f", len(text)  # a function that is called
    for match in QUALIFIER.finditer(code):
        yield match.start(), "q", len(match[0])


def _class(token: _TokenType) -> str:
    return next((css for kind, css in CLASSES.items() if token in kind), "")


def _tagged(text: str, classes: list[str]) -> Iterator[str]:
    start = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or classes[i] != classes[start]:
            run = escape(text[start:i])
            yield f"<i class={classes[start]}>{run}</i>" if classes[start] else run
            start = i


def draw_tables(record: StepData) -> str:
    """All tables of the page."""
    return "".join((_traffic(record), _buckets(record), _saved(record), _setup(record)))


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A table of HTML cells. A column whose title begins with "#" is aligned as numbers."""
    columns = [(name.removeprefix("#"), ' class="n"' if name.startswith("#") else "") for name in head]
    top = "".join(f"<th{css}>{name}</th>" for name, css in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{css}>{cell}</td>" for cell, (_, css) in zip(row, columns, strict=True)) + "</tr>"
        for row in rows
    )
    note = f"<p>{note}</p>" if note else ""
    return f"<figure><h3>{title}</h3>{note}<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></figure>"


def _traffic(record: StepData) -> str:
    rows = [row.cells for row in traffic(record)]
    if not rows:
        return ""
    note = (
        "Bytes of unsharded buckets, padding included; each rank sends and receives (N - 1) / N of them. "
        "P: all parameters; G: the gradients of trained parameters."
    )
    return table("Collectives of a step", ("phase", "kind", "#number", "#bytes", "#formula", ""), rows, note)


def _buckets(record: StepData) -> str:
    held: dict[str, list[int]] = {}
    for p in record.parameters:
        held.setdefault(p.bucket, [0, 0, 0])
        for k, n in enumerate((1, p.bytes, p.shard_bytes)):
            held[p.bucket][k] += n
    rows = [(escape(name), f"{n}", size(whole), size(shard)) for name, (n, whole, shard) in held.items()]
    return table("Buckets", ("bucket", "#parameters", "#unsharded", "#shards of a rank"), rows) if rows else ""


def _saved(record: StepData) -> str:
    rows = [
        (f"<code>{escape(s.name)}</code>", escape(s.type), size(s.bytes), escape(s.module))
        for s in largest_saved(record)
    ]
    return table("Largest tensors saved for backward", ("name", "type", "#bytes", "module"), rows) if rows else ""


def _setup(record: StepData) -> str:
    link, device = record.setup.cost.link, record.setup.cost.device
    rows = [
        ("link", f"{link.bandwidth / 1e9:g} GB/s, {duration(link.latency)} per collective"),
        ("matrix products", f"{device.flops / 1e12:g} TFLOP/s, {device.half_flops / 1e12:g} in 16 bits"),
        ("memory", f"{device.bandwidth / 1e9:g} GB/s"),
        ("each line", duration(device.overhead)),
    ]
    if record.setup.host_bytes:
        rows.append(("to and from host memory", f"{device.host_bandwidth / 1e9:g} GB/s"))
    note = "Predicted times rest on these rates; <code>shardtrace calibrate</code> measures them."
    return table("Cost model", ("", ""), rows, note)


# ---- the page ----


SCRIPTS = ("lines.js", "timeline.js", "page.js")  # one module: each uses the names of those before it


def render(record: StepData, proof: Proof | None = None) -> str:
    """The whole page."""
    css, script = palette(":root") + _resource("page.css"), "".join(map(_resource, SCRIPTS))
    title = escape(f"{record.setup.model} · shardtrace")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    more = _panel("modules", draw_modules(record)) + _panel("numbers", draw_tables(record))
    panels = f"{_timeline(record)}{_tabs()}{_passes(record)}{more}"
    data = f'<script type="text/plain" id="data">{pack(page_data(record))}</script>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{css}</style></head>\n'
        f"<body>{_header(record, proof)}{_cards(record)}{panels}{_help()}{data}"
        f'<script type="module">{script}</script></body></html>\n'
    )


def embed(record: StepData, proof: Proof | None) -> str:
    """The page in a frame, for a notebook. Viewers without frames (GitHub) show only the numbers."""
    frame = "border:1px solid #8884;border-radius:8px;width:100%;height:860px"
    return (
        f"<style>.shardtrace-plain{{display:none}}</style>"
        f'<iframe style="{frame}" srcdoc="{escape(render(record, proof))}" title="shardtrace inspector"></iframe>'
        f'<div class="shardtrace-plain">{_heading(record)}{draw_tables(record)}</div>'
    )


def _resource(name: str) -> str:
    return resources.files("shardtrace.inspector").joinpath(name).read_text(encoding="utf-8")


# ---- the head of the page ----


def _heading(record: StepData) -> str:
    setup = record.setup
    rates = f"<p>{escape(setup.rates)}</p>" if record.phases else ""
    return f"<h1>{escape(setup.model)}</h1><p>{escape(setup.description)}</p>{rates}"


PROVEN = (
    "<p>Communication is erased by the law of each collective. What is left of the final forward and backward has the "
    "same outputs, gradients and writes as what Thunder makes of the recorded model without shardtrace's passes "
    "(docs/proof.md).</p>"
)


def _header(record: StepData, proof: Proof | None) -> str:
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in record.notes)
    if proof is not None:
        badge, _, why = str(proof).partition("\n")
        inside = f"<pre>{escape(why)}</pre>" if why else ""
        notes += (
            f'<details class="note proof {proof.verdict}"><summary>{escape(badge)}</summary>{PROVEN}{inside}</details>'
        )
    keys = '<button class="quiet" id="keys">keys <kbd>?</kbd></button>'
    return f"<header><div>{_heading(record)}</div>{keys}</header>{notes}"


def _cards(record: StepData) -> str:
    top = peak(record)
    if top is None:
        return ""
    step = totals(record)
    beside = count(sum(len(p.lines) for p in record.phases), "line")
    if record.measured_steps:
        beside = f"{duration(record.predicted_seconds)} predicted"
    where = f'<a href="#" data-at="{top.phase}:{top.line}">line {top.line} of {top.phase}</a>'
    cards = [
        (f"step, {record.times}", duration(step.seconds), beside, ""),
        ("exposed communication", duration(step.exposed), step.share, "idle" if step.waits else ""),
        ("peak memory", size(top.bytes), where, ""),
        ("sent by each rank", size(step.sent), count(step.collectives, "collective"), ""),
    ]
    drawn = "".join(
        f'<div class="card {css}"><dt>{name}</dt><dd>{value} <small>{note}</small></dd></div>'
        for name, value, note, css in cards
    )
    return f'<dl class="cards">{drawn}</dl>'


def _timeline(record: StepData) -> str:
    drawn = draw_timeline(record)
    if not drawn:
        return ""
    zoom = (
        '<span class="zoom" role="group" aria-label="zoom">'
        '<button data-zoom="0.5" aria-label="zoom out">&minus;</button>'
        '<button data-zoom="0" aria-label="whole step">fit</button>'
        '<button data-zoom="2" aria-label="zoom in">+</button>'
        "</span>"
    )
    return (
        f'<section id="timeline" tabindex="0" aria-label="timeline">{drawn}</section>'
        f'<div class="legend"><div>{legend(record)}</div>{zoom}</div>'
    )


def _tabs() -> str:
    tabs = "".join(
        f'<button role="tab" id="tab-{name}" aria-controls="{name}" aria-selected="{selected}">'
        f"{name.capitalize()}</button>"
        for name, selected in (("passes", "true"), ("modules", "false"), ("numbers", "false"))
    )
    return f'<nav role="tablist">{tabs}</nav>'


# ---- passes ----


def _passes(record: StepData) -> str:
    phases = "".join(_stage_list(record, phase) for phase in dict.fromkeys(stage.phase for stage in record.stages))
    toolbar = (
        '<div class="toolbar"><h2 id="stage"></h2>'
        '<span class="modes" role="group">'
        '<button data-mode="code">code</button><button data-mode="diff">diff</button></span>'
        '<button id="dels" title="show the lines that free values">del</button>'
        '<input id="search" type="search" placeholder="search" aria-label="search the lines" spellcheck="false">'
        '<output id="hits"></output></div>'
    )
    view = '<div class="view" id="view" tabindex="0" role="listbox" aria-label="lines"><div id="rows"></div></div>'
    details = '<aside id="details" aria-live="polite"></aside>'
    return (
        f'<section class="panel open" id="passes" role="tabpanel" aria-labelledby="tab-passes">'
        f'<div class="stages" id="stages" role="listbox" tabindex="0" aria-label="passes">{phases}</div>'
        f'<div class="code">{toolbar}{view}</div>{details}</section>'
    )


def _stage_list(record: StepData, phase: str) -> str:
    stages = [(k, stage) for k, stage in enumerate(record.stages) if stage.phase == phase]
    if not stages:
        return ""
    if phase not in ("forward", "backward"):  # the checks of a call's arguments, and the functions of blocks
        inside = "".join(_stage_entry(k, s) for k, s in stages)
        return f"<details><summary><h3>{escape(phase)}</h3></summary>{inside}</details>"
    shown = "".join(_stage_entry(k, s) for k, s in stages if not s.is_unchanged)
    idle = [(k, s) for k, s in stages if s.is_unchanged]
    if idle:
        inside = "".join(_stage_entry(k, s) for k, s in idle)
        number = f"{len(idle)} pass{'es' if len(idle) > 1 else ''}"
        shown += f"<details><summary>{number} that changed nothing</summary>{inside}</details>"
    return f"<h3>{phase}</h3>{shown}"


def _stage_entry(k: int, stage: Stage) -> str:
    ours = stage.name.removeprefix("shardtrace: ") if stage.is_ours else stage.name
    changes = stage.changes
    signs = "".join(
        f'<span class="{name}">{sign}{changes[name]:,}</span>'
        for name, sign in (("added", "+"), ("removed", "&minus;"), ("moved", "↕"))
        if changes[name] and (name != "added" or len(stage.lines) != changes[name])
    )
    took = f"<span>{duration(stage.seconds)}</span>" if stage.seconds is not None else ""
    css = "stage ours" if stage.is_ours else "stage"
    return (
        f'<div role="option" class="{css}" data-stage="{k}"><b>{escape(ours)}</b>'
        f"<small><span>{count(len(stage.lines), 'line')}</span>{signs}{took}</small></div>"
    )


def _panel(name: str, body: str) -> str:
    return f'<section class="panel" id="{name}" role="tabpanel" aria-labelledby="tab-{name}">{body}</section>'


# ---- help ----

KEYS = (
    ("↑ ↓", "in the list: previous or next pass; in the code: previous or next line"),
    ("[ ]", "previous or next pass"),
    ("d", "code or diff"),
    ("o", "open or close the lines of a block's function, or of a fusion"),
    ("/", "search; Enter and Shift+Enter: next and previous match"),
    ("p c", "go to the line's first producer or consumer"),
    ("+ - 0", "zoom the timeline, or show the whole step"),
    ("← →", "in the timeline: previous or next line"),
    ("1 2 3", "passes, modules, numbers"),
    ("Esc", "clear the selection"),
)


def _help() -> str:
    rows = "".join(f"<tr><td><kbd>{escape(keys)}</kbd></td><td>{escape(what)}</td></tr>" for keys, what in KEYS)
    close = '<form method="dialog"><button>close</button></form>'
    return f'<dialog id="help"><h2>Keys</h2><table>{rows}</table>{close}</dialog>'
