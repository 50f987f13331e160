"""Python code as HTML with syntax colours. A template is coloured once for all of its lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from shardtrace.inspector.lines import Template

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
