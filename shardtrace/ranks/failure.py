"""Reporting the error of a failed rank to the others, so that they end with it and not with a broken connection.

Note [Dead peers]: gloo's collectives raise when a connection breaks. Those of nccl wait for a lost rank until the
timeout of the process group, and then end the process. Therefore a thread looks for the word of a failed rank. It
aborts the collectives, so that the program goes on to the next line that asks, which raises.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import Any

from passes.compat import notes_of
from shardtrace.ranks.mesh import Groups, backend_for, is_alone

import torch
import torch.distributed as dist

KEY = "shardtrace/failed"  # in the default store; after a restart it has no old keys: rendezvous.py, Note [Restarts]
LOOK_UP = 1.0  # seconds between look-ups of this key
SHORTEST_PAUSE, LONGEST_PAUSE = 1e-4, 0.02  # seconds between questions to the store
NETWORK_ERRORS = ("gloo", "NCCL", "onnection")


class RankFailedError(RuntimeError):
    """Another rank has ended in the middle of a step. The message contains its error, if it could still report one."""


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


def tell_others_of_failure(group: dist.ProcessGroup) -> None:
    """Installs a hook that tells the other ranks of an exception that ends this process."""
    if is_alone(group):
        return
    if not isinstance(sys.excepthook, _TellOthers):
        sys.excepthook = _TellOthers(sys.excepthook)
    sys.excepthook.store, sys.excepthook.rank = dist.distributed_c10d._get_default_store(), dist.get_rank()


class _Watch(threading.Thread):
    """Looks for the word of another rank, and then aborts the groups: Note [Dead peers]."""

    def __init__(self, rank: int) -> None:
        super().__init__(name="shardtrace-watch", daemon=True)
        self.groups: list[dist.ProcessGroup] = []
        self.reason = ""
        self._own, self._over = f"rank {rank}: ", threading.Event()

    def run(self) -> None:
        while not self._over.wait(LOOK_UP):
            reason = _word()
            if reason and not reason.startswith(self._own):
                self.reason = reason
                for group in self.groups:
                    with contextlib.suppress(RuntimeError):  # it may be gone
                        group.abort()
                return

    def stop(self) -> None:
        self._over.set()
        self.join()


def watches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if a collective of ``group`` waits for a lost rank instead of raising: Note [Dead peers]."""
    return not is_alone(group) and backend_for(group, {device.type}) != "gloo"


def watch(groups: Groups) -> None:
    """Aborts the collectives of ``groups`` when another rank has reported that it failed."""
    hook = sys.excepthook
    assert isinstance(hook, _TellOthers)
    if hook.watch is None or not hook.watch.is_alive():
        hook.watch = _Watch(hook.rank)
        hook.watch.start()
        atexit.register(hook.watch.stop)
    hook.watch.groups += [g for g in dict.fromkeys(groups) if g is not None]


def raise_if_aborted(bucket: str) -> None:
    """Raises :class:`RankFailedError` if collectives were aborted, so that their results are without meaning."""
    hook = sys.excepthook
    if isinstance(hook, _TellOthers) and hook.watch is not None and hook.watch.reason:
        raise RankFailedError(_failed(hook.watch.reason, bucket))


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
                raise RankFailedError(f"another rank failed: {reason}")
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


def raise_if_rank_failed(error: Exception, bucket: str) -> None:
    """Raises :class:`RankFailedError` if ``error``, from a collective of ``bucket``, means a broken connection."""
    if isinstance(error, RankFailedError) or not any(word in str(error) for word in NETWORK_ERRORS):
        return
    reason = _word() or "it left no word, so it may have been killed: see its output"
    raise RankFailedError(_failed(reason, bucket)) from error


def _failed(reason: str, bucket: str) -> str:
    return f"another rank failed: {reason} (noticed in a collective of {bucket or 'the model'})"


def _word() -> str:
    """The message of a failed rank, which it writes before its connections break."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.get(KEY).decode() if store.check([KEY]) else ""
    except (RuntimeError, ValueError):  # the store is gone, or there is no process group
        return ""
