"""Pass: one line names all inputs of the computation.

Thunder has a line for each. They run nothing, but each pass takes them apart: with blocks that are called they are most
of the lines, a dozen for each call. Passes of others, which may look for Thunder's own lines, find a line for each
input. The text of a trace is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from thunder.core import prims
from thunder.core.codeutils import prettyprint
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace


def merge_arguments(computation: TraceCtx) -> TraceCtx:
    """Returns the computation with one line in the place of successive ones that name an input each."""
    new = from_trace(computation)
    for named, group in groupby(computation.bound_symbols, _names_an_input):
        lines = list(group)
        new.bound_symbols += [_merged(lines)] if named and len(lines) > 1 else lines
    return new if len(new.bound_symbols) < len(computation.bound_symbols) else computation


def split_arguments(trace: TraceCtx) -> TraceCtx:
    """Returns the trace with a line for each input."""
    if not any(b.sym is unpack_inputs for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    for bsym in trace.bound_symbols:
        new.bound_symbols += _split(bsym) if bsym.sym is unpack_inputs else (bsym,)
    return new


def _names_an_input(bsym: BoundSymbol) -> bool:
    return bsym.sym is prims.unpack_trivial


def _merged(lines: list[BoundSymbol]) -> BoundSymbol:
    inputs = tuple(b.output for b in lines)
    return unpack_inputs.bind(inputs, name="inputs", output=inputs)


def _split(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    return (prims.unpack_trivial.bind(p, name=p.name, output=p) for p in bsym.output)


def _print(bsym: BoundSymbol, inputs: Any, *_: Any) -> list[str]:
    return [f"# {prettyprint(p, with_type=True)}" for p in inputs]


# Equal to Thunder's symbol, so that its passes take it for one.
unpack_inputs = replace(prims.unpack_trivial, name="unpack_inputs", python_printer=_print)
