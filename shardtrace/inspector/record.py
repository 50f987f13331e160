"""Everything that is shown of a compiled step, as plain data: no trace, no module and no process group is kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from passes.analysis.liveness import Buffer, LineMemory, Liveness, step_liveness
from passes.analysis.recognise import bucket_of, is_collective, is_issue, is_offload
from passes.analysis.traffic import Collective, collectives
from passes.plan import Axis, Bucket, CostModel, Plan, default_cost_model
from shardtrace.inspector.diff import Row, diff
from shardtrace.inspector.lines import Line, read_line
from shardtrace.inspector.modules import Branch, ModuleMap, Name, assign_modules, fold, modules_of_traced
from shardtrace.inspector.profiling import LineTimes
from shardtrace.inspector.timeline import Timeline, measured, predicted

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

T = TypeVar("T")


class Rows(list[T]):
    """A list of named tuples, one for each row of a table."""

    def to_pandas(self) -> Any:
        """The table as a ``pandas.DataFrame``. Raises ImportError if pandas is not installed."""
        import pandas

        return pandas.DataFrame(self)


class Stage(NamedTuple):
    """A trace after one pass. ``seconds`` that the pass took are None where nobody measured them.

    ``rows`` is the difference to the stage before it in the same phase; without one, all lines are new.
    """

    phase: str  # "forward", "backward" or "prologue"
    name: str
    seconds: float | None
    lines: tuple[Line, ...]
    rows: tuple[Row, ...]

    @property
    def is_ours(self) -> bool:
        """True for a pass of shardtrace, False for one of Thunder's."""
        return self.name.startswith("shardtrace: ")

    @property
    def changes(self) -> Counter[str]:
        """How many lines are kept, added, moved and removed."""
        return Counter(row.mark.name.lower() for row in self.rows)

    @property
    def is_unchanged(self) -> bool:
        return set(self.changes) <= {"kept"}


class Phase(NamedTuple):
    """An executed trace: for each of its lines, when it runs and what memory is alive, where it belongs and why it
    stands there ("" where nobody said)."""

    name: str  # "forward" or "backward"
    lines: tuple[Line, ...]
    timeline: Timeline
    memory: tuple[LineMemory, ...]
    buffers: tuple[Buffer, ...]
    collectives: tuple[Collective, ...]  # in the order of issue
    modules: tuple[Name | None, ...]
    buckets: tuple[str, ...]  # labels; "" for a line of compute
    why: tuple[str, ...]

    @property
    def peak(self) -> LineMemory:
        return max(self.memory, key=lambda row: row.during)


class Parameter(NamedTuple):
    """A sharded parameter: bytes of the whole on the wire, with padding, and of this rank's shard at rest, which may be
    in host memory.

    Its gradient has ``reduced_bytes`` on the wire, of which ``outer_bytes`` are reduced again over replicas.
    """

    name: str
    module: Name
    bucket: str
    shape: tuple[int, ...]
    bytes: int
    shard_bytes: int
    trainable: bool
    strategy: str
    reduced_bytes: int
    outer_bytes: int
    on_host: bool = False


class Setup(NamedTuple):
    """What was compiled, and how. A model that shardtrace did not shard has no strategy ("")."""

    model: str
    strategy: str
    world_size: int
    rank: int
    bucketing: str
    prefetch: int
    max_inflight_bytes: int | None
    cost: CostModel
    host_bytes: int = 0  # of shards at rest in host memory


class Record(NamedTuple):
    """What was compiled, what became of it, and when it runs: as ``predicted_seconds`` are, unless ``measured_steps``
    tells that times are medians over so many."""

    setup: Setup
    stages: tuple[Stage, ...]
    phases: tuple[Phase, ...]  # forward, then backward if there is one
    parameters: tuple[Parameter, ...]
    modules: Branch
    notes: tuple[str, ...]  # what the reader should know about what is missing
    predicted_seconds: float
    measured_steps: int

    @property
    def times(self) -> str:
        """What its times are."""
        return "measured" if self.measured_steps else "predicted"


def record(
    forward: Sequence[TraceCtx],
    backward: Sequence[TraceCtx],
    prologue: Sequence[TraceCtx] = (),
    *,
    model: str,
    module_map: ModuleMap,
    forms: Mapping[Name, str],
    plan: Plan | None = None,
    notes: Sequence[str] = (),
    times: LineTimes | None = None,
) -> Record:
    """Of one compilation: the stages of its forward, backward and prologue, in order; any may be empty.

    ``forms`` are the classes of the model's modules by name; ``plan`` is that of the model, for where no trace tells;
    ``times`` are shown instead of predicted ones.
    """
    stages = _stages("forward", forward) + _stages("backward", backward) + _stages("prologue", prologue)
    ends = (next((t for t in reversed(traces) if t.bound_symbols), None) for traces in (forward, backward))
    last = [trace for trace in ends if trace is not None]  # forward, then backward if there is one
    buckets = list(dict.fromkeys(b for t in last for b in _gathered(t)))
    plan = buckets[0].plan if buckets else plan
    cost = plan.cost if plan is not None else default_cost_model(_device(last), "none")
    expected = predicted(last, cost)
    clocks = measured(last, times.seconds) if times is not None else expected
    traced = modules_of_traced(forward[0].bound_symbols, module_map) if last else {}
    phases = _phases(last, stages, clocks, module_map, traced) if last else ()
    parameters = _parameters(buckets)
    names = [*forms, *(p.module for p in parameters), *(m for p in phases for m in p.modules if m)]
    shapes: dict[Name, list[Any]] = {}
    for p in parameters:
        shapes.setdefault(p.module, []).append((p.name.rpartition(".")[2], p.shape))
    tree = fold(names, lambda name: (forms.get(name), tuple(shapes.get(name, ()))))
    kept = sum(p.shard_bytes for p in parameters if p.on_host)
    setup, seconds = _setup(model, plan, cost, parameters, kept), expected[-1].end if expected else 0.0
    steps = times.steps if times is not None else 0
    return Record(setup, stages, phases, parameters, tree, tuple(notes), seconds, steps)


