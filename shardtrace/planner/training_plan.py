"""A plan: the options of ``fsdp`` that :func:`shardtrace.plan` has chosen, and what they are predicted to cost.

The front of memory and time has the steps of a plan that no other beats in both. A plan's page has its figures, the
front as rows and as a drawing, what the memory is for, and the table of choices.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from passes.plan import CostModel
from shardtrace.options.options import DEFAULTS
from shardtrace.options.policies import (
    HOMES,
    ContextParallel,
    TensorParallel,
    flat,
    grouped,
    needs,
    parallel_dims,
)

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

# ---- the front of memory and time ----


class Shown(NamedTuple):
    """The contents of a plan's page. ``answer``: the plan in a sentence; ``cards``: figures by name, each with a
    remark; ``code``: how to use the plan."""

    title: str
    answer: str
    cards: Mapping[str, tuple[str, str]]
    memory: Mapping[str, int]
    budget: float
    rows: Sequence[Row]
    chosen: Row | None
    code: str
    notes: Sequence[str]


def embed(shown: Shown) -> str:
    """The plan as a part of a notebook."""
    css = palette(".shardtrace-plan") + _resource("plan_page.css")
    notes = "".join(f"<p>{escape(note)}</p>" for note in shown.notes)
    fronts = "".join(draw_front(shown.rows, shown.chosen, shown.budget, size) for size in (WIDE, NARROW))
    return (
        f'<style>{css}</style><div class="shardtrace-plan"><h2>{escape(shown.title)}</h2>'
        f'<p class="answer">{escape(shown.answer)}</p>{_cards(shown)}{notes}'
        f"<h3>Options of fsdp</h3><pre>{escape(shown.code)}</pre>"
        f"<h3>Memory of a rank at the peak</h3>{_memory(shown)}"
        f"<h3>Memory against time, numbered as in the table</h3>{fronts}{_table(shown)}</div>"
    )


def palette(scope: str) -> str:
    """The colours of all pages, as custom properties of what the selector ``scope`` finds."""
    return _resource("palette.css").replace("SCOPE", scope)


def _resource(name: str) -> str:
    return resources.files("shardtrace.planner").joinpath(name).read_text(encoding="utf-8")


def render(shown: Shown) -> str:
    """The plan as a page of its own."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(shown.title)}'
    style = f"<style>{palette(':root')}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</title>{style}</head><body>{embed(shown)}</body></html>\n'


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
        f'<span style="width:{100 * nbytes / whole:.2f}%;{_colour(kind)}" title="{escape(kind)} {gib(nbytes)}"></span>'
        for kind, nbytes in kinds
    )
    key = "".join(
        f'<li><span style="{_colour(kind)}"></span>{escape(kind.replace("_", " "))} {gib(nbytes)}</li>'
        for kind, nbytes in kinds
    )
    return f'<div class="bar">{bar}</div><ul>{key}</ul>'


def _colour(kind: str) -> str:
    return f"background:var(--{escape(kind.replace('_', '-'))},var(--other))"


def _table(shown: Shown) -> str:
    rows = "".join(
        f'<tr class="chosen">{cells}</tr>' if row is shown.chosen else f"<tr>{cells}</tr>"
        for number, row in enumerate(shown.rows, 1)
        for cells in [_cells("td", (str(number), *row.cells))]
    )
    return f"<table><tr>{_cells('th', ('', *(name for name, _ in COLUMNS)))}</tr>{rows}</table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


# ---- rows ----


@dataclass(frozen=True)
class Row:
    """A step on the front of memory and time: no other needs less of both. Bytes and seconds of one rank.

    ``strategy``, ``kept`` (buckets that stay gathered until backward), ``recomputing`` (numbers of blocks, by what
    ``activation_checkpointing`` says of them) and ``prefetch`` say what it does; ``options`` are those of ``fsdp``.
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


class Size(NamedTuple):
    """A drawing's class in CSS and its size in pixels, at which its text is read."""

    css: str
    width: int
    height: int


