"""Reporting the error of a failed rank to the others, so that they end with it and not with a broken connection.

Note [Dead peers]: gloo's collectives raise when a connection breaks. Those of nccl wait for a lost rank until the
timeout of the process group, and then end the process. Therefore a thread looks for the report of a failed rank, and
for ranks that show no sign of life. It prints the reason, and aborts all process groups, so that the program goes on to
the next line that asks, which raises. A program that waits for something else is ended as torchrun ends it, by SIGTERM.

Note [Last rank]: a rank that fails stays until the others have its report, because the store may go with it, or because
torchrun ends the others when it is gone.

Note [Long waits]: the same thread says what this rank waits for, if that takes long, and shows it in the store while it
lasts. Two ranks thus see that each waits where the other will not come. All ranks of a group communicate in the same
order, so it is enough to count. A collective of the script itself is seen on the stack, if no rank leaves it before all
have come to it. A rank that computes shows nothing, however long it takes.

Signs of life of the ranks, in the store: a rank that is killed or stopped can tell nobody.

A sign that does not change proves little, because a rank shows none while it holds Python's lock, as when it sorts a
long list. Processes of this machine are therefore asked for their state. Ranks of other machines have
``SILENT`` looks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any

from passes.compat.jit import notes_of
from passes.compat.versions import aborted_together, default_store, own_connection
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed import get_process_group_ranks as ranks_of

TAG = 0x5AE  # of a message that nobody sends


def abort_groups(timeout: float) -> None:
    """Ends the collectives of all process groups, of nccl's in the kernels that wait for another rank.

    As ``_abort_process_group`` of torch, but the groups stay known, so that code that cleans up may still ask for its
    rank. Communicators are aborted together because one could wait for the kernels of another. An abort can hang, hence
    the ``timeout`` in seconds. Gloo has no abort, but closes all connections of a group if a message does not come in
    time. A message that nobody sends is therefore received for a millisecond.
    """
    thread = threading.Thread(target=_abort, name="shardtrace-abort", daemon=True)
    thread.start()
    thread.join(timeout)


def _abort() -> None:
    names = c10d._world.pg_names
    groups = sorted(names, key=lambda group: names[group], reverse=True)
    pairs = [(group, _backend(group)) for group in groups]
    nccl = [pair for pair in pairs if isinstance(pair[1], getattr(c10d, "ProcessGroupNCCL", ()))]
    with aborted_together(*nccl[0]) if nccl else contextlib.nullcontext():
        for group in groups:
            gloo: Any = _backend(group, "cpu")
            with contextlib.suppress(RuntimeError):  # it may be gone; or what gloo raises when it closes connections
                group.abort()
                if type(gloo) is getattr(c10d, "ProcessGroupGloo", None) and group.size() > 1:
                    other = (group.rank() + 1) % group.size()
                    gloo.recv([torch.empty(1)], other, TAG).wait(timedelta(milliseconds=1))


def asynchronous_error() -> str:
    """The name of the error that has ended a collective of some group of nccl, such as "TIMEOUT"; empty if there is
    none. Does not wait for the device."""
    for group in list(c10d._world.pg_names):
        get_error = getattr(_backend(group), "get_error", None)
        name: str = get_error().name if get_error is not None else "SUCCESS"
        if name != "SUCCESS":
            return name
    return ""


def _backend(group: dist.ProcessGroup, device: str = "cuda") -> Any:
    """What sends the tensors of a device for ``group``, by default of a GPU; None if nothing does."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


PULSE = "shardtrace/life"
LEFT = "left"  # the last sign of a rank that ends as it should
STOPPED, SILENT = 8, 300  # looks, one each second: at a stopped process, and at one that shows no sign


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
        store.set(f"{PULSE}/{self._rank}", f"{_machine()} {os.getpid()} {self._shown}")
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
        store.set(f"{PULSE}/{self._rank}", LEFT)

    def _judge(self, rank: int, sign: str) -> str:
        self._seen = sign, self._seen[1] + 1 if sign == self._seen[0] else 0
        state, looks = _state(sign), self._seen[1]
        if state in ("", "Z", "X"):
            return f"rank {rank}: its process is gone and left no report, so it may have been killed: see its output"
        if state == "T" and looks >= STOPPED:
            return _stopped(rank)
        if state is None and looks >= SILENT:
            return f"rank {rank}: it has shown no sign of life for {SILENT} s"
        return ""


def _stopped(rank: int) -> str:
    return f"rank {rank}: its process has been stopped for {STOPPED} s"


def _sign(store: dist.Store, rank: int) -> str:
    key = f"{PULSE}/{rank}"
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


