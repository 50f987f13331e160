"""The inspector as one HTML page that needs nothing else. It can be read without its script, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from shardtrace.inspector.data import page_data
from shardtrace.inspector.drawing import draw_timeline, legend
from shardtrace.inspector.moduletree import draw_modules
from shardtrace.inspector.record import Record, Stage
from shardtrace.inspector.summary import exposed, largest_saved, peak, seconds, sent_bytes, traffic
from shardtrace.inspector.units import count, duration, size


def render(record: Record) -> str:
    """The whole page."""
    css, script = _resource("page.css"), _resource("page.js")
    title = escape(f"{record.setup.model} · shardtrace")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    panels = f"{_timeline(record)}{_tabs()}{_passes(record)}{_modules(record)}{_numbers(record)}"
    data = f'<script type="application/json" id="data">{page_data(record)}</script>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{css}</style></head>\n'
        f"<body>{_header(record)}{_cards(record)}{panels}{_help()}{data}<script>{script}</script></body></html>\n"
    )


def embed(record: Record) -> str:
    """For a notebook: the page in a frame of its own, and the numbers alone where frames are not shown (GitHub)."""
    frame = "border:1px solid #8884;border-radius:8px;width:100%;height:860px"
    return (
        f"<style>.shardtrace-plain{{display:none}}</style>"
        f'<iframe style="{frame}" srcdoc="{escape(render(record))}" title="shardtrace inspector"></iframe>'
        f'<div class="shardtrace-plain">{_heading(record)}{_tables(record)}</div>'
    )


def _resource(name: str) -> str:
    return resources.files("shardtrace.inspector").joinpath(name).read_text(encoding="utf-8")


# ---- the head of the page ----


def describe(record: Record) -> str:
    """The setup in one line."""
    s = record.setup
    if not s.strategy:
        return "not sharded by shardtrace"
    limit = f"prefetch {s.prefetch}"
    if s.max_inflight_bytes is not None:
        limit += f", at most {size(s.max_inflight_bytes)} in flight"
    return f"{s.strategy} over {count(s.world_size, 'rank')}, seen from rank {s.rank} · buckets by {s.bucketing} · {limit}"


def _heading(record: Record) -> str:
    return f"<h1>{escape(record.setup.model)}</h1><p>{escape(describe(record))}</p>"


def _header(record: Record) -> str:
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in record.notes)
    keys = '<button class="quiet" id="keys">keys <kbd>?</kbd></button>'
    return f"<header><div>{_heading(record)}</div>{keys}</header>{notes}"


def _cards(record: Record) -> str:
    top = peak(record)
    if top is None:
        return ""
    total, idle = seconds(record), exposed(record)
    number = sum(len(p.collectives) for p in record.phases)
    share = f"{100 * idle / total:.0f} % of the step" if total else ""
    cards = [
        ("step, predicted", duration(total), f"{count(sum(len(p.lines) for p in record.phases), 'line')}", ""),
        ("exposed communication", duration(idle), share, "idle" if idle else ""),
        ("peak memory", size(top.bytes), f"line {top.line} of {top.phase}", ""),
        ("sent by each rank", size(sent_bytes(record)), count(number, "collective"), ""),
    ]
    drawn = "".join(
        f'<div class="card {css}"><dt>{name}</dt><dd>{value} <small>{note}</small></dd></div>'
        for name, value, note, css in cards
    )
    return f'<dl class="cards">{drawn}</dl>'


def _timeline(record: Record) -> str:
    drawn = draw_timeline(record)
    if not drawn:
        return ""
    zoom = (
        '<span class="zoom" role="group" aria-label="zoom"><button data-zoom="0.5" aria-label="zoom out">−</button>'
        '<button data-zoom="0" aria-label="whole step">fit</button><button data-zoom="2" aria-label="zoom in">+</button>'
        "</span>"
    )
    return (
        f'<section id="timeline" tabindex="0" aria-label="timeline">{drawn}</section>'
        f'<div class="legend"><ul>{legend()}</ul>{zoom}</div>'
    )


def _tabs() -> str:
    tabs = "".join(
        f'<button role="tab" id="tab-{name}" aria-controls="{name}" aria-selected="{selected}">{name.capitalize()}</button>'
        for name, selected in (("passes", "true"), ("modules", "false"), ("numbers", "false"))
    )
    return f'<nav role="tablist">{tabs}</nav>'


# ---- passes ----


def _passes(record: Record) -> str:
    phases = "".join(_stage_list(record, phase) for phase in ("forward", "backward"))
    toolbar = (
        '<div class="toolbar"><h2 id="stage"></h2>'
        '<span class="modes" role="group"><button data-mode="code">code</button><button data-mode="diff">diff</button></span>'
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


def _stage_list(record: Record, phase: str) -> str:
    stages = [(k, stage) for k, stage in enumerate(record.stages) if stage.phase == phase]
    if not stages:
        return ""
    shown = "".join(_stage_entry(k, s) for k, s in stages if not s.is_unchanged)
    idle = [(k, s) for k, s in stages if s.is_unchanged]
    if idle:
        inside = "".join(_stage_entry(k, s) for k, s in idle)
        shown += f"<details><summary>{count(len(idle), 'pass').replace('passs', 'passes')} that changed nothing</summary>{inside}</details>"
    return f"<h3>{phase}</h3>{shown}"


def _stage_entry(k: int, stage: Stage) -> str:
    ours = stage.name.removeprefix("shardtrace: ") if stage.is_ours else stage.name
    changes = stage.changes
    signs = "".join(
        f'<span class="{name}">{sign}{changes[name]:,}</span>'
        for name, sign in (("added", "+"), ("removed", "−"), ("moved", "↕"))
        if changes[name] and (name != "added" or len(stage.lines) != changes[name])
    )
    took = f"<span>{duration(stage.seconds)}</span>" if stage.seconds is not None else ""
    css = "ours" if stage.is_ours else ""
    return (
        f'<div role="option" class="stage {css}" data-stage="{k}"><b>{escape(ours)}</b>'
        f"<small><span>{count(len(stage.lines), 'line')}</span>{signs}{took}</small></div>"
    )


# ---- modules, numbers ----


def _modules(record: Record) -> str:
    return (
        '<section class="panel" id="modules" role="tabpanel" aria-labelledby="tab-modules">'
        f"{draw_modules(record)}</section>"
    )


def _numbers(record: Record) -> str:
    return f'<section class="panel" id="numbers" role="tabpanel" aria-labelledby="tab-numbers">{_tables(record)}</section>'


def _tables(record: Record) -> str:
    return "".join((_traffic(record), _buckets(record), _saved(record), _setup(record)))


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A table of cells that are HTML already; the columns after the first are numbers if they begin with "#"."""
    columns = [(name.removeprefix("#"), ' class="n"' if name.startswith("#") else "") for name in head]
    top = "".join(f"<th{css}>{name}</th>" for name, css in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{css}>{cell}</td>" for cell, (_, css) in zip(row, columns, strict=True)) + "</tr>"
        for row in rows
    )
    note = f"<p>{note}</p>" if note else ""
    return f"<figure><h3>{title}</h3>{note}<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></figure>"


