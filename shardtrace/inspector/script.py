"""Running a training script as one of ranks that do not exist, until it has compiled a step."""

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
    """The script ended and had compiled no sharded model."""


class _Compiled(BaseException):
    """Ends the script; not an Exception, which it may catch."""


class _Watch(Transform):
    """Sees the traces of each jitted function that calls a sharded module, after all passes."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Traces]] = []

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        if is_backward(computation_trace):  # after the forward that belongs to it
            raise _Compiled
        data, stats = compile_data_and_stats()
        self.seen.append((data.fn, Traces(stats.last_traces, stats.last_backward_traces, stats.last_prologue_traces)))
        return computation_trace


def run_script(path: Path, arguments: Sequence[str], *, world_size: int, rank: int = 0) -> Inspection:
    """What a script compiles for its first training step: the first call of a sharded model that has a backward.

    There the script ends, before the step runs. If it has no such call, it runs to its end, and its first call is
    shown. It finds torchrun's environment, and a process group whose other ranks do not exist: to make one has no
    effect, and collectives of its own do nothing.

    Raises:
        NothingCompiledError: if it ended without a call of a sharded model.
        BaseException: what the script raises.
    """
    watch = _Watch()
    token = watching.set((watch,))
    try:
        with _as_rank(rank, world_size), _as_main(path, arguments), suppress(_Compiled):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        if not watch.seen:
            what = f"{path} left by sys.exit({stop.code!r}) before it called a sharded model (its arguments follow --)"
            raise NothingCompiledError(what) from stop
    finally:
        watching.reset(token)
    if not watch.seen:
        raise NothingCompiledError(
            f"{path} called no sharded model: let it shard one with shardtrace.fsdp, jit it and call it, or name a "
            f"function that returns a module and what it is called with, {path}:function"
        )
    found = [(function, traces) for function, traces in watch.seen if traces.backward]
    return inspect_traces(*(found or watch.seen)[0])


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """As torchrun would start it, alone on its machine."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
    environment = {name: str(number) for name, number in numbers.items()}
    environment |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "shardtrace"}
    with (
        mock.patch.dict(os.environ, environment),
        fake_ranks(world_size, rank),
        mock.patch.object(dist, "init_process_group"),  # it is there already
    ):
        yield


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """As ``python path arguments`` would start it."""
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
    ):
        yield
