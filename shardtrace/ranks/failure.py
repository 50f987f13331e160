"""Reporting the error of a failed rank to the others, so that they end with it and not with a broken connection.

Note [Dead peers]: gloo's collectives raise when a connection breaks. Those of nccl wait for a lost rank until the
timeout of the process group, and then end the process. Therefore a thread looks for the word of a failed rank. It
aborts the collectives, so that the program goes on to the next line that asks, which raises.

Note [Long waits]: the same thread says what this rank waits for, if that takes long, and writes it into the store. A
rank that compares something thus sees one that waits in a later communication, to which it will not come. All ranks of
a group communicate in the same order, so it is enough to count.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any

from passes.compat.failures import notes_of
from passes.compat.versions import default_store
from shardtrace.ranks.mesh import Groups, backend_for, is_alone

import torch
import torch.distributed as dist

KEY = "shardtrace/failed"  # in the default store; after a restart it has no old keys: rendezvous.py, Note [Restarts]
LOOK_UP = 1.0  # seconds between look-ups of this key
SHORTEST_PAUSE, LONGEST_PAUSE = 1e-4, 0.02  # seconds between questions to the store
NETWORK_ERRORS = ("gloo", "NCCL", "onnection")
DEADLOCK = "the ranks wait for each other: "
SILENCE = 10.0  # seconds after which a rank says what it waits for
LIBRARIES = ("torch", "thunder", "shardtrace", "passes", "contextlib")  # a line of the script is not in these
LIKELY = (
    "only some ranks run a part of the script, as in `if rank == 0: evaluate(model)`, but each call of a sharded model "
    "is a call of all its ranks"
)


class RankFailedError(RuntimeError):
    """Another rank has ended in the middle of a step, or waits for something else than this one. The message contains
    its error, if it could still report one."""


class _TellOthers:
    """A ``sys.excepthook`` that first tells the other ranks which exception ends this one."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.store: dist.Store | None = None
        self.rank = 0
        self.watch: _Watch | None = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.store is not None and not issubclass(kind, RankFailedError | KeyboardInterrupt):
            with contextlib.suppress(RuntimeError):  # the store may have gone first, with the rank that held it
                word = f"rank {self.rank}: {kind.__name__}: {error}{notes_of(error)}"
                self.store.compare_set(KEY, "", word)  # the first one counts
        self.before(kind, error, trace)
        time.sleep(LOOK_UP)  # the others read the word before the store goes with this process


def tell_others_of_failure(group: dist.ProcessGroup) -> None:
    """Installs a hook that tells the other ranks of an exception that ends this process, and starts the thread that
    looks for theirs."""
    if is_alone(group):
        return
    if not isinstance(sys.excepthook, _TellOthers):
        sys.excepthook = _TellOthers(sys.excepthook)
    hook = sys.excepthook
    hook.store, hook.rank = default_store(), dist.get_rank()
    if hook.watch is None or not hook.watch.is_alive():
        hook.watch = _Watch(hook.rank)
        hook.watch.start()
        atexit.register(hook.watch.stop)


