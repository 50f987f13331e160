"""The bodies of a step, which mutants change: the lines of forward and backward, of the functions of called blocks, and
of fusions. A step is never changed: a new body makes a new step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from passes.analysis.calls import BlockFunction, block_function, symbol_of_call
from passes.analysis.recognise import is_collective, is_deletion, is_offload, is_return, is_unpack
from passes.compat.jit import renamed

import torch
from steps import Step
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used

Lines = list[BoundSymbol]


class Body(NamedTuple):
    """Some lines, without those that free memory unless ``raw``, and the step that they are in.

    ``where``: "forward" or "backward". ``path``: the line of the trace that calls the block, if any, and the line that
    is the fusion, if any. ``inputs``: the values that the lines do not make.
    """

    step: Step
    where: str
    path: tuple[tuple[str, int], ...]
    lines: Lines
    inputs: tuple[Any, ...]
    raw: bool = False

    @property
    def is_whole(self) -> bool:
        return not self.path

    @property
    def is_fusion(self) -> bool:
        return bool(self.path) and self.path[-1][0] == "fusion"

    def known(self, at: int) -> list[TensorProxy]:
        """The tensors that exist before a line."""
        found = [p for p in self.inputs if isinstance(p, TensorProxy)]
        found += [o for b in self.lines[:at] for o in b.flat_proxy_outs]
        return list({p.name: p for p in found if is_value(p)}.values())

    def others(self, at: int, like: TensorProxy) -> list[TensorProxy]:
        """Other tensors of the same shape and dtype that exist before a line."""
        return [p for p in self.known(at) if p.name != like.name and alike(p, like)]

    def computing(self) -> list[int]:
        return [i for i, b in enumerate(self.lines) if computes(b)]


def is_value(proxy: Any) -> bool:
    return type(proxy) is TensorProxy


def alike(a: Any, b: Any) -> bool:
    return is_value(a) and is_value(b) and tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype


def computes(bsym: BoundSymbol) -> bool:
    if is_unpack(bsym) or is_return(bsym) or is_deletion(bsym) or is_collective(bsym) or is_offload(bsym):
        return False
    return bool(bsym.flat_proxy_outs)


def bodies(step: Step, *, raw: bool = False) -> Iterator[Body]:
    """All bodies of a step. A function that several lines call is one body."""
    seen: set[int] = set()
    for where in ("forward", "backward"):
        trace = getattr(step, where)
        if trace is None:
            continue
        inputs = tuple(p for p in trace.args if isinstance(p, Proxy))
        lines = trace.bound_symbols if raw else without_deletions(trace.bound_symbols)
        yield Body(step, where, (), list(lines), inputs, raw)
        for i, bsym in enumerate(lines):
            called = block_function(bsym)
            if called is not None and id(called) not in seen:
                seen.add(id(called))
                inside = called.trace.bound_symbols if raw else without_deletions(called.trace.bound_symbols)
                yield Body(step, where, (("block", i),), list(inside), tuple(called.trace.args), raw)
                if not raw:
                    yield from _fusions(step, where, (("block", i),), inside)
        if not raw:
            yield from _fusions(step, where, (), lines)


def _fusions(step: Step, where: str, path: Any, lines: Sequence[BoundSymbol]) -> Iterator[Body]:
    for i, bsym in enumerate(lines):
        if bsym.sym.is_fusion and len(bsym.subsymbols) > 0:
            yield Body(step, where, (*path, ("fusion", i)), list(bsym.subsymbols), tuple(bsym.flat_proxy_args))


def without_deletions(lines: Sequence[BoundSymbol]) -> Lines:
    return [b for b in lines if not is_deletion(b)]


def put(body: Body, lines: Lines, *, only: int | None = None) -> Step:
    """The step with other lines in the place of a body's."""
    trace: TraceCtx = getattr(body.step, body.where)
    top = list(trace.bound_symbols) if body.raw else without_deletions(trace.bound_symbols)
    new = from_trace(trace)
    new.bound_symbols = _put(top, body.path, lines, raw=body.raw)
    if not body.raw:
        new = del_last_used(new, clear_mutable_collections=body.where == "backward")
    return body.step._replace(**{body.where: new})


