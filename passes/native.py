"""A bucket's collectives as one collective of the backend each, on one flat buffer."""

from __future__ import annotations

from typing import Any, NamedTuple

from passes import compat
from passes.plan import Bucket

import torch
import torch.distributed as dist


class InFlight(NamedTuple):
    """A collective that was issued: ``input`` must outlive it."""

    work: Any
    output: torch.Tensor
    input: torch.Tensor


def issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    row = bucket.layout.flat_row(shards)  # (numel,)
    rows = row.new_empty(bucket.plan.world_size * bucket.numel)
    work = compat.all_gather_single(rows, row, group=bucket.plan.group, async_op=True)
    return InFlight(work, rows, row)


def finish_all_gather(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    future.work.wait()
    return bucket.layout.unpack_rows(future.output)


def issue_reduce_scatter(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    """Averages over ranks: in the collective where the backend can (nccl multiplies by 1/N before it adds), else while
    packing. Either way a sum of fp16 gradients does not overflow where their mean does not."""
    plan = bucket.plan
    rows = bucket.layout.pack_rows(grads, divisor=1 if plan.averages else plan.world_size)
    row = rows.new_empty(bucket.numel)
    op = dist.ReduceOp.AVG if plan.averages else dist.ReduceOp.SUM
    work = compat.reduce_scatter_single(row, rows, op=op, group=plan.group, async_op=True)
    return InFlight(work, row, rows)


def finish_reduce_scatter(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    future.work.wait()
    return bucket.layout.unpack_row(future.output)
