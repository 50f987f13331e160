"""The front of memory and time, which has the steps of a plan that no other beats in both, and a plan as HTML.

The page has its figures, the front as rows and as a drawing, what the memory is for, and the table of choices.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from shardtrace.options.values import needs


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


# ---- rows ----


@dataclass(frozen=True)
class Row:
    """A step on the front of memory and time: no other needs less of both. Bytes and seconds of one rank.

    ``strategy``, ``kept`` (buckets that stay gathered until backward), ``recomputing`` (blocks that recompute their
    activations, all of them or the cheap ones) and ``prefetch`` say what it does; ``options`` are those of ``fsdp``.
    """

    memory: int
    seconds: float
    exposed: float
    strategy: str
    kept: int
    recomputing: str
    prefetch: int
    options: Mapping[str, Any] = field(repr=False)

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of its columns."""
        times = gib(self.memory), ms(self.seconds), ms(self.exposed)
        return (*times, self.strategy, self.recomputing, str(self.prefetch))

    @property
    def words(self) -> str:
        """The strategy and the recomputation, as part of a sentence."""
        return f"{self.strategy}, recomputing {self.recomputing}"

    def __str__(self) -> str:
        return "".join(f"{cell + ' ':<{width}}" for cell, (_, width) in zip(self.cells, COLUMNS, strict=True)).rstrip()


COLUMNS = (("memory", 14), ("step", 14), ("exposed", 14), ("strategy", 28), ("recomputing", 20), ("prefetch", 8))
HEADINGS = "".join(f"{name:<{width}}" for name, width in COLUMNS).rstrip()


class Rows(list[Row]):
    """Rows, with :meth:`to_pandas`."""

    def to_pandas(self) -> Any:
        """A pandas.DataFrame. Raises ImportError if pandas is not installed."""
        needs("pandas", extra="notebook", what="to_pandas")
        import pandas

        return pandas.DataFrame([vars(row) for row in self])

    def to_csv(self) -> str:
        """The rows as comma-separated values, without the options."""
        text = io.StringIO()
        names = [f.name for f in fields(Row) if f.name != "options"]
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(vars, self))
        return text.getvalue()


def gib(nbytes: float) -> str:
    """Bytes with two digits, so that rows can be compared."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def ms(seconds: float) -> str:
    """Seconds with three digits or more, so that rows can be compared."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


# ---- the drawing ----

WIDTH, HEIGHT = 960, 320  # of the SVG
LEFT, RIGHT, TOP, BOTTOM = 76, 40, 22, 44  # margins
TICKS = 5
FAR = 2  # times what the rows span


def draw_front(rows: Sequence[Row], chosen: Row | None, budget: float) -> str:
    """The rows as an SVG: memory to the right, seconds upwards, ``chosen`` filled, the budget as a vertical line, or as
    an arrow if it is so far away that it would squeeze the rows."""
    memories: list[float] = [row.memory for row in rows] or [0.0, budget]
    far = budget - max(memories) > FAR * (max(memories) - min(memories)) > 0
    x = _Axis([*memories, *([] if far else [budget])], LEFT, WIDTH - RIGHT, {"GiB": 2**30, "MiB": 2**20})
    y = _Axis([row.seconds for row in rows], HEIGHT - BOTTOM, TOP, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    shapes = [
        *(
            f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{y.label(v)}</text>'
            for v in y.ticks
        ),
        *(f'<text x="{x(v):.1f}" y="{bottom + 18}" text-anchor="middle">{x.label(v)}</text>' for v in x.ticks),
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">memory of a rank</text>',
        f'<text x="{right}" y="{TOP - 8}" text-anchor="end">budget {gib(budget)} →</text>' if far else _line(x(budget)),
    ]
    corners = [(x(row.memory), y(row.seconds)) for row in rows]
    path = "".join(f"H{a:.1f}V{b:.1f}" for a, b in corners[1:])  # a step takes as long until the next one fits
    shapes.append(f'<path class="front" d="M{corners[0][0]:.1f},{corners[0][1]:.1f}{path}"/>' if corners else "")
    for row, (a, b) in zip(rows, corners, strict=True):
        css = "chosen" if row is chosen else "fits" if row.memory <= budget else "beyond"
        title = escape(f"{gib(row.memory)}, {ms(row.seconds)}: {row.words}")
        shapes.append(f'<circle class="{css}" cx="{a:.1f}" cy="{b:.1f}" r="5"><title>{title}</title></circle>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory against time">{"".join(shapes)}</svg>'


def _line(at: float) -> str:
    line = f'<line class="budget" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return f'{line}<text x="{at:.1f}" y="{TOP - 8}" text-anchor="middle">budget</text>'


class _Axis:
    """Maps values to pixels from ``start`` to ``stop``. ``units``: names and sizes, the largest first."""

    def __init__(self, values: Sequence[float], start: float, stop: float, units: Mapping[str, float]) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = 0.06 * (high - low) or 0.5 * high or 1.0
        self.low, self.high = (low - room if low else 0.0), high + room
        self.start, self.stop = start, stop
        self.unit, self.one = next((u for u in units.items() if high >= u[1]), list(units.items())[-1])
        least = (self.high - self.low) / self.one / TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = self.one * next(k * power for k in (1, 2, 5, 10) if k * power >= least)
        self.digits = max(4, 1 + math.ceil(math.log10(self.high / step)))
        self.ticks = [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def __call__(self, value: float) -> float:
        return self.start + (self.stop - self.start) * (value - self.low) / (self.high - self.low)

    def label(self, value: float) -> str:
        return f"{value / self.one:.{self.digits}g} {self.unit}"
