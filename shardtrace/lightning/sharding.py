"""What the strategies of Fabric and of the Trainer have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from shardtrace.api import fsdp
from shardtrace.model.materialize import init_empty_weights
from shardtrace.model.state import state_of
from shardtrace.options.policies import Checks, InitPolicy, parse_context
from shardtrace.ranks.mesh import init_process_group

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

M = TypeVar("M", bound=nn.Module)

# A mixed precision also gathers parameters and reduces gradients in the lower one, as Lightning's FSDPStrategy does.
_POLICIES = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


def check_precision(precision: Any) -> None:
    """Raises TypeError for a precision plugin, of Fabric or of the Trainer, that sharded models do not work with."""
    kinds = {cls.__name__ for cls in type(precision).__mro__} & {"DoublePrecision", "HalfPrecision", "MixedPrecision"}
    if not (precision is None or kinds or type(precision).__name__ == "Precision"):  # others replace layers or kernels
        raise TypeError(
            f"ShardtraceStrategy does not work with {type(precision).__name__}: use precision='32-true', "
            "'64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
        )


def seconds(timeout: timedelta | None) -> float:
    """How long ranks wait for each other."""
    return 300.0 if timeout is None else timeout.total_seconds()


@contextmanager
def environment(strategy: Any) -> Iterator[None]:
    """Around Lightning's own setup: the process group of ranks that torchrun has started, and the mesh."""
    if dist.is_torchelastic_launched() and strategy.process_group_backend is None:
        # torchrun may restart ranks, which Lightning's own group does not survive
        device = strategy.root_device
        strategy.accelerator.setup_device(device)
        init_process_group(device, timeout=strategy.seconds, **({"device_id": device} if device.type == "cuda" else {}))
    yield
    if isinstance(strategy.mesh, tuple):
        context = parse_context(strategy.options.get("context_parallel"))
        names = ("replicate", "shard") if context is None else ("data", context.mesh_dim)
        strategy.mesh = init_device_mesh(strategy.root_device.type, strategy.mesh, mesh_dim_names=names)


def sampling(strategy: Any, usual: dict[str, Any]) -> dict[str, Any]:
    """How many replicas of the data there are, and which is this rank's: the ranks of one sequence share theirs."""
    context, mesh = parse_context(strategy.options.get("context_parallel")), strategy.mesh
    if context is None or not isinstance(mesh, DeviceMesh):
        return usual
    others = [name for name in mesh.mesh_dim_names or () if name != context.mesh_dim]
    replicas, rank = 1, 0
    for name in others:
        replicas, rank = replicas * mesh[name].size(), rank * mesh[name].size() + mesh.get_local_rank(name)
    return {"num_replicas": replicas, "rank": rank}


@contextmanager
def building(precision: Any, empty: bool | None) -> Iterator[None]:
    """Modules are built in host memory, or without memory for their parameters (``empty``)."""
    with precision:
        if empty:
            with init_empty_weights():
                yield
        else:
            yield


def sharded(strategy: Any, module: M, precision: str) -> M:
    """Shards the module in place by the strategy's options, unless it is sharded already."""
    if state_of(module) is not None:
        return module
    policy = _POLICIES.get(precision)
    options = {**({"mp_policy": policy} if policy is not None else {}), **strategy.options}
    init = replace(options.pop("init_policy", InitPolicy()), device=strategy.root_device)
    checks = replace(options.pop("checks", Checks()), timeout=strategy.seconds)
    return fsdp(module, mesh=strategy.mesh, init_policy=init, checks=checks, **options)