KEY = "shardtrace/failed"  # in the default store; after a restart it has no old keys: mesh.py, Note [Restarts]
WATCHING, HEARD = "shardtrace/watching", "shardtrace/heard"  # how many ranks look for this key, and have found it
LOOK_UP = 1.0  # seconds between look-ups of this key
PATIENCE = 5.0  # seconds for the others to read a report, for an abort, for a store that does not answer, for a report
GRACE = 8.0  # seconds in which a rank comes to a line that raises, after the abort
SHORTEST_PAUSE, LONGEST_PAUSE = 1e-4, 0.02  # seconds between questions to the store
NETWORK_ERRORS = ("gloo", "NCCL", "onnection", "pair closure")
DEADLOCK = "the ranks wait for each other: "
LOST = "no sign of life from "
WAITS = "shardtrace/waits"  # in the store: what each rank has waited for longer than ``SILENCE``
SILENCE = 10.0  # seconds after which a rank says what it waits for
COLLECTIVES = (  # of torch.distributed, which no rank leaves before all have come
    "all_reduce", "barrier", "all_gather", "all_gather_single", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor",
)  # fmt: skip
LIBRARIES = ("torch", "thunder", "shardtrace", "passes", "contextlib")  # a line of the script is not in these
LIKELY = (
    "only some ranks run a part of the script, as in `if rank == 0: evaluate(model)`, but each call of a sharded model "
    "is a call of all its ranks"
)


class RankFailedError(RuntimeError):
    """Another rank has ended in the middle of a step, or waits for something else than this one. The message contains
    its error, if it could still report one."""


class _TellOthers:
    """A ``sys.excepthook`` that tells the other ranks which exception ends this one: Note [Last rank]."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.store: dist.Store | None = None
        self.rank = 0
        self.watch: _Watch | None = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watch, store = self.watch, self.store
        if watch is None or store is None or watch.in_fork() or issubclass(kind, KeyboardInterrupt):
            return self.before(kind, error, trace)
        watch.ends = True
        report = f"rank {self.rank}: {kind.__name__}: {error}{notes_of(error)}"
        if watch.can_ask():
            with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that held it
                first = store.compare_set(KEY, "", report).decode()  # the first one counts
                if first != report:
                    watch.say_once(first)  # this error may be what follows from it, in a collective of the script
        self.before(kind, error, trace)
        if watch.can_ask():
            _wait_until(lambda: store.add(HEARD, 0) >= store.add(WATCHING, 0) - 1, PATIENCE)
        abort_groups(PATIENCE)  # kernels that wait for other ranks would keep the process


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):  # the store is gone
        while not done() and time.monotonic() < end:
            time.sleep(LONGEST_PAUSE)


def tell_others_of_failure(group: dist.ProcessGroup) -> None:
    """Installs a hook that tells the other ranks of an exception that ends this process, and starts the thread that
    looks for theirs."""
    if is_alone(group):
        return
    if not isinstance(sys.excepthook, _TellOthers):
        sys.excepthook = _TellOthers(sys.excepthook)
    hook, store = sys.excepthook, default_store()
    if hook.watch is None or not hook.watch.is_alive() or hook.store is not store:
        hook.store, hook.rank = store, dist.get_rank()
        hook.watch = _Watch(store)
        hook.watch.start()
        atexit.register(hook.watch.stop)


class _Watch(threading.Thread):
    """Looks for the report of another rank, and then aborts the groups: Note [Dead peers]. Says what this rank waits
    for: Note [Long waits].

    ``ends`` tells that this rank ends by itself, because it has raised an error, and ``said`` that the report of the
    other rank has been said, by an error or on stderr.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__(name="shardtrace-watch", daemon=True)
        self.reason, self.ends, self.said = "", False, False
        self.rank = dist.get_rank()
        self.waits = _Waits(self.rank)
        self._life = Life(self.rank, dist.get_world_size())
        self._default, self._store = store, own_connection(store)
        self._store.add(WATCHING, 1)
        self._over, self._process = threading.Event(), os.getpid()

    def run(self) -> None:
        answered = time.monotonic()
        while not self.reason and not self._over.wait(LOOK_UP) and self._is_current():
            try:
                self.reason = self._look(self._store)
                answered = time.monotonic()
            except RuntimeError:
                if time.monotonic() - answered >= PATIENCE:
                    self.reason = f"{LOST}rank 0: the store that it held does not answer, so it may have been killed"
        with contextlib.suppress(RuntimeError):
            if not self.reason:
                self._life.leave(self._store)
                self._store.add(WATCHING, -1)
            elif self.can_ask():
                self._store.add(HEARD, 1)
        if self.reason:
            self._act()

    def _is_current(self) -> bool:
        try:
            return default_store() is self._default
        except ValueError:  # there is no process group any more
            return False

    def _look(self, store: dist.Store) -> str:
        """The report of another rank. Writes one for a rank that is lost, or that waits for something else."""
        if self._life.first_is_stopped():
            lost = self._life.waited_for_first()
            return lost and LOST + lost
        if store.check([KEY]):
            report = store.get(KEY).decode()
            return "" if report.startswith(f"rank {self.rank}: ") else report
        if lost := self._life.look(store):
            store.compare_set(KEY, "", LOST + lost)
            store.add(WATCHING, -1)
        elif deadlock := self.waits.look(store):
            store.compare_set(KEY, "", DEADLOCK + deadlock)
        return ""

    def _act(self) -> None:
        if not self.ends:
            self.say_once(self.reason)
        self._over.wait(LOOK_UP)  # the others hear it before a communicator closes
        abort_groups(PATIENCE)
        if self._over.wait(GRACE) or self.ends:
            return
        if self.waits.any() or not self.reason.startswith(LOST):  # such a rank may have ended as it should
            self._say(f"ends, because it did not come to a line that raises this within {GRACE:g} s")
            os.kill(os.getpid(), signal.SIGTERM)

    def say_once(self, reason: str) -> None:
        if not self.said:
            self.said = True
            self._say(_failed_text(reason))

    def _say(self, text: str) -> None:
        sys.stderr.write(f"shardtrace: rank {self.rank}: {text}\n")
        sys.stderr.flush()

    def can_ask(self) -> bool:
        """False if the store has gone, or was stopped, with the rank that held it."""
        return not self.reason.startswith(f"{LOST}rank 0: ")

    def in_fork(self) -> bool:
        return os.getpid() != self._process

    def stop(self) -> None:
        if self.in_fork():
            return
        self._over.set()
        self.join(PATIENCE)
        if self.rank == 0 and not (self.ends or self.reason):  # the store may go with it
            _wait_until(lambda: self._store.add(WATCHING, 0) <= 0, 2 * LOOK_UP)


