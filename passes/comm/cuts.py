"""A bucket's collectives for ranks that compute with parts of its members: each rank receives only its parts.

Parameters are sharded by rows over all ranks, whatever is cut. Each rank sends every other one what that one's part has
of its rows, and gets the gradients of these back:

    rank 1 of four holds rows 2 and 3 of eight. Ranks 0 and 2 compute with rows 0 to 3: both receive rows 2 and 3
    ranks 1 and 3 compute with rows 4 to 7, and receive nothing from it

With P bytes of parameters and T ranks that share them, a rank receives P / T bytes.

A *seat* is a rank's number among those that share parameters, and so that of its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from passes.comm import messages
from passes.comm.messages import InFlight
from passes.plan import Bucket, ShardedParameter
from passes.plan.layout import summed_to

import torch
import torch.distributed as dist


def issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    rank, seats = bucket.plan.rank, _seats(bucket)
    pairs = [(_own_rows(shard, p, rank), p) for shard, p in zip(shards, _parameters(bucket), strict=True)]

    def piece_for(seat: int) -> torch.Tensor:
        pieces = (rows.index_select(p.cut.split.dim, _held(p, rank, seat, rows.device)) for rows, p in pairs)
        return torch.cat([piece.reshape(-1).to(bucket.layout.dtype) for piece in pieces])

    by_seat = [piece_for(seat) for seat in range(max(seats) + 1)]
    received = [sum(_sizes(bucket, r, seats[rank])) for r in range(len(seats))]
    return _exchange([by_seat[seat] for seat in seats], received, bucket)


def finish_all_gather(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    seats = _seats(bucket)
    sizes = [_sizes(bucket, r, seats[bucket.plan.rank]) for r in range(len(seats))]
    by_rank = _split(future, sizes)
    return tuple(
        torch.cat([pieces[i] for pieces in by_rank]).view(p.used_shape) for i, p in enumerate(_parameters(bucket))
    )


def issue_reduce_scatter(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    rank, seats = bucket.plan.rank, _seats(bucket)
    flat = [
        summed_to(grad, p.used_shape).to(bucket.layout.dtype).reshape(-1)
        for grad, p in zip(grads, _parameters(bucket), strict=True)
    ]
    sizes = [_sizes(bucket, r, seats[rank]) for r in range(len(seats))]
    by_member = [g.split(list(own)) for g, own in zip(flat, zip(*sizes, strict=True), strict=True)]
    sent = [torch.cat(pieces) for pieces in zip(*by_member, strict=True)]
    return _exchange(sent, [sum(_sizes(bucket, rank, seat)) for seat in seats], bucket)


def finish_reduce_scatter(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """Multiplies before it adds, unless the plan sums, because a sum of fp16 gradients may overflow even if their mean
    does not."""
    plan, seats, parameters = bucket.plan, _seats(bucket), _parameters(bucket)
    share = 1 / plan.divisor
    totals = [future.received.new_zeros(p.shard_shape) for p in parameters]
    sizes = [_sizes(bucket, plan.rank, seat) for seat in seats]
    for seat, pieces in zip(seats, _split(future, sizes), strict=True):
        for total, p, piece in zip(totals, parameters, pieces, strict=True):
            rows, dim, held = _own_rows(total, p, plan.rank), p.cut.split.dim, _held(p, plan.rank, seat, total.device)
            shape = (*rows.shape[:dim], len(held), *rows.shape[dim + 1 :])
            rows.index_add_(dim, held, piece.view(shape), alpha=1 if plan.sums else share)
    return tuple((t.mul_(share) if plan.sums else t).to(bucket.torch_reduced_dtype) for t in totals)


def _exchange(rows: Sequence[torch.Tensor], sizes: Sequence[int], bucket: Bucket) -> InFlight:
    """Starts to send each rank its row. Those that the others send have these ``sizes``."""
    plan, sent = bucket.plan, torch.cat(list(rows))
    out, received = [len(row) for row in rows], sent.new_empty(sum(sizes))
    if not plan.direct:
        work = dist.all_to_all_single(received, sent, list(sizes), out, group=plan.group, async_op=True)
        return InFlight([work], received, sent)
    mine, places = sent.split(out), received.split(list(sizes))
    works = messages.exchange(bucket, mine, places)
    places[plan.rank].copy_(mine[plan.rank])
    return InFlight(works, received, sent)


def _split(future: InFlight, sizes: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, ...]]:
    """What each rank has sent of each member; ``sizes`` are those."""
    rows = future.wait().split([sum(own) for own in sizes])
    return [row.split(list(own)) for row, own in zip(rows, sizes, strict=True)]


# ---- who holds what ----


def _parameters(bucket: Bucket) -> list[ShardedParameter]:
    return [m.parameter for m in bucket.members]


def _seats(bucket: Bucket) -> tuple[int, ...]:
    seats: tuple[int, ...] = bucket.members[0].parameter.cut.plan.seats
    return seats


def _rows(p: ShardedParameter, rank: int) -> range:
    """The rows of a parameter that a rank holds, without padding."""
    each = p.shard_shape[0]
    return range(min(rank * each, p.full_shape[0]), min((rank + 1) * each, p.full_shape[0]))


def _own_rows(shard: torch.Tensor, p: ShardedParameter, rank: int) -> torch.Tensor:
    """A shard without padding."""
    return shard[: len(_rows(p, rank))]


@lru_cache(maxsize=4096)
def _positions(p: ShardedParameter, rank: int, seat: int) -> list[int]:
    """Where, along the dim that is cut, a rank's rows are in the part of a seat."""
    split = p.cut.split
    rows = _rows(p, rank) if split.dim == 0 else range(split.size)
    return [i for i, at in enumerate(rows) if at // split.inner % split.length == seat]


@lru_cache(maxsize=4096)
def _held(p: ShardedParameter, rank: int, seat: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(_positions(p, rank, seat), dtype=torch.long, device=device)


def _sizes(bucket: Bucket, rank: int, seat: int) -> list[int]:
    """The elements of each member that are in a rank's rows and in the part of a seat."""
    return [_size(p, rank, seat) for p in _parameters(bucket)]


def _size(p: ShardedParameter, rank: int, seat: int) -> int:
    shape = list(p.full_shape)
    shape[0] = len(_rows(p, rank))
    shape[p.cut.split.dim] = len(_positions(p, rank, seat))
    return math.prod(shape)
