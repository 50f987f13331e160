"""Signs of life of the ranks, in the store: a rank that is killed or stopped can tell nobody.

A sign that does not change proves little, because a rank shows none while it holds Python's lock, as when it sorts a
long list. Processes of this machine are therefore asked for their state. Ranks of other machines have ``SILENCE``.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch.distributed as dist

KEY = "shardtrace/life"
LEFT = "left"  # the last sign of a rank that ends as it should
STOPPED, SILENCE = 8, 300  # looks, one each second: of a stopped process, and of one that shows no sign


class Life:
    """The signs of one rank of ``size``, which looks for those of the next rank that has not left."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._shown = 0
        self._first = ""  # a sign of the first rank
        self._stopped = 0  # looks at the first rank since it was stopped
        self._seen = "", 0  # a sign, and how often it was seen again

    def look(self, store: dist.Store) -> str:
        """Shows a sign. Returns the rank that is lost, with what is known about it, or an empty string."""
        self._shown += 1
        store.set(f"{KEY}/{self._rank}", f"{_machine()} {os.getpid()} {self._shown}")
        if self._rank and not self._first:
            self._first = _sign(store, 0)
        for other in range(self._rank + 1, self._rank + self._size):
            rank = other % self._size
            sign = _sign(store, rank)
            if sign and sign != LEFT:
                lost = self._judge(rank, sign)
                return lost if lost and _sign(store, rank) != LEFT else ""  # it may have left meanwhile
        return ""

    def first_is_stopped(self) -> bool:
        """True while the process of the first rank is stopped. If it holds the store, this would not answer."""
        stopped = bool(self._first) and self._first != LEFT and _state(self._first) == "T"
        self._stopped = self._stopped + 1 if stopped else 0
        return stopped

    def waited_for_first(self) -> str:
        """What :meth:`look` returns, once the first rank has been stopped for too long."""
        return _stopped(0) if self._stopped > STOPPED else ""

    def leave(self, store: dist.Store) -> None:
        """Shows that this rank ends as it should."""
        store.set(f"{KEY}/{self._rank}", LEFT)

    def _judge(self, rank: int, sign: str) -> str:
        self._seen = sign, self._seen[1] + 1 if sign == self._seen[0] else 0
        state, looks = _state(sign), self._seen[1]
        if state in ("", "Z", "X"):
            return f"rank {rank}: its process is gone and left no word, so it may have been killed: see its output"
        if state == "T" and looks >= STOPPED:
            return _stopped(rank)
        if state is None and looks >= SILENCE:
            return f"rank {rank}: it has shown no sign of life for {SILENCE} s"
        return ""


def _stopped(rank: int) -> str:
    return f"rank {rank}: its process has been stopped for {STOPPED} s"


def _sign(store: dist.Store, rank: int) -> str:
    key = f"{KEY}/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


@cache
def _machine() -> str:
    """A name of the machine, or of the container, in which process numbers have a meaning. "-" if it has no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def _state(sign: str) -> str | None:
    """The state of the process that showed a sign, as ps prints it. Empty if there is none, None if nobody knows."""
    machine, process, _ = sign.split()
    if machine == "-" or machine != _machine():
        return None
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