def _watch() -> _Watch | None:
    return sys.excepthook.watch if isinstance(sys.excepthook, _TellOthers) else None


def reason_to_stop() -> str:
    """The report of another rank that has failed, or the error that has ended a collective, so that its results have no
    meaning. Empty if neither is known by now. Waits neither for the device nor for other ranks."""
    watch = _watch()
    if watch is None:
        return ""
    error = "" if watch.reason else asynchronous_error()
    return f"a collective was aborted ({error})" if error else watch.reason


class _Waits:
    """The innermost wait of each thread of this process. Another thread looks at them from time to time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._now: dict[int, communicating | None] = {}
        self._finished: dict[dist.ProcessGroup, int] = {}
        self._seen: dict[communicating, float] = {}  # when waits that were under way at the last look were first seen
        self._scripts: tuple[FrameType, communicating] | None = None  # a collective of the script at the last look
        self._beats: dict[tuple[communicating, int], int] = {}  # of other ranks, when a wait was found to be long
        self._beat = 0  # looks at which this rank has shown long waits
        self._said: set[str] = set()

    def begin(self, wait: communicating) -> None:
        thread = get_ident()
        wait.outer, self._now[thread] = self._now.get(thread), wait
        wait.number = self._finished.get(wait.group, 0)

    def end(self, wait: communicating) -> None:
        self._now[get_ident()] = wait.outer
        if not wait.compares:
            self._finished[wait.group] = wait.number + 1

    def any(self) -> bool:
        return any(wait is not None for wait in list(self._now.values()))

    def look(self, store: dist.Store) -> str:
        """Says what this rank has waited for longer than ``SILENCE``. Returns the reason if a wait will never end."""
        now = time.monotonic()
        waits = {wait: thread for thread, wait in list(self._now.items()) if wait is not None}
        if not waits and (scripts := self._script_waits()) is not None:
            waits[scripts] = threading.main_thread().ident or 0
        self._seen = {wait: self._seen.get(wait, now) for wait in waits}
        long = {wait: self._text(wait, waits[wait]) for wait, since in self._seen.items() if now - since >= SILENCE}
        self._beats = {(wait, rank): beat for (wait, rank), beat in self._beats.items() if wait in long}
        if long or self._beat:
            self._show(long, store)
        for wait, mine in long.items():
            if not wait.by_script and (reason := self._in_vain(wait, store) or self._too_long(wait, now)):
                return f"{mine}, {reason}. Probably {LIKELY}"
        return ""

    def _script_waits(self) -> communicating | None:
        """The collective of the script in which the main thread is."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
            if frame.f_code.co_name in COLLECTIVES and frame.f_globals["__name__"] == c10d.__name__:
                if self._scripts is None or self._scripts[0] is not frame:
                    what = f"{frame.f_code.co_name} of torch.distributed"
                    group: Any = frame.f_locals.get("group") or dist.group.WORLD
                    self._scripts = frame, communicating(what, group, by_script=True)
                return self._scripts[1]
            frame = frame.f_back
        self._scripts = None
        return None

    def _text(self, wait: communicating, thread: int) -> str:
        mine = f"rank {self._rank}{_place(thread)} waits for {wait.what}"
        if mine not in self._said and not wait.by_script:
            self._said.add(mine)
            late = ", ".join(map(str, wait.absent() if wait.absent is not None else ()))
            whom = f": rank(s) {late} did not come yet" if late else ""
            sys.stderr.write(f"shardtrace: {mine}, for {SILENCE:g} s now{whom}. Perhaps {LIKELY}\n")
        return mine

    def _show(self, long: Mapping[communicating, str], store: dist.Store) -> None:
        """Tells the other ranks, until nothing takes long any more."""
        self._beat = self._beat + 1 if long else 0
        finished = {group.group_name: number for group, number in list(self._finished.items())}
        waits = [
            (wait.group.group_name, ranks_of(wait.group), None if wait.by_script else wait.number, wait.what, text)
            for wait, text in long.items()
            if not wait.compares  # which times out by itself
        ]
        store.set(f"{WAITS}/{self._rank}", json.dumps([self._beat, finished, waits]))

    def _in_vain(self, wait: communicating, store: dist.Store) -> str:
        """What another rank says that waits where this one will not come, while this one waits for it."""
        mine = {group.group_name: number for group, number in list(self._finished.items())}
        for rank in ranks_of(wait.group):
            if rank == self._rank or not store.check([f"{WAITS}/{rank}"]):
                continue
            beat, theirs, others = json.loads(store.get(f"{WAITS}/{rank}"))
            if self._beats.setdefault((wait, rank), beat) == beat:  # it may have been there before this wait
                continue
            here = theirs.get(wait.group.group_name, 0) <= wait.number  # it has not been where this rank waits
            for group, ranks, number, what, text in others:
                there = number is None or mine.get(group, 0) <= number
                apart = (group, what) != (wait.group.group_name, wait.what)
                if self._rank in ranks and there and (wait.compares or (here and apart)):
                    return str(text)
        return ""

    def _too_long(self, wait: communicating, now: float) -> str:
        late = wait.limit is not None and now - self._seen[wait] >= wait.limit
        return f"and the others did not come within {wait.limit:g} s" if late else ""


