"""A plan as HTML: its figures, the front of memory and time, what the memory is for, and the table of choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

from shardtrace.options.front import COLUMNS, Row, draw_front, gib


class Shown(NamedTuple):
    """The contents of a plan's page. ``cards``: figures by name, each with a remark; ``code``: how to use the plan."""

    title: str
    setting: str
    cards: Mapping[str, tuple[str, str]]
    memory: Mapping[str, int]
    budget: float
    rows: Sequence[Row]
    chosen: Row | None
    code: str
    notes: Sequence[str]


def embed(shown: Shown) -> str:
    """The plan as a part of a notebook."""
    css = resources.files("shardtrace.options").joinpath("plan_page.css").read_text(encoding="utf-8")
    notes = "".join(f"<p>{escape(note)}</p>" for note in shown.notes)
    return (
        f'<style>{css}</style><div class="shardtrace-plan"><h2>{escape(shown.title)}</h2><p>{escape(shown.setting)}</p>'
        f"{_cards(shown)}{notes}<h3>Options</h3><pre>{escape(shown.code)}</pre>"
        f"<h3>Memory of a rank at the peak</h3>{_memory(shown)}"
        f"<h3>Memory against time</h3>{draw_front(shown.rows, shown.chosen, shown.budget)}{_table(shown)}</div>"
    )


def render(shown: Shown) -> str:
    """The plan as a page of its own."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(shown.title)}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</title></head><body>{embed(shown)}</body></html>\n'


def _cards(shown: Shown) -> str:
    cards = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)} <small>{escape(remark)}</small></dd></div>"
        for name, (value, remark) in shown.cards.items()
    )
    return f"<dl>{''.join(cards)}</dl>"


def _memory(shown: Shown) -> str:
    """A bar as long as the budget, and its parts by kind. A plan that does not fit has a longer one."""
    whole = max(shown.budget, sum(shown.memory.values()))
    kinds = sorted(shown.memory.items(), key=lambda item: -item[1])
    bar = "".join(
        f'<span class="k{i % 8}" style="width:{100 * nbytes / whole:.2f}%" title="{escape(kind)} {gib(nbytes)}"></span>'
        for i, (kind, nbytes) in enumerate(kinds)
    )
    key = "".join(
        f'<li><span class="k{i % 8}"></span>{escape(kind.replace("_", " "))} {gib(nbytes)}</li>'
        for i, (kind, nbytes) in enumerate(kinds)
    )
    return f'<div class="bar">{bar}</div><ul>{key}</ul>'


def _table(shown: Shown) -> str:
    rows = "".join(
        f'<tr class="chosen">{cells}</tr>' if row is shown.chosen else f"<tr>{cells}</tr>"
        for row in shown.rows
        for cells in [_cells("td", row.cells)]
    )
    return f"<table><tr>{_cells('th', (name for name, _ in COLUMNS))}</tr>{rows}</table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
