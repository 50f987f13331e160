"""The user's Python while a forward is recorded: what runs, and what its bytecode does with what it has called.

The watcher sees which functions run, and what they do to generators of random numbers.

A forward that reads a condition to raise an error is recorded as if the condition held. The check becomes a line of the
trace, which raises the error in a step in which the condition does not hold. It makes a token. What forward returns is
made to depend on all tokens, so that no pass takes the check for unused.

The variables to which a line of Python assigns results give a trace the user's names.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import linecache
import os
import random
import sys
import sysconfig
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count, pairwise
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType, TracebackType
from typing import Any, NamedTuple

from passes.compat.jit import add_note

import torch
from torch import nn

# ---- marks ----


ATTRIBUTE = "_shardtrace"  # of a sharded module: its ShardedState
PART_ATTRIBUTE = "_shardtrace_part_of"  # of a submodule of a sharded model: the ShardedState around it
REPEATED = "_shardtrace_block"  # of a block that is compiled once with others of its kind: its name
EAGER = "_shardtrace_eager"  # of a module that PyTorch runs
LIBRARIES = frozenset({"torch", "torchgen", "thunder", "shardtrace", "passes", "contextlib"})
CHECKPOINTED = "_shardtrace_checkpointed"  # what becomes of a module's activations, as way_of reads it


def recomputed(module: nn.Module) -> str | None:
    """A module's own mark, or None."""
    return module.__dict__.get(CHECKPOINTED)


@functools.cache
def is_library(module: str) -> bool:
    """Whether a module of Python, by its name, is part of torch, Thunder or shardtrace: none of the user's lines or
    objects is in it."""
    return module.partition(".")[0] in LIBRARIES


# ---- the class of a fake ----


