"""What the command line looks at: a factory, or a script, which runs as a fake rank until it has compiled a step."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from passes.analysis.recognise import is_backward
from passes.compat.jit import compile_data_and_stats, jitted_module
from shardtrace.inspector.fake import fake_ranks
from shardtrace.inspector.inspection import Inspection, inspect_traces, with_proof
from shardtrace.inspector.step_data import Traces
from shardtrace.model.state import states_in
from shardtrace.model.tracing import watching

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from torch import nn


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


class Call(BaseException):
    """A call of a jitted module. It is raised to end the script, and no Exception, because the script may catch those.

    ``model`` is sharded; ``arguments`` and ``keywords`` are those of the call.
    """

    def __init__(self, model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.arguments, self.keywords = model, arguments, keywords


def first_call(path: Path, arguments: Sequence[str], *, world_size: int) -> Call:
    """The first call of a sharded model in a script, with gradients enabled. The script runs as in :func:`run_script`
    and ends at this call, which is neither compiled nor run.

    Raises:
        NothingCompiledError: if there is none. A function that ``thunder.jit`` compiles is no model.
        BaseException: any exception of the script.
    """
    run = ThunderModule.__call__

    def call(self: ThunderModule, *args: Any, **kwargs: Any) -> Any:
        module = jitted_module(self)
        if torch.is_grad_enabled() and states_in(module):
            raise Call(module, args, kwargs)
        return run(self, *args, **kwargs)

    watch = _Watch()
    try:
        with mock.patch.object(ThunderModule, "__call__", call):
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
    """What a factory returns."""
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
