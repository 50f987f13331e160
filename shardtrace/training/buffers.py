"""Buffers, which each rank holds whole and updates by itself, such as the running statistics of batch normalization."""

from __future__ import annotations

import warnings
import zlib

from passes.compat.versions import all_gather_single
from shardtrace.model.materialize import broadcast
from shardtrace.model.state import sharded_states
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from torch import nn


def sync_buffers(model: nn.Module) -> None:
    """Make buffers equal on all ranks: a floating-point buffer becomes the ranks' mean, any other the first rank's.

    Each rank updates its buffers from its own part of the batch. After a step, for example, the running means and
    variances of batch normalization differ. Call this before evaluation and before saving. A collective. (PyTorch's DDP
    broadcasts the first rank's buffers before each forward.)

    Raises ValueError if the model is not sharded.
    """
    module, states = sharded_states(model)
    group = states[0].group
    if is_alone(group):
        return
    first = dist.get_process_group_ranks(group)[0]
    for buffer in module.buffers():
        if buffer.is_floating_point() and buffer.numel():
            mean = buffer.detach().double() / group.size()
            with communicating("the mean of a buffer", group):
                dist.all_reduce(mean, group=group)
            buffer.copy_(mean)
        else:
            broadcast(buffer, first, group)


def warn_of_differing_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Warn if the ranks would save different buffers. A collective."""
    if differ := _differing_buffers(module, group):
        others = " and others" if len(differ) > 1 else ""
        warnings.warn(
            f"{len(differ)} buffers differ between ranks ({differ[0]!r}{others}): each rank has its own in its state "
            "dict, and a checkpoint gets the first rank's; call shardtrace.sync_buffers(model) before",
            stacklevel=3,
        )


def _differing_buffers(module: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """The names of the buffers in ``module.state_dict()`` that are not equal on all ranks. A collective."""
    persistent = module.state_dict(keep_vars=True)
    held = {name: buffer for name, buffer in module.named_buffers() if name in persistent and buffer.numel()}
    if not held or is_alone(group):
        return []
    sums = torch.tensor([_checksum(b) for b in held.values()], device=next(iter(held.values())).device)
    everyones = sums.new_empty(group.size() * len(sums))
    with communicating("the checksums of buffers", group):
        all_gather_single(everyones, sums, group=group)
    everyones = everyones.view(group.size(), -1)
    differ = (everyones != everyones[0]).any(0).tolist()
    return [name for name, differs in zip(held, differ, strict=True) if differs]


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