class TypeOfFakes:
    """Stands for ``type`` in the user's code while a forward is recorded: a fake is of the class of what it stands for,
    a module of the class that it had before it was sharded.

    It is no class itself, so that classes which forward makes derive from ``type``.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = type(*args, **kwargs)
        if len(args) == 1 and hasattr(found, "seen_as"):
            return args[0].seen_as
        return self if found is type else found

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name == "__mro_entries__" else getattr(type, name)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (type,)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, type)

    def __getitem__(self, parameters: Any) -> Any:
        return type[parameters]

    def __eq__(self, other: object) -> bool:
        return other is self or other is type

    def __hash__(self) -> int:
        return hash(type)


TYPE = TypeOfFakes()


# ---- code ----


ENVIRONMENT = type(os.environ).__getitem__.__code__  # by which Python reads a variable of the environment
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
    variables: set[str] = field(default_factory=set)  # of the environment, that were read
    shadowed: list[dict[str, Any]] = field(default_factory=list)  # the globals in which ``type`` is ours
    _found: tuple[set[tuple[int, ...]], list[FunctionType]] = field(default_factory=lambda: (set(), []))
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
        for variables in self.shadowed:
            variables.pop("type", None)
        self.shadowed.clear()
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
        if code is ENVIRONMENT:
            self.variables.add(frame.f_locals["key"])
        if id(code) not in self.seen:
            self.seen[id(code)] = code
            if not _is_library(frame):
                self.globals_of[code] = frame.f_globals
                if "type" in code.co_names and "type" not in frame.f_globals:
                    frame.f_globals["type"] = TYPE
                    self.shadowed.append(frame.f_globals)
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
            Outside(cell, f"variable {name} of {function.__qualname__}", ["cell_contents"])
            for function in self._functions()
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        ]
        return [*read.values(), *cells]

    def environment(self) -> Callable[[], None]:
        """A guard of the variables that were read: it raises RuntimeError if one is another one than now."""
        known = {name: os.environ.get(name) for name in self.variables}

        def check() -> None:
            for name, value in known.items():
                if os.environ.get(name) != value:
                    raise RuntimeError(f"the environment variable {name} has changed")

        return check

    def stateful(self) -> dict[tuple[int, ...], CodeType]:
        """Those of ``closures`` that the forward did not make itself: the variables of these follow from its code."""
        local = {inner for code in self.globals_of for inner in code.co_consts if isinstance(inner, CodeType)}
        return {key: code for key, code in self.closures.items() if code not in local}

    def _functions(self) -> list[FunctionType]:
        """The functions of code that ran whose free variables hold state. A twin of one, with the same code and values,
        may be left out if an object holds it: a :class:`State` finds it there."""
        wanted = self.stateful()
        known, found = self._found
        if known == wanted.keys():
            return found
        near: dict[tuple[int, ...], list[FunctionType]] = {}
        for function in _functions_in(self.globals_of.values()) if wanted else ():
            near.setdefault(_key(function), []).append(function)
        if all(key in near for key in wanted):
            found = [function for key in wanted for function in near[key]]
        else:  # the search of all objects takes 0.05 s or more
            codes = set(wanted.values())
            found = [f for f in gc.get_referrers(*codes) if isinstance(f, FunctionType) and f.__code__ in codes]
        self._found = set(wanted), found
        return found


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


# ---- random numbers ----


SEEDS = 0x5EED << 32  # from here on: the seeds of torch's generators during a recording, which no script uses
REMEDY = "or move that into a submodule that takes and returns tensors, which PyTorch can then run"


class RandomStates:
    """Context around a recording or a trial. All generators that the forward may reach are put back at the end.

    A draw on fake tensors advances no generator of torch. Each has a seed of ours meanwhile, and another one after each
    draw. A forward that seeds a generator, or restores what it was before a draw, leaves a seed that is not the last
    one. Generators of Python and numpy are compared by their states.

    Args:
        known: what the forward may reach, each with a name, and generators among it.
    """

    def __init__(self, known: Iterable[tuple[str, object]] = ()) -> None:
        self._known = list(known)
        self._before: dict[int, tuple[Any, str, Any]] = {}  # of a generator: itself, its name, its state
        self._expected: dict[int, Any] = {}
        self._seeds, self._set = count(SEEDS), ""

    def __enter__(self) -> RandomStates:
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        for generator in (torch.default_generator, *cuda):
            self._add("torch's own generator", generator)
        for module in filter(None, map(sys.modules.get, ("random", "numpy.random"))):
            self._add(module.__name__, module)
        for name, value in self._known:
            if _is_generator(value):
                self._add(name, value)
        return self

    def __exit__(self, *error: object) -> None:
        for generator, _, state in self._before.values():
            _access(generator)[1](state)

    def see_draw(self, generator: torch.Generator | None, device: torch.device) -> None:
        """Is told of each draw on fake tensors."""
        if not self._before:
            return
        if generator is None and device.type == "cuda" and torch.cuda.is_initialized():
            number = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[number]
        generator = torch.default_generator if generator is None else generator
        self._add("a torch.Generator", generator)
        if _now(generator) != self._expected[_identity(generator)]:
            self._set = self._before[_identity(generator)][1]
        self._advance(generator)

    def check(self) -> None:
        """Raises RuntimeError if the forward has drawn from a generator of Python or numpy, or set one of torch."""
        changed = {name: g for i, (g, name, _) in self._before.items() if _now(g) != self._expected[i]}
        of_torch = [self._set] if self._set else [n for n, g in changed.items() if isinstance(g, torch.Generator)]
        if of_torch:
            raise RuntimeError(
                f"forward seeds {of_torch[0]}, or sets its state, which no step would do again: do it outside of "
                f"forward, {REMEDY}"
            )
        if changed:
            raise RuntimeError(
                f"forward draws numbers from {' and '.join(changed)}, which each step would have to draw anew: use "
                "torch's random functions (torch.rand, torch.randint), draw outside of forward and pass the numbers "
                f"as arguments, {REMEDY}"
            )

    def _add(self, name: str, generator: Any) -> None:
        if _identity(generator) not in self._before:
            self._before[_identity(generator)] = generator, name, _access(generator)[0]()
            self._advance(generator)

    def _advance(self, generator: Any) -> None:
        """Gives a generator a state that no script has given it."""
        if isinstance(generator, torch.Generator):
            generator.manual_seed(next(self._seeds))
        else:
            (getattr(generator, "random_raw", None) or generator.random)()
        self._expected[_identity(generator)] = _now(generator)


def _identity(generator: Any) -> int:
    """The same for all that share a state: wrappers of one of torch, a module and its hidden generator, those of numpy
    and their bits."""
    reads = getattr(generator, "getstate", None) or getattr(generator, "get_state", None)
    owner = getattr(reads, "__self__", generator)
    bits = getattr(owner, "bit_generator", None) or getattr(owner, "_bit_generator", owner)
    return getattr(owner, "_cdata", id(bits))


def _is_generator(value: object) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator))


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The functions that read and set the state of a generator."""
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = getattr(generator, "bit_generator", generator)
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _now(generator: Any) -> Any:
    """What tells two states of a generator apart."""
    return generator.initial_seed() if isinstance(generator, torch.Generator) else _plain(_access(generator)[0]())


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if type(state) is tuple:
        return state if {*map(type, state)} == {int} else tuple(map(_plain, state))  # Python's has 625 numbers
    return state.tolist() if hasattr(state, "tolist") else state


