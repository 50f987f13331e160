"""Everything that the inspector shows of a compiled step, as plain data without traces, modules or process groups."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple, TypeVar

from passes.analysis.calls import block_functions
from passes.analysis.liveness import Buffer, Collective, LineMemory, Liveness, collectives, step_liveness
from passes.analysis.recognise import bucket_of, is_collective, is_issue, is_offload
from passes.pipeline import REMARK
from passes.plan import Axis, Bucket, BucketPlan, CostModel, Member, default_cost_model, shard_shape
from passes.plan.cost import describe
from passes.plan.plan import STRATEGY_NAMES
from passes.proof.prove import Proof
from shardtrace.inspector.lines import Branch, Line, Name, Reader, Row, Table, assign_modules, diff, fold
from shardtrace.inspector.timeline import LineTimes, Timeline, measured, predicted
from shardtrace.options.policies import needs

from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

# ---- tables ----


def size(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"


def duration(seconds: float) -> str:
    """0.00153 -> '1.53 ms'."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:  # three digits round up to it
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0 s"


def count(number: int, noun: str) -> str:
    """2, 'line' -> '2 lines'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


T = TypeVar("T")
MOST = 60  # rows that are printed
SIZES = ("bytes", "during", "total", "inputs", "unsharded", "in_flight", "activations", "saved", "gradients")
SECONDS = ("time", "start", "stop", "exposed")


class Rows(list[T]):
    """A list of named tuples of one kind: the rows of a table, as which it prints."""

    def to_pandas(self) -> Any:
        """The table as a ``pandas.DataFrame``. Raises ImportError if pandas is not installed."""
        needs("pandas", extra="notebook", what="to_pandas")
        import pandas

        return pandas.DataFrame(self)

    def __str__(self) -> str:
        return "\n".join([*columns(list(self._cells()), numbers=False), *self._rest()]) if self else "no rows"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = list(self._cells()) or [()]
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        note = "".join(f"<p>{escape(line)}</p>" for line in self._rest())
        return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{body}</table>{note}"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """The titles of the columns, then the texts of each row."""
        for k, row in enumerate(self[:MOST]):
            fields: dict[str, Any] = row._asdict()  # type: ignore[attr-defined]
            if k == 0:
                yield tuple(fields)
            yield tuple(_text(name, value) for name, value in fields.items())

    def _rest(self) -> list[str]:
        return [f"and {len(self) - MOST:,} more rows: see to_pandas()"] if len(self) > MOST else []


def _text(name: str, value: Any) -> str:
    if name in SIZES and isinstance(value, int):
        return size(value)
    if name in SECONDS:
        return duration(value)
    if isinstance(value, tuple):
        return ", ".join(value[:2]) + (f" and {len(value) - 2} more" if len(value) > 2 else "")
    text = str(value).partition("\n")[0]
    return text if len(text) <= 60 else text[:59] + "…"


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = True) -> list[str]:
    """Rows with aligned columns: the first to the left, the others to the right if they are ``numbers``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def padded(k: int, cell: str) -> str:
        return cell.rjust(widths[k]) if k and numbers else cell.ljust(widths[k])

    return ["  ".join(padded(k, cell) for k, cell in enumerate(row)).rstrip() for row in rows]


# ---- steps ----


class Stage(NamedTuple):
    """A trace after one pass. ``seconds`` is the time that the pass took, or None if it was not measured.

    ``rows`` is the difference from the previous stage of the phase. All lines of the first stage are new.
    """

    phase: str  # "forward", "backward", "prologue", or the name of a block's function
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
    """An executed trace: when each line runs, the memory that is alive, its module, and the reason for its position (""
    if no pass gave one)."""

    name: str  # "forward" or "backward"
    lines: tuple[Line, ...]
    timeline: Timeline
    memory: tuple[LineMemory, ...]
    buffers: tuple[Buffer, ...]
    collectives: tuple[Collective, ...]  # in order of issue
    modules: tuple[Name | None, ...]
    buckets: tuple[str, ...]  # labels; "" for a line of compute
    why: tuple[str, ...]

    @property
    def peak(self) -> LineMemory:
        return max(self.memory, key=lambda row: row.during)

    def work(self) -> Iterator[Work]:
        """What each line computes. For a line that calls a block, these are the lines of its function, which share its
        time in proportion to their predicted times."""
        starts = self.timeline.starts
        for i, (line, module) in enumerate(zip(self.lines, self.modules, strict=True)):
            if module is None:
                continue
            seconds, function = starts[i + 1] - starts[i], line.function
            if function is None:
                yield Work(i, None, module, seconds)
                continue
            total = sum(function.seconds) or 1.0
            for k, inner in enumerate(function.modules):
                if inner is not None:
                    yield Work(i, k, function.module_in(module, inner), seconds * function.seconds[k] / total)


