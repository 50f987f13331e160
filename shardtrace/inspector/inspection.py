"""``inspect``: a compiled step as tables, text and a page. The command line looks at the step of a factory, or of a
script, which runs as a fake rank until it has compiled one."""

from __future__ import annotations

import copy
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from passes.analysis.calls import block_functions
from passes.analysis.recognise import is_backward
from passes.compat.jit import compile_data_and_stats, jitted_module
from passes.pipeline import REMARK
from shardtrace.inspector import drawing, page, summary
from shardtrace.inspector.checking import Proof, prove_compiled
from shardtrace.inspector.step_data import Rows, Stage, StepData, Traces, build_step_data, count
from shardtrace.inspector.summary import Totals, totals
from shardtrace.inspector.timeline import Profile
from shardtrace.model.distribute import shard_parameters
from shardtrace.model.state import states_in
from shardtrace.model.tracing import watching
from shardtrace.options.options import canonical, parse_options
from shardtrace.planner.training_plan import mesh_dim_names
from shardtrace.testing import compile_sharded, count_ranks, fake_ranks, parse_arguments

import thunder
import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from torch import nn
from torch.distributed import init_device_mesh


class CollectiveRow(NamedTuple):
    """One collective of a step.

    ``bytes`` is the size of the unsharded bucket, with padding. ``issue`` and ``wait`` are lines of the executed trace.
    ``start`` and ``stop`` are seconds since the step began, and ``exposed`` the seconds that compute waits for it.

    ``times`` is "predicted" (by the cost model) or "measured". A measured collective lasts from its issue to the end of
    its wait, because the time of its arrival is not known.
    """

    phase: str
    kind: str
    bucket: str
    dtype: str
    bytes: int
    parameters: tuple[str, ...]
    issue: int
    wait: int
    start: float
    stop: float
    exposed: float
    times: str
    why_issued: str
    why_waited: str


class MemoryRow(NamedTuple):
    """The memory of tensors at one line of an executed trace, in bytes. ``time`` is the line's start in seconds.

    ``during`` is needed while the line runs, ``total`` is alive after it. ``inputs`` are the shards and the batch.
    """

    phase: str
    line: int
    code: str
    time: float
    during: int
    total: int
    inputs: int
    unsharded: int
    in_flight: int
    activations: int
    saved: int
    gradients: int


class Inspection:
    """The result of :func:`inspect`. ``print`` shows the summary, a notebook the whole page."""

    def __init__(self, data: StepData, prove: Callable[[], Proof | None] = lambda: None) -> None:
        self.record, self._prove = data, prove

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The passes of forward, backward, the functions of blocks that they call, and prologue (which checks a call's
        arguments), in this order. Each has ``name``, ``phase``, ``seconds``, ``lines`` and ``changes``."""
        return self.record.stages

    @cached_property
    def proof(self) -> Proof | None:
        """The proof that the step is the unsharded program (:func:`shardtrace.prove`); None without a sharded model.
        It is made when it is asked for, or shown on the page."""
        return self._prove()

    @property
    def times(self) -> str:
        """The kind of its times: "measured" if ``inspect`` was given a profile, else "predicted"."""
        return self.record.times

    @cached_property
    def collectives(self) -> Rows[CollectiveRow]:
        """The collectives of a step in order of issue: a list of named tuples, with ``to_pandas()``."""
        rows = Rows[CollectiveRow]()
        for phase in self.record.phases:
            spans = [span for span in phase.timeline.spans if span.kind != "offload"]
            for c, s in zip(phase.collectives, sorted(spans, key=lambda span: span.issue), strict=True):
                row = (c.phase, c.kind, *c[2:], s.issue, s.wait, s.start, s.stop, s.exposed, self.times)
                rows.append(CollectiveRow(*row, why_issued=phase.why[s.issue], why_waited=phase.why[s.wait]))
        return rows

    @property
    def totals(self) -> Totals:
        """The step in five numbers, for comparisons. All are 0 if nothing was compiled."""
        return totals(self.record)

    @cached_property
    def memory(self) -> Rows[MemoryRow]:
        """The memory at each line of a step: a list of named tuples, with ``to_pandas()``."""
        return Rows(
            MemoryRow(phase.name, row.line, line.code, time, *row[1:])
            for phase in self.record.phases
            for row, line, time in zip(phase.memory, phase.lines, phase.timeline.starts, strict=False)
        )

    def to_html(self, path: str | Path) -> Path:
        """Writes the page to one self-contained file, which needs no network, and returns its path."""
        return _write(path, page.render(self.record, self.proof))

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Writes the timeline for https://ui.perfetto.dev or chrome://tracing, and returns its path."""
        return _write(path, drawing.render(self.record))

    def __str__(self) -> str:
        return summary.render(self.record)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return page.embed(self.record, self.proof)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


