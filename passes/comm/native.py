"""A bucket's collectives, each as one collective of the backend on one flat buffer, and the rows that ranks send.

Rows: each rank's to all others, or one for each of them. They are messages between each pair of ranks if the plan is
direct, else one collective of the backend. The caller decides what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from passes.compat.versions import all_gather_single, reduce_scatter_single
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


# ---- rows to and from all ranks ----


# Messages of one tag between two ranks are matched in the order in which they are sent.
TAG = 0x5AD  # unlikely to be used by a script for its own messages in the same group
# Bytes of a message. gloo sends all of a message before it reads one: a large one would halve the rate.
PIECE = 2**19


class InFlight(NamedTuple):
    """Messages in flight. ``sent`` must outlive them, and so must ``staged``, to which shards in host memory are
    copied."""

    works: list[Any]
    received: torch.Tensor
    sent: torch.Tensor
    staged: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Waits for the backend, which need not block the program. Returns what was received."""
        for work in self.works:
            work.wait()
        return self.received


def gather(row: torch.Tensor, sizes: Sequence[int], bucket: Bucket, rows: torch.Tensor | None = None) -> InFlight:
    """Starts to send this rank's row to all ranks. ``sizes`` are the elements of each rank's. All of them are received,
    in order of rank, in ``rows`` if that is given."""
    rows = row.new_empty(sum(sizes)) if rows is None else rows
    plan = bucket.plan
    if not plan.direct and len(set(sizes)) == 1:
        return InFlight([all_gather_single(rows, row, group=plan.group, async_op=True)], rows, row)
    places = rows.split_with_sizes(list(sizes))
    if plan.direct:
        works = exchange(bucket, [row] * len(places), places)
        places[plan.rank].copy_(row)
    else:  # nccl turns the list into one group of broadcasts
        works = [dist.all_gather(list(places), row, group=plan.group, async_op=True)]
    return InFlight(works, rows, row)


def swap(rows: torch.Tensor, sizes: Sequence[int], bucket: Bucket) -> InFlight:
    """Starts to send each other rank its row: ``rows`` has them in order of rank, and ``sizes`` are those of each
    rank. None is for this rank itself. Received are the rows that the others send, in order of rank, each as long as
    this rank's size."""
    plan = bucket.plan
    out = [0 if rank == plan.rank else size for rank, size in enumerate(sizes)]
    into = [0 if rank == plan.rank else sizes[plan.rank] for rank in range(len(sizes))]
    received = rows.new_empty(sum(into))
    if plan.direct:
        works = exchange(bucket, rows.split_with_sizes(out), received.split_with_sizes(into))
    else:
        works = [dist.all_to_all_single(received, rows, into, out, group=plan.group, async_op=True)]
    return InFlight(works, received, rows)


def exchange(bucket: Bucket, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> list[Any]:
    """Posts a message to and one from every other rank, in pieces. ``send`` and ``receive`` are indexed by rank.
    Returns the works to wait for."""
    group, mine = bucket.plan.group, bucket.plan.rank
    works = []
    for rank, (out, into) in enumerate(zip(send, receive, strict=True)):
        if rank == mine:
            continue
        for to, fro in zip_longest(_pieces(out), _pieces(into)):
            if fro is not None:
                works.append(group.recv([fro], rank, TAG))
            if to is not None:
                works.append(group.send([to], rank, TAG))
    return works


def _pieces(message: torch.Tensor) -> Sequence[torch.Tensor]:
    """Both sides cut a message alike and skip an empty one."""
    size = PIECE // message.element_size()
    return message.split(size) if message.numel() > size else (message,) if message.numel() else ()
