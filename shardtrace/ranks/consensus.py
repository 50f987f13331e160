"""Comparing ranks before a collective can hang: through the store, not through the process group."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from passes.compat.versions import default_store
from shardtrace.ranks.failure import communicating, wait_for
from shardtrace.ranks.mesh import Mesh, is_2d, is_alone, resolve_groups

import torch
import torch.distributed as dist
from torch import nn

EQUAL, DIFFERENT, LATE = "equal", "different", "late"  # results of the comparison by digest
GRACE = 10.0  # seconds for the store operations of the ranks that are there


class RankMismatchError(RuntimeError):
    """The ranks of a group differ in something that must be equal. Every rank raises it with the same message."""


class AnnouncedError(RankMismatchError):
    """Another rank has raised an error, which it announced."""


def compare(
    group: dist.ProcessGroup,
    what: str,
    lines: list[str],
    *,
    timeout: float,
    error: str | None = None,
    hint: str = "",
    likely: bool = False,
    here: str = "",
) -> None:
    """Raises :class:`RankMismatchError` on every rank unless ``lines`` is the same on all ranks of ``group``.

    Each rank writes its lines to the default store. The first rank of the group compares their number, then the lines,
    and writes the verdict that all ranks read. If a rank passes an ``error``, all ranks raise with it.

    Args:
        what: the subject of the comparison, for the message ("the model's parameters").
        hint: a remedy, for the message about a difference.
        timeout: seconds to wait for the other ranks. The error names those that do not come.
        likely: the lines are likely to be equal. They are compared by a digest first, which costs each rank a few
            messages to the store, however many ranks and lines there are.
        here: the place from which this rank comes, for the message about ranks that do not come.
    """
    if is_alone(group):
        if error:
            raise RankMismatchError(f"rank {dist.get_rank()}: {error}")
        return
    with (wait := communicating(f"the others to compare {what}", group, compares=True)):
        store, turn = _next_turn(group)
        wait.absent = partial(_absent, store, turn, group)
        seen = _first_sight(store, turn, group.size(), lines if likely and not error else None, timeout)
        if seen == EQUAL:
            return
        _say(store, turn, group, what=what, lines=lines, error=error, hint=hint)
        ranks, patience = dist.get_process_group_ranks(group), min(GRACE, timeout) if seen == LATE else timeout
        did_not_come = partial(_did_not_come, what=what, timeout=timeout, here=here)
        if dist.get_rank(group) == 0:
            store.set(f"{turn}/verdict", json.dumps(_verdict(store, turn, ranks, patience, did_not_come)))
        if not wait_for(store, f"{turn}/verdict", patience + GRACE):  # the first rank gives up a little earlier
            raise RankMismatchError(did_not_come(ranks[:1]))
        announced, verdict = json.loads(store.get(f"{turn}/verdict"))
        if verdict:
            raise (AnnouncedError if announced else RankMismatchError)(verdict)


def announce(group: dist.ProcessGroup, what: str, error: str) -> None:
    """Makes the other ranks raise ``error`` when they come to compare ``what``, without waiting for them."""
    if is_alone(group):
        return
    store, turn = _next_turn(group)
    _first_sight(store, turn, group.size(), None, 0)
    _say(store, turn, group, what=what, lines=[], error=error, hint="")
    if dist.get_rank(group) == 0:
        store.set(f"{turn}/verdict", json.dumps((True, f"rank {dist.get_rank()}: {error}")))


@contextmanager
def announced(model: nn.Module, mesh: Mesh | None) -> Iterator[None]:
    """An error of this rank is raised by the other ranks of a process group, too, once they compare the model."""
    try:
        yield
    except Exception as error:
        if dist.is_initialized():
            with suppress(ValueError, TypeError):  # of a mesh that is wrong itself
                group = resolve_groups(mesh, torch.device("cpu"), hybrid=is_2d(mesh)).everyone
                announce(group, f"the parameters of {type(model).__name__}", str(error))
        raise


def _next_turn(group: dist.ProcessGroup) -> tuple[dist.Store, int]:
    """The store, and the number of this comparison. The n-th comparison of one rank meets the n-th of the others."""
    store = dist.PrefixStore(f"shardtrace/{group.group_name}", default_store())
    return store, store.add(f"turn/{dist.get_rank(group)}", 1)


def _absent(store: dist.Store, turn: int, group: dist.ProcessGroup) -> list[int]:
    """The global ranks that have not come to this comparison."""
    ranks = dist.get_process_group_ranks(group)
    return [rank for place, rank in enumerate(ranks) if store.add(f"turn/{place}", 0) < turn]


def _first_sight(store: dist.Store, turn: int, ranks: int, lines: list[str] | None, timeout: float) -> str:
    """Compares digests. EQUAL: all ranks have these lines. LATE: a rank did not come; the full comparison finds out
    which one.

    Waits only if there are lines. The last rank to come counts equal digests and deletes the keys of the previous turn,
    which all ranks have left. The first rank that gives up ends the wait for all: the result is written once.
    """
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest() if lines is not None else ""
    result = f"{turn}/equal"
    if digest:
        store.add(f"{turn}/{digest}", 1)
    if store.add(f"{turn}/came", 1) == ranks:
        equal = bool(digest) and store.add(f"{turn}/{digest}", 0) == ranks
        store.compare_set(result, "", EQUAL if equal else DIFFERENT)
        for key in (digest, "came", "equal", "verdict"):
            store.delete_key(f"{turn - 1}/{key}")
    if not digest:
        return DIFFERENT
    if not wait_for(store, result, timeout):
        store.compare_set(result, "", LATE)
    return store.get(result).decode()


def _say(
    store: dist.Store,
    turn: int,
    group: dist.ProcessGroup,
    *,
    what: str,
    lines: list[str],
    error: str | None,
    hint: str,
) -> None:
    """Writes this rank's part of a comparison."""
    said = {"what": what, "lines": lines, "error": error, "hint": hint}
    store.set(f"{turn}/{dist.get_rank(group)}", json.dumps(said))


