"""The model as a tree, with the cost of each module's lines. Repeated blocks are folded into one branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from shardtrace.inspector.modules import Branch, Name, ancestors
from shardtrace.inspector.rows import duration, size
from shardtrace.inspector.step_data import StepData


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