def _write(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path


def inspect(
    model: Callable[..., Any],
    example_inputs: Any = None,
    *,
    world_size: int | None = None,
    mesh_shape: tuple[int, int] | None = None,
    rank: int = 0,
    compilation: int | None = None,
    profile: Profile | None = None,
    jit_options: Mapping[str, Any] | None = None,
    **fsdp_options: Any,
) -> Inspection:
    """Inspects a step: its passes, its timeline and memory, and the purpose of each line.

    ``inspect(cmodel)`` shows what ``thunder.jit`` has compiled. ``inspect(model, example_inputs, world_size=64)``
    compiles a copy of ``model`` for one of 64 fake ranks and runs nothing. It needs no GPU, no other process, and only
    the memory of one rank's shards.

    Args:
        model: the result of ``thunder.jit``; or, for fake ranks, a module, which may be on the meta device.
        example_inputs: the module's inputs: a tuple of arguments, a mapping of keyword arguments, or a single
            argument. Their values do not matter.
        world_size: number of fake ranks.
        mesh_shape: (replicas, shards) of the fake ranks, for a hybrid strategy; (data, context), (data, expert) or
            (data, tensor) with ``context_parallel``, ``expert_parallel`` or ``tensor_parallel``. ``world_size`` is
            then optional.
        rank: the fake rank to show. All ranks run the same lines.
        compilation: which compilation of a jitted model to show, if there are several (one for each input shape):
            its number in order of compilation, from 0. Default: the one of the last call.
        profile: a profile of the jitted model by :func:`profile`. Its times replace the predicted ones.
        jit_options: options of ``thunder.jit``, for fake ranks.
        fsdp_options: options of :func:`shardtrace.fsdp`, for fake ranks: ``sharding_strategy``, ``compile_policy``, ...
            Without a ``cost_model``, times rest on its pessimistic defaults, which are the same on every machine.
            ``InitPolicy(device="cuda")`` needs no GPU; the executors are those of this machine, so nvFuser takes part
            only if it is installed.

    Raises:
        TypeError: if ``model`` is neither, or if an argument does not apply to it.
        IndexError: if there is no such compilation.
        ValueError: if this compilation did not run in the profile; if there is no such rank; if ``mesh_shape`` does
            not have ``world_size`` ranks.
        RuntimeError: for fake ranks, if this process already is in a process group.
    """
    if thunder.compile_data(model) is not None:
        if example_inputs is not None or world_size is not None or mesh_shape or jit_options or fsdp_options:
            raise TypeError(
                "a jitted model is shown as it was compiled: call inspect(cmodel) without further arguments, "
                "or pass the unsharded module to compile it for fake ranks"
            )
        return inspect_traces(thunder.compile_data(model).fn, _traces(model, compilation), profile)
    if profile is not None:
        raise TypeError("a profile is of a jitted model: pass this model, as in inspect(cmodel, profile=p)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect takes what thunder.jit returned, or a module, not {type(model).__name__}")
    if states_in(model):
        raise TypeError(f"this {type(model).__name__} is sharded: pass what thunder.jit returned for it, after a call")
    if mesh_shape is not None:
        world_size = count_ranks(mesh_shape, world_size)
    if example_inputs is None or world_size is None:
        raise TypeError(
            "a module that is not jitted is compiled for fake ranks: pass example_inputs and world_size as well, "
            "as in inspect(model, (x, y), world_size=64)"
        )
    with fake_ranks(world_size, rank):
        if mesh_shape is not None:
            fsdp_options["mesh"] = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_dim_names(fsdp_options))
        arguments = parse_arguments(example_inputs)
        ours = compile_sharded(model, arguments, fsdp_options=fsdp_options, jit_options=jit_options or {})
        return inspect_traces(thunder.compile_data(ours).fn, _traces(ours, None))


