"""Where gradients flow in a computation that autodiff has not seen yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.analysis.recognise import names

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transforms import is_constant_for_vjp


def differentiated(computation: TraceCtx, inputs: Collection[str] | None = None) -> set[str]:
    """The names of values that depend on an input which requires a gradient. ``inputs``: the names of these."""
    wanted = (a.name for a in computation.args if isinstance(a, TensorProxy) and a.requires_grad)
    found = set(wanted if inputs is None else inputs)
    for bsym in computation.bound_symbols:
        if not found.isdisjoint(names(bsym.flat_proxy_args)) and not stops_gradients(bsym):
            found |= names(bsym.flat_proxy_outs)
    return found


def with_gradients(lines: Sequence[BoundSymbol]) -> set[str]:
    """The names of values that get a gradient: those that are returned, or that lines read whose results get one."""
    found = names(lines[-1].args[0]["output"])
    for bsym in reversed(lines[:-1]):
        if not found.isdisjoint(names(bsym.flat_proxy_outs)) and not stops_gradients(bsym):
            found |= names(bsym.flat_proxy_args)
    return found


def stops_gradients(bsym: BoundSymbol) -> bool:
    """True for a line through which no gradient flows, such as ``detach``."""
    return is_constant_for_vjp(bsym) or (bool(bsym.subsymbols) and all(map(stops_gradients, bsym.subsymbols)))


# ---- the trace of a block ----