class Work(NamedTuple):
    """Line number ``line`` of an executed trace, or line number ``part`` of the function that it calls."""

    line: int
    part: int | None
    module: Name
    seconds: float


class Parameter(NamedTuple):
    """A sharded parameter.

    ``bytes`` is the size of the whole parameter on the wire, with padding; ``shard_bytes`` that of this rank's shard at
    rest, on the device or in host memory. Its gradient has ``reduced_bytes`` on the wire. Hybrid strategies reduce
    ``outer_bytes`` of them again over the replicas.
    """

    name: str
    module: Name
    bucket: str
    shape: tuple[int, ...]
    bytes: int
    shard_bytes: int
    strategy: str
    reduced_bytes: int
    outer_bytes: int
    on_host: bool = False
    second_bytes: int = 0  # of the gather of second shards


class Setup(NamedTuple):
    """The model and the options that it was compiled with. ``strategy`` is "" if shardtrace did not shard the model."""

    model: str
    cost: CostModel
    strategy: str = ""
    world_size: int = 1
    description: str = "not sharded by shardtrace"
    host_bytes: int = 0  # shards at rest in host memory

    @property
    def rates(self) -> str:
        """The rates behind the predicted times, in words."""
        return f"predicted with the rates of {describe(self.cost)}"


class StepData(NamedTuple):
    """A compiled step: its setup, its passes, and its executed traces on one clock.

    All times are predicted, or, if ``measured_steps`` is not 0, medians over that many steps.
    """

    setup: Setup
    stages: tuple[Stage, ...]
    phases: tuple[Phase, ...]  # forward, then backward if there is one
    parameters: tuple[Parameter, ...]
    modules: Branch
    notes: tuple[str, ...]  # remarks about missing or chosen data
    predicted_seconds: float
    measured_steps: int

    @property
    def times(self) -> str:
        """The kind of its times: "predicted" or "measured"."""
        return "measured" if self.measured_steps else "predicted"

    @property
    def end(self) -> float:
        """The seconds of the step: forward and backward."""
        return self.phases[-1].timeline.end if self.phases else 0.0


class Traces(NamedTuple):
    """The traces of one compilation in the order of the passes, notes about which compilation it is, and what
    proves it."""

    forward: Sequence[TraceCtx]
    backward: Sequence[TraceCtx]
    prologue: Sequence[TraceCtx]
    notes: tuple[str, ...] = ()
    prove: Callable[[], Proof | None] = lambda: None


