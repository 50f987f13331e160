"""The inspector as text: the numbers of a step beside theory, its modules, its passes, and its lines in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from passes.analysis.liveness import Buffer
from shardtrace.inspector.lines import Branch, Line, Name, ancestors
from shardtrace.inspector.step_data import Phase, Stage, StepData, columns, count, duration, size

# ---- numbers ----


class Traffic(NamedTuple):
    """One kind of collective in one phase: their number, and their bytes of unsharded buckets.

    ``formula`` gives the ``expected`` bytes. Fewer bytes mean that a phase does not need some of the parameters.
    """

    phase: str
    kind: str
    number: int
    bytes: int
    expected: int
    formula: str

    @property
    def agrees(self) -> bool:
        return self.bytes == self.expected

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        verdict = "✓" if self.agrees else "fewer"
        return (
            self.phase,
            self.kind,
            f"{self.number}",
            size(self.bytes),
            f"{self.formula} = {size(self.expected)}",
            verdict,
        )


class Peak(NamedTuple):
    """The line at which a step needs the most memory, and the bytes that are needed while it runs."""

    phase: str
    line: int
    code: str
    bytes: int


class Saved(NamedTuple):
    """A buffer that forward saves for backward. If a block saves it, ``name`` is that within the block's function."""

    name: str
    bytes: int
    type: str
    module: str


class Totals(NamedTuple):
    """A step in five numbers: its ``seconds`` (predicted or measured), the ``exposed`` seconds in which compute waits
    for communication, the ``peak`` bytes of tensors, the bytes ``sent`` by each rank, the number of ``collectives``."""

    seconds: float
    exposed: float
    peak: int
    sent: int
    collectives: int

    @property
    def share(self) -> str:
        """The exposed part of the step, in words; empty if the step takes no time."""
        return f"{100 * self.exposed / self.seconds:.0f} % of the step" if self.seconds else ""

    @property
    def waits(self) -> bool:
        """Whether compute waits for communication so long that it matters: more than 5 % of the step."""
        return self.exposed > 0.05 * self.seconds


def totals(record: StepData) -> Totals:
    """The step in five numbers. Each rank sends, and receives, (N - 1) / N of each unsharded bucket, and twice that for
    an all_reduce."""
    top = peak(record)
    return Totals(
        seconds=record.end,
        exposed=sum(p.timeline.exposed for p in record.phases),
        peak=top.bytes if top is not None else 0,
        sent=sum(span.sent for p in record.phases for span in p.timeline.spans),
        collectives=sum(len(p.collectives) for p in record.phases),
    )


_GATHER, _AGAIN, _REDUCE = (
    ("forward", "all_gather", "P"),
    ("backward", "all_gather", "P"),
    ("backward", "reduce_scatter", "G"),
)
_KEPT, _REPLICAS = ("backward", "all_gather", "0"), ("backward", "all_reduce", "G/N")
_RULES = {  # the traffic of a strategy: a kind of collective in a phase, and the formula of its bytes
    "ddp": [("backward", "all_reduce", "G")],
    "zero1": [_GATHER, _KEPT, _REDUCE],
    "zero2": [_GATHER, _KEPT, _REDUCE],
    "zero3": [_GATHER, _AGAIN, _REDUCE],
    "hybrid_zero2": [_GATHER, _KEPT, _REDUCE, _REPLICAS],
    "hybrid_zero3": [_GATHER, _AGAIN, _REDUCE, _REPLICAS],
    "zero3_secondary": [_GATHER, ("backward", "all_gather", "P in the node"), _REDUCE],
    "owner": [("forward", "broadcast", "P"), ("backward", "broadcast", "P"), ("backward", "reduce", "G")],
}


def traffic(record: StepData) -> list[Traffic]:
    """The bytes that the collectives of a step move, beside the closed formulas of ZeRO.

    P is the bytes of all parameters, G the bytes of the gradients of trained parameters, N the number of ranks that
    share a copy. ZeRO gathers P in forward and reduces G in backward. ZeRO-3 gathers P again in backward, hybrids
    reduce G/N once more over the replicas, and DDP all-reduces G. If parts of a model have different strategies, their
    bytes add up. With fp16 each model shares a flag of 4 bytes.
    """
    found: dict[tuple[str, str], Counter[str]] = {}
    for p in record.parameters:
        terms = {"P": p.bytes, "0": 0, "P in the node": p.second_bytes, "G": p.reduced_bytes, "G/N": p.outer_bytes}
        for name, kind, formula in _RULES[p.strategy]:
            found.setdefault((name, kind), Counter())[formula] += terms[formula]
    rows = []
    for phase in record.phases:
        for (name, kind), sums in found.items():
            if name == phase.name:
                sizes = [c.bytes for c in phase.collectives if c.kind == kind]
                formula = " + ".join(sorted(sums))
                rows.append(Traffic(name, kind, len(sizes), sum(sizes), sums.total(), formula))
    return rows