WIDE, NARROW = Size("wide", 1024, 360), Size("narrow", 400, 300)  # of a desk, of a phone
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 30, 44  # margins
TICKS = 5
FAR = 2  # times what the rows span


def draw_front(rows: Sequence[Row], chosen: Row | None, budget: float, size: Size = WIDE) -> str:
    """The rows as an SVG: memory to the right, seconds upwards, ``chosen`` filled, the budget as a vertical line, or as
    an arrow if it is so far away that it would squeeze the rows. Points have their numbers, and what they do where
    there is room."""
    memories: list[float] = [row.memory for row in rows] or [0.0, budget]
    far = budget - max(memories) > FAR * (max(memories) - min(memories)) > 0
    bottom, right = size.height - BOTTOM, size.width - RIGHT
    x = _Axis([*memories, *([] if far else [budget])], LEFT, right, {"GiB": 2**30, "MiB": 2**20})
    y = _Axis([row.seconds for row in rows], bottom, TOP, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})
    shapes = [
        *(
            f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{y.label(v)}</text>'
            for v in y.ticks
        ),
        *(f'<text x="{x(v):.1f}" y="{bottom + 18}" text-anchor="middle">{x.label(v)}</text>' for v in x.ticks),
        f'<text x="{(LEFT + right) / 2}" y="{size.height - 6}" text-anchor="middle">memory of a rank</text>',
        f'<text x="{LEFT - 8}" y="{TOP - 12}" text-anchor="end">step</text>',
        f'<text x="{right}" y="{TOP - 12}" text-anchor="end">budget {gib(budget)} →</text>'
        if far
        else _line(x(budget), bottom),
    ]
    corners = [(x(row.memory), y(row.seconds)) for row in rows]
    path = "".join(f"H{a:.1f}V{b:.1f}" for a, b in corners[1:])  # a step takes as long until the next one fits
    shapes.append(f'<path class="front" d="M{corners[0][0]:.1f},{corners[0][1]:.1f}{path}"/>' if corners else "")
    for row, (a, b) in zip(rows, corners, strict=True):
        css = "chosen" if row is chosen else "fits" if row.memory <= budget else "beyond"
        title = escape(f"{gib(row.memory)}, {ms(row.seconds)}: {row.words}")
        shapes.append(f'<circle class="{css}" cx="{a:.1f}" cy="{b:.1f}" r="5"><title>{title}</title></circle>')
    shapes += _names(rows, chosen, corners, (LEFT, TOP, right, bottom))
    about = f'class="{size.css}" viewBox="0 0 {size.width} {size.height}" role="img" aria-label="memory against time"'
    return f"<svg {about}>{''.join(shapes)}</svg>"


def _line(at: float, bottom: int) -> str:
    line = f'<line class="budget" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>'
    return f'{line}<text x="{at:.1f}" y="{TOP - 12}" text-anchor="middle">budget</text>'


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _names(rows: Sequence[Row], chosen: Row | None, corners: Sequence[tuple[float, float]], plot: Box) -> Iterator[str]:
    """The names of points: their numbers, then words as well where there is room. The chosen one is first to choose."""
    points = [(a - 7, b - 7, a + 7, b + 7) for a, b in corners]
    found: dict[int, tuple[Box, str]] = {}
    for words in (False, True):
        for k in sorted(range(len(rows)), key=lambda k: (rows[k] is not chosen, k)):
            text = f"{k + 1}  {rows[k].words}" if words else str(k + 1)
            taken = [*points, *(box for j, (box, _) in found.items() if j != k)]
            free = (box for box in _beside(*corners[k], text) if _is_free(box, taken, plot))
            if (box := next(free, None)) is not None:
                found[k] = box, text
    for k, ((left, _, _, bottom), text) in found.items():
        css = "name chosen" if rows[k] is chosen else "name"
        yield f'<text class="{css}" x="{left:.1f}" y="{bottom - 4:.1f}">{escape(text)}</text>'


