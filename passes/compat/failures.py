"""Errors while Thunder traces: notes, limits and logs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from thunder.core.interpreter import InterpreterError, do_raise


def raised(error: BaseException) -> Any:
    """What a lookaside returns to raise ``error`` in the program that is traced. An exception that a lookaside itself
    raises becomes an InterpreterError."""
    return do_raise(error)


def interrupt_of(error: BaseException) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that an exception is, or that Thunder's interpreter has made an InterpreterError."""
    cause: BaseException | None = error
    while isinstance(cause, InterpreterError):
        cause = cause.__cause__
    return cause if isinstance(cause, KeyboardInterrupt) else None


def add_note(error: BaseException, note: str) -> None:
    """Python's ``error.add_note``. Python 3.10 prints no notes: there the message gets it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def notes_of(error: BaseException) -> str:
    """The notes of an exception and of its causes, each on lines of its own, after a line break."""
    notes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        notes += getattr(cause, "__notes__", ())
        cause = cause.__cause__
    return "".join(f"\n{note}" for note in notes)


@contextmanager
def deeper_recursion() -> Iterator[None]:
    """Raises Python's limit of recursion. Recording a call of nested modules takes more frames than the call itself."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@contextmanager
def without_log_of_fakes() -> Iterator[None]:
    """Keeps torch from logging each error of a fake tensor with 20 lines of traceback. The error is raised as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_drop)
    try:
        yield
    finally:
        log.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