def _put(outer: Lines, path: tuple[tuple[str, int], ...], lines: Lines, *, raw: bool) -> Lines:
    if not path:
        return lines
    (kind, at), *rest = path
    bsym = outer[at]
    if kind == "fusion":
        return [*outer[:at], fused(bsym, lines), *outer[at + 1 :]]
    called = block_function(bsym)
    assert called is not None
    inside = list(called.trace.bound_symbols) if raw else without_deletions(called.trace.bound_symbols)
    trace = from_trace(called.trace)
    trace.bound_symbols = _put(inside, tuple(rest), lines, raw=raw)
    other = BlockFunction(
        called.name, [*called.traces[:-1], trace if raw else del_last_used(trace)], called.saved, module=called.module
    )
    return [calling(b, other) if block_function(b) is called else b for b in outer]


def calling(bsym: BoundSymbol, part: BlockFunction) -> BoundSymbol:
    """A line that calls another function of a block."""
    sym = bsym.sym
    return bsym.from_bsym(sym=symbol_of_call(part.name, sym.meta, part, executor=sym.executor, tags=sym.tags))


def fused(bsym: BoundSymbol, lines: Lines) -> BoundSymbol:
    """A fusion of other lines."""
    from thunder.core import prims, utils  # noqa: F401
    from thunder.executors.passes import transform_for_execution
    from thunder.executors.torchex import ex as torch_executor

    region = TraceCtx()
    region.args = tuple(bsym.flat_proxy_args)
    region.names = {p.name for b in lines for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
    region.names |= {p.name for b in lines for s in b.subsymbols for p in s.flat_proxy_outs}
    result = prims.python_return.bind(tuple(bsym.flat_proxy_outs), output=None)
    region.bound_symbols = [*lines, result]
    from passes.compat.jit import set_signature

    set_signature(region, "fusion")
    function = transform_for_execution(region, executors_list=(torch_executor,)).python_callable(
        include_decorators=False
    )
    return bsym.from_bsym(subsymbols=list(lines), _call_ctx={bsym.sym.name: torch.no_grad()(function)})


# ---- lines ----


def swapped(bsym: BoundSymbol, pairs: dict[str, Proxy], old: Sequence[Proxy]) -> BoundSymbol:
    """A line that reads other values, by the names of those that it reads."""
    swap = {variableify(p): pairs[p.name] for p in old if p.name in pairs}
    return bsym.from_bsym_swap_proxies(swap, skip_output=True)


def reading(bsym: BoundSymbol, old: Proxy, new: Proxy) -> BoundSymbol:
    return bsym.from_bsym_swap_proxies({variableify(old): new}, skip_output=True)


def reading_from(lines: Lines, at: int, old: Proxy, new: Proxy) -> Lines:
    """The lines, of which those from ``at`` on read another value."""
    return [*lines[:at], *(reading(b, old, new) if not is_unpack(b) else b for b in lines[at:])]


def exchanged(bsym: BoundSymbol, a: Proxy, b: Proxy) -> BoundSymbol:
    between = renamed(a, "between")  # Thunder takes a swap for a cycle
    for old, new in ((a, between), (b, a), (between, b)):
        bsym = reading(bsym, old, new)
    return bsym


def again(bsym: BoundSymbol, suffix: str) -> tuple[BoundSymbol, dict[str, Proxy]]:
    """The line with results of other names, and these by the old names."""
    new = {o.name: renamed(o, f"{o.name}_{suffix}") for o in bsym.flat_proxy_outs}
    swap = {variableify(o): new[o.name] for o in bsym.flat_proxy_outs}
    return bsym.from_bsym_swap_proxies(swap, skip_inputs=True), new


def with_leaf(bsym: BoundSymbol, at: int, value: Any) -> BoundSymbol:
    """The line with another leaf among its arguments."""
    leaves, spec = tree_flatten((bsym.args, bsym.kwargs))
    leaves[at] = value
    args, kwargs = tree_unflatten(leaves, spec)
    return bsym.from_bsym(args=args, kwargs=kwargs)


def pairs_alike(values: Sequence[Any]) -> list[tuple[int, int]]:
    """The places of two different values of one shape and dtype."""
    return [(i, j) for i, a in enumerate(values) for j, b in enumerate(values[:i]) if alike(a, b) and a.name != b.name]


def exchange_places(values: Sequence[Any], rng: random.Random) -> tuple[Any, ...] | None:
    found = pairs_alike(values)
    if not found:
        return None
    i, j = rng.choice(found)
    new = list(values)
    new[i], new[j] = new[j], new[i]
    return tuple(new)
