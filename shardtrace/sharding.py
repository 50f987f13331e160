"""Tensors and their shards. Layout: :mod:`passes.plan`."""

from __future__ import annotations

from passes.compat import all_gather_single
from passes.plan import Shape, shard_shape

import torch
import torch.distributed as dist


def shard(full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's padded dim-0 shard of ``full``, in memory of its own.

    ``(rows, *rest) -> (ceil(rows / world_size), *rest)``. A 0-dim tensor counts as shape ``(1,)``. A tensor without
    elements, or in a group of one, is returned as it is.
    """
    source = full.detach()
    if source.numel() == 0 or group.size() == 1:
        return source
    source = source.reshape(1) if source.dim() == 0 else source
    shape = shard_shape(tuple(source.shape), group.size())
    mine = source[group.rank() * shape[0] :][: shape[0]]  # empty or short where padding begins
    result = torch.zeros(shape, dtype=source.dtype, device=source.device)
    result[: mine.shape[0]].copy_(mine)
    return result


def unshard(shard: torch.Tensor, full_shape: Shape, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of :func:`shard`: gathers from all ranks of ``group`` (a collective) and drops the padding."""
    if shard.numel() == 0 or group.size() == 1:
        return shard.detach().clone()
    mine = shard.detach().contiguous()
    padded = mine.new_empty(group.size() * mine.shape[0], *mine.shape[1:])
    all_gather_single(padded, mine, group=group)
    full = padded[: full_shape[0]] if full_shape else padded[0]
    return full if full.shape == padded.shape else full.clone()  # a view would keep, and save, the padding
