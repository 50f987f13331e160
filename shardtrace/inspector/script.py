"""Runs a training script as a fake rank until it has compiled a step."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from passes.analysis.recognise import is_backward
from passes.compat import compile_data_and_stats
from shardtrace.fake import fake_ranks
from shardtrace.inspector.inspection import Inspection, Traces, inspect_traces
from shardtrace.model.tracing import watching

import torch.distributed as dist
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform


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
        self.seen.append((data.fn, Traces(stats.last_traces, stats.last_backward_traces, stats.last_prologue_traces)))
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
    if not watch.seen:
        raise NothingCompiledError(
            f"{path} called no sharded model: let it shard a model with shardtrace.fsdp, jit it and call it, or name a "
            f"function that returns a module and its inputs, as in {path}:function"
        )
    found = [(function, traces) for function, traces in watch.seen if traces.backward]
    return inspect_traces(*(found or watch.seen)[0])


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
