"""Watch which Python functions of the user run while a forward is recorded."""

from __future__ import annotations

import dis
import gc
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple

from shardtrace.record.marks import is_library

STDLIB = sysconfig.get_path("stdlib")
INSTALLED = ("site-packages", "dist-packages")  # folders below the standard library's that are not part of it


class Outside(NamedTuple):
    """State outside of modules. ``owner``: the globals of a module of Python, or a cell."""

    owner: Any
    label: str
    keys: list[str]


@dataclass
class CodeWatcher:
    """Context that collects the user's functions that run in this thread.

    Functions of torch, Thunder, the standard library, ``shardtrace`` and ``passes`` are ignored. A profiler that was
    installed before is restored at the end. Nothing is collected between :meth:`pause` and :meth:`resume`, which nest.

    Python's garbage collector is off meanwhile: its callbacks and finalizers would run among the user's functions, and
    what they read is no state of the forward.
    """

    globals_of: dict[CodeType, dict[str, Any]] = field(default_factory=dict)  # by code that ran
    seen: dict[int, CodeType] = field(default_factory=dict)  # all code by id: the hash of code is slow
    closures: dict[tuple[int, ...], CodeType] = field(default_factory=dict)  # by code and free variables, if state
    _previous: Any = None
    _install: Callable[[Any], None] = sys.setprofile
    _active: bool = False
    _pauses: int = 0
    _collects: bool = False

    def __enter__(self) -> CodeWatcher:
        self._previous, self._active, self._collects = sys.getprofile(), True, gc.isenabled()
        if not (self._previous is None or callable(self._previous) or hasattr(self._previous, "enable")):
            self._install, self._previous = (
                sys.settrace,
                sys.gettrace(),
            )  # torch's profiler with_stack cannot be put back
        gc.disable()
        self._install(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._collects:
            gc.enable()
        previous, self._previous, self._active = self._previous, None, False
        if previous is None or callable(previous):
            self._install(previous)
        else:  # cProfile before Python 3.12
            sys.setprofile(None)
            previous.enable()

    def pause(self) -> None:
        self._pauses += 1
        if self._active and self._pauses == 1:
            self._install(None)

    def resume(self) -> None:
        self._pauses -= 1
        if self._active and not self._pauses:
            self._install(self._called)

    def _called(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if id(code) not in self.seen:
            self.seen[id(code)] = code
            if not _is_library(frame):
                self.globals_of[code] = frame.f_globals
        if code.co_freevars and code in self.globals_of:
            variables = frame.f_locals
            values = [variables.get(name) for name in code.co_freevars]
            if any(map(_is_state, values)):
                key = (id(code), *map(id, values))
                self.closures[key] = code

    def add(self, other: CodeWatcher) -> None:
        """Adds the code that another one has seen."""
        self.globals_of |= other.globals_of
        self.seen |= other.seen
        self.closures |= other.closures

    def names(self) -> frozenset[str]:
        """The names of attributes that the code may read, also by ``getattr``."""
        return frozenset(chain.from_iterable(map(_strings, self.globals_of)))

    def outside(self) -> list[Outside]:
        """The global variables that the code reads, and the cells of its closures."""
        read: dict[int, Outside] = {}
        for code, variables in self.globals_of.items():
            empty = Outside(variables, f"global {variables.get('__name__')}", [])
            read.setdefault(id(variables), empty).keys.extend(_globals(code))
        cells = [
            Outside(cell, f"variable {name} of {function.__module__}.{function.__qualname__}", ["cell_contents"])
            for function in self._functions()
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        ]
        return [*read.values(), *cells]

    def _functions(self) -> list[FunctionType]:
        """The functions of code that ran whose free variables hold state. Functions that the forward itself made are
        left out: their variables follow from the code that made them."""
        local = {inner for code in self.globals_of for inner in code.co_consts if isinstance(inner, CodeType)}
        wanted = {key: code for key, code in self.closures.items() if code not in local}
        near = {_key(function): function for function in _functions_in(self.globals_of.values())} if wanted else {}
        if all(key in near for key in wanted):
            return [near[key] for key in wanted]
        codes = set(wanted.values())  # the search of all objects takes 0.05 s or more
        return [f for f in gc.get_referrers(*codes) if isinstance(f, FunctionType) and f.__code__ in codes]


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if is_library(str(frame.f_globals.get("__name__", ""))) or file.startswith("<frozen "):
        return True
    return file.startswith(STDLIB) and not any(folder in file for folder in INSTALLED)


def _is_state(value: object) -> bool:
    """Whether a free variable may change in value: decorators hold functions, methods hold their class."""
    return not isinstance(value, (FunctionType, type, ModuleType))


@lru_cache(maxsize=4096)
def _globals(code: CodeType) -> list[str]:
    return sorted({i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"})


def _strings(code: CodeType) -> Iterator[str]:
    """The name of the code, the names that it uses, and its constants that are strings."""
    yield code.co_name
    yield from code.co_names
    for constant in code.co_consts:
        strings = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
        yield from (s for s in strings if isinstance(s, str))


def _key(function: FunctionType) -> tuple[int, ...]:
    return (id(function.__code__), *(id(content) for content in _contents(function)))


def _contents(function: FunctionType) -> Iterator[object]:
    """What the free variables of a function hold. None for one without a value."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None


def _functions_in(namespaces: Iterable[dict[str, Any]]) -> Iterator[FunctionType]:
    """The functions of modules of Python and of their classes, and those in the closures of these."""
    seen: set[int] = set()
    found: list[object] = [v for variables in {id(n): n for n in namespaces}.values() for v in variables.values()]
    found += [v for cls in found if isinstance(cls, type) for v in vars(cls).values()]
    while found:
        value = found.pop()
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        value = value.fget if isinstance(value, property) else value
        if isinstance(value, FunctionType) and id(value) not in seen:
            seen.add(id(value))
            yield value
            found += _contents(value)
