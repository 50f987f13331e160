"""A bucket's collectives as messages between each pair of ranks: for gloo, whose own collectives are slower.

Each rank sends its shard of a parameter to every other rank, straight from where it lies, and receives the others' into
their places in the unsharded parameter: no packing, no unpacking, no padding on the wire. A gradient goes the other
way: each rank receives the others' parts of its shard and adds them up. Both send ``(N - 1) / N`` of a bucket's bytes,
the least that is possible. (gloo's reduce_scatter sends all of them, and its all_gather does not fill the link.)

Members whose shards are small travel together, packed into one message to each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from passes.layout import summed_to
from passes.plan import Bucket, Member

import torch

# Messages between two ranks are matched in the order in which they are sent under one tag.
TAG = 0x5AD  # one that a script does not use for messages of its own in the same group


class InFlight(NamedTuple):
    """Messages under way: ``sent`` and ``received`` have an entry for each large member, and last one for the small.

    ``sent`` must outlive the messages.
    """

    works: list[Any]
    sent: list[torch.Tensor]
    received: list[torch.Tensor]


def issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    future = InFlight([], [], [])
    rank = bucket.plan.group.rank()
    for i in bucket.layout.large:
        parameter = bucket.members[i].parameter
        full = shards[i].new_empty(parameter.full_shape)
        places = [full.view(-1)[start:stop] for start, stop in parameter.pieces]
        mine = shards[i].reshape(-1)[: places[rank].numel()]  # without padding
        _exchange(future, bucket, [mine] * len(places), places)
        places[rank].copy_(mine)
        future.sent.append(mine)
        future.received.append(full)
    if bucket.layout.small:
        row = bucket.packed.flat_row([shards[i] for i in bucket.layout.small])
        rows = row.new_empty(bucket.plan.world_size, row.numel())
        _exchange(future, bucket, [row] * len(rows), rows.unbind())
        rows[rank].copy_(row)
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
    for i in bucket.layout.large:
        parameter = bucket.members[i].parameter
        grad = summed_to(grads[i], parameter.full_shape).reshape(-1)
        _collect(future, bucket, grad, [grad[start:stop] for start, stop in parameter.pieces])
    if bucket.layout.small:
        rows = bucket.packed.pack_rows([grads[i] for i in bucket.layout.small])
        _collect(future, bucket, rows, rows.view(bucket.plan.world_size, -1).unbind())
    return future


def finish_reduce_scatter(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    _wait(future)
    rank = bucket.plan.group.rank()
    large = []
    for i, grad, others in zip(bucket.layout.large, future.sent, future.received, strict=False):
        large.append(_mean_shard(grad, others, bucket.members[i], rank))
    if not bucket.layout.small:
        return tuple(large)
    mine = future.sent[-1].view(bucket.plan.world_size, -1)[rank]
    return _in_order(bucket, large, bucket.packed.unpack_row(_mean(mine, future.received[-1])))


def _exchange(future: InFlight, bucket: Bucket, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
    """Posts one message to and one from each other rank; ``send`` and ``receive`` are by rank. Empty ones are left out
    on both sides."""
    group = bucket.plan.group
    for rank in range(bucket.plan.world_size):
        if rank == group.rank():
            continue
        if receive[rank].numel():
            future.works.append(group.recv([receive[rank]], rank, TAG))
        if send[rank].numel():
            future.works.append(group.send([send[rank]], rank, TAG))


def _collect(future: InFlight, bucket: Bucket, grad: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Sends each rank its piece of a flat gradient, and receives from each what it has for this rank's."""
    rank = bucket.plan.group.rank()
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
    """Multiplies before it adds: a sum of fp16 gradients may overflow where their mean does not."""
    share = 1 / (len(others) + 1)
    mean = mine * share
    for other in others:
        mean.add_(other, alpha=share)
    return mean


def _in_order(bucket: Bucket, large: Sequence[torch.Tensor], small: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The members' tensors in the order of the bucket, which is that of each kind too."""
    if not large:
        return tuple(small)
    kinds = {True: iter(large), False: iter(small)}
    is_large = set(bucket.layout.large)
    return tuple(next(kinds[i in is_large]) for i in range(len(bucket.members)))
