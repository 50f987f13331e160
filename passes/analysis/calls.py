"""Calls of functions that are traces themselves: what a line of a trace that calls a block runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class Part:
    """A function of a compiled block (its forward, its backward, or its forward without gradients), which any number of
    lines call. It is the id of their symbol.

    ``traces`` are its stages, one for each pass. The last one runs. It takes the arguments of the call; ``saved`` is
    the name among them of the list of what forward saved, which is emptied; empty if there is none. ``traced`` is the
    block as it was traced, when ``module`` (a qualified name) was called.
    """

    def __init__(
        self,
        name: str,
        traces: Sequence[TraceCtx],
        saved: str = "",
        *,
        traced: TraceCtx | None = None,
        module: str = "",
    ) -> None:
        self.name = name
        self.traces = tuple(traces)
        self.saved = saved
        self.traced = traces[0] if traced is None else traced
        self.module = module
        self.facts: dict[Any, Any] = {}  # what analyses have found out about the trace that runs

    @property
    def trace(self) -> TraceCtx:
        return self.traces[-1]

    @cached_property
    def _function(self) -> Any:
        return self.trace.python_callable(include_decorators=False)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __repr__(self) -> str:
        return f"Part({self.name})"


class TraceWithBlocks(TraceCtx):
    """A trace that prints the functions of blocks that it calls below itself. It runs as any other trace."""

    def __repr__(self) -> str:
        functions = (part.trace.python(print_depth=-1, include_decorators=False) for part in parts_in(self))
        return "\n\n\n".join([super().__repr__(), *functions])


def with_blocks(trace: TraceCtx) -> TraceCtx:
    """The trace as one that prints the functions that it calls; the trace itself if it calls none."""
    if isinstance(trace, TraceWithBlocks) or not parts_in(trace):
        return trace
    new = TraceWithBlocks(trace.fn)
    new.__dict__.update(trace.__dict__)
    return new


class CallOf(NamedTuple):
    """A tag of the lines that call a block: the qualified name of the module that is called."""

    module: str


def part_of(bsym: BoundSymbol) -> Part | None:
    """The function of a block that a line calls; None if it does something else."""
    return bsym.sym.id if isinstance(bsym.sym.id, Part) else None


def parts_in(trace: TraceCtx) -> list[Part]:
    """The functions of blocks that a trace calls, in order of their first call."""
    return list(dict.fromkeys(part for b in trace.bound_symbols if (part := part_of(b)) is not None))


def called_module(bsym: BoundSymbol) -> str | None:
    """The qualified name of the module that a line calls; None if it calls no block."""
    return next((tag.module for tag in bsym.tags if isinstance(tag, CallOf)), None)


def lines_within(bsym: BoundSymbol) -> Sequence[BoundSymbol]:
    """What a line consists of: the lines of the function that it calls, or its own parts."""
    part = part_of(bsym)
    return part.trace.bound_symbols if part is not None else bsym.subsymbols
