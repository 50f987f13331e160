"""Pass: no gradient for a parameter that only unused outputs depend on, instead of zeros.

    t31 = unless_unused(t29, uses_0)        the last lines of a backward: None if no output that it depends on was used

Zeros would move an optimizer's momentum and decay the parameter. A line is added only for a gradient that depends on
some of several outputs. It keeps a gradient that is not zero, because another rank has used the output.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from passes.analysis.recognise import is_backward, is_deletion, is_unpack, issues_future, waits_for_future
from passes.comm.kept_gradients import accumulated
from passes.comm.properties import Property
from passes.comm.symbols import symbol
from passes.plan.step import Unused

import torch
from thunder.core.codeutils import ContextObject
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

NOTHING = frozenset[int]()


class Uses(NamedTuple):
    """The outputs that depend on a parameter, and those that a step does not use."""

    outputs: frozenset[int]
    unused: Unused


def drop_unused(trace: TraceCtx, *, unused: Unused) -> TraceCtx:
    """Gives no gradient, instead of zeros, to a parameter that only unused outputs depend on.

    Takes: a lowered backward, in which gradients are waited for. ``unused`` is filled when it runs.
    Gives: a line for each gradient that depends on some of the outputs.
    No-op when: every gradient depends on all outputs or on none; in a forward.
    """
    *lines, last = trace.bound_symbols
    cotangents = next((b for b in lines if is_unpack(b) and b.args and _name(b.args[0]) == "cotangents"), None)
    if not is_backward(trace) or cotangents is None:
        return trace
    everything = frozenset(range(len(cotangents.output)))
    uses = {_name(o): frozenset([i]) for i, o in enumerate(cotangents.output) if isinstance(o, Proxy)}
    _propagate(lines, uses, everything)
    some = {g.name: g for g in last.flat_proxy_args if NOTHING < uses.get(g.name, NOTHING) < everything}
    if not some:
        return trace
    new = from_trace(trace)
    new.push_scope([])
    with tracectx(new):
        kept = {
            name: unless_unused(gradient, ContextObject(f"uses_{i}", Uses(uses[name], unused)))
            for i, (name, gradient) in enumerate(some.items())
        }
    args = tree_map(lambda x: kept.get(_name(x), x), last.args)
    new.bound_symbols = [*lines, *new.pop_scope(), last.from_bsym(args=args)]
    return new


def _propagate(lines: Iterable[BoundSymbol], uses: dict[str, frozenset[int]], everything: frozenset[int]) -> None:
    """Fills ``uses``, the outputs whose gradients each value is computed from, by name."""
    in_flight: dict[str, list[frozenset[int]]] = {}  # by the future: of each member of a bucket
    for bsym in lines:
        if is_unpack(bsym) or is_deletion(bsym):
            continue
        if issues_future(bsym):
            in_flight[bsym.output.name] = [uses.get(value.name, NOTHING) for value in bsym.args[0]]
        elif waits_for_future(bsym):
            uses |= zip((o.name for o in bsym.flat_proxy_outs), in_flight[bsym.args[0].name], strict=True)
        elif bsym.sym.id == accumulated.id:  # earlier steps may have used others
            uses |= {o.name: everything for o in bsym.flat_proxy_outs}
        else:
            _propagate(bsym.subsymbols, uses, everything)
            read = NOTHING.union(*(uses.get(a.name, NOTHING) for a in bsym.flat_proxy_args))
            for o in bsym.flat_proxy_outs:
                uses.setdefault(o.name, read)


def _name(value: Any) -> str:
    return value.name if isinstance(value, Proxy) else ""


def _unless_unused(gradient: torch.Tensor, uses: ContextObject) -> torch.Tensor | None:
    outputs, unused = uses.obj
    return None if outputs <= unused.outputs and not gradient.any() else gradient


unless_unused = symbol(
    "unless_unused", lambda gradient, uses: TensorProxy(like=gradient), _unless_unused, properties=Property.VIEW
)