def build_step_data(
    traces: Traces,
    *,
    model: str,
    forms: Mapping[Name, str],
    plan: BucketPlan | None = None,
    notes: Sequence[str] = (),
    times: LineTimes | None = None,
) -> StepData:
    """Collects the record of one compilation from its stages; there may be none.

    ``forms`` has the class of each module by name. ``plan`` is the fallback if the traces have no collectives.
    ``times`` replace the predicted times.
    """
    ends = (next((t for t in reversed(of_phase) if t.bound_symbols), None) for of_phase in traces[:2])
    last = [trace for trace in ends if trace is not None]  # forward, then backward if there is one
    buckets = list(dict.fromkeys(b for t in last for b in _gathered(t)))
    plan = buckets[0].plan if buckets else plan
    cost = plan.cost if plan is not None else default_cost_model(_device(last), "none")
    reader = Reader(cost)
    stages = _stages("forward", traces.forward, reader) + _stages("backward", traces.backward, reader)
    for called in block_functions(*last):
        stages += _stages(called.name, called.traces, reader)
    stages += _stages("prologue", traces.prologue, reader)
    expected = predicted(last, cost)
    clocks = measured(last, times.seconds, cost) if times is not None else expected
    phases = _phases(last, stages, clocks) if last else ()
    parameters = _parameters(buckets)
    names = [*forms, *(p.module for p in parameters), *(m for p in phases for m in p.modules if m)]
    shapes: dict[Name, list[Any]] = {}
    for p in parameters:
        shapes.setdefault(p.module, []).append((p.name.rpartition(".")[2], p.shape))
    tree = fold(names, lambda name: (forms.get(name), tuple(shapes.get(name, ()))))
    return StepData(
        setup=_setup(model if forms else plan.model, plan, buckets, parameters) if plan else Setup(model, cost),
        stages=stages,
        phases=phases,
        parameters=parameters,
        modules=tree,
        notes=tuple(notes),
        predicted_seconds=expected[-1].end if expected else 0.0,
        measured_steps=times.steps if times is not None else 0,
    )


# ---- stages ----


TOOK = re.compile(r" \(took ([\d.]+) milliseconds\)")


def _stages(phase: str, traces: Sequence[TraceCtx], reader: Reader) -> tuple[Stage, ...]:
    """The stages of a phase, without traces that are the same object as the previous one."""
    stages: list[Stage] = []
    known, before = Table[Line](), list[int]()  # lines are compared by their places
    for k, trace in enumerate(traces):
        if k and trace is traces[k - 1]:
            continue
        lines = reader.lines(trace.bound_symbols)
        name, seconds = _provenance(trace)
        now = list(map(known.place, lines))
        stages.append(Stage(phase, name, seconds, lines, tuple(diff(before, now))))
        before = now
    return tuple(stages)


def _provenance(trace: TraceCtx) -> tuple[str, float | None]:
    """The name of the pass that made a trace, and the seconds it took."""
    if trace.get_provenance() is None:
        return "traced", None
    text = str(trace.get_provenance()).removeprefix("# Constructed by ").partition(REMARK)[0]
    took = TOOK.search(text)
    return TOOK.sub("", text), float(took[1]) / 1e3 if took else None


# ---- phases ----


def _phases(last: Sequence[TraceCtx], stages: Sequence[Stage], clocks: Sequence[Timeline]) -> tuple[Phase, ...]:
    step = step_liveness(last[0], last[1] if len(last) > 1 else None)
    memories = [memory for memory in step if memory is not None]
    printed = {stage.phase: stage.lines for stage in stages}  # the last stage of each phase wins
    phases: list[Phase] = []
    for name, trace, memory, clock in zip(("forward", "backward"), last, memories, clocks, strict=False):
        modules = assign_modules(trace.bound_symbols, modules_by_name(phases))
        phases.append(_phase(name, printed[name], trace, memory, clock, modules))
    return tuple(phases)


def _phase(
    name: str, printed: tuple[Line, ...], trace: TraceCtx, memory: Liveness, clock: Timeline, modules: list[Name | None]
) -> Phase:
    lines = trace.bound_symbols
    return Phase(
        name=name,
        lines=printed,
        timeline=clock,
        memory=tuple(memory.lines),
        buffers=tuple(memory.buffers),
        collectives=tuple(collectives(trace)),
        modules=tuple(modules),
        buckets=tuple(bucket_of(b).label if is_collective(b) or is_offload(b) else "" for b in lines),
        why=tuple(b.header if isinstance(b.header, str) else " ".join(b.header) for b in lines),
    )


def modules_by_name(phases: Sequence[Phase]) -> dict[str, Name]:
    """The modules of all values that ``phases`` compute, by name of the value."""
    lines = ((line, module) for p in phases for line, module in zip(p.lines, p.modules, strict=True))
    return {name: module for line, module in lines if module is not None for name in line.results}


# ---- parameters ----


