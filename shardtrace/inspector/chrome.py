"""The timeline in the Trace Event Format of Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from passes.analysis.liveness import KINDS
from shardtrace.inspector.step_data import Phase, StepData
from shardtrace.inspector.timeline import Span, stacked

COMPUTE = 0  # thread ids: compute, then one per link, and another row of links wherever collectives overlap
Event = dict[str, Any]


def render(record: StepData) -> str:
    """JSON with an event for each line of compute and each collective, and a counter of the memory by kind. Times are
    microseconds, memory is bytes."""
    setup = record.setup
    name = f"{setup.model}, {setup.strategy} over {setup.world_size} ranks" if setup.strategy else setup.model
    events = [_metadata("process_name", f"{name}, {record.times}"), _metadata("thread_name", "compute", COMPUTE)]
    links = record.phases[-1].timeline.links if record.phases else []
    for phase in record.phases:
        events += [*_lines(phase), *_memory(phase)]
        for k, link in enumerate(links):
            for row, spans in enumerate(stacked(s for s in phase.timeline.spans if s.link == k)):
                thread = 1 + k + row * len(links)
                events.append(_metadata("thread_name", f"link, {link}", thread))
                events += (_collective(phase, s, thread) for s in spans)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _metadata(kind: str, name: str, thread: int = COMPUTE) -> Event:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}


def _span(name: str, kind: str, thread: int, start: float, stop: float, about: Event) -> Event:
    times = {"ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {"ph": "X", "pid": 0, "tid": thread, "name": name, "cat": kind, **times, "args": about}


def _lines(phase: Phase) -> Iterator[Event]:
    starts = phase.timeline.starts
    for i, line in enumerate(phase.lines):
        if starts[i + 1] > starts[i]:
            if phase.buckets[i]:
                name, kind = f"wait for {phase.buckets[i]}", "exposed"
            else:
                name, kind = line.code.partition(" = ")[2].partition("(")[0] or line.code, phase.name
            about: Event = {"line": i, "code": line.code, "module": phase.modules[i] or "", "why": phase.why[i]}
            yield _span(name, kind, COMPUTE, starts[i], starts[i + 1], about)


def _collective(phase: Phase, s: Span, thread: int) -> Event:
    why = {"why": phase.why[s.issue], "waited": phase.why[s.wait]}
    about: Event = {"bytes": s.bytes, "exposed_us": s.exposed * 1e6, **why}
    return _span(f"{s.kind} {s.bucket}", s.kind, thread, s.start, s.stop, about)


def _memory(phase: Phase) -> Iterator[Event]:
    before = None
    for row, start in zip(phase.memory, phase.timeline.starts, strict=False):
        now = {kind: getattr(row, kind) for kind in KINDS}
        if now != before:
            yield {"ph": "C", "pid": 0, "name": "memory", "ts": start * 1e6, "args": now}
        before = now