# ---- iterators ----


def iterators(known: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Where the iterators of Python are that a forward may reach, by their names."""
    held = ((name, v) for name, v in known if isinstance(v, Iterator))
    return {name: _position(v) for name, v in held}


def _position(value: Any) -> Any:
    """What tells whether an iterator has been advanced; None if nothing does."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    if type(value).__module__ not in ("builtins", "itertools"):  # its attributes tell
        return None
    with warnings.catch_warnings(), suppress(TypeError):  # Python 3.14 copies none of itertools
        warnings.simplefilter("ignore")
        _, args, *state = value.__reduce__()
        return tuple(map(_part, (*args, *(s for part in state for s in (part if type(part) is tuple else (part,))))))
    return None


def _part(value: Any) -> Any:
    if isinstance(value, Iterator):
        return _position(value)
    return len(value) if isinstance(value, (list, tuple)) else repr(value) if isinstance(value, (int, range)) else None


# ---- checks that only raise, and variables ----


LASTING = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "YIELD_VALUE", "RETURN_VALUE", "RETURN_CONST")
RECORD = ("shardtrace.record.recorder", "record")  # calls the forward
BOOLEANS = {torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.Tensor.equal}


@dataclass(frozen=True)
class Check:
    """Returns a token. Raises if ``condition`` of some tensors is not what it was taken for: ``note`` says where."""

    condition: Callable[..., Any]
    holds: bool
    error: type[Exception]
    message: str
    note: str = ""
    __name__ = "check"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if bool(self.condition(*args, **kwargs)) != self.holds:
            try:
                error = self.error(self.message)
            except Exception:  # it takes other arguments
                error = RuntimeError(self.message)
            if self.note:
                add_note(error, self.note)
            raise error
        return token(args[0])


def token(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.bool, device=like.device)


