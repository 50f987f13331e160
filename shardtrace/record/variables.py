"""The variables to which a line of Python assigns what it has called, so that a trace has the user's names."""

from __future__ import annotations

import dis
import functools
from itertools import pairwise
from types import CodeType, FrameType

STORES = ("STORE_FAST", "STORE_DEREF")


def assigned(frame: FrameType) -> tuple[str, ...]:
    """The variables that get the result of the call, or of the operator, that ``frame`` is executing: one, or several
    if the result is unpacked at once; empty if it is not assigned."""
    names = _stores(frame.f_code).get(frame.f_lasti, ())
    return names if all(map(str.isidentifier, names)) else ()


@functools.lru_cache(4096)
def _stores(code: CodeType) -> dict[int, tuple[str, ...]]:
    """The variables to which the result of each instruction is assigned, by its offset."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP", "EXTENDED_ARG")]
    found: dict[int, tuple[str, ...]] = {}
    for i, (before, after) in enumerate(pairwise(instructions)):
        if after.opname.startswith(STORES):
            found[before.offset] = (_name(after),)
        elif after.opname == "UNPACK_SEQUENCE":
            stores = instructions[i + 2 : i + 2 + (after.arg or 0)]
            if all(s.opname.startswith(STORES) for s in stores) and len(stores) == after.arg:
                found[before.offset] = tuple(map(_name, stores))
    return found


def _name(store: dis.Instruction) -> str:
    return str(store.argval[0] if isinstance(store.argval, tuple) else store.argval)