def _gathered(trace: TraceCtx) -> list[Bucket]:
    """The buckets of a trace's collectives, in order of issue."""
    return [bucket_of(b) for b in trace.bound_symbols if is_issue(b)]


def _parameters(buckets: Sequence[Bucket]) -> tuple[Parameter, ...]:
    found: dict[str, Parameter] = {}
    for bucket in buckets:
        trainable = bucket.trainable
        gathered = _bytes_of(bucket) if bucket.wire is not None and not bucket.wire.reduces else {}
        reduced, over_replicas = _bytes_of(trainable), _bytes_of(trainable.outer if trainable is not None else None)
        for m in bucket.members:
            p, plan, rest = m.parameter, bucket.plan, bucket.rest_dtype
            new = Parameter(
                name=p.name,
                module=p.layer,
                bucket=bucket.label,
                shape=p.full_shape,
                bytes=gathered.get(p.name, p.full_numel * plan.unsharded_dtype(rest).bytes),
                shard_bytes=m.numel * rest.bytes,
                strategy=plan.strategy,
                reduced_bytes=reduced.get(p.name, 0),
                outer_bytes=over_replicas.get(p.name, 0),
                on_host=plan.host is not None,
                second_bytes=_second_bytes(bucket, m),
            )
            found.setdefault(p.name, new)
    return tuple(found.values())


def _second_bytes(bucket: Bucket, member: Member) -> int:
    plan = bucket.plan.secondary
    if plan is None:
        return 0
    return plan.world_size * math.prod(shard_shape(member.parameter.full_shape, plan.world_size)) * bucket.dtype.bytes


def _bytes_of(bucket: Bucket | None) -> dict[str, int]:
    """The bytes of a collective of a bucket, by the name of the parameter."""
    if bucket is None:
        return {}
    return {m.parameter.name: size for m, size in zip(bucket.members, bucket.member_bytes, strict=True)}


def _setup(model: str, plan: BucketPlan, buckets: Sequence[Bucket], parameters: Sequence[Parameter]) -> Setup:
    names = dict.fromkeys(p.strategy for p in parameters) or [plan.strategy]
    strategy = " and ".join(STRATEGY_NAMES.get(name, name) for name in names)
    group = plan.runtime.group(Axis.ALL)
    ranks, rank = (group.size(), group.rank()) if group is not None else (plan.world_size, plan.rank)
    kept = sum(p.shard_bytes for p in parameters if p.on_host)
    limit = f"prefetch {plan.prefetch}"
    if plan.max_inflight_bytes is not None:
        limit += f", at most {size(plan.max_inflight_bytes)} in flight"
    parts = [
        f"{strategy} over {count(ranks, 'rank')}, seen from rank {rank}",
        f"buckets by {_bucketing(plan)}",
        limit,
        f"{size(kept)} of shards in host memory" if kept else "",
        _wires(buckets),
    ]
    return Setup(model, plan.cost, strategy, ranks, " · ".join(filter(None, parts)), kept)


def _wires(buckets: Sequence[Bucket]) -> str:
    """What is rounded on its way, and to what."""
    found = dict.fromkeys((b.wire.reduces, b.travels_as) for b in buckets if b.wire is not None)
    verbs = {False: "gathered as", True: "reduced as"}
    texts = (" and ".join(name for r, name in found if r is reduces) for reduces in (False, True))
    return ", ".join(f"{verbs[bool(k)]} {text}" for k, text in enumerate(texts) if text)


def _bucketing(plan: BucketPlan) -> str:
    """How parameters are grouped into buckets, and why."""
    if isinstance(plan.bucketing, int | float):
        return f"{plan.bucketing:g} MB"
    if plan.pieces == 1:
        return plan.bucketing
    return f"{plan.bucketing}, split into {plan.pieces} because the link is slow"


def _device(traces: Sequence[TraceCtx]) -> str:
    inputs = (p for trace in traces[:1] for p in trace.args or () if isinstance(p, TensorProxy))
    return next((p.device.device_str().partition(":")[0] for p in inputs), "cpu")
