"""Tools to read compiled traces and to test your own passes in a single process.

with fake_ranks(2):
    cmodel = compile_fake(build, x)
print(text(stage(cmodel, "schedule")))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from passes.compat.jit import attention_of_gpus, deeper_recursion
from shardtrace.api import fsdp
from shardtrace.model.distribute import hollow_copy
from shardtrace.options.policies import Checks, InitPolicy, parse_count
from shardtrace.ranks.mesh import resolve_device
from shardtrace.record.arguments import claim, is_absent, never_runs

import thunder
import torch
import torch.distributed as dist
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from torch import nn
from torch.utils._pytree import tree_map

__all__ = ["compile_fake", "fake_ranks", "stage", "text"]


def compile_fake(
    build: Callable[[], nn.Module],
    *inputs: Any,
    backward: bool = True,
    transforms: Sequence[Transform] = (),
    **options: Any,
) -> Any:
    """Shards the model that ``build`` returns over the current process group, jits it and calls it once.

    ``options`` go to :func:`shardtrace.fsdp`, ``transforms`` to ``thunder.jit``. With ``backward`` the sum of the
    result is differentiated. Inside :func:`fake_ranks` the numbers are meaningless; only the traces count.
    """
    cmodel = thunder.jit(fsdp(build(), **options), transforms=list(transforms))
    result = cmodel(*inputs)
    if backward:
        result.sum().backward()
    return cmodel


def stage(cmodel: Any, name: str, traces: Callable[[Any], list[TraceCtx]] = thunder.last_traces) -> TraceCtx:
    """The trace that pass ``name`` made: the forward one, or with ``thunder.last_backward_traces`` the backward one.

    Raises:
        ValueError: if the pass changed no trace.
    """
    ours = {}
    for trace in traces(cmodel):
        if found := re.search(r"shardtrace: (\w+) ", str(trace.get_provenance())):
            ours[found[1]] = trace
    if name not in ours:
        raise ValueError(f"no pass {name!r} has changed this trace, only {', '.join(ours) or 'none of shardtrace'}")
    return ours[name]


def text(trace: TraceCtx, *, dels: bool = True) -> str:
    """The lines of a trace without comments, with values numbered in order of appearance."""
    lines = []
    for bsym in trace.bound_symbols:
        if bsym.sym.name == "python_del" and not dels:
            continue
        lines += [line for line in str(bsym).splitlines() if not line.lstrip().startswith("#")]
    lines = [re.sub(r"  # .*", "", line) for line in lines]
    numbers: dict[str, str] = {}

    def renumber(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"{match[1]}{len(numbers)}")

    return "\n".join(re.sub(r"\b((?:bw_)?f?t)\d+\b", renumber, line) for line in lines if line)


# ---- fake ranks: a laptop compiles rank r of N for any N, without running anything ----


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Makes this process one of ``world_size`` ranks. The others do not exist, and collectives do nothing.

    Raises:
        ValueError: if there is no such rank.
        RuntimeError: if this process already is in a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parse_count("world_size", world_size, "a number of ranks, 1 or more", least=1)
    if parse_count("rank", rank, "0 or more") >= world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}: rank must be below world_size")
    if dist.is_initialized():
        raise RuntimeError(
            "this process is in a process group already, where there can be no fake ranks: call inspect(model, ..., "
            "world_size=...) in a process without one, or inspect what thunder.jit returned for a model that is "
            "sharded over this group"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():  # a script may have destroyed it already
            dist.destroy_process_group()


def count_ranks(mesh_shape: tuple[int, int], world_size: int | None = None) -> int:
    """The number of ranks of a mesh of (replicas, shards). Raises ValueError for any other shape, or if the number is
    not ``world_size``."""
    if not isinstance(mesh_shape, tuple | list) or len(mesh_shape) != 2:
        raise ValueError(f"mesh_shape must be (replicas, shards), as in (8, 8), not {mesh_shape!r}")
    for size in mesh_shape:
        parse_count("mesh_shape", size, "two numbers of ranks, (replicas, shards), as in (8, 8)", least=1)
    ranks = math.prod(mesh_shape)
    if world_size not in (None, ranks):
        raise ValueError(f"a mesh of shape {mesh_shape} has {ranks} ranks, not world_size={world_size}")
    return ranks


def compile_only(function: Callable[..., Any], arguments: Arguments) -> None:
    """Traces and compiles a call of a jitted function without running it."""
    args, kwargs = arguments
    thunder.compile_data(function).get_computation_and_inputs(*args, **kwargs)


@contextmanager
def sharded_copy(
    model: nn.Module, arguments: Arguments, fsdp_options: Mapping[str, Any]
) -> Iterator[tuple[nn.Module, Arguments]]:
    """A sharded copy of ``model``, which has no memory, and the arguments on its device. Compile it inside.

    A step that is never run is proven only where its proof is shown.
    """
    init = fsdp_options.get("init_policy", InitPolicy())
    device = resolve_device(init.device, _device(model, arguments))
    checks = replace(fsdp_options.get("checks", Checks()), prove=False)
    policies = {"init_policy": replace(init, device=device, param_init_fn=never_runs), "checks": checks}
    with deeper_recursion(), attention_of_gpus() if is_absent(device) else nullcontext():
        yield fsdp(hollow_copy(model), **{**fsdp_options, **policies}), _on(device, arguments)


def compile_sharded(
    model: nn.Module, arguments: Arguments, *, fsdp_options: Mapping[str, Any], jit_options: Mapping[str, Any]
) -> Any:
    """A jitted and sharded copy of ``model``, compiled for one call in the current process group. The model is not
    changed."""
    with sharded_copy(model, arguments, fsdp_options) as (copy, given):
        ours = thunder.jit(copy, **jit_options)
        compile_only(ours, given)
    return ours


def _on(device: torch.device, arguments: Arguments) -> Arguments:
    """The arguments on ``device``."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        return claim(value, device) if is_absent(device) or value.is_meta else value.to(device)

    moved: Arguments = tree_map(move, arguments)
    return moved


def parse_arguments(example_inputs: Any) -> Arguments:
    """A tuple or list of arguments, a mapping of keyword arguments, or the only argument."""
    if isinstance(example_inputs, Mapping):
        return (), example_inputs
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _device(model: nn.Module, arguments: Arguments) -> torch.device:
    args, kwargs = arguments
    tensors = [*model.parameters(), *(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))]
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