def peak(record: StepData) -> Peak | None:
    """The line at which the most memory is needed; None if nothing was compiled."""
    if not record.phases:
        return None
    phase: Phase = max(record.phases, key=lambda p: p.peak.during)
    row = phase.peak
    return Peak(phase.name, row.line, phase.lines[row.line].code, row.during)


def largest_saved(record: StepData, most: int = 8) -> list[Saved]:
    """The largest buffers that forward saves for backward, without shards and inputs."""
    if not record.phases:
        return []
    forward = record.phases[0]
    made = {name: i for i, line in enumerate(forward.lines) for name in line.results}
    kept = sorted((b for b in forward.buffers if b.kind == "saved"), key=lambda b: -b.bytes)
    rows = []
    for b in kept[:most]:
        line = made.get(b.name)
        if line is None:
            rows.append(Saved(b.name, b.bytes, "", ""))
        else:
            rows.append(_saved_by(forward.lines[line], forward.modules[line] or "", b))
    return rows


def _saved_by(line: Line, module: str, buffer: Buffer) -> Saved:
    name, function = buffer.inner or buffer.name, line.function
    if function is not None:
        at = next((k for k, part in enumerate(function.lines) if buffer.inner in part.results), None)
        if at is not None:
            line, inside = function.lines[at], function.modules[at]
            module = function.module_in(module, inside) if inside is not None else module
    found = line.template.types[line.results.index(name)] if name in line.results else None
    return Saved(name, buffer.bytes, found.text if found is not None else "", module)


# ---- modules ----


class Cost(NamedTuple):
    """The cost of a module with everything inside it: bytes of parameters and of shards, seconds by phase, lines."""

    parameters: int
    shards: int
    forward: float
    backward: float
    lines: int


def module_costs(record: StepData) -> dict[Name, Cost]:
    """The costs by module name; "" is the model."""
    sums: dict[str, Counter[Name]] = {field: Counter() for field in Cost._fields}

    def add(field: str, module: Name, amount: float) -> None:
        for name in ancestors(module):
            sums[field][name] += amount  # type: ignore[assignment]

    for p in record.parameters:
        add("parameters", p.module, p.bytes)
        add("shards", p.module, p.shard_bytes)
    for phase in record.phases:
        for work in phase.work():
            add(phase.name, work.module, work.seconds)
            add("lines", work.module, 1)
    names = {name for counter in sums.values() for name in counter}
    return {name: Cost(*(sums[field][name] for field in Cost._fields)) for name in names}


def first_lines(record: StepData) -> dict[Name, str]:
    """The first line of each module, as "phase:line", or "phase:line:part" inside a block's function."""
    found: dict[Name, str] = {}
    for phase in record.phases:
        for work in phase.work():
            inside = "" if work.part is None else f":{work.part}"
            for name in ancestors(work.module):
                found.setdefault(name, f"{phase.name}:{work.line}{inside}")
    return found


def label(names: Sequence[Name], root: str) -> str:
    """The title of a branch: the module's own name, or the first and the last of several."""
    last = names[0].rpartition(".")[2] or root
    return last if len(names) == 1 else f"{last} … {names[-1].rpartition('.')[2]}"


def draw_modules(record: StepData) -> str:
    """Nested details elements, which open and close without a script."""
    costs, at = module_costs(record), first_lines(record)
    total = costs.get("")
    if total is None:
        return "<p>Its modules are not known.</p>"
    whole = max(total.forward + total.backward, 1e-12)

    def branch(b: Branch, names: Sequence[Name], opened: int) -> str:
        cost = _sum([costs[name] for name in names if name in costs])
        text = escape(label(names, record.setup.model))
        times = f' <span class="times">&times;{len(names)}</span>' if len(names) > 1 else ""
        link = f'<a data-at="{at[names[0]]}" href="#">{text}</a>' if names[0] in at else text
        cells = "".join(f"<span>{cell}</span>" for cell in _cells(cost))
        bar = "".join(
            f'<i class="{css}" style="width:{100 * part / whole:.2f}%"></i>'
            for css, part in (("forward", cost.forward), ("backward", cost.backward))
        )
        row = f'<span class="module">{link}{times}</span>{cells}<span class="share">{bar}</span>'
        if not b.children:
            return f'<div class="row leaf">{row}</div>'
        inside = "".join(
            branch(child, [n + c[len(b.names[0]) :] for n in names for c in child.names], opened - 1)
            if b.names[0]
            else branch(child, child.names, opened - 1)
            for child in b.children
        )
        is_open = " open" if opened > 0 else ""
        return f'<details{is_open}><summary class="row">{row}</summary><div class="inside">{inside}</div></details>'

    head = ("module", "parameters", "shards", "forward", "backward", "lines", "share of compute")
    titles = "".join(f"<span>{title}</span>" for title in head)
    return f'<div class="tree"><div class="row head">{titles}</div>{branch(record.modules, ("",), 2)}</div>'


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(*(sum(getattr(cost, field) for cost in costs) for field in Cost._fields))


def _cells(cost: Cost) -> tuple[str, ...]:
    memory = (size(cost.parameters), size(cost.shards)) if cost.parameters else ("", "")
    return (*memory, duration(cost.forward), duration(cost.backward), f"{cost.lines:,}")


