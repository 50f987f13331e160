"""Which lines of a block to repeat in backward, so that little is saved and nothing costly is computed twice.

Autodiff says what backward needs of the values of forward. Each needed value is saved, or computed again from values
that are. A minimum cut through forward's values, weighted with their bytes, is the least that must be saved if only
cheap lines may be repeated (as in PyTorch's min-cut partitioner of functorch, He and Yu, 2023, "Transcending runtime-
memory tradeoffs in checkpointing by being fusion aware"). Products, attention, convolutions and random lines are not
cheap. The inputs of the block are there anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from passes.analysis.calls import function_of_lines, lines_within, part_of
from passes.analysis.flops import is_library_call
from passes.analysis.recognise import is_repeatable, names
from passes.analysis.symbols import is_foreign

import networkx as nx
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import dce
from thunder.transforms.autodiff import grad_transform_on_trace

SOURCE, SINK = "source", "sink"


class _Line(NamedTuple):
    """A tag that autodiff hands on: the number of the line that a line was made of."""

    number: int


def cheap_lines(lines: Sequence[BoundSymbol], results: Collection[str], taken: Collection[str]) -> set[int]:
    """The numbers of the lines to repeat in backward.

    Args:
        lines: of one block, none of which autodiff takes apart.
        results: names of the values that other lines read.
        taken: names that new values must not have.
    """
    outputs = [o for b in lines for o in b.flat_proxy_outs if isinstance(o, TensorProxy) and o.name in results]
    if not any(dtypes.is_float_dtype(o.dtype) for o in outputs):
        return set()
    joint = _differentiated(lines, outputs, taken)
    forward = [b for b in joint.bound_symbols if BoundSymbolTag.BACKWARD not in b.tags and _number(b) is not None]
    backward = [b for b in joint.bound_symbols[:-1] if BoundSymbolTag.BACKWARD in b.tags]
    made = {o.name: o for b in forward for o in b.flat_proxy_outs if isinstance(o, TensorProxy)}
    needed = names([b.flat_proxy_args for b in backward]) & made.keys()
    saved_side = _cut(forward, made, needed)
    kept = {_number(b) for b in forward if not _is_cheap(b) or not saved_side.isdisjoint(names(b.flat_proxy_outs))}
    return {n for b in forward if (n := _number(b)) is not None} - kept


def _cut(forward: Sequence[BoundSymbol], made: dict[str, TensorProxy], needed: set[str]) -> set[str]:
    """The values that a minimum cut does not compute again: those that it saves, and all that are only read before."""
    graph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for name, value in made.items():
        graph.add_edge(("in", name), ("out", name), capacity=value.numel * value.dtype.bytes)
        if name in needed:
            graph.add_edge(("out", name), SINK)  # an edge without capacity is infinite
    for bsym in forward:
        outs = names(bsym.flat_proxy_outs) & made.keys()
        if not _is_cheap(bsym):
            graph.add_edges_from((SOURCE, ("in", o)) for o in outs)
        else:
            graph.add_edges_from(
                (("out", a), ("in", o)) for a in names(bsym.flat_proxy_args) & made.keys() for o in outs
            )
    _, (before, _) = nx.minimum_cut(graph, SOURCE, SINK)
    return {name for name in made if ("in", name) in before}


def _differentiated(lines: Sequence[BoundSymbol], outputs: Sequence[TensorProxy], taken: Collection[str]) -> TraceCtx:
    """The lines and those of their backward, each with the number of the line that it was made of."""
    made = {o.name for b in lines for o in b.flat_proxy_outs}
    inputs = {a.name: a for b in lines for a in b.flat_proxy_args if isinstance(a, TensorProxy) and a.name not in made}
    with tracectx(TraceCtx()):  # the names are taken in the lines' own trace
        args = [TensorProxy(like=a, name=a.name, requires_grad=dtypes.is_float_dtype(a.dtype)) for a in inputs.values()]
    swap = {variableify(a): new for a, new in zip(inputs.values(), args, strict=True)}
    lines = [b.from_bsym_swap_proxies(swap, skip_output=True) for b in lines]
    numbered = [_copy(b, _Line(i)) for i, b in enumerate(lines)]
    result: Any = {"output": tuple(outputs), "flat_args": tuple(args)}
    return dce(grad_transform_on_trace(function_of_lines("block", args, numbered, result, taken)))


def _copy(bsym: BoundSymbol, tag: _Line) -> BoundSymbol:
    return bsym.from_bsym(subsymbols=[_copy(part, tag) for part in bsym.subsymbols], tags={tag})


def _number(bsym: BoundSymbol) -> int | None:
    return next((tag.number for tag in bsym.tags if isinstance(tag, _Line)), None)


def _is_cheap(bsym: BoundSymbol) -> bool:
    return is_repeatable(bsym) and not _is_costly(bsym)


def _is_costly(bsym: BoundSymbol) -> bool:
    if is_library_call(bsym.sym) or part_of(bsym) is not None or is_foreign(bsym.sym):
        return True
    return any(map(_is_costly, lines_within(bsym)))
