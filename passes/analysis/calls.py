"""Calls of blocks, which are lines that stand for the lines of another trace, and where gradients flow.

A traced line calls a :class:`Block`. Autodiff and lowering make it lines that call a :class:`BlockFunction` of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from passes.analysis.recognise import is_deletion, is_issue, is_random, is_return, is_unpack, names
from passes.compat.jit import function_of, set_signature, symbol_that_calls

from thunder.core import prims
from thunder.core.prims import OpTags
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceTag, tracectx
from thunder.core.transform_common import dce
from thunder.core.transforms import is_constant_for_vjp


class Block:
    """A traced block. It is the id of the symbol whose lines call it.

    Args:
        name: of its class; an identifier, unique in the trace that calls it.
        lines: what tracing its first call recorded.
        inputs: the values that the lines read and do not make: those of the call, its parameters, its buffers.
        outputs: the tensors that the call returns.
        taken: names that its values must not have.
        module: the qualified name of the module that was called.

    ``variants`` are what :mod:`passes.blocks` makes of it, ``recomputing`` the same block with marks on what backward
    is to recompute.
    """

    def __init__(
        self,
        name: str,
        lines: Sequence[BoundSymbol],
        inputs: Sequence[TensorProxy],
        outputs: Sequence[TensorProxy],
        taken: Collection[str],
        module: str = "",
    ) -> None:
        self.name, self.module = name, module
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.trace = dce(function_of_lines(name, self.inputs, lines, self.outputs, taken))
        self.is_random = any(map(is_random, self.trace.bound_symbols))
        self.variants: dict[Any, Any] = {}
        self.recomputing: dict[str, Block] = {}

    @cached_property
    def symbol(self) -> Symbol:
        return symbol_of_call(self.name, self._meta, self, tags=[OpTags.RANDOM_OP] if self.is_random else [])

    def _meta(self, *args: Any) -> tuple[TensorProxy, ...]:
        # one result that is detached would detach the whole line
        detached = {ProxyTag.DETACHED_AUTOGRAD_GRAPH}
        return tuple(TensorProxy(like=o, tags=o.tags - detached) for o in self.outputs)

    @cached_property
    def differentiable(self) -> frozenset[int]:
        """The numbers of the inputs through which a gradient may flow."""
        found: set[str] = set()
        for bsym in self.trace.bound_symbols:
            if not is_return(bsym) and not is_unpack(bsym) and not is_constant_for_vjp(bsym):
                found |= names(bsym.flat_proxy_args)
        return frozenset(i for i, p in enumerate(self.inputs) if p.name in found)


class BlockFunction:
    """A function of a compiled block (its forward, its backward, or its forward without gradients), which any number of
    lines call. It is the id of their symbol.

    ``traces`` are its stages, one for each pass. The last one runs. It takes the arguments of the call; ``saved`` is
    the name among them of the list of what forward saved, which is emptied; empty if there is none. ``module`` is the
    qualified name of the module whose call was traced.
    """

    def __init__(self, name: str, traces: Sequence[TraceCtx], saved: str = "", *, module: str = "") -> None:
        self.name = name
        self.traces = tuple(traces)
        self.saved = saved
        self.module = module
        self.facts: dict[Any, Any] = {}  # what analyses have found out about the trace that runs

    @property
    def trace(self) -> TraceCtx:
        return self.traces[-1]

    @cached_property
    def function(self) -> Any:
        """The last trace, compiled."""
        return self.trace.python_callable(include_decorators=False)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __repr__(self) -> str:
        return f"BlockFunction({self.name})"


REGION = "shardtrace_region"  # of the function of a fusion


class CallOf(NamedTuple):
    """A tag of the lines that call a block: the qualified name of the module that is called, and a digest of what this
    very call has recorded."""

    module: str
    digest: str = ""


HOST = "host"  # where a block may keep what it saves: "host", "cheap+host", "full+host"


class OnHost(NamedTuple):
    """A tag of the lines that call blocks whose activations are kept in host memory (:mod:`passes.save`)."""


ON_HOST = OnHost()


def way_of(what: str) -> tuple[str, bool]:
    """What a block recomputes ("full", "cheap" or nothing), and whether it keeps in host memory what it saves."""
    *recomputed, last = what.split("+")
    return ("".join(recomputed), True) if last == HOST else (last, False)


def block_of(bsym: BoundSymbol) -> Block | None:
    """The block that a traced line calls; None if it does something else."""
    return bsym.sym.id if isinstance(bsym.sym.id, Block) else None


def block_function(bsym: BoundSymbol) -> BlockFunction | None:
    """The function of a block that a line calls; None if it does something else."""
    return bsym.sym.id if isinstance(bsym.sym.id, BlockFunction) else None


def block_functions(*traces: TraceCtx) -> list[BlockFunction]:
    """The functions of blocks that traces call, in order of their first call."""
    lines = (b for trace in traces for b in trace.bound_symbols)
    return list(dict.fromkeys(called for b in lines if (called := block_function(b)) is not None))


def called_module(bsym: BoundSymbol) -> str | None:
    """The qualified name of the module that a line calls; None if it calls no block."""
    tag = call_tag(bsym)
    return tag.module if tag is not None else None


def call_tag(bsym: BoundSymbol) -> CallOf | None:
    """The tag of a line that calls a block; None for other lines."""
    return next((tag for tag in bsym.tags if isinstance(tag, CallOf)), None)


def keep_regions(trace: TraceCtx) -> None:
    """Notes with the function of each fusion the line that it was compiled from, whatever line calls it later. Those of
    nvFuser take no note."""
    for bsym in trace.bound_symbols:
        function = function_of(bsym) if bsym.sym.is_fusion else None
        if hasattr(function, "__dict__") and region_of(bsym) is None:
            vars(function)[REGION] = bsym


def region_of(bsym: BoundSymbol) -> BoundSymbol | None:
    """The fusion that the function of a line was compiled from; None if it is not known."""
    region: BoundSymbol | None = getattr(function_of(bsym), REGION, None)
    return region


def lines_within(bsym: BoundSymbol) -> Sequence[BoundSymbol]:
    """The lines of the block, or of a block's function, that a line calls, or else its subsymbols."""
    called = block_of(bsym) or block_function(bsym)
    return called.trace.bound_symbols if called is not None else bsym.subsymbols


