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

from passes.comm import native
from passes.comm.native import finish_all_reduce, issue_all_reduce  # noqa: F401  gloo's own
from passes.plan import Bucket, Member
from passes.plan.bucket import summed_to

import torch


class InFlight(NamedTuple):
    """Messages in flight: ``sent`` and ``received`` have an entry for each large member, then one for all small ones.

    ``sent`` must outlive the messages. ``received`` are the unsharded parameters of a gather, or the parts of this
    rank's shard of a gradient that the other ranks send.
    """

    works: list[Any]
    sent: list[torch.Tensor]
    received: list[Any]


def issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    future = InFlight([], [], [])
    rank, layout = bucket.plan.rank, bucket.layout
    for i in layout.large:
        parameter = bucket.members[i].parameter
        full = shards[i].new_empty(parameter.full_shape, dtype=layout.dtype)
        places = [full.view(-1)[start:stop] for start, stop in parameter.pieces]
        mine = shards[i].reshape(-1)[: places[rank].numel()].to(layout.dtype)  # without padding
        future.works.extend(native.exchange(bucket, [mine] * len(places), places))
        places[rank].copy_(mine)
        future.sent.append(mine)
        future.received.append(full)
    if layout.small:
        row = bucket.packed.flat_row([shards[i] for i in layout.small]).to(layout.dtype)
        small = native.gather(row, bucket.packed.row_sizes, bucket)
        future.works.extend(small.works)
        future.sent.append(row)
        future.received.append(small.received)
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
        _collect(future, bucket, rows, rows.split_with_sizes(bucket.packed.row_sizes))
    return future


def finish_reduce_scatter(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    _wait(future)
    rank, layout, dtype = bucket.plan.rank, bucket.layout, bucket.torch_reduced_dtype
    share = 1 / bucket.plan.divisor
    large = []
    for i, grad, others in zip(layout.large, future.sent, future.received, strict=False):
        large.append(_mean_shard(grad, others, bucket.members[i], rank, share).to(dtype))
    if not layout.small:
        return tuple(large)
    mine = future.sent[-1].split_with_sizes(bucket.packed.row_sizes)[rank]
    return _in_order(bucket, large, bucket.packed.unpack_row(_mean(mine, future.received[-1], share).to(dtype)))


def _collect(future: InFlight, bucket: Bucket, grad: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Sends each rank its piece of a flat gradient, and receives from each its part of this rank's piece."""
    rank = bucket.plan.rank
    others = grad.new_empty(bucket.plan.world_size - 1, pieces[rank].numel()).unbind()
    future.works.extend(native.exchange(bucket, pieces, [*others[:rank], pieces[rank], *others[rank:]]))
    future.sent.append(grad)
    future.received.append(others)


def _wait(future: InFlight) -> None:
    for work in future.works:
        work.wait()


def _mean_shard(
    grad: torch.Tensor, others: Sequence[torch.Tensor], member: Member, rank: int, share: float
) -> torch.Tensor:
    start, stop = member.parameter.pieces[rank]
    mean = _mean(grad[start:stop], others, share)
    if mean.numel() < member.numel:
        padded = mean.new_zeros(member.numel)
        padded[: mean.numel()] = mean
        mean = padded
    return mean.view(member.parameter.shard_shape)


def _mean(mine: torch.Tensor, others: Sequence[torch.Tensor], share: float) -> torch.Tensor:
    """Multiplies by ``share`` before it adds, because a sum of fp16 gradients may overflow even if their mean does
    not."""
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
