"""Messages between the ranks of a bucket: each rank's row to all others, or one for each of them.

As messages between each pair of ranks if the plan is direct, else as one collective of the backend. What they mean is
the business of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from passes.compat.versions import all_gather_single
from passes.plan import Bucket

import torch
import torch.distributed as dist

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
