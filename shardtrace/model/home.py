"""The place of a tensor between uses, and each rank's part of it. Placements: :mod:`passes.plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from passes.compat.versions import all_gather_single
from passes.plan import HostMemory, Placement, Shape, shard_shape
from shardtrace.ranks.failure import communicating

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement


@dataclass(frozen=True, eq=False)
class Home:
    """The place of a parameter between uses: its placement over the ranks of a group, the group rank that owns it (only
    with OWNER), and whether it is in host memory. ``mesh``: of the DTensor that it is; None: it is a plain tensor."""

    placement: Placement
    group: dist.ProcessGroup
    owner: int = 0
    host: HostMemory | None = None
    mesh: DeviceMesh | None = None

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """Of the DTensor. The last dimension of the mesh is split, others replicate."""
        last = Shard(0) if self.placement is Placement.SHARD else Replicate()
        return (*[Replicate()] * (self.mesh.ndim - 1), last) if self.mesh is not None else ()

    @property
    def is_spread(self) -> bool:
        """True if the ranks hold different parts of the parameter."""
        return self.placement is not Placement.REPLICATE and self.group.size() > 1


def shard(full: torch.Tensor, home: Home) -> torch.Tensor:
    """The part of ``full`` that this rank keeps, in its own memory on the same device.

    SHARD: its padded shard, ``(rows, *rest) -> (ceil(rows / world_size), *rest)``. OWNER: the whole tensor,
    contiguous, on its owner, ``(0, *rest)`` elsewhere. REPLICATE: the whole tensor.
    A tensor that needs no other memory is returned as it is.
    """
    source, group = full.detach(), home.group
    if source.numel() == 0 or home.placement is Placement.REPLICATE:
        return source
    if home.placement is Placement.OWNER:
        return source.contiguous() if group.rank() == home.owner else source.new_empty(0, *source.shape[1:])
    shape = shard_shape(tuple(source.shape), group.size())
    mine = source[group.rank() * shape[0] :][: shape[0]]  # empty or short where padding begins
    result = torch.zeros(shape, dtype=source.dtype, device=source.device)
    result[: mine.shape[0]].copy_(mine)
    return result


def unshard(shard: torch.Tensor, full_shape: Shape, home: Home) -> torch.Tensor:
    """The inverse of :func:`shard`: a new tensor on the device that computes.

    Runs a collective of ``home.group``, unless the placement is REPLICATE.
    """
    group = home.group
    shard = shard.detach()
    if home.host is not None:
        shard = torch.empty_like(shard, device=home.host.device).copy_(shard)
    if home.placement is Placement.REPLICATE or math.prod(full_shape) == 0:
        return shard.clone()
    if group.size() == 1:  # it was in host memory, and is now on the device
        return shard.view(full_shape)
    if home.placement is Placement.OWNER:
        mine = shard if home.host is not None else shard.clone()
        full = mine if group.rank() == home.owner else shard.new_empty(full_shape)
        with communicating("the shards of a parameter", group):
            dist.broadcast(full, group=group, group_src=home.owner)
        return full
    mine = shard.contiguous()
    padded = mine.new_empty(group.size() * mine.shape[0], *mine.shape[1:])
    with communicating("the shards of a parameter", group):
        all_gather_single(padded, mine, group=group)
    full = padded[: full_shape[0]]
    return full if full.shape == padded.shape else full.clone()  # a view would keep, and save, the padding
