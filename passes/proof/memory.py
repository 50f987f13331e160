"""No line writes into a value that another line reads later, backward included.

A value that is read by the name by which it was written has the number of what was written
(:mod:`passes.proof.program`). This file finds the reads by other names: views, and what forward saved.
"""

from __future__ import annotations

from collections.abc import Iterator

from passes.analysis.calls import part_of, parts_in
from passes.analysis.recognise import is_deletion, is_return, is_unpack, names, updated_by
from passes.analysis.symbols import properties
from passes.proof.program import WRITTEN

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

SAVED = "saved_for_backward"  # as Thunder names this argument of backward


def hazards(forward: TraceCtx, backward: TraceCtx | None) -> Iterator[str]:
    """The reads of values that a line has written before, in words."""
    if not any(_writes(trace) for trace in (forward, backward) if trace is not None):
        return
    memory = Memory()
    yield from memory.read(forward.bound_symbols)
    if backward is None:
        return
    memory.rename({new.name: old.name for old, new in handed_over(forward, backward)})
    yield from memory.read(backward.bound_symbols)


def handed_over(forward: TraceCtx, backward: TraceCtx) -> Iterator[tuple[Proxy, Proxy]]:
    """What forward saves, with the name that backward gives it. What backward does not name is left out."""
    last = forward.bound_symbols[-1]
    unpacks = [b for b in backward.bound_symbols if b.sym.id == PrimIDs.UNPACK_SEQUENCE]
    named = {b.args[0].name: b.output for b in unpacks}
    groups = last.args[1] if len(last.args) > 1 else ()
    for saved, collection in zip(groups, named.get(SAVED, ()), strict=False):
        taken = named.get(collection.name, ()) if isinstance(collection, Proxy) else ()
        for old, new in zip(saved, taken, strict=False):
            if isinstance(old, Proxy) and isinstance(new, Proxy):
                yield old, new


def _writes(trace: TraceCtx) -> bool:
    parts = (part.trace for part in parts_in(trace))
    return any(_written(line) for t in (trace, *parts) for line in t.bound_symbols)


class Memory:
    """The memory behind names, and which of it has been written."""

    def __init__(self) -> None:
        self._behind: dict[str, str] = {}
        self._written: dict[str, set[str]] = {}  # for each memory, the names that show its content now

    def rename(self, old: dict[str, str]) -> None:
        """New names of values."""
        moved = {new: self._behind.get(name, name) for new, name in old.items()}
        for new, name in old.items():
            if (fresh := self._written.get(moved[new])) is not None and name in fresh:
                fresh.add(new)
        self._behind |= moved

    def read(self, lines: list[BoundSymbol]) -> Iterator[str]:
        """The hazards of further lines."""
        for line in lines:
            if is_unpack(line) or is_deletion(line):
                continue
            written = _written(line)
            part = part_of(line)
            if part is not None:
                written |= self._written_inside(line)
                yield from Memory().read(part.trace.bound_symbols)
            used = names(line.args[1]) if is_return(line) and len(line.args) > 1 else names(line.flat_proxy_args)
            for name in sorted(used - written) if not is_return(line) else ():
                fresh = self._written.get(self._behind.get(name, name))
                if fresh is not None and name not in fresh and line.sym.id != PrimIDs.UPDATE_ALIASES:
                    yield f"{name} is read after its memory was written: {_text(line)}"
            self._apply(line, written)

    def _written_inside(self, line: BoundSymbol) -> set[str]:
        part = part_of(line)
        assert part is not None
        inside = {name for b in part.trace.bound_symbols for name in _written(b)}
        return {a.name for a, p in zip(line.args, part.trace.args, strict=True) if p.name in inside}

    def _apply(self, line: BoundSymbol, written: set[str]) -> None:
        results = names(line.flat_proxy_outs) if line.sym.id not in WRITTEN else set[str]()
        sources = [a.name for a in line.flat_proxy_args]
        for name in written:
            memory = self._behind.get(name, name)
            self._written[memory] = results | {name}
            self._behind |= dict.fromkeys(results, memory)
        if line.sym.id == PrimIDs.UPDATE_ALIASES:
            for a, o in zip(line.args[0], line.output, strict=True):
                memory = self._behind[o.name] = self._behind.get(a.name, a.name)
                if memory in self._written:
                    self._written[memory].add(o.name)
        elif sources and properties(line.sym).is_alias:
            memory = self._behind.get(sources[0], sources[0])
            self._behind |= dict.fromkeys(results, memory)
            if sources[0] in self._written.get(memory, ()):
                self._written[memory] |= results


def _written(line: BoundSymbol) -> set[str]:
    """The names of values that a line writes into."""
    if line.sym.id == PrimIDs.UPDATE_ALIASES:
        return set()
    known = (line.args[i] for i in WRITTEN.get(line.sym.id, ()))
    return {*updated_by(line), *(a.name for a in known if a is not None)}


def _text(line: BoundSymbol) -> str:
    return str(line.from_bsym(header="")).splitlines()[0].strip()
