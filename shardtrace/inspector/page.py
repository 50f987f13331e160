"""The inspector as one self-contained HTML page, which is readable without its script too."""

from __future__ import annotations

from html import escape
from importlib import resources

from passes.proof.prove import Proof
from shardtrace.inspector.data import pack, page_data
from shardtrace.inspector.drawing import draw_timeline, legend
from shardtrace.inspector.module_tree import draw_modules
from shardtrace.inspector.rows import count, duration, size
from shardtrace.inspector.step_data import Stage, StepData
from shardtrace.inspector.summary import peak, totals
from shardtrace.inspector.tables import draw_tables

SCRIPTS = ("lines.js", "timeline.js", "page.js")  # one module: each uses the names of those before it


def render(record: StepData, proof: Proof | None = None) -> str:
    """The whole page."""
    css, script = _resource("page.css"), "".join(map(_resource, SCRIPTS))
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
        ("exposed communication", duration(step.exposed), step.share, "idle" if step.exposed else ""),
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
