"""The numbers of a step as HTML tables, readable without style and script, and its code with syntax colours.

A template of code is coloured once for all of its lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardtrace.inspector.lines import Template
from shardtrace.inspector.rows import duration, size
from shardtrace.inspector.step_data import StepData
from shardtrace.inspector.summary import largest_saved, traffic

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String, _TokenType

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
