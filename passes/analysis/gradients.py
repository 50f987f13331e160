"""Where gradients flow in a computation that autodiff has not seen yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from passes.analysis.calls import block_of
from passes.analysis.recognise import is_return, is_unpack, names

from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transforms import is_constant_for_vjp

Numbers = frozenset[int]
NOTHING = Numbers()


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


def results_of_step(epilogue: TraceCtx, computation: TraceCtx) -> tuple[TensorProxy, ...]:
    """The tensors that an epilogue gets from a computation: what it returns and more, in whatever structure."""
    inputs = {a.name for a in computation.args}
    return tuple(a for a in epilogue.args if isinstance(a, TensorProxy) and a.name not in inputs)


def computed_from(computation: TraceCtx) -> dict[str, Numbers]:
    """By the name of each result, the numbers of the other results that are computed from it."""
    results = [getattr(r, "name", "") for r in tree_flatten(computation.bound_symbols[-1].args[0]["output"])[0]]
    found: dict[str, Numbers] = {}
    _follow(computation.bound_symbols, {name: Numbers([i]) for i, name in enumerate(results)}, found)
    return {
        name: Numbers(j for j, other in enumerate(results) if other != name and i in found.get(other, NOTHING))
        for i, name in enumerate(results)
    }


def _follow(lines: Sequence[BoundSymbol], own: Mapping[str, Numbers], found: dict[str, Numbers]) -> None:
    """Fills ``found``, the results that each value is computed from; ``own`` are the numbers of results."""
    for bsym in lines:
        if is_return(bsym) or is_unpack(bsym) or stops_gradients(bsym):
            continue
        block = block_of(bsym)
        if block is None:
            read = NOTHING.union(*(found.get(a.name, NOTHING) for a in bsym.flat_proxy_args))
            found |= {o.name: read | own.get(o.name, NOTHING) for o in bsym.flat_proxy_outs}
            continue
        inner = {p.name: found.get(a.name, NOTHING) for p, a in zip(block.inputs, bsym.args, strict=True)}
        outputs = list(zip(block.outputs, bsym.output, strict=True))
        _follow(block.trace.bound_symbols, {p.name: own.get(o.name, NOTHING) for p, o in outputs}, inner)
        found |= {o.name: inner.get(p.name, NOTHING) for p, o in outputs}
