"""Where gradients flow in a computation that autodiff has not seen yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from passes.analysis.calls import block_of, part_of
from passes.analysis.recognise import is_deletion, is_return, is_unpack, names

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transforms import is_constant_for_vjp

Sources = frozenset[int]
NOTHING = Sources()


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
    """The tensors that a computation hands its epilogue, whatever becomes of them."""
    inputs = names(tuple(computation.args))
    return tuple(a for a in epilogue.args if isinstance(a, TensorProxy) and a.name not in inputs)


class Flow:
    """Finds by which sources, which are numbers, values have come about. ``skips``: lines that pass nothing on."""

    def __init__(self, skips: Callable[[BoundSymbol], bool] = is_deletion) -> None:
        self._skips = skips

    def joined(self, sources: Iterable[Sources]) -> Sources:
        """The sources of what is computed from values with these."""
        return NOTHING.union(*sources)

    def follow(self, lines: Iterable[BoundSymbol], found: dict[str, Sources], own: Mapping[str, Sources] = {}) -> None:
        """Fills ``found``, by the names of values. ``own``: further sources of some."""
        for bsym in lines:
            if not is_unpack(bsym) and not is_return(bsym) and not self._skips(bsym):
                for o, sources in zip(bsym.flat_proxy_outs, self.of_results(bsym, found, own), strict=False):
                    found[o.name] = sources | own.get(o.name, NOTHING)

    def of_results(self, bsym: BoundSymbol, found: dict[str, Sources], own: Mapping[str, Sources]) -> list[Sources]:
        """The sources of the results of a line: for a block, those inside of it; else all of the arguments."""
        block, outs = part_of(bsym) or block_of(bsym), bsym.flat_proxy_outs
        if block is not None:
            *lines, last = block.trace.bound_symbols
            pairs = zip(block.trace.args, bsym.args, strict=True)
            inner = {p.name: found.get(getattr(a, "name", ""), NOTHING) for p, a in pairs}
            results = last.flat_proxy_args
            self.follow(lines, inner, {r.name: own.get(o.name, NOTHING) for r, o in zip(results, outs, strict=False)})
            return [inner.get(r.name, NOTHING) for r in results]
        self.follow(bsym.subsymbols, found)
        joined = self.joined(found.get(a.name, NOTHING) for a in bsym.flat_proxy_args)
        return [found.get(o.name, joined) for o in outs]