def inspect_traces(function: Any, traces: Traces, profile: Profile | None = None) -> Inspection:
    """Inspects the traces of ``function``, the function or module that was passed to ``thunder.jit``."""
    forward, notes = traces.forward, [*traces.notes]
    module = function if isinstance(function, nn.Module) else None
    name = type(function).__name__ if module is not None else getattr(function, "__name__", type(function).__name__)
    forms = {n: type(m).__name__ for n, m in module.named_modules()} if module is not None else {}
    states = states_in(module) if module is not None else []
    plan = next((plan for state in states for plan in state.plans.values()), None)
    if not forward:
        notes.append("It was not called yet. There is no trace: call it once, then inspect it again.")
    times = profile.times(forward) if profile is not None else None
    notes += [f"Blocks: {remark}." for trace in forward if (remark := str(trace.get_provenance()).partition(REMARK)[2])]
    if times is not None:
        steps = count(times.steps, "step")
        notes.append(f"Times are medians over {steps} on this rank. Reasons for a line's position rest on predictions.")
        if block_functions(*forward):
            notes.append(
                "A block is timed as a whole; its lines share the time in proportion to their predicted times."
            )
    shown = build_step_data(traces, model=name, forms=forms, plan=plan, notes=notes, times=times)
    if forward and not shown.setup.strategy:
        no_collectives = (
            "Its traces have no collectives of shardtrace: it was not sharded by shardtrace.fsdp, or on one rank."
        )
        shown = shown._replace(notes=(*shown.notes, no_collectives))
    return Inspection(shown, traces.prove)


def _traces(cmodel: Any, compilation: int | None) -> Traces:
    """The traces of a compilation, by default of the last call's."""
    stats = thunder.compile_stats(cmodel)
    entries = stats.interpreter_cache
    last = stats.last_traces or []
    at = next((i for i, entry in enumerate(entries) if entry.computation_traces is last), None)
    if compilation is not None:
        if not -len(entries) <= compilation < len(entries):
            raise IndexError(f"there are {len(entries)} compilations, so none with number {compilation}")
        at = compilation % len(entries)
    if at is None:
        found = Traces(last, stats.last_backward_traces or [], stats.last_prologue_traces or [])
        return with_proof(thunder.compile_data(cmodel), found)
    chosen = f"This is compilation {at} of {len(entries)} (counted from 0): inspect(cmodel, compilation=...) shows the"
    notes = (f"{chosen} others.",) if compilation is not None or len(entries) > 1 else ()
    entry = entries[at]
    return with_proof(
        thunder.compile_data(cmodel),
        Traces(entry.computation_traces, entry.backward_traces, entry.prologue_traces, notes),
    )


def with_proof(data: Any, traces: Traces) -> Traces:
    """Traces that were compiled with Thunder's ``data``, with what proves them if they have a sharded model."""
    forward = next((t for t in reversed(traces.forward) if t.bound_symbols), None)
    if forward is None:
        return traces
    backward = traces.backward[-1] if traces.backward else None
    return traces._replace(prove=partial(prove_compiled, data, traces.forward, forward, backward))


# ---- scripts and factories of the command line ----


class NothingCompiledError(Exception):
    """The script ended without compiling a sharded model."""


class _Compiled(BaseException):
    """Ends the script. It is not an Exception, because the script may catch those."""


class _Watch(Transform):
    """Collects the traces of each jitted function that calls a sharded module, after all passes."""

    sees_no_lines = True  # it shows them as they are

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Traces]] = []

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        if is_backward(computation_trace):  # after the forward that belongs to it
            raise _Compiled
        data, stats = compile_data_and_stats()
        self.seen.append((data, Traces(stats.last_traces, stats.last_backward_traces, stats.last_prologue_traces)))
        return computation_trace


def run_script(path: Path, arguments: Sequence[str], *, world_size: int, rank: int = 0) -> Inspection:
    """Inspects the first training step of a script: its first call of a sharded model that has a backward.

    The script ends at this call, before the step runs. Without such a call it runs to its end, and its first call is
    shown. It sees torchrun's environment and a process group of fake ranks. ``init_process_group`` has no effect, and
    the script's own collectives do nothing.

    Raises:
        NothingCompiledError: if the script ends without calling a sharded model.
        BaseException: any exception of the script.
    """
    watch = _Watch()
    _run(path, arguments, watch, world_size=world_size, rank=rank)
    if not watch.seen:
        raise NothingCompiledError(
            f"{path} called no sharded model: let it shard a model with shardtrace.fsdp, jit it and call it, or name a "
            f"function that returns a module and its inputs, as in {path}:function"
        )
    found = [(data, traces) for data, traces in watch.seen if traces.backward]
    data, traces = (found or watch.seen)[0]
    return inspect_traces(data.fn, with_proof(data, traces))


class Sharded(NamedTuple):
    """A script's call of ``fsdp``: the module, the options by their names in :func:`shardtrace.fsdp`, and ``whole``, a
    copy of the module from before the call, if one was asked for."""

    module: nn.Module
    options: Mapping[str, Any]
    whole: nn.Module | None


