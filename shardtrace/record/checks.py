"""What the bytecode of a forward does with what it has called: checks that only raise, and variables.

A forward that reads a condition to raise an error is recorded as if the condition held.

The check becomes a line of the trace, which raises the error in a step in which the condition does not hold. It makes a
token. What forward returns is made to depend on all tokens, so that no pass takes the check for unused.

The variables to which a line of Python assigns results give a trace the user's names.
"""

from __future__ import annotations

import builtins
import dis
import linecache
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

from passes.compat.jit import add_note
from shardtrace.record.calls import Record
from shardtrace.record.watcher import is_library

import torch

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


def tokens_of(record: Record) -> list[torch.Tensor]:
    return [t for call in record.calls if isinstance(call.function, Check) for t in call.results]


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
