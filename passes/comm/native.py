"""A bucket's collectives, each as one collective of the backend on one flat buffer."""

from __future__ import annotations

from typing import Any

from passes.comm.messages import InFlight, gather
from passes.compat.versions import reduce_scatter_single
from passes.plan import Bucket
from passes.plan.runtime import DONE, HostMemory

import torch
import torch.distributed as dist


def issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    layout = bucket.layout
    if bucket.plan.host is not None:
        return _issue_from_host(layout.pieces(shards), bucket, bucket.plan.host)
    return gather(layout.flat_row(shards).to(layout.dtype), layout.row_sizes, bucket)


def _issue_from_host(pieces: list[torch.Tensor], bucket: Bucket, host: HostMemory) -> InFlight:
    """All buffers are allocated on the compute stream, which can reuse them once it has waited."""
    alone = bucket.plan.world_size == 1  # no other rank: only the copy is needed
    staged = torch.empty(bucket.numel, dtype=pieces[0].dtype, device=host.device)
    row = staged if staged.dtype == bucket.layout.dtype else torch.empty_like(staged, dtype=bucket.layout.dtype)
    rows = row if alone else row.new_empty(bucket.full_numel)
    with host.ahead():
        for piece, place in zip(pieces, staged.split([piece.numel() for piece in pieces]), strict=True):
            host.load(piece, place)
        if row is not staged:
            row.copy_(staged)  # casts on the device: a copy between devices would cast on the host
        future = InFlight([host.mark()], rows, row) if alone else gather(row, bucket.layout.row_sizes, bucket, rows)
        return future._replace(staged=staged)


def finish_all_gather(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """A collective follows the copy from host memory."""
    return bucket.layout.unpack_rows(future.wait())


def issue_reduce_scatter(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    """Averages over ranks: in the collective if the backend can (nccl multiplies by 1/N before it adds), else while
    packing. Either way a sum of fp16 gradients does not overflow if their mean does not. A plan that ``sums`` divides
    this rank's shard afterwards."""
    layout, group = bucket.layout, bucket.plan.group
    rows, op = _packed(grads, bucket)
    if bucket.plan.world_size == 1 and not bucket.plan.averages:
        return InFlight([DONE], rows, rows)
    row = rows.new_empty(layout.numel)
    if len(set(layout.row_sizes)) > 1:  # one group of reductions
        work = dist.reduce_scatter(row, list(rows.split(layout.row_sizes)), op=op, group=group, async_op=True)
    else:
        work = reduce_scatter_single(row, rows, op=op, group=group, async_op=True)
    return InFlight([work], row, rows)


def finish_reduce_scatter(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return bucket.layout.unpack_row(_divided(future.wait(), bucket))


def _divided(row: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The row of a mean, in the dtype of reduced gradients. One kernel divides and casts."""
    _, divisor = bucket.plan.divisors(bucket.dtype)
    dtype = bucket.torch_reduced_dtype
    if divisor == 1:
        return row.to(dtype)
    return torch.div(row, divisor, out=row if row.dtype == dtype else torch.empty_like(row, dtype=dtype))


def issue_all_reduce(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    """Averages over ranks, in place in one flat buffer."""
    rows, op = _packed(grads, bucket)
    return InFlight([dist.all_reduce(rows, op=op, group=bucket.plan.group, async_op=True)], rows, rows)


finish_all_reduce = finish_reduce_scatter


def _packed(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> tuple[torch.Tensor, Any]:
    plan = bucket.plan
    before, _ = plan.divisors(bucket.dtype)
    rows = bucket.layout.pack_rows(grads, divisor=before)
    return rows, dist.ReduceOp.AVG if plan.is_averaged else dist.ReduceOp.SUM
