"""A bucket's collectives as messages between each pair of ranks, for gloo, whose own collectives are slower.

Each rank sends its shard of a parameter to every other rank without packing it, and receives the others' shards
directly in the unsharded parameter, without unpacking. Padding is not sent. Gradients travel the other way: each rank
receives the others' parts of its shard and adds them up. Both ways send ``(N - 1) / N`` of a bucket's bytes, the least
possible. Whole parameters travel from their owner to the other ranks, and their gradients to the owner, in the same
way. (gloo's reduce_scatter sends all bytes, and its all_gather does not saturate the link.)

Members whose shards are small travel together, packed into one message to each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from passes.plan import Bucket, Member
from passes.plan.layout import summed_to

import torch
from thunder.core.dtypes import to_torch_dtype

# Messages of one tag between two ranks are matched in the order in which they are sent.
TAG = 0x5AD  # unlikely to be used by a script for its own messages in the same group


class InFlight(NamedTuple):
    """Messages in flight: ``sent`` and ``received`` have an entry for each large member, then one for all small ones.

    ``sent`` must outlive the messages.
    """

    works: list[Any]
    sent: list[torch.Tensor]
    received: list[torch.Tensor]


def issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    future = InFlight([], [], [])
    rank, layout = bucket.plan.rank, bucket.layout
    for i in layout.large:
        parameter = bucket.members[i].parameter
        full = shards[i].new_empty(parameter.full_shape, dtype=layout.dtype)
        places = [full.view(-1)[start:stop] for start, stop in parameter.pieces]
        mine = shards[i].reshape(-1)[: places[rank].numel()].to(layout.dtype)  # without padding
        _exchange(future, bucket, [mine] * len(places), places)
        places[rank].copy_(mine)
        future.sent.append(mine)
        future.received.append(full)
    if layout.small:
        row = bucket.packed.flat_row([shards[i] for i in layout.small]).to(layout.dtype)
        rows = row.new_empty(sum(bucket.packed.row_sizes))
        places = rows.split(bucket.packed.row_sizes)
        _exchange(future, bucket, [row] * len(places), places)
        places[rank].copy_(row)
        future.sent.append(row)
        future.received.append(rows)
    return future


def finish_all_gather(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    _wait(future)
    if not bucket.layout.small:
        return tuple(future.received)
    *large, rows = future.received
    return _in_order(bucket, large, bucket.packed.unpack_rows(rows))


def issue_reduce_scatter(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    future = InFlight([], [], [])
    layout = bucket.layout
    for i in layout.large:
        parameter = bucket.members[i].parameter
        grad = summed_to(grads[i], parameter.full_shape).reshape(-1).to(layout.dtype)
        _collect(future, bucket, grad, [grad[start:stop] for start, stop in parameter.pieces])
    if layout.small:
        rows = bucket.packed.pack_rows([grads[i] for i in layout.small])
        _collect(future, bucket, rows, rows.split(bucket.packed.row_sizes))
    return future


def finish_reduce_scatter(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    _wait(future)
    rank, layout = bucket.plan.rank, bucket.layout
    dtype = to_torch_dtype(bucket.rest_dtype)
    large = []
    for i, grad, others in zip(layout.large, future.sent, future.received, strict=False):
        large.append(_mean_shard(grad, others, bucket.members[i], rank).to(dtype))
    if not layout.small:
        return tuple(large)
    mine = future.sent[-1].split(bucket.packed.row_sizes)[rank]
    return _in_order(bucket, large, bucket.packed.unpack_row(_mean(mine, future.received[-1]).to(dtype)))


def _exchange(future: InFlight, bucket: Bucket, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
    """Posts one message to and one from every other rank. ``send`` and ``receive`` are indexed by rank. Both sides skip
    empty messages."""
    group = bucket.plan.group
    for rank in range(bucket.plan.world_size):
        if rank == bucket.plan.rank:
            continue
        if receive[rank].numel():
            future.works.append(group.recv([receive[rank]], rank, TAG))
        if send[rank].numel():
            future.works.append(group.send([send[rank]], rank, TAG))


def _collect(future: InFlight, bucket: Bucket, grad: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Sends each rank its piece of a flat gradient, and receives from each its part of this rank's piece."""
    rank = bucket.plan.rank
    others = grad.new_empty(bucket.plan.world_size - 1, pieces[rank].numel())
    _exchange(future, bucket, pieces, [*others[:rank], pieces[rank], *others[rank:]])
    future.sent.append(grad)
    future.received.append(others)


def _wait(future: InFlight) -> None:
    for work in future.works:
        work.wait()


def _mean_shard(grad: torch.Tensor, others: torch.Tensor, member: Member, rank: int) -> torch.Tensor:
    start, stop = member.parameter.pieces[rank]
    mean = _mean(grad[start:stop], others)
    if mean.numel() < member.numel:
        padded = mean.new_zeros(member.numel)
        padded[: mean.numel()] = mean
        mean = padded
    return mean.view(member.parameter.shard_shape)


def _mean(mine: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Multiplies before it adds, because a sum of fp16 gradients may overflow even if their mean does not."""
    share = 1 / (len(others) + 1)
    mean = mine * share
    for other in others:
        mean.add_(other, alpha=share)
    return mean


def _in_order(bucket: Bucket, large: Sequence[torch.Tensor], small: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Merges the large and the small members' tensors into the bucket's order, which each already follows."""
    if not large:
        return tuple(small)
    kinds = {True: iter(large), False: iter(small)}
    is_large = set(bucket.layout.large)
    return tuple(next(kinds[i in is_large]) for i in range(len(bucket.members)))
