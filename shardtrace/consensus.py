"""Comparing ranks before a collective could hang: through the store, not through the process group."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch.distributed as dist


class RankMismatchError(RuntimeError):
    """The ranks of a group differ where they must be equal. Raised on every rank with the same message."""


def compare(
    group: dist.ProcessGroup, what: str, lines: list[str], *, timeout: float, error: str | None = None, hint: str = ""
) -> None:
    """Raises :class:`RankMismatchError` on every rank unless ``lines`` is the same on all ranks of ``group``.

    Each rank writes its lines to the default store; the first rank of the group compares lengths, then lines, and
    writes the verdict that all read. A rank that passes an ``error`` makes all ranks raise with it.

    Args:
        what: the name of what is compared, for the message ("the model's parameters").
        hint: what may help, for the message of a difference.
        timeout: seconds to wait for the other ranks. Ranks that do not come are named in the error.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1 or dist.get_backend(group) == "fake":  # other ranks of a fake group do not exist
        if error:
            raise RankMismatchError(f"rank {rank}: {error}")
        return
    store = dist.PrefixStore(f"shardtrace/{group.group_name}", dist.distributed_c10d._get_default_store())
    turn = store.add(f"turn/{rank}", 1)  # the n-th comparison of each rank meets the n-th of the others
    store.set(f"{turn}/{rank}", json.dumps({"what": what, "lines": lines, "error": error, "hint": hint}))
    if rank == 0:
        store.set(f"{turn}/verdict", _verdict(store, turn, what, world_size, timeout))
    try:
        store.wait([f"{turn}/verdict"], timedelta(seconds=timeout + 10))  # rank 0 gives up a little earlier
    except RuntimeError:  # which of its subclasses a time-out raises differs between stores
        raise RankMismatchError(f"rank 0 of the group did not come to compare {what} within {timeout:g} s") from None
    verdict = store.get(f"{turn}/verdict").decode()
    if verdict:
        raise RankMismatchError(verdict)


def _verdict(store: dist.Store, turn: int, what: str, world_size: int, timeout: float) -> str:
    """What is wrong, or nothing."""
    keys = [f"{turn}/{r}" for r in range(world_size)]
    absent: list[int] = []
    deadline = time.monotonic() + timeout
    for r, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:  # which of its subclasses a time-out raises differs between stores
            absent.append(r)
    if absent:
        ranks = ", ".join(map(str, absent))
        return f"rank(s) {ranks} did not come to compare {what} within {timeout:g} s: they do something else"
    said = [json.loads(store.get(key)) for key in keys]
    for key in keys:
        store.delete_key(key)
    for r, one in enumerate(said):
        if one["error"]:
            return f"rank {r}: {one['error']}"
    for r, one in enumerate(said[1:], start=1):
        if difference := _difference(said[0], one, r):
            return difference
    return ""


def _difference(first: dict, other: dict, rank: int) -> str:
    if first["what"] != other["what"]:
        return f"rank 0 compares {first['what']}, rank {rank} {other['what']}: the ranks run different programs"
    a, b = first["lines"], other["lines"]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if len(a) == len(b) == at:
        return ""
    lengths = f": rank 0 has {len(a)}, rank {rank} has {len(b)}" if len(a) != len(b) else ""
    mine, theirs = (side[at] if at < len(side) else "nothing" for side in (a, b))
    where = f"the ranks differ in {first['what']}{lengths}; the first difference, at position {at}"
    hint = f" ({first['hint']})" if first["hint"] else ""
    return f"{where}: rank 0 has {mine}; rank {rank} has {theirs}{hint}"
