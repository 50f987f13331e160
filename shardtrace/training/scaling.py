"""``torch.amp.GradScaler`` on shards: an overflow on one rank is an overflow on all."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from shardtrace.model.state import link_of
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

Found = dict[torch.device, torch.Tensor]


@functools.cache  # once for each process
def share_overflows() -> None:
    """Make every GradScaler, built before or after, find what any rank of a sharded model finds.

    A rank has only the gradients of its shards. By itself it would skip the step and lower its scale, while others do
    not. (torch asks the other ranks only if the first gradient is a shard, and not for shards in host memory.) The
    method that looks for an inf or NaN has no hook, and is replaced. It is given the rows of this rank. The collective,
    of one number, is sent when a scaler unscales the gradients of an optimizer: every rank must do so.
    """
    look = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(look)
    def everywhere(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Found:
        groups = [{"params": [_rows(p) for p in group["params"]]} for group in optimizer.param_groups]
        mine: Any = SimpleNamespace(param_groups=groups)
        return _over_ranks(look(self, mine, *args, **kwargs), optimizer)

    torch.amp.GradScaler._unscale_grads_ = everywhere  # type: ignore[method-assign]


def _rows(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter that is a DTensor, and of its gradient."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    rows = parameter.detach().to_local()  # type: ignore[attr-defined]
    rows.grad = parameter.grad.to_local()
    return rows


def _over_ranks(found: Found, optimizer: torch.optim.Optimizer) -> Found:
    """What any rank has found, on each device of this rank's gradients, and on one if it has none."""
    links = [link_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    models = {link.state: link.entry.device for link in links if link is not None}
    # to the device that computes: its tensors can be sent
    groups = {state.group: device for state, device in models.items() if not is_alone(state.group)}
    for group, device in groups.items():
        anywhere = torch.zeros((), device=device)
        for value in found.values():
            anywhere = torch.maximum(anywhere, value.to(device))
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
        found = {where: anywhere.to(where) for where in found or (device,)}
    return found
