"""Buffers of bytes between the ranks of a bucket: each rank's to all others, or one for each of them.

As messages between each pair of ranks (:mod:`passes.comm.direct`) if the plan is direct, else as one collective of the
backend. What the bytes mean is the business of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from passes.comm import direct
from passes.compat.versions import all_gather_single
from passes.plan import Bucket

import torch
import torch.distributed as dist


class InFlight(NamedTuple):
    """Messages in flight. ``sent`` must outlive them."""

    works: list[Any]
    received: torch.Tensor
    sent: torch.Tensor


def gather(row: torch.Tensor, sizes: Sequence[int], bucket: Bucket) -> InFlight:
    """Starts to send this rank's bytes to all ranks. ``sizes`` are those of each rank. The result has all of them, in
    order of rank."""
    rows = row.new_empty(sum(sizes))
    places = rows.split_with_sizes(list(sizes))
    plan = bucket.plan
    if plan.direct:
        works = direct.exchange(bucket, [row] * len(places), places)
        places[plan.rank].copy_(row)
        return InFlight(works, rows, row)
    if len(set(sizes)) > 1:
        work = dist.all_gather(list(places), row, group=plan.group, async_op=True)
    else:
        work = all_gather_single(rows, row, group=plan.group, async_op=True)
    return InFlight([work], rows, row)


def swap(rows: torch.Tensor, sizes: Sequence[int], bucket: Bucket) -> InFlight:
    """Starts to send each other rank its bytes: ``rows`` has them in order of rank, and ``sizes`` are those of each
    rank. None are for this rank itself. The result is what the others send, in order of rank, each as many bytes as
    this rank's size."""
    plan = bucket.plan
    out = [0 if rank == plan.rank else size for rank, size in enumerate(sizes)]
    into = [0 if rank == plan.rank else sizes[plan.rank] for rank in range(len(sizes))]
    received = rows.new_empty(sum(into))
    if plan.direct:
        works = direct.exchange(bucket, rows.split_with_sizes(out), received.split_with_sizes(into))
    else:
        works = [dist.all_to_all_single(received, rows, into, out, group=plan.group, async_op=True)]
    return InFlight(works, received, rows)


def wait(future: InFlight) -> torch.Tensor:
    """Waits for the backend, which need not block the program. Returns the received bytes."""
    for work in future.works:
        work.wait()
    return future.received