class Call(BaseException):
    """A call of a jitted module. It is raised to end the script, and no Exception, because the script may catch those.

    ``model`` is sharded, with ``sharded`` if it is so as a whole; ``arguments`` and ``keywords`` are those of the call.
    """

    def __init__(
        self, model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], sharded: Sharded | None
    ) -> None:
        super().__init__()
        self.model, self.arguments, self.keywords, self.sharded = model, arguments, keywords, sharded


def first_call(path: Path, arguments: Sequence[str], *, world_size: int, copies: bool = False) -> Call:
    """The first call of a sharded model in a script, with gradients enabled. The script runs as in :func:`run_script`
    and ends at this call, which is neither compiled nor run. ``copies``: of models, before ``fsdp`` shards them.

    Raises:
        NothingCompiledError: if there is none. A function that ``thunder.jit`` compiles is no model.
        BaseException: any exception of the script.
    """
    run = ThunderModule.__call__
    options: list[Mapping[str, Any]] = []
    sharded: list[Sharded] = []

    def parsed(arguments: Mapping[str, Any], spelling: Mapping[str, Any]) -> Any:
        options.append(canonical(arguments, spelling))
        return parse_options(arguments, spelling)

    def before(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sharded.append(Sharded(module, options[-1], copy.deepcopy(module) if copies else None))
        return shard_parameters(module, *args, **kwargs)

    def call(self: ThunderModule, *args: Any, **kwargs: Any) -> Any:
        module = jitted_module(self)
        if torch.is_grad_enabled() and states_in(module):
            raise Call(module, args, kwargs, next((one for one in sharded if one.module is module), None))
        return run(self, *args, **kwargs)

    watch = _Watch()
    try:
        with (
            mock.patch.object(ThunderModule, "__call__", call),
            mock.patch("shardtrace.api.parse_options", parsed),
            mock.patch("shardtrace.api.shard_parameters", before),
        ):
            _run(path, arguments, watch, world_size=world_size, rank=0)
    except Call as found:
        return found
    raise NothingCompiledError(
        f"{path} trained no jitted model: let it call thunder.jit(model) for a model that shardtrace.fsdp has sharded, "
        f"or name a function that returns a module and its inputs, as in {path}:function"
    )


def _run(path: Path, arguments: Sequence[str], watch: _Watch, *, world_size: int, rank: int) -> None:
    """Runs a script as a fake rank until ``watch`` has seen a backward. Its end is an error if it compiled nothing."""
    token = watching.set((watch,))
    try:
        with _as_rank(rank, world_size), _as_main(path, arguments), suppress(_Compiled):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        if not watch.seen:
            left = f"{path} left by sys.exit({stop.code!r}) before it called a sharded model (its arguments follow --)"
            raise NothingCompiledError(left) from stop
    finally:
        watching.reset(token)


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """The environment of a rank that torchrun starts, the only one on its machine."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
    environment = {name: str(number) for name, number in numbers.items()}
    environment |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "shardtrace"}
    with (
        mock.patch.dict(os.environ, environment),
        fake_ranks(world_size, rank),
        mock.patch.object(dist, "init_process_group"),  # it exists already
    ):
        yield


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as in ``python path arguments``."""
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
    ):
        yield


# ---- targets ----


class TargetError(Exception):
    """A target that cannot be used; the message is for the person at the terminal."""


def script_of(target: str) -> Path | None:
    """The file of a target that is a training script. None for a factory."""
    if ":" in target:
        return None
    _check_file(Path(target))
    return Path(target)


def make(target: str) -> Any:
    """The result of a factory, called without arguments."""
    place, _, function = target.rpartition(":")
    if place.endswith(".py"):
        _check_file(Path(place))
        sys.path.insert(0, str(Path(place).resolve().parent))
        found = runpy.run_path(place, run_name=Path(place).stem).get(function)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            found = getattr(importlib.import_module(place), function, None)
        except ModuleNotFoundError as error:
            raise TargetError(f"there is no module {error.name}: is {place} a file? Then write {place}.py") from error
    if not callable(found):
        raise TargetError(f"there is no function {function} in {place}")
    return found()


def model_and_inputs(target: str, made: Any) -> tuple[Any, Any]:
    """The module and the inputs that a factory has made."""
    if not (isinstance(made, tuple) and len(made) == 2):
        raise TargetError(
            f"{target} must return a module and its inputs, as in `return model, (x, y)`, not {type(made).__name__}"
        )
    model, inputs = made
    return model, inputs


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