def _did_not_come(ranks: list[int], what: str, timeout: float, here: str) -> str:
    late = ", ".join(map(str, ranks))
    place = f", while here {here}" if here else ""
    return f"rank(s) {late} did not come to compare {what} within {timeout:g} s: they do something else{place}"


def _verdict(
    store: dist.Store, turn: int, ranks: list[int], patience: float, did_not_come: Callable[[list[int]], str]
) -> tuple[bool, str]:
    """Whether the first problem is an error that a rank announced, and its message, which is empty if there is none.
    ``ranks`` are the global ranks of the group, for the message. They have ``patience`` seconds to come."""
    keys = [f"{turn}/{r}" for r in range(len(ranks))]
    absent: list[int] = []
    deadline = time.monotonic() + patience
    for rank, key in zip(ranks, keys, strict=True):
        if not wait_for(store, key, deadline - time.monotonic()):
            absent.append(rank)
    said = {r: json.loads(store.get(key)) for r, key in zip(ranks, keys, strict=True) if r not in absent}
    for rank, one in said.items():
        if one["error"]:
            return True, f"rank {rank}: {one['error']}"
    if absent:
        return False, did_not_come(absent)
    for key in keys:
        store.delete_key(key)
    for rank in ranks[1:]:
        if difference := _difference(said[ranks[0]], said[rank], ranks[0], rank):
            return False, difference
    return False, ""


def _difference(first: dict, other: dict, rank_0: int, rank: int) -> str:
    if first["what"] != other["what"]:
        return f"rank {rank_0} compares {first['what']}, rank {rank} {other['what']}: the ranks run different programs"
    a, b = first["lines"], other["lines"]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if len(a) == len(b) == at:
        return ""
    lengths = f": rank {rank_0} has {len(a)}, rank {rank} has {len(b)}" if len(a) != len(b) else ""
    mine, theirs = (side[at] if at < len(side) else "nothing" for side in (a, b))
    where = f"the ranks differ in {first['what']}{lengths}; the first difference, at position {at}"
    hint = f" ({first['hint']})" if first["hint"] else ""
    return f"{where}: rank {rank_0} has {mine}; rank {rank} has {theirs}{hint}"
