"""The calls of this process that wait for other ranks. A rank that waits long says so, here and in the store."""

from __future__ import annotations

import json
import sys
import threading
import time
from threading import get_ident
from types import FrameType

import torch.distributed as dist

SILENCE = 10.0  # seconds after which a rank says what it waits for
LIBRARIES = ("torch", "thunder", "shardtrace", "passes", "contextlib")  # a line of the script is not in these
LIKELY = (
    "only some ranks run a part of the script, as in `if rank == 0: evaluate(model)`, but each call of a sharded model "
    "is a call of all its ranks"
)


class Wait:
    """A call that waits for the other ranks of ``group``. ``number`` counts those of the group before it, and ``outer``
    is the one that it is a part of."""

    __slots__ = ("compares", "group", "number", "outer", "what")

    def __init__(self, what: str, group: dist.ProcessGroup, *, compares: bool = False) -> None:
        self.what, self.group, self.compares = what, group, compares
        self.number = 0
        self.outer: Wait | None = None


class Waits:
    """The innermost wait of each thread of this process. Another thread looks at them from time to time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._now: dict[int, Wait | None] = {}
        self._finished: dict[dist.ProcessGroup, int] = {}
        self._seen: dict[Wait, float] = {}  # when the waits that were under way at the last look were first seen
        self._said: set[str] = set()

    def begin(self, wait: Wait) -> None:
        thread = get_ident()
        wait.outer, self._now[thread] = self._now.get(thread), wait
        wait.number = self._finished.get(wait.group, 0)

    def end(self, wait: Wait) -> None:
        self._now[get_ident()] = wait.outer
        if not wait.compares:
            self._finished[wait.group] = wait.number + 1

    def look(self, store: dist.Store) -> str:
        """Says what this rank has waited for longer than ``SILENCE``. Returns the reason if a wait will never end."""
        now = time.monotonic()
        found = [(thread, wait) for thread, wait in list(self._now.items()) if wait is not None]
        self._seen = {wait: self._seen.get(wait, now) for _, wait in found}
        for thread, wait in found:
            if now - self._seen[wait] >= SILENCE and (reason := self._long(thread, wait, store)):
                return reason
        return ""

    def _long(self, thread: int, wait: Wait, store: dist.Store) -> str:
        mine = f"rank {self._rank}{_place(thread)} waits for {wait.what}"
        key = f"shardtrace/waits/{wait.group.group_name}"
        if mine not in self._said:
            self._said.add(mine)
            sys.stderr.write(f"shardtrace: {mine}, for {SILENCE:g} s now. Perhaps {LIKELY}\n")
            if not wait.compares:
                store.set(key, json.dumps([wait.number, mine]))
        if wait.compares and store.check([key]):
            number, other = json.loads(store.get(key))
            if number >= wait.number:
                return f"{mine}, {other}. Probably {LIKELY}"
        return ""


def _place(thread: int) -> str:
    """The line of the script that runs in a thread, or in the main thread if that one is autograd's."""
    frames = sys._current_frames()
    for ident in (thread, threading.main_thread().ident):
        frame: FrameType | None = frames.get(ident or 0)
        while frame is not None:
            module = str(frame.f_globals.get("__name__", "thunder"))  # generated code has none
            if module.partition(".")[0] not in LIBRARIES:
                return f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name},"
            frame = frame.f_back
    return ""
