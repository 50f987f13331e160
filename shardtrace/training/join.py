"""Batches when ranks have different numbers of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from shardtrace.model.state import ShardedState, sharded_states
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from torch import nn

Batch = TypeVar("Batch")


def join(model: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Iterate over this rank's batches until all ranks have used theirs, all in step. ::

        for (x, y), weight in shardtrace.join(model, loader):
            (cmodel(x, y) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    Every step of a sharded model is a collective, so that a rank that has no batch left must go on with the others. It
    gets its last batch again, with weight 0. A rank that has a batch gets the weight N / (ranks that have one): the
    gradient is then the mean over these ranks. Buffers, such as those of batch norm, see the repeated batches.

    A collective of one number before each step. Leave the loop in the same step on all ranks. PyTorch's ``Join`` does
    the same for DDP, where a rank need not run the model to take part.

    Args:
        model: the sharded model, before or after ``thunder.jit``.
        batches: this rank's batches; may be endless on some ranks only if the loop is left.

    Yields:
        A batch, and the factor of its loss.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: on every rank, if a rank has no batch at all while another one has.
    """
    _, states = sharded_states(model)
    iterator = iter(batches)
    last: list[Batch] = []
    while True:
        has, now = True, last
        try:
            now = [next(iterator)]
        except StopIteration:
            has = False
        having, empty = _count(states[0], has, first=not now)
        if not having:
            return
        if empty:
            raise RuntimeError(
                f"{empty} rank(s) have no batch at all, and so none that they could repeat in step with the others: "
                "give each rank at least one"
            )
        last = now
        yield now[0], states[0].group.size() / having if has else 0.0


def _count(state: ShardedState, has: bool, *, first: bool) -> tuple[int, int]:
    """The number of ranks that have a batch, and of those that never had one."""
    if is_alone(state.group):
        return int(has), int(first and not has)
    device = state.entries[0].device if state.entries else torch.device("cpu")
    counts = torch.tensor([int(has), int(first and not has)], device=device)
    with communicating("the number of ranks that have a batch", state.group):
        dist.all_reduce(counts, group=state.group)
    having, empty = counts.tolist()
    return having, empty