def _beside(a: float, b: float, text: str) -> Iterator[Box]:
    """Places for a text at a point: above to the right, which the front leaves free, then above, below, higher."""
    width, height = 6.6 * len(text), 15
    beside, around, before = a + 8, a - width / 2, a - width - 4
    places = ((beside, -18), (around, -24), (before, 4), (around, 9), (before, -26), (before, -42), (before, -58))
    for left, above in places:
        yield left, b + above, left + width, b + above + height


def _is_free(box: Box, taken: Sequence[Box], plot: Box) -> bool:
    left, top, right, bottom = box
    inside = plot[0] <= left and plot[1] - 12 <= top and right <= plot[2] and bottom <= plot[3]
    return inside and all(right <= a or c <= left or bottom <= b or d <= top for a, b, c, d in taken)


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


# ---- the plan ----


VERSION = 1  # of the file format
TYPES: dict[str, Any] = {"str": str, "int": int, "float": int | float, "Mapping": Mapping}  # of fields, by annotation
T = TypeVar("T", Row, "TrainingPlan")


class PlanError(ValueError):
    """A plan that cannot be read, or that is for another model, world size or version."""


class NoPlanFitsError(ValueError):
    """No step fits into the memory. ``least`` is the plan that needs the least."""

    def __init__(self, message: str, least: TrainingPlan) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class TrainingPlan:
    """The result of :func:`shardtrace.plan`. All sizes are bytes of one rank, all times seconds of one step.

    Args:
        model: the class of the model; ``fingerprint`` identifies its parameters.
        world_size, mesh_shape: the ranks, and (replicas, shards) if a hybrid strategy was chosen, (data, context) if
            sequences are split, (data, expert) if experts are, (data, tensor) if parameters are, or with both.
        budget: the memory that a step may need; ``budget_given``: as the user wrote it, if that was not in GiB.
        device, links: what was planned for, as text; ``rates`` says where the figures come from: "modelled",
            "calibrated", "partly calibrated" (links are modelled) or "given".
        choices: the options of ``fsdp`` as JSON has them; :attr:`options` are those to pass.
        seconds, exposed, tokens: of a step; ``exposed`` seconds of it compute waits for communication; ``tokens`` are
            those that a rank computes, 0 if the inputs are no integers.
        memory: the bytes at the peak by kind; ``peak`` is their sum.
        mfu: the FLOPs of the model, none recomputed, over those that the device could do meanwhile; 0 if unknown. FLOPs
            are those of products, three times forward's; causal attention counts half of its scores, a look-up in an
            embedding nothing. ``mfu_all_scores`` counts all scores, as PaLM and torchtitan do.
        binding: what keeps the step from being faster; ``helps``: what would make it faster, the best first.
        update: the optimizer, and how torch runs it.
        pareto: the front of memory and time, from the least memory to the fastest step.
        cost: the rates of the cost model.
        notes: what a reader should know.
        allowed: the values of ``gather_dtype`` and ``reduce_wire`` that might be chosen, beside exact ones.
    """

    model: str
    fingerprint: str
    world_size: int
    mesh_shape: tuple[int, ...] | None
    budget: float
    device: str
    links: str
    rates: str
    choices: Mapping[str, Any]
    seconds: float
    forward: float
    backward: float
    optimizer: float
    exposed: float
    tokens: int
    memory: Mapping[str, int]
    mfu: float
    binding: str
    pareto: Rows
    cost: CostModel
    notes: tuple[str, ...] = ()
    allowed: Mapping[str, list[str]] = field(default_factory=dict)
    version: int = VERSION
    budget_given: str = ""
    mfu_all_scores: float = 0.0
    helps: tuple[str, ...] = ()
    update: str = ""
    again: Any = field(default=None, repr=False, compare=False)  # plans for another batch; None if read from a file

    @property
    def peak(self) -> int:
        """The bytes at the peak."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        speed = f", {self._speed}" if self.tokens else ""
        chosen, runner_up = self.chosen, self._next
        parts = [
            self.answer,
            "",
            f"{self.model} on {self._ranks}",
            "",
            *(f"  {line}" for line in self._options),
            *([f"  mesh_shape = {self.mesh_shape}"] if self.mesh_shape else []),
            "",
            f"step     {ms(self.seconds)}{speed}" + (f", MFU {self._mfu}" if self.mfu else ""),
            f"         forward {ms(self.forward)}, backward {ms(self.backward)}, {self.update or 'optimizer'} "
            f"{ms(self.optimizer)}; compute waits {ms(self.exposed)} for communication",
            f"memory   {gib(self.peak)} of {self.budget_shown}",
            *(f"         {gib(n):>12}  {kind}" for kind, n in sorted(self.memory.items(), key=lambda kv: -kv[1])),
            *([f"rounds   {self.rounding}"] if self.rounding else []),
            f"limit    {self.binding}",
            *(f"{'' if i else 'helps':<9}{text}" for i, text in enumerate(self.helps)),
            *([f"smaller  {runner_up}"] if runner_up else []),
            "",
            f"  {HEADINGS}",
            *(f"{'> ' if row is chosen else '  '}{row}" for row in self.pareto),
            *self.notes,
        ]
        return "\n".join(parts)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of :func:`shardtrace.fsdp`. A hybrid strategy, ``context_parallel`` and ``tensor_parallel``
        need a mesh of ``mesh_shape`` as well, which ``fsdp(model, plan=plan)`` makes."""
        return grouped(self._decided)

    @property
    def _decided(self) -> dict[str, Any]:
        return options_of(self.choices) | {"cost_model": self.cost}

    def merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of ``fsdp``: all those ``given``, with the options of the plan. Raises PlanError if an option is
        given and decided."""
        decided, own = self._decided, flat(given)
        twice = [n for n in decided if n in own and (n in HOMES or own[n] != DEFAULTS.get(n))]
        if twice:
            raise PlanError(f"the plan decides {', '.join(twice)}: leave it to the plan, or pass plan.options yourself")
        return grouped(own | decided)

    def largest_batch(self) -> int:
        """The largest size of dim 0 of the inputs with which these options fit into the memory.

        Compiles the model two or three times. Raises PlanError for a plan that was read from a file.
        """
        if self.again is None:
            raise PlanError("a plan from a file has no model: call shardtrace.plan(...).largest_batch()")
        size: int = self.again(self)
        return size

    # ---- in words and pictures ----

    @property
    def rounding(self) -> str:
        """The values that a step rounds, and those that it was allowed to, in words. Empty if there are neither."""
        what = {"gather_dtype": "parameters", "reduce_wire": "gradients"}
        rounds = [f"{word} to {value}" for option, word in what.items() if (value := self.choices.get(option))]
        if not rounds and not self.allowed:
            return ""
        text = f"{' and '.join(rounds)} on their way between ranks" if rounds else "nothing"
        allowed = "; ".join(f"{option} {', '.join(values)}" for option, values in self.allowed.items())
        return f"{text} (allowed: {allowed})" if allowed else text

    @property
    def chosen(self) -> Row | None:
        """The row of :attr:`pareto` that this plan is. None if the front was made for other options."""
        return next((row for row in self.pareto if row.options == self.choices), None)

    @property
    def budget_shown(self) -> str:
        """The budget, first as it was given, if that was in GB."""
        return f"{self.budget_given} ({gib(self.budget)})" if self.budget_given else gib(self.budget)

    @property
    def _ranks(self) -> str:
        return f"{self.world_size} ranks of {self.device}, {self.links} ({self.rates} rates)"

    @property
    def _speed(self) -> str:
        return f"{self.tokens / self.seconds:,.0f} tokens/s a rank" if self.tokens else ""

    @property
    def _mfu(self) -> str:
        """MFU, and as others count it."""
        other = f" ({self.mfu_all_scores:.1%} with all scores of causal attention)"
        return f"{self.mfu:.1%}{other if self.mfu_all_scores > self.mfu else ''}"

    @property
    def _options(self) -> list[str]:
        return [f"{name} = {value!r}" for name, value in _shortened(self.choices).items() if value is not None]

    @property
    def _next(self) -> str:
        """The runner-up: the next best step, with less memory."""
        less = [row for row in self.pareto if row.memory < self.peak]
        if self.chosen is None or not less:
            return ""
        row = less[-1]
        saved, lost = self.peak - row.memory, row.seconds - self.seconds
        return f"{row.words}, needs {gib(saved)} less memory and takes {ms(lost)} longer"

    def _repr_html_(self) -> str:
        return embed(self._shown)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def to_html(self, path: str | Path) -> Path:
        """Writes the plan as a page of its own: its figures, memory against time, and the table of choices."""
        path = Path(path)
        path.write_text(render(self._shown), encoding="utf-8")
        return path

    @property
    def answer(self) -> str:
        """The plan in a sentence: whether it fits, what it does, its speed, what limits it, and what would help."""
        fits = self.peak <= self.budget
        what = ", ".join(filter(None, [self.chosen.words if self.chosen is not None else "", self._speed]))
        helps = f"; what would help most is {self.helps[0]}" if self.helps else ""
        return (
            f"{'Fits' if fits else 'Does not fit'}{f' with {what}' if what else ''}: a step takes {ms(self.seconds)} "
            f"and needs {gib(self.peak)} {'of' if fits else 'where there are'} {self.budget_shown}; the limit is "
            f"{self.binding}{helps}."
        )

    @property
    def _shown(self) -> Shown:
        cards = {
            "step": (ms(self.seconds), self._speed),
            "model FLOPs utilization": (
                f"{self.mfu:.1%}" if self.mfu else "unknown",
                "of the data sheet's peak"
                + (f"; {self.mfu_all_scores:.1%} with all scores of causal attention" if self.mfu else ""),
            ),
            "optimizer": (ms(self.optimizer), self.update),
            "exposed communication": (ms(self.exposed), f"{self.exposed / self.seconds:.1%} of the step"),
            "memory": (gib(self.peak), f"of {self.budget_shown}"),
        }
        runner_up = self._next
        return Shown(
            title=f"{self.model} on {self._ranks}",
            answer=self.answer,
            cards=cards,
            memory=self.memory,
            budget=self.budget,
            rows=self.pareto,
            chosen=self.chosen,
            code="\n".join(self._options),
            notes=[
                *([f"Rounds {self.rounding}."] if self.rounding else []),
                f"Limit: {self.binding}.",
                *([f"Would help: {'; '.join(self.helps)}."] if self.helps else []),
                *([f"The next smaller plan, {runner_up}."] if runner_up else []),
                *self.notes,
            ],
        )

    # ---- files ----

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as text, written to ``path`` if one is given."""
        data = {"answer": self.answer} | {f.name: getattr(self, f.name) for f in fields(self) if f.name != "again"}
        data |= {"cost": asdict(self.cost), "pareto": [asdict(row) for row in self.pareto]}
        text = json.dumps(data, indent=2) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> TrainingPlan:
        """Reads a plan from a file, or from the text of one.

        Raises:
            PlanError: if it is no plan, or one of another version.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            data = json.loads(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                raise PlanError(f"the plan is of version {data['version']!r}, not {VERSION}: plan again")
            data["cost"] = CostModel.from_dict(data["cost"])
            data["pareto"] = Rows(_checked(Row(**row)) for row in data["pareto"])
            data["mesh_shape"] = tuple(data["mesh_shape"]) if data["mesh_shape"] else None
            data |= {name: tuple(data.get(name, ())) for name in ("notes", "helps")}
            data.pop("answer", None)  # which follows from the others
            found = _checked(cls(**data))
            if (shape := found.mesh_shape) and (len(shape) not in (2, 3) or math.prod(shape) != found.world_size):
                raise ValueError(f"a mesh of shape {shape} for {found.world_size} ranks")
            options_of(found.choices)
            return found
        except PlanError:
            raise
        except OSError as error:
            raise PlanError(f"there is no plan in {source}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = "the text" if is_text else source
            raise PlanError(f"{what} is no plan of shardtrace ({type(error).__name__}: {error})") from error

    @property
    def hash(self) -> str:
        """Identifies what ``fsdp`` does with the plan. Ranks compare it."""
        text = json.dumps([self.fingerprint, self.world_size, self.choices, asdict(self.cost)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self, model: nn.Module, world_size: int) -> None:
        """Raises PlanError if the plan is for another model or number of ranks."""
        if fingerprint(model) != self.fingerprint:
            raise PlanError(
                f"the plan is for a {self.model} with other parameters than this {type(model).__name__}: names, shapes "
                "or dtypes differ; plan again"
            )
        if world_size != self.world_size:
            raise PlanError(f"the plan is for {self.world_size} ranks, not {world_size}: plan again")


def _checked(record: T) -> T:
    """A dataclass that was read from a file. Raises TypeError for a field that has not its type."""
    for f in fields(record):
        expected, value = TYPES.get(str(f.type).partition("[")[0]), getattr(record, f.name)
        if expected is not None and not isinstance(value, expected):
            raise TypeError(f"{f.name} is {value!r}")
    return record


def fingerprint(model: nn.Module) -> str:
    """Identifies a model's parameters: their names, shapes and dtypes."""
    text = json.dumps([(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- text ----


def _shortened(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The choices with mappings of many names in few words."""

    def short(value: Any) -> Any:
        if not isinstance(value, Mapping) or len(value) < 4:
            return value
        groups: dict[Any, list[str]] = {}
        for name, what in value.items():
            groups.setdefault(what, []).append(name)
        return {f"{n[0]} to {n[-1]} ({len(n)})" if len(n) > 2 else ", ".join(n): w for w, n in groups.items()}

    return {name: short(value) for name, value in choices.items()}


# ---- options as JSON ----


def choices_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``fsdp``, with fields in place of policies, as JSON. Raises TypeError that names one that has no place
    there."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, MixedPrecisionPolicy):
            found[name] = {key: _dtype_name(v) for key, v in asdict(value).items()}
        elif isinstance(value, CPUOffloadPolicy):
            found[name] = {"pin_memory": value.pin_memory}
        elif isinstance(value, (ContextParallel, TensorParallel)):
            found[name] = asdict(value)
        else:
            try:
                found[name] = json.loads(json.dumps(value))
            except TypeError:
                raise TypeError(f"fixed option {name}={value!r} cannot be written into a plan's file") from None
    return found


def options_of(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`choices_of`."""
    options = dict(choices)
    if isinstance(policy := options.get("mp_policy"), Mapping):
        options["mp_policy"] = MixedPrecisionPolicy(**{key: _dtype(v) for key, v in policy.items()})
    if isinstance(policy := options.get("offload_policy"), Mapping):
        options["offload_policy"] = CPUOffloadPolicy(**policy)
    if isinstance(policy := options.get("context_parallel"), Mapping):
        options["context_parallel"] = ContextParallel(**policy)
    if isinstance(policy := options.get("tensor_parallel"), Mapping):
        options["tensor_parallel"] = TensorParallel(**policy)
    return options


def mesh_dim_names(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the dimensions of the mesh that some options of ``fsdp`` need."""
    dims = parallel_dims(options).values()
    return ("data", *dims) if dims else ("replicate", "shard")


def _dtype_name(value: Any) -> Any:
    return str(value) if isinstance(value, torch.dtype) else value


def _dtype(value: Any) -> Any:
    return getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) else value
