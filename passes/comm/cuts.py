"""A bucket's collectives for ranks that compute with parts of its members: each rank receives only its parts.

Parameters are sharded by rows over all ranks, whatever is cut. Each rank sends every other one what that one's part has
of its rows, and gets the gradients of these back:

    rank 1 of four holds rows 2 and 3 of eight. Ranks 0 and 2 compute with rows 0 to 3: both receive rows 2 and 3
    ranks 1 and 3 compute with rows 4 to 7, and receive nothing from it

With P bytes of parameters and T ranks that share them, a rank receives P / T bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.comm import native
from passes.comm.native import InFlight
from passes.plan import Bucket
from passes.plan.bucket import summed_to

import torch
import torch.distributed as dist


def issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    cuts = bucket.cuts
    own = [cuts.own_rows(i, shard) for i, shard in enumerate(shards)]

    def piece_for(seat: int) -> torch.Tensor:
        pieces = (
            rows.index_select(p.cut.split.dim, cuts.positions(i, seat, rows.device))
            for i, (rows, p) in enumerate(zip(own, cuts.parameters, strict=True))
        )
        return torch.cat([piece.reshape(-1).to(bucket.layout.dtype) for piece in pieces])

    by_seat = [piece_for(seat) for seat in range(len(cuts.sent))]
    return _exchange([by_seat[seat] for seat in cuts.seats], [sum(sizes) for sizes in cuts.received], bucket)


def finish_all_gather(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    by_rank = _split(future, bucket.cuts.received)
    return tuple(
        torch.cat([pieces[i] for pieces in by_rank]).view(p.used_shape) for i, p in enumerate(bucket.cuts.parameters)
    )


def issue_reduce_scatter(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    cuts = bucket.cuts
    flat = [
        summed_to(grad, p.used_shape).to(bucket.layout.dtype).reshape(-1)
        for grad, p in zip(grads, cuts.parameters, strict=True)
    ]
    by_member = [g.split(list(own)) for g, own in zip(flat, zip(*cuts.received, strict=True), strict=True)]
    sent = [torch.cat(pieces) for pieces in zip(*by_member, strict=True)]
    return _exchange(sent, [sum(cuts.sent[seat]) for seat in cuts.seats], bucket)


def finish_reduce_scatter(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """Multiplies before it adds, unless the plan sums, because a sum of fp16 gradients may overflow even if their mean
    does not."""
    plan, cuts = bucket.plan, bucket.cuts
    share = 1 / plan.divisor
    by_rank = _split(future, [cuts.sent[seat] for seat in cuts.seats])
    # minus zero, which stays where no gradient has come (passes.parameters)
    totals = [by_rank[0][0].new_full(p.shard_shape, -0.0) for p in cuts.parameters]
    for seat, pieces in zip(cuts.seats, by_rank, strict=True):
        for i, (total, p, piece) in enumerate(zip(totals, cuts.parameters, pieces, strict=True)):
            rows, dim = cuts.own_rows(i, total), p.cut.split.dim
            held = cuts.positions(i, seat, total.device)
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
    works = native.exchange(bucket, mine, places)
    places[plan.rank].copy_(mine[plan.rank])
    return InFlight(works, received, sent)


def _split(future: InFlight, sizes: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, ...]]:
    """The rows that came from each rank, by member. ``sizes``: the elements of each."""
    rows = future.wait().split([sum(own) for own in sizes])
    return [row.split(list(own)) for row, own in zip(rows, sizes, strict=True)]