# ---- stages ----


TOOK = re.compile(r" \(took ([\d.]+) milliseconds\)")


def _stages(phase: str, traces: Sequence[TraceCtx]) -> tuple[Stage, ...]:
    """Each trace that is not the very same object as the one before it."""
    seen: dict[int, Line] = {}  # bound symbols are often shared by traces, and all of them are alive
    stages: list[Stage] = []
    for k, trace in enumerate(traces):
        if k and trace is traces[k - 1]:
            continue
        lines = tuple(_read(bsym, seen) for bsym in trace.bound_symbols)
        name, seconds = _provenance(trace)
        rows = diff(stages[-1].lines if stages else (), lines)
        stages.append(Stage(phase, name, seconds, lines, tuple(rows)))
    return tuple(stages)


def _read(bsym: BoundSymbol, seen: dict[int, Line]) -> Line:
    if id(bsym) not in seen:
        seen[id(bsym)] = read_line(bsym)
    return seen[id(bsym)]


def _provenance(trace: TraceCtx) -> tuple[str, float | None]:
    """The name of the pass that made a trace, and the seconds that it took."""
    if trace.get_provenance() is None:
        return "traced", None
    text = str(trace.get_provenance()).removeprefix("# Constructed by ")
    took = TOOK.search(text)
    return TOOK.sub("", text), float(took[1]) / 1e3 if took else None


# ---- phases ----


def _phases(
    last: Sequence[TraceCtx],
    stages: Sequence[Stage],
    clocks: Sequence[Timeline],
    module_map: ModuleMap,
    traced: Mapping[str, Name],
) -> tuple[Phase, ...]:
    step = step_liveness(last[0], last[1] if len(last) > 1 else None)
    memories = [memory for memory in step if memory is not None]
    printed = {stage.phase: stage.lines for stage in stages}  # of the last stage of each phase
    phases: list[Phase] = []
    for name, trace, memory, clock in zip(("forward", "backward"), last, memories, clocks, strict=False):
        modules = assign_modules(trace.bound_symbols, module_map, modules_by_name(phases), traced)
        phases.append(_phase(name, printed[name], trace, memory, clock, modules))
    return tuple(phases)


def _phase(
    name: str, printed: tuple[Line, ...], trace: TraceCtx, memory: Liveness, clock: Timeline, modules: list[Name | None]
) -> Phase:
    lines = trace.bound_symbols
    return Phase(
        name,
        printed,
        clock,
        tuple(memory.lines),
        tuple(memory.buffers),
        tuple(collectives(trace)),
        tuple(modules),
        tuple(bucket_of(b).label if is_collective(b) or is_offload(b) else "" for b in lines),
        tuple(b.header if isinstance(b.header, str) else " ".join(b.header) for b in lines),
    )


def modules_by_name(phases: Sequence[Phase]) -> dict[str, Name]:
    """The modules of all values that ``phases`` compute, by the names of the values."""
    lines = ((line, module) for p in phases for line, module in zip(p.lines, p.modules, strict=True))
    return {name: module for line, module in lines if module is not None for name in line.results}


# ---- parameters ----


def _gathered(trace: TraceCtx) -> list[Bucket]:
    """The buckets of a trace's collectives, in the order of issue."""
    return [bucket_of(b) for b in trace.bound_symbols if is_issue(b)]


def _parameters(buckets: Sequence[Bucket]) -> tuple[Parameter, ...]:
    found: dict[str, Parameter] = {}
    for bucket in buckets:
        for m in bucket.members:
            p, plan, rest = m.parameter, bucket.plan, bucket.rest_dtype
            reduced = plan.reduced_dtype(rest).bytes
            new = Parameter(
                p.name,
                p.layer,
                bucket.label,
                p.full_shape,
                p.full_numel * plan.unsharded_dtype(rest).bytes,
                m.numel * rest.bytes,
                m.trainable,
                plan.strategy,
                p.full_numel * reduced,
                m.numel * reduced if plan.outer is not None else 0,
                plan.host is not None,
            )
            found.setdefault(p.name, new)
    return tuple(found.values())


STRATEGIES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "hybrid_zero2": "hybrid ZeRO-2",
    "hybrid_zero3": "hybrid ZeRO-3",
    "owner": "ZeRO-3 by owners",
}


def _setup(model: str, plan: Plan | None, cost: CostModel, parameters: Sequence[Parameter], kept: int) -> Setup:
    if plan is None:
        return Setup(model, "", 1, 0, "", 0, None, cost)
    strategies = dict.fromkeys(p.strategy for p in parameters) or [plan.strategy]
    bucketing = f"{plan.bucketing:g} MB" if isinstance(plan.bucketing, int | float) else plan.bucketing
    strategy = " and ".join(STRATEGIES.get(name, name) for name in strategies)
    everyone = plan.runtime.group(Axis.ALL)
    ranks, rank = (everyone.size(), everyone.rank()) if everyone is not None else (plan.world_size, plan.rank)
    return Setup(plan.model, strategy, ranks, rank, bucketing, plan.prefetch, plan.max_inflight_bytes, plan.cost, kept)


def _device(traces: Sequence[TraceCtx]) -> str:
    inputs = (p for trace in traces[:1] for p in trace.args or () if isinstance(p, TensorProxy))
    return next((p.device.device_str().partition(":")[0] for p in inputs), "cpu")
