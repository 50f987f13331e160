"""Says on stderr what takes long: compiling, which is a matter of minutes for large models.

A thread looks at the stack of the one that works. It says nothing for 10 seconds, or as many as SHARDTRACE_PROGRESS in
the environment. Then it keeps one line up to date in a terminal; elsewhere it writes a line, and another one whenever
the time has doubled.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from time import monotonic

from shardtrace.ranks.mesh import is_alone

import torch.distributed as dist

SILENCE = float(os.environ.get("SHARDTRACE_PROGRESS", "10"))  # seconds; "inf" says nothing at all
LOOK_UP = 1.0  # seconds between looks
COMPILES = "thunder", "get_computation_and_inputs"  # Thunder's function that compiles: its module and name
NAME = "shardtrace-progress"
RECORDING = "recording the forward"
STAGES = (  # by the module of the innermost frame that has one of these
    ("shardtrace.planner.search", "solving"),
    ("shardtrace.planner.compose", "composing steps"),
    ("thunder.transforms.autodiff", "differentiating"),
    ("thunder.executors", "choosing kernels"),
)
RUNNERS = ("passes.pipeline", "passes.sequence", "passes.writer")  # that run passes or write lines, and are none


class _Says(threading.Thread):
    """Says what the thread ``worker`` does, until that has left Thunder's compiler, or until :meth:`stop`.

    ``stage`` is what it does, if that is known. Its stack is not looked at then: a frame that another thread holds
    keeps the fake tensors of a recording alive.
    """

    def __init__(self, what: str, *, until_compiled: bool) -> None:
        super().__init__(name=NAME, daemon=True)
        self.stage = ""
        self._what, self._worker, self.until_compiled = what, threading.get_ident(), until_compiled
        self._over, self._begin, self._due = threading.Event(), monotonic(), SILENCE

    def begins(self, what: str) -> None:
        """Another compilation has begun before a look has seen that the last one ended."""
        self._what, self._begin, self._due = what, monotonic(), SILENCE

    def run(self) -> None:
        said, in_place = False, sys.stderr.isatty()
        while not self._over.wait(LOOK_UP):
            stage = self.stage
            if not stage:
                places = _places(self._worker)
                if self.until_compiled and COMPILES not in places:
                    break
                stage = _stage(places)
            seconds = monotonic() - self._begin
            if seconds >= self._due:
                line = f"shardtrace: {self._what} for {seconds:.0f} s: {stage}"
                sys.stderr.write(f"\r\x1b[K{line}" if in_place else f"{line}\n")
                sys.stderr.flush()
                said, self._due = True, seconds if in_place else 2 * seconds
        if said and in_place:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    @contextmanager
    def naming(self, stage: str) -> Iterator[None]:
        """Around what is this stage."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def stop(self) -> None:
        self._over.set()
        self.join()


@contextmanager
def compiling(name: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Around the recording of a forward that Thunder compiles. Says, on the first rank of ``group``, what happens until
    it is compiled."""
    says = _running()
    if says is None:
        says = _Says(f"compiling {name}", until_compiled=True)
        if is_alone(group) or dist.get_rank(group) == 0:
            says.start()
    elif says.until_compiled:
        says.begins(f"compiling {name}")
    with says.naming(RECORDING):
        yield


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Says what happens inside."""
    says = _Says(what, until_compiled=False)
    if _running() is None:
        says.start()
    try:
        yield
    finally:
        if says.is_alive():
            says.stop()


def meanwhile(stage: str) -> AbstractContextManager[None]:
    """Names what is done inside, if something says it."""
    says = _running()
    return says.naming(stage) if says is not None else nullcontext()


def _running() -> _Says | None:
    return next((thread for thread in threading.enumerate() if isinstance(thread, _Says)), None)


def _places(thread: int) -> list[tuple[str, str]]:
    """The modules and names of the functions that a thread runs, the innermost first."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append((str(frame.f_globals.get("__name__", "")), frame.f_code.co_name))
        frame = frame.f_back
    return found


def _stage(places: Sequence[tuple[str, str]]) -> str:
    """What is being done, in words. ``places``: the modules and names of functions, the innermost first."""
    for at, (module, _) in enumerate(places):
        for prefix, words in STAGES:
            if module == prefix or module.startswith(prefix + "."):
                return words
        if module.startswith("passes.") and module.count(".") == 1 and module not in RUNNERS:
            until_run = takewhile(lambda place: place[0] not in RUNNERS, places[at:])
            return f"pass {[name for other, name in until_run if other == module][-1]}"
    return "tracing"
