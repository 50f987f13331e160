"""The variables to which a line of Python assigns what it has called, so that a trace has the user's names."""

from __future__ import annotations

import dis
import functools
from itertools import pairwise
from types import CodeType, FrameType

STORES = ("STORE_FAST", "STORE_DEREF")
IGNORED = ("CACHE", "NOP", "EXTENDED_ARG")


def assigned(frame: FrameType) -> tuple[str, ...]:
    """The variables that get the result of the call, or of the operator, that ``frame`` is executing: one, or several
    if the result is unpacked at once; empty if it is not assigned."""
    names = _stores(frame.f_code).get(frame.f_lasti, ())
    return names if all(map(str.isidentifier, names)) else ()


@functools.lru_cache(4096)
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
