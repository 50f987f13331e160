"""What options or a plan choose in a model while it is still whole, and where the model is to live."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from passes.plan import HostMemory, Placement, Wire
from shardtrace.model.places import Place, places
from shardtrace.model.state import states_in
from shardtrace.options.blocks import (
    blocks_of_a_kind,
    checkpointed_blocks,
    chosen_blocks,
    eager_modules,
    repeated_blocks,
)
from shardtrace.options.options import Options
from shardtrace.options.planned import TrainingPlan, mesh_dim_names
from shardtrace.options.spellings import canonical
from shardtrace.options.strategy import ShardingStrategy, assign
from shardtrace.options.wires import Travelling, assign_gathers, refuse_reductions
from shardtrace.ranks.consensus import announced, compare
from shardtrace.ranks.device import choose_device, use_device
from shardtrace.ranks.failure import tell_others_of_failure
from shardtrace.ranks.mesh import Groups, Mesh, backend_for, is_2d, mesh_of_nodes, resolve_groups
from shardtrace.record.absent import is_absent

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy


def with_plan(
    module: nn.Module, plan: TrainingPlan | str | Path, arguments: Mapping[str, Any], spelling: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of ``fsdp`` with the options of a plan. Call it on all ranks."""
    mesh = arguments["mesh"]
    with announced(module, mesh):
        given = canonical(arguments, spelling)
        device = choose_device(given["init_policy"].device, mesh, next((p.device for p in module.parameters()), None))
        timeout = given["checks"].timeout
        group = resolve_groups(mesh, device, hybrid=is_2d(mesh), timeout=timeout).everyone
        found = plan if isinstance(plan, TrainingPlan) else TrainingPlan.from_json(plan)
        found.check(module, group.size())
        merged = found.merged(given)
    compare(group, "the plan", [found.hash], timeout=timeout)
    if mesh is None and found.mesh_shape is not None:
        mesh = init_device_mesh(device.type, found.mesh_shape, mesh_dim_names=mesh_dim_names(merged))
    return merged | {"mesh": mesh}


class Chosen(NamedTuple):
    """The parameters to shard, by name the strategy and all ``names`` of each, and the modules that are treated in
    another way: ``blocks`` are buckets, ``checkpointed`` ones are recomputed (what of them), ``by_torch`` are run by
    PyTorch, ``repeated`` ones are compiled once."""

    places: list[Place]
    strategies: Mapping[str, ShardingStrategy]
    names: Mapping[str, list[str]]
    blocks: list[str]
    checkpointed: Mapping[str, tuple[nn.Module, str]]
    by_torch: list[nn.Module]
    repeated: Mapping[str, nn.Module]
    device: torch.device | None  # of the whole model


class Target(NamedTuple):
    """The device that computes, the groups of ranks, and the host memory for shards, if they do not stay on it."""

    device: torch.device
    groups: Groups
    host: HostMemory | None


def choose(module: nn.Module, options: Options, ignored: Collection[nn.Parameter]) -> Chosen:
    """Finds all parameters that are neither ignored nor sharded by an earlier call for a submodule, and what the
    options choose for them. Raises ValueError for a choice that chooses nothing, TypeError for one of another kind."""
    if wrong := [p for p in ignored if not isinstance(p, torch.Tensor)]:
        raise TypeError(f"ignored_params must be parameters, not {wrong[0]!r}: pass those of model.named_parameters()")
    blocks = repeated_blocks(module) if options.wrap is None else chosen_blocks(module, options.wrap)
    exclude = {id(entry.shard) for state in states_in(module) for entry in state.entries} | set(map(id, ignored))
    found = places(module, exclude, blocks)
    by_id: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(p), []).append(name)
    names = {place.name: by_id[id(place.parameter)] for place in found}
    return Chosen(
        places=found,
        checkpointed=checkpointed_blocks(module, options.checkpointing),
        by_torch=eager_modules(module, options.compile.eager),
        repeated=blocks_of_a_kind(module, options.compile.repeated_blocks, blocks),
        strategies=assign(options.rules, {p.name: p.parameter for p in found}, names),
        names=names,
        blocks=blocks,
        device=found[0].parameter.device if found else None,
    )


def find_target(chosen: Chosen, options: Options, mesh: Mesh | None) -> Target:
    """Chooses the device and the groups. Raises ValueError if the options have nothing to do there."""
    device = choose_device(options.init.device, mesh, chosen.device, on_host=options.offload is not None)
    if options.nodes_of is not None:
        mesh = mesh_of_nodes(options.nodes_of, mesh, device, timeout=options.checks.timeout)
    hybrid = any(strategy.needs_mesh for _, strategy in options.rules)
    groups = resolve_groups(
        mesh,
        device,
        hybrid=hybrid,
        context=options.context.mesh_dim if options.context else None,
        timeout=options.checks.timeout,
    )
    tell_others_of_failure(groups.everyone)
    if is_absent(device) and dist.get_backend(groups.everyone) != "fake":
        raise ValueError(
            f'torch sees no {device.type} device on this machine: pass init_policy=InitPolicy(device="cpu"), or '
            "compile for fake ranks, as in "
            'shardtrace.inspect(model, x, world_size=8, init_policy=InitPolicy(device="cuda"))'
        )
    if dist.get_backend(groups.everyone) != "fake":
        use_device(device)
    strategies = chosen.strategies.values()
    if options.offload and strategies and all(s.placement is Placement.REPLICATE for s in strategies):
        raise ValueError(
            'offload_policy keeps nothing in host memory with sharding_strategy="ddp", which replicates parameters on '
            'the device: choose one that shards, such as "zero3"'
        )
    if ShardingStrategy.ZERO3_SECONDARY in strategies and groups.outer is not None:
        _refuse_useless_secondary(groups.inner.size(), groups.outer.size())
    return Target(device, groups, host_memory(options.offload, device))


def host_memory(policy: CPUOffloadPolicy | None, device: torch.device) -> HostMemory | None:
    """The host memory for parameters that are used on ``device``. None if they stay on the device."""
    return None if policy is None or device.type == "cpu" else HostMemory(device, pinned=policy.pin_memory)


def _refuse_useless_secondary(inside: int, nodes: int) -> None:
    if inside == 1 or nodes == 1:
        same = "zero2" if inside == 1 else "zero3"
        raise ValueError(
            f'sharding_strategy="zero3_secondary" on a mesh of shape {(nodes, inside)} is "{same}": choose that, or a '
            "mesh with more than one node and more than one rank in each"
        )


def choose_gathers(chosen: Chosen, options: Options, target: Target) -> dict[str, Wire | None]:
    """The wire on which each parameter is gathered, by name. Raises ValueError if a wire changes nothing."""
    inner, ranks = target.groups.inner, target.groups.everyone.size()
    travelling = {
        p.name: Travelling(p.parameter, strategy, inner.size() if strategy.is_hybrid else ranks, ranks)
        for p in chosen.places
        for strategy in [chosen.strategies[p.name]]
    }
    refuse_reductions(options.reduction, travelling, error_feedback=options.comm.error_feedback)
    device = target.device.type
    if options.reduction is not None and device != "cpu" and backend_for(inner, {device}) == "gloo":
        raise ValueError(f"gloo cannot send parts of gradients from {device}: use nccl with reduce_wire")
    return assign_gathers(options.gathers, travelling, chosen.names)