class communicating:
    """A context manager around a call that waits for the other ranks of ``group``, in which all of them make the same
    calls. An error says so if another rank is its cause. ``what`` names the call, for messages, and ``compares`` says
    that no rank gets further before all have come. ``absent`` may be set to what finds out which have not. ``limit`` is
    the longest time to wait in seconds, and ``by_script`` tells a collective that the script itself has called.

    ``number`` counts the calls of the group before it, and ``outer`` is the one that it is a part of.

    Raises:
        RankFailedError: if another rank has failed, or can never come to this call.
    """

    __slots__ = ("_watch", "absent", "by_script", "compares", "group", "limit", "number", "outer", "what")

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup,
        *,
        compares: bool = False,
        limit: float | None = None,
        by_script: bool = False,
    ) -> None:
        self.what, self.group, self.compares, self.limit, self.by_script = what, group, compares, limit, by_script
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
            raise failed(watch.reason, self.what)


def wait_for(store: dist.Store, key: str, timeout: float) -> bool:
    """Waits for ``key`` in the store. False if it has not come within ``timeout`` seconds.

    Raises RankFailedError as soon as a rank has reported that it failed, because that rank may never write the key.
    """
    now = time.monotonic()
    deadline, look_up, pause = now + timeout, now + LOOK_UP, SHORTEST_PAUSE
    while not _has(store, key):
        now = time.monotonic()
        if now >= min(deadline, look_up):
            if reason := _report():
                raise failed(reason)
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
    timed_out = "imed out" in str(error)
    if (watch := _watch()) is not None and not timed_out:
        watch.ends = True
        _wait_until(lambda: bool(_report()), PATIENCE + 2 * LOOK_UP)  # of a rank that was killed, another one tells
    reason = _report()
    if not reason and timed_out:
        raise RankFailedError(f"the other ranks did not come to {what} in time. Perhaps {LIKELY}") from error
    raise failed(reason or "it left no report, so it may have been killed: see its output", what) from error


def failed(reason: str, what: str = "") -> RankFailedError:
    if (watch := _watch()) is not None:
        watch.ends = watch.said = True
    text = _failed_text(reason)
    return RankFailedError(f"{text} (noticed in {what})" if what else text)


def _failed_text(reason: str) -> str:
    return reason if reason.startswith(DEADLOCK) else f"another rank failed: {reason}"


def _report() -> str:
    """The message of a failed rank, which it writes before its connections break."""
    watch = _watch()
    if watch is not None and watch.reason:
        return watch.reason
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