class _Watch(threading.Thread):
    """Looks for the word of another rank, and then aborts the groups: Note [Dead peers]. Says what this rank waits for:
    Note [Long waits]."""

    def __init__(self, rank: int) -> None:
        super().__init__(name="shardtrace-watch", daemon=True)
        self.groups: list[dist.ProcessGroup] = []
        self.reason = ""
        self.waits = _Waits(rank)
        self._own, self._over = f"rank {rank}: ", threading.Event()

    def run(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the store is gone, or the process group
            while not self.reason and not self._over.wait(LOOK_UP):
                self._look(default_store())

    def _look(self, store: dist.Store) -> None:
        if store.check([KEY]) and not (word := store.get(KEY).decode()).startswith(self._own):
            self.reason = word
            for group in self.groups:
                with contextlib.suppress(RuntimeError):  # it may be gone
                    group.abort()
        elif deadlock := self.waits.look(store):
            store.compare_set(KEY, "", DEADLOCK + deadlock)

    def stop(self) -> None:
        self._over.set()
        self.join()


def watches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if a collective of ``group`` waits for a lost rank instead of raising: Note [Dead peers]."""
    return not is_alone(group) and backend_for(group, {device.type}) != "gloo"


def watch(groups: Groups) -> None:
    """Aborts the collectives of ``groups`` when another rank has reported that it failed."""
    found = _watch()
    assert found is not None
    found.groups += [g for g in dict.fromkeys(groups) if g is not None]


def _watch() -> _Watch | None:
    return sys.excepthook.watch if isinstance(sys.excepthook, _TellOthers) else None


class _Waits:
    """The innermost wait of each thread of this process. Another thread looks at them from time to time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._now: dict[int, communicating | None] = {}
        self._finished: dict[dist.ProcessGroup, int] = {}
        self._seen: dict[
            communicating, float
        ] = {}  # when the waits that were under way at the last look were first seen
        self._said: set[str] = set()

    def begin(self, wait: communicating) -> None:
        thread = get_ident()
        wait.outer, self._now[thread] = self._now.get(thread), wait
        wait.number = self._finished.get(wait.group, 0)

    def end(self, wait: communicating) -> None:
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

    def _long(self, thread: int, wait: communicating, store: dist.Store) -> str:
        mine = f"rank {self._rank}{_place(thread)} waits for {wait.what}"
        key = f"shardtrace/waits/{wait.group.group_name}"
        if mine not in self._said:
            self._said.add(mine)
            late = ", ".join(map(str, wait.absent() if wait.absent is not None else ()))
            whom = f": rank(s) {late} did not come yet" if late else ""
            sys.stderr.write(f"shardtrace: {mine}, for {SILENCE:g} s now{whom}. Perhaps {LIKELY}\n")
            if not wait.compares:
                store.set(key, json.dumps([wait.number, mine]))
        if wait.compares and store.check([key]):
            number, other = json.loads(store.get(key))
            if number >= wait.number:
                return f"{mine}, {other}. Probably {LIKELY}"
        return ""


class communicating:
    """A context manager around a call that waits for the other ranks of ``group``, in which all of them make the same
    calls. An error says so if another rank is its cause. ``what`` names the call, for messages, and ``compares`` says
    that no rank gets further before all have come. ``absent`` may be set to what finds out which have not.

    ``number`` counts the calls of the group before it, and ``outer`` is the one that it is a part of.

    Raises:
        RankFailedError: if another rank has failed, or can never come to this call.
    """

    __slots__ = ("_watch", "absent", "compares", "group", "number", "outer", "what")

    def __init__(self, what: str, group: dist.ProcessGroup, *, compares: bool = False) -> None:
        self.what, self.group, self.compares = what, group, compares
        self.absent: Callable[[], list[int]] | None = None
        self.number = 0
        self.outer: communicating | None = None

    def __enter__(self) -> None:
        self._watch = _watch()
        if self._watch is not None:
            self._watch.waits.begin(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        watch = self._watch
        if watch is not None:
            watch.waits.end(self)
        if isinstance(error, RuntimeError):
            _raise_if_rank_failed(error, self.what)
        elif error is None and watch is not None and watch.reason:  # the results may be without meaning
            raise _failed(watch.reason, self.what)


def wait_for(store: dist.Store, key: str, timeout: float) -> bool:
    """Waits for ``key`` in the store. False if it has not come within ``timeout`` seconds.

    Raises RankFailedError as soon as a rank has reported that it failed, because that rank may never write the key.
    """
    now = time.monotonic()
    deadline, look_up, pause = now + timeout, now + LOOK_UP, SHORTEST_PAUSE
    while not _has(store, key):
        now = time.monotonic()
        if now >= min(deadline, look_up):
            if reason := _word():
                raise _failed(reason)
            if now >= deadline:
                return False
            look_up = now + LOOK_UP
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def _has(store: dist.Store, key: str) -> bool:
    """Asks instead of waiting with a timeout, which torch would report on stderr as a failure of the socket."""
    try:
        found: bool = store.check([key])
        return found
    except RuntimeError:  # the store is gone
        return False


def _raise_if_rank_failed(error: RuntimeError, what: str) -> None:
    """Raises :class:`RankFailedError` if ``error`` means a broken connection."""
    if isinstance(error, RankFailedError) or not any(word in str(error) for word in NETWORK_ERRORS):
        return
    watch = _watch()
    reason = (watch.reason if watch is not None else "") or _word()
    if not reason and "imed out" in str(error):
        raise RankFailedError(f"the other ranks did not come to {what} in time. Perhaps {LIKELY}") from error
    raise _failed(reason or "it left no word, so it may have been killed: see its output", what) from error


def _failed(reason: str, what: str = "") -> RankFailedError:
    text = reason if reason.startswith(DEADLOCK) else f"another rank failed: {reason}"
    return RankFailedError(f"{text} (noticed in {what})" if what else text)


def _word() -> str:
    """The message of a failed rank, which it writes before its connections break."""
    try:
        store = default_store()
        return store.get(KEY).decode() if store.check([KEY]) else ""
    except (RuntimeError, ValueError):  # the store is gone, or there is no process group
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