def after_checks(value: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
    """The value of a tensor that needs the tokens."""
    return value.view_as(value)


def check_of(frame: FrameType, condition: Callable[..., Any], args: Any) -> Check | None:
    """The check that is made of what ``condition`` returns to ``frame``, which is the innermost one outside of
    shardtrace; None if that has another use, or if the error would be caught."""
    is_item = condition is torch.Tensor.item and args[0].dtype == torch.bool
    if not is_item and condition not in (*BOOLEANS, torch._assert):
        return None
    user, found = frame, None
    while user.f_back is not None and is_library(user.f_globals.get("__name__", "")):
        user = user.f_back
    place = f"{user.f_code.co_filename}:{user.f_lineno} in {user.f_code.co_name}"
    text = f"at {place}:\n    {linecache.getline(user.f_code.co_filename, user.f_lineno).strip()}"
    if frame.f_code is torch._check_tensor_all_with.__code__:
        found = Check(condition, True, frame.f_locals["error_type"], _message(frame.f_locals["message"]), text)
    elif condition is torch._assert:
        found = Check(_first, True, AssertionError, str(args[1]), text)
    elif frame is user and (branch := _branches(user.f_code).get(user.f_lasti)) is not None:
        error = _error(branch.raises, user)
        found = Check(condition, branch.passes, error, f"a check of the model has failed, {text}")
    return None if found is None or any(map(_catches, _callers(user))) else found


def _first(condition: torch.Tensor, message: object) -> bool:
    return bool(condition)


def _message(message: Callable[[], Any] | None) -> str:
    """The text of a check of torch. A function may read values of this step for it."""
    text = "a check of the model has failed"
    with suppress(Exception):
        text = str(message()) if message is not None else "Expected cond to be True, but got False."
    return text if "FakeTensor" not in text else "a check of the model has failed"


def _error(names: tuple[str, ...], frame: FrameType) -> type[Exception]:
    """The first exception among the global variables of these names."""
    variables: Mapping[str, Any] = vars(builtins) | frame.f_globals
    found = (variables.get(name) for name in names)
    return next((v for v in found if isinstance(v, type) and issubclass(v, Exception)), RuntimeError)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the forward that is being recorded, inner ones first."""
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != RECORD:
        if not is_library(frame.f_globals.get("__name__", "")):
            yield frame
        frame = frame.f_back


def _catches(frame: FrameType) -> bool:
    """Whether a frame may handle an error that is raised where it is; what ends a ``with`` does not count."""
    return any(begin <= frame.f_lasti < end for begin, end in _handled(frame.f_code))


@lru_cache(4096)
def _handled(code: CodeType) -> tuple[tuple[int, int], ...]:
    after = {a.offset: b.opname for a, b in zip(_instructions(code), _instructions(code)[1:], strict=False)}
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    return tuple((e.start, e.end) for e in entries if after.get(e.target) not in ("WITH_EXCEPT_START", "POP_EXCEPT"))


class Branch(NamedTuple):
    """What a condition must be for nothing to be raised, and the names of global variables before the raise."""

    passes: bool
    raises: tuple[str, ...]


@lru_cache(4096)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opname not in IGNORED]


@lru_cache(4096)
def _branches(code: CodeType) -> dict[int, Branch]:
    """The conditions that only decide whether an error is raised, by the offset of the instruction that reads one."""
    found: dict[int, Branch] = {}
    if not hasattr(dis.Bytecode(code), "exception_entries"):
        return found  # before Python 3.11, where handlers are not known
    kept = _instructions(code)
    for n, jump in enumerate(kept):
        if "JUMP" not in jump.opname or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
            continue
        begin, inverted = n, False
        while kept[begin - 1].opname in ("UNARY_NOT", "TO_BOOL"):
            begin, inverted = begin - 1, inverted != (kept[begin - 1].opname == "UNARY_NOT")
        jumps = jump.opname.endswith("IF_TRUE")
        taken, other = _raised(kept, jump.argval), _raised(kept, kept[n + 1].offset)
        if (taken is None) == (other is None):
            continue
        passes = jumps == (taken is None)
        branch = Branch(passes != inverted, taken or other or ())
        found.update((i, branch) for i in range(kept[begin - 1].offset, jump.offset + 1, 2))
    return found


def _raised(kept: list[dis.Instruction], offset: int) -> tuple[str, ...] | None:
    """The names of the global variables on the ways from an instruction, if all of them end in a raise; else None."""
    names: list[str] = []
    waiting, seen = [offset], set[int]()
    while waiting:
        n = bisect_left(kept, waiting.pop(), key=lambda i: i.offset)  # what is ignored may be jumped to
        while n not in seen:
            seen.add(n)
            i = kept[n]
            names += [str(i.argval)] * (i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
            names += ["AssertionError"] * (i.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT"))
            if i.opname in ("RAISE_VARARGS", "RERAISE"):
                break
            if i.opname in LASTING or "BACKWARD" in i.opname or i.opname == "FOR_ITER":
                return None
            if "JUMP" in i.opname:
                waiting.append(i.argval)
            if i.opname == "JUMP_FORWARD":
                break
            n += 1
    return tuple(names)


STORES = ("STORE_FAST", "STORE_DEREF")
IGNORED = ("CACHE", "NOP", "EXTENDED_ARG")


def assigned(frame: FrameType) -> tuple[str, ...]:
    """The variables that get the result of the call, or of the operator, that ``frame`` is executing: one, or several
    if the result is unpacked at once; empty if it is not assigned."""
    names = _stores(frame.f_code).get(frame.f_lasti, ())
    return names if all(map(str.isidentifier, names)) else ()


@lru_cache(4096)
def _stores(code: CodeType) -> dict[int, tuple[str, ...]]:
    """The variables to which the result of each instruction is assigned, by its offset."""
    instructions = list(dis.get_instructions(code))
    ends = [i.offset for i in instructions[1:]] + [len(code.co_code)]  # behind the caches, where a call may stand
    kept = [(i, end) for i, end in zip(instructions, ends, strict=True) if i.opname not in IGNORED]
    found: dict[int, tuple[str, ...]] = {}
    for n, ((before, end), (after, _)) in enumerate(pairwise(kept)):
        names: tuple[str, ...] = ()
        if after.opname.startswith(STORES):
            names = (_name(after),)
        elif after.opname == "UNPACK_SEQUENCE":
            stores = [i for i, _ in kept[n + 2 : n + 2 + (after.arg or 0)]]
            if all(s.opname.startswith(STORES) for s in stores) and len(stores) == after.arg:
                names = tuple(map(_name, stores))
        if names:
            found.update(dict.fromkeys(range(before.offset, end, 2), names))
    return found


def _name(store: dis.Instruction) -> str:
    return str(store.argval[0] if isinstance(store.argval, tuple) else store.argval)
