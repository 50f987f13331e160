"""The data of the page's script: tables that refer to each other by index, with strings escaped for HTML."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from passes.analysis.liveness import KINDS
from shardtrace.inspector.diff import Mark
from shardtrace.inspector.lines import Function, Line, Source, Table, Template, Type
from shardtrace.inspector.step_data import Phase, Stage, StepData, modules_by_name
from shardtrace.inspector.tables import highlight


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