def _traffic(record: Record) -> str:
    rows = [
        (t.phase, t.kind, f"{t.count}", size(t.bytes), f"{t.formula} = {size(t.expected)}", "✓" if t.agrees else "fewer")
        for t in traffic(record)
    ]
    if not rows:
        return ""
    note = (
        "Bytes of unsharded buckets, padding included; each rank sends and receives (N − 1) / N of them. "
        "P: all parameters, G: those that are trained."
    )
    return table("Collectives of a step", ("phase", "kind", "#number", "#bytes", "#formula", ""), rows, note)


def _buckets(record: Record) -> str:
    held: dict[str, list[int]] = {}
    for p in record.parameters:
        held.setdefault(p.bucket, [0, 0, 0])
        for k, n in enumerate((1, p.bytes, p.shard_bytes)):
            held[p.bucket][k] += n
    rows = [(escape(name), f"{n}", size(whole), size(shard)) for name, (n, whole, shard) in held.items()]
    return table("Buckets", ("bucket", "#parameters", "#gathered", "#shards of a rank"), rows) if rows else ""


def _saved(record: Record) -> str:
    rows = [
        (f"<code>{escape(s.name)}</code>", escape(s.type), size(s.bytes), escape(s.module)) for s in largest_saved(record)
    ]
    return table("Largest tensors saved for backward", ("name", "type", "#bytes", "module"), rows) if rows else ""


def _setup(record: Record) -> str:
    link, device = record.setup.cost.link, record.setup.cost.device
    rows = [
        ("link", f"{link.bandwidth / 1e9:g} GB/s, {duration(link.latency)} for each collective"),
        ("matrix products", f"{device.flops / 1e12:g} TFLOP/s, {device.half_flops / 1e12:g} in 16 bits"),
        ("memory", f"{device.bandwidth / 1e9:g} GB/s"),
        ("each line", duration(device.overhead)),
    ]
    note = "What predicted times rest on; <code>python -m shardtrace.calibrate</code> measures them."
    return table("Cost model", ("", ""), rows, note)


# ---- help ----

KEYS = (
    ("↑ ↓", "in the list: another pass; in the code: another line"),
    ("[ ]", "the pass before, the pass after"),
    ("d", "code or diff"),
    ("/", "search; Enter and Shift+Enter go through what is found"),
    ("p c", "from a line to the first that it is made from, or that uses it"),
    ("+ − 0", "zoom the timeline, or show the whole step"),
    ("← →", "in the timeline: from one line to the next"),
    ("1 2 3", "passes, modules, numbers"),
    ("Esc", "let go of the selected line"),
)


def _help() -> str:
    rows = "".join(f"<tr><td><kbd>{escape(keys)}</kbd></td><td>{escape(what)}</td></tr>" for keys, what in KEYS)
    return f'<dialog id="help"><h2>Keys</h2><table>{rows}</table><form method="dialog"><button>close</button></form></dialog>'
