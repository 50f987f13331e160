"""``fsdp`` with a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrace.options.planned import TrainingPlan, mesh_dim_names
from shardtrace.options.spellings import canonical
from shardtrace.ranks.consensus import announced, compare
from shardtrace.ranks.device import choose_device
from shardtrace.ranks.mesh import is_2d, resolve_groups

from torch import nn
from torch.distributed import init_device_mesh


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