# ---- in characters ----


WIDTH = 72  # characters of the drawing
HEIGHTS = " ▁▂▃▄▅▆▇█"


def render(record: StepData) -> str:
    """The summary of a step in a few dozen lines."""
    rates = [record.setup.rates] if record.phases else []
    parts = [f"{record.setup.model}: {record.setup.description}", *rates, *record.notes]
    top = peak(record)
    if top is not None:
        step = totals(record)
        share = f" ({step.share})" if step.share else ""
        expected = f"; predicted: {duration(record.predicted_seconds)}" if record.measured_steps else ""
        parts += [
            "",
            f"step, {record.times:9}       {duration(step.seconds)}, of which {duration(step.exposed)}{share} wait for "
            f"communication{expected}",
            f"peak memory           {size(top.bytes)} at line {top.line} of {top.phase}: {_cut(top.code, 60)}",
            f"sent by each rank     {size(step.sent)} in {count(step.collectives, 'collective')}",
            *_section("time", _drawing(record)),
            *_section("collectives of a step, in bytes of unsharded buckets", _traffic(record)),
            *_section("largest tensors saved for backward", _saved(record)),
        ]
    return "\n".join([*parts, *_section("passes", _passes(record.stages))])


def _section(title: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _cut(text: str, width: int) -> str:
    text = text.partition("\n")[0]
    return text if len(text) <= width else text[: width - 1] + "…"


def _traffic(record: StepData) -> list[str]:
    rows = [(f"{phase} {kind}", *cells) for phase, kind, *cells in (row.cells for row in traffic(record))]
    return columns(rows) if rows else []


def _saved(record: StepData) -> list[str]:
    rows = [(f"{s.name} {s.type}", size(s.bytes), s.module) for s in largest_saved(record)]
    return columns(rows) if rows else []


def _passes(stages: Sequence[Stage]) -> list[str]:
    rows = []
    for s in stages:
        changes = s.changes
        signs = (
            f"{sign}{changes[name]}"
            for name, sign in (("added", "+"), ("removed", "-"), ("moved", "↕"))
            if changes[name]
        )
        what = "unchanged" if s.is_unchanged else " ".join(signs)
        took = duration(s.seconds) if s.seconds is not None else ""
        rows.append((f"{s.phase:8}  {s.name}", f"{len(s.lines)} lines", what, took))
    return columns(rows) if rows else []


# ---- the step in characters ----


def _drawing(record: StepData) -> list[str]:
    end = record.end
    if not end:
        return []
    split = round(WIDTH * record.phases[0].timeline.end / end)
    busy, idle = (_lane(record.phases, end, kind) for kind in (_computing, _waiting))
    gathers = _lane(record.phases, end, lambda phase: _links(phase, gathers=True))
    reduces = _lane(record.phases, end, lambda phase: _links(phase, gathers=False))
    names = f"{'forward':<{split}}" + ("backward" if len(record.phases) > 1 else "")
    lanes = [("", names), ("compute", busy), ("exposed", idle)]
    if gathers.strip() or reduces.strip():
        lanes += [("parameters", gathers), ("gradients", reduces)]
    lanes.append(("memory", _memory(record, end)))
    return [f"{name:15}{lane}".rstrip() for name, lane in lanes]


Spans = Iterable[tuple[float, float]]


def _computing(phase: Phase) -> Spans:
    starts = phase.timeline.starts
    return ((starts[i], starts[i + 1]) for i in range(len(phase.lines)) if not phase.buckets[i])


def _waiting(phase: Phase) -> Spans:
    starts = phase.timeline.starts
    return ((starts[s.wait], starts[s.wait + 1]) for s in phase.timeline.spans if not s.in_block)


def _links(phase: Phase, *, gathers: bool) -> Spans:
    return ((s.start, s.stop) for s in phase.timeline.spans if s.gathers == gathers)


def _lane(phases: Sequence[Phase], end: float, spans: Callable[[Phase], Spans]) -> str:
    """The part of each character's time that the spans fill."""
    filled = [0.0] * WIDTH
    for phase in phases:
        for start, stop in spans(phase):
            a, b = WIDTH * start / end, WIDTH * stop / end
            for k in range(int(a), min(WIDTH, int(b) + 1)):
                filled[k] += max(0.0, min(b, k + 1) - max(a, k))
    return "".join(_height(part) for part in filled)


def _memory(record: StepData, end: float) -> str:
    top = [0] * WIDTH
    for phase in record.phases:
        for row, start, stop in zip(phase.memory, phase.timeline.starts, phase.timeline.starts[1:], strict=False):
            for k in range(int(WIDTH * start / end), min(WIDTH - 1, int(WIDTH * stop / end)) + 1):
                top[k] = max(top[k], row.during)
    most = max(top)
    return "".join(_height(value / most) for value in top) if most else ""


def _height(part: float) -> str:
    return HEIGHTS[min(8, max(int(part > 0.01), round(8 * part)))]