def symbol_of_call(
    name: str, meta: Any, what: Any, *, executor: Any = None, tags: Sequence[Any] | None = None
) -> Symbol:
    """The symbol of lines that call ``what``, which is its id."""
    return symbol_that_calls(name, meta, what, id=what, is_prim=True, executor=executor, tags=list(tags or []))


def function_of_lines(
    name: str,
    args: Sequence[Proxy],
    lines: Sequence[BoundSymbol],
    result: Any,
    taken: Collection[str],
    *,
    unpacking: Sequence[BoundSymbol] = (),
) -> TraceCtx:
    """A trace that is a function of ``args``. ``unpacking`` are lines that take them apart."""
    trace = TraceCtx()
    trace.names = set(taken)
    trace.args = tuple(args)
    set_signature(trace, name)
    trace.bound_symbols = [prims.unpack_trivial.bind(a, name=a.name, output=a) for a in args]
    trace.bound_symbols += [*unpacking, *lines]
    with tracectx(trace):
        prims.python_return(result)
    return trace


def unique_name(trace: TraceCtx, base: str, *, first: int = 2) -> str:
    """``base``; if the trace has this name already, ``base`` with a number from ``first`` on. The trace has the name
    from now on."""
    name, n = base, first
    while trace.has_name(name):
        name, n = f"{base}_{n}", n + 1
    trace.add_name(name)
    return name


# ---- what a forward saves ----


class Saving(NamedTuple):
    """What a lowered forward saves for its backward. ``lines`` are without deletions and without the ``last`` one. The
    arguments of that are ``result`` and (``saved``, ``other``). ``only_saved``: the names of what is saved and not
    returned; ``issues``: of collectives, by their futures."""

    lines: list[BoundSymbol]
    last: BoundSymbol
    result: dict[str, Any]
    saved: tuple[Any, ...]
    other: Any
    only_saved: Collection[str]
    issues: dict[str, BoundSymbol]

    @classmethod
    def of(cls, trace: TraceCtx) -> Saving | None:
        """None for a trace that is no forward with a backward."""
        if TraceTag.AUGMENTED_FORWARD not in trace.tags or not is_return(trace.bound_symbols[-1]):
            return None
        *lines, last = [b for b in trace.bound_symbols if not is_deletion(b)]
        result, (saved, other) = last.args
        issues = {b.output.name: b for b in lines if is_issue(b)}
        return cls(lines, last, result, saved, other, names(saved) - names(result["output"]), issues)

    def returning(self, saved: tuple[Any, ...]) -> BoundSymbol:
        """The last line with other saved values."""
        return self.last.from_bsym(args=(self.result, (saved, self.other)))


# ---- where gradients flow ----


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
        block, outs = block_function(bsym) or block_of(bsym), bsym.flat_proxy_outs
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
