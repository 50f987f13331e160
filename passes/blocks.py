"""Passes over blocks that are called many times: they are differentiated, lowered and compiled once.

``outline``: a block that is called many times is differentiated and lowered once.

Tracing leaves one line for each call of a block, with the block's own trace behind it (:class:`Block`):

    x1 = Block(x0, w, b)

This pass finds out what each call needs: which of its inputs need a gradient, which results get one, and which
parameters are gathered again in backward. Calls that need the same share a :class:`Variant`. By its grad rule, autodiff
makes two lines of the call:

    x1, saved = Block_forward(x0, w, b)
    gx0, gw, gb = Block_backward(saved, x0, w, gx1)

Both functions are made once, of the block's trace, by the passes that the whole trace goes through. ``saved`` is a list
of what only the block's backward reads, which empties it, so that memory is freed as early as without the call.
Parameters, inputs and results are passed instead of saved. In ZeRO-3, backward thus gets the parameters from its own
gather.

``share_fusions``: equal fusions call one function, so that torch.compile compiles one for all blocks of a kind.

Thunder makes a function of each region that the torchcompile executor fuses, which is compiled when it is first called.
Two regions are equal if they consist of the same lines on values of the same shapes, whatever their names. Such regions
may list their inputs and outputs in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from passes.analysis.calls import (
    Block,
    BlockFunction,
    block_of,
    differentiated,
    function_of_lines,
    keep_regions,
    symbol_of_call,
    unique_name,
    with_gradients,
)
from passes.analysis.recognise import changes_values, is_deletion, is_return, is_unpack, names
from passes.comm.symbols import symbol, synchronize
from passes.compat.jit import OwnLine, OwnLines, calling_function_of, compile_data_and_stats
from passes.compat.versions import keeps_graph

from thunder.core import prims
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, CollectionProxy, Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transforms import get_grad, is_constant_for_vjp, put_grad
from thunder.executors.passes import del_last_used, transform_for_execution
from thunder.executors.torch_compile import TorchCompileExecutor
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward

Run = Callable[[TraceCtx], TraceCtx]


class Inner(NamedTuple):
    """The passes that a block's own trace goes through. Those ``before`` autodiff are made for the names of the inputs
    that are parameters which backward gathers again."""

    before: Callable[[Collection[str]], Sequence[Run]]
    after: Sequence[Run]


class Needs(NamedTuple):
    """What calls of a block need: the numbers of the inputs that need a gradient, of the outputs that get one, and of
    the inputs that are parameters which backward gathers again."""

    gradients: frozenset[int]
    outputs: frozenset[int]
    regathered: frozenset[int]


NOTHING = Needs(frozenset(), frozenset(), frozenset())


class Parts(NamedTuple):
    """A differentiated block. Its backward takes what forward saved, if anything, and the inputs, outputs and gradients
    of outputs with these numbers."""

    forward: BlockFunction
    backward: BlockFunction | None
    saves: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cotangents: tuple[int, ...]
    gradients: tuple[int, ...]  # the numbers of the inputs whose gradients backward returns
    results: tuple[TensorProxy, ...]  # these gradients


executor = OwnLines("shardtrace_blocks")


class Variant(OwnLine):
    """A block as some of its calls need it. It is the id of the symbol whose lines call it, until these are lowered."""

    def __init__(self, name: str, block: Block, needs: Needs, inner: Inner) -> None:
        self.name, self.block, self.needs, self.inner = name, block, needs, inner
        self.differentiated: TraceCtx | None = None  # what autodiff has got

    @cached_property
    def symbol(self) -> Symbol:
        return self._symbol(self.name, self.block.symbol.meta, self)

    def _symbol(self, name: str, meta: Any, what: Any) -> Symbol:
        return symbol_of_call(name, meta, what, executor=executor, tags=self.block.symbol.tags)

    # ---- without gradients ----

    def execute(self, *args: Any) -> Any:
        """Adds the line that runs the block where nothing is differentiated."""
        return self._symbol(self.plain.name, self.block.symbol.meta, self.plain)(*args)

    @cached_property
    def plain(self) -> BlockFunction:
        stages = _Stages(prepared(self.block, NOTHING))
        for run in self.inner.before(()):
            stages.run(run)
        *lines, last = stages.last.bound_symbols
        stages.add(_with_lines(stages.last, [*lines, last.from_bsym(args=(last.args[0]["outputs"],))]))
        stages.add(transform_for_execution(stages.last, compile_data_and_stats()[0].executors_list))
        stages.run(del_last_used)
        for run in self.inner.after:
            stages.run(run)
        return BlockFunction(self.name, stages.traces, module=self.block.module)

    # ---- with gradients ----

    def differentiate(self, *args: Any) -> Any:
        """The grad rule of a call."""
        if self.needs is NOTHING:
            return self.execute(*args)
        parts, outputs = self.parts, self.block.outputs

        def forward_meta(*args: Any) -> tuple[Any, ...]:
            results = tuple(TensorProxy(like=o, requires_grad=False, tags=set()) for o in outputs)
            return (*results, AnyProxy(None, prefix="saved")) if parts.saves else results

        results = self._symbol(parts.forward.name, forward_meta, parts.forward)(*args)
        outs, saved = results[: len(outputs)], results[len(outputs) :]
        if parts.backward is not None:
            given = (*saved, *(args[i] for i in parts.inputs), *(outs[i] for i in parts.outputs))
            cotangents = tuple(get_grad(outs[i]) for i in parts.cotangents)

            def backward_meta(*args: Any) -> tuple[TensorProxy, ...]:
                return tuple(TensorProxy(like=g, requires_grad=False, tags=set()) for g in parts.results)

            gradients = self._symbol(parts.backward.name, backward_meta, parts.backward)(*given, *cotangents)
            for i, gradient in zip(parts.gradients, gradients, strict=True):
                put_grad(args[i], gradient)
        return outs

    @cached_property
    def parts(self) -> Parts:
        needs, name = self.needs, self.name
        stages = _Stages(prepared(self.block, needs))
        for run in self.inner.before({self.block.inputs[i].name for i in needs.regathered}):
            stages.run(run)
        self.differentiated = stages.last
        stages.run(grad_transform_on_trace)
        stages.add(transform_for_execution(stages.last, compile_data_and_stats()[0].executors_list))
        forward, backward = split_into_forward_and_backward(_with_all_outputs(stages.last))
        stages.add(del_last_used(forward))
        backwards = None
        if backward is not None:
            backwards = _Stages(del_last_used(backward, clear_mutable_collections=True))
        for run in self.inner.after:
            stages.run(run)
            if backwards is not None:
                backwards.run(run)
        return _assemble(name, self.block, stages, backwards)


def _run_release(saved: list[Any]) -> None:
    if not keeps_graph():
        saved.clear()


# Empties the list of what forward saved, unless backward(retain_graph=True) asked to keep it.
release = symbol("release", lambda saved: None, _run_release, tags=[OpTags.DONT_DCE])


class _Stages:
    """The traces of a function, one for each pass that changed it."""

    def __init__(self, first: TraceCtx) -> None:
        self.traces = [first]

    @property
    def last(self) -> TraceCtx:
        return self.traces[-1]

    def run(self, run: Run) -> None:
        name = getattr(getattr(run, "func", run), "__name__", "")  # of a function, or of a partial one
        self.add(run(self.last), name if name.isidentifier() else "outline")

    def add(self, new: TraceCtx, name: str = "outline", *, sign: bool = False) -> None:
        if new is self.last:
            return
        if sign or new.get_provenance() is None:
            new.set_provenance(TraceProvenance(f"shardtrace: {name}"))
        self.traces.append(new)


def traced_block(bsym: BoundSymbol) -> Block | None:
    """The block that a line calls before it is differentiated and lowered; None if it does something else."""
    return bsym.sym.id.block if isinstance(bsym.sym.id, Variant) else block_of(bsym)


def outline(computation: TraceCtx, *, inner: Inner) -> TraceCtx:
    """Differentiates and lowers a block once for all calls that need the same.

    Takes: a computation with calls of blocks, and the passes that blocks go through.
    Gives: each call as one of the variant that it needs, whose grad rule makes the block's functions.
    No-op when: no line calls a block.
    """
    lines = computation.bound_symbols
    if not any(block_of(b) for b in lines):
        return computation
    again = {o.name for b in lines if b.sym.id == synchronize.id and b.args[1].plan.regather for o in b.flat_proxy_outs}
    new = from_trace(computation)
    for bsym, needs in needs_of_calls(computation):
        block = block_of(bsym)
        if block is not None and needs is not None:
            if needs is not NOTHING:
                needs = needs._replace(regathered=frozenset(i for i, a in enumerate(bsym.args) if a.name in again))
            bsym = bsym.from_bsym(sym=_variant(block, needs, inner, new).symbol)
        new.bound_symbols.append(bsym)
    return new


def needs_of_calls(computation: TraceCtx) -> Iterator[tuple[BoundSymbol, Needs | None]]:
    """The lines of a computation; with each call of a block, what it needs of gradients."""
    flows, read = differentiated(computation), with_gradients(computation.bound_symbols)
    for bsym in _without_new_names(computation.bound_symbols):
        block = block_of(bsym)
        if block is None:
            yield bsym, None
            continue
        gradients = frozenset(i for i in block.differentiable if bsym.args[i].name in flows)
        if is_constant_for_vjp(bsym) or not gradients:
            yield bsym, NOTHING
        else:
            yield bsym, Needs(gradients, frozenset(i for i, o in enumerate(bsym.output) if o.name in read), frozenset())


def _without_new_names(lines: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
    """The lines without Thunder's new names for aliases that follow the last update in place, which nothing needs.

    Thunder writes them ahead of each line that reads a mask, for example. Between calls of blocks each would be a
    fusion by itself, and Thunder's rematerialization fails on those.
    """
    last = max((i for i, b in enumerate(lines) if changes_values(b)), default=-1)
    old: dict[Variable, Proxy] = {}
    for i, bsym in enumerate(lines):
        if i > last and bsym.sym.id == prims.PrimIDs.UPDATE_ALIASES:
            for a, o in zip(bsym.args[0], bsym.output, strict=True):
                old[variableify(o)] = old.get(variableify(a), a)
        else:
            yield bsym.from_bsym_swap_proxies(old) if old else bsym


def _variant(block: Block, needs: Needs, inner: Inner, trace: TraceCtx) -> Variant:
    """The variant of a block for these needs. A new one gets a name that is unique in ``trace``, like its functions."""
    if needs not in block.variants:
        name = unique_name(trace, block.name) if block.variants else block.name
        block.variants[needs] = Variant(name, block, needs, inner)
    variant: Variant = block.variants[needs]
    return variant


def _with_lines(trace: TraceCtx, lines: Sequence[BoundSymbol]) -> TraceCtx:
    new = from_trace(trace)
    new.bound_symbols = list(lines)
    return new


def prepared(block: Block, needs: Needs) -> TraceCtx:
    """The block's trace as Thunder's autodiff takes it: with marks on the inputs that need a gradient, and only the
    outputs that get one as results. The others are listed with them."""
    new = from_trace(block.trace)
    new.names = set(block.trace.names)
    with tracectx(TraceCtx()):  # the names are taken in the block's own trace
        args = [_as_input(p, i in needs.gradients) for i, p in enumerate(block.inputs)]
    new.args = tuple(args)
    swap = {p.name: a for p, a in zip(block.inputs, args, strict=True)}
    *lines, _ = block.trace.bound_symbols
    new.bound_symbols = [
        prims.unpack_trivial.bind(swap[b.output.name], name=b.output.name, output=swap[b.output.name])
        if is_unpack(b)
        else copy_of(b)
        for b in lines
    ]
    results = tuple(o for i, o in enumerate(block.outputs) if i in needs.outputs)
    everything = {"output": results, "flat_args": tuple(args), "outputs": block.outputs}
    with tracectx(new):
        prims.python_return(everything)
    return new


def copy_of(bsym: BoundSymbol, *, tags: bool = True) -> BoundSymbol:
    """A copy with parts and tags of its own, which Thunder's passes change in place. ``tags``: whether it has any."""
    parts = [copy_of(part, tags=tags) for part in bsym.subsymbols]
    return bsym.from_bsym(subsymbols=parts, tags=set(bsym.tags) if tags else set())


def _as_input(proxy: TensorProxy, differentiated: bool) -> TensorProxy:
    tags = proxy.tags & {ProxyTag.STATIC_MEMORY_LOCATION}
    return TensorProxy(like=proxy, name=proxy.name, requires_grad=differentiated, tags=tags)


def _with_all_outputs(joint: TraceCtx) -> TraceCtx:
    """The joint trace with all outputs of the block as those of forward."""
    *lines, last = joint.bound_symbols
    results = last.args[0]
    return _with_lines(joint, [*lines, last.from_bsym(args=({**results, "fw_flat_out": results["outputs"]},))])


def _assemble(name: str, block: Block, forwards: _Stages, backwards: _Stages | None) -> Parts:
    """The functions of a block, of the traces that Thunder's split and the passes after it left."""
    forward = forwards.last
    result, (saved, other) = forward.bound_symbols[-1].args
    args, outputs = forward.args, result["flat_output"]
    numbers = {p.name: i for i, p in enumerate(args)}
    out_numbers = {p.name: i for i, p in enumerate(outputs)}
    kept = [p for p in (*saved, *other) if p.name not in numbers and p.name not in out_numbers]
    returned = (*outputs, kept) if kept else tuple(outputs)
    lines = [b for b in forward.bound_symbols if not (is_unpack(b) or is_return(b) or is_deletion(b))]
    function = function_of_lines(f"{name}_forward", args, lines, returned, forward.names)
    forwards.add(del_last_used(function), sign=True)
    first = BlockFunction(f"{name}_forward", forwards.traces, module=block.module)
    if backwards is None:
        return Parts(first, None, bool(kept), (), (), (), (), ())

    backward = backwards.last
    gradients = backward.bound_symbols[-1].args[0]
    lines = [b for b in backward.bound_symbols if not (is_unpack(b) or is_return(b) or is_deletion(b))]
    read = set().union(names(gradients), *(names(b.flat_proxy_args) for b in lines))
    cotangents = [(i, c) for i, c in enumerate(backward.args[1]) if c is not None and c.name in read]
    given_args = [i for p, i in numbers.items() if p in read]
    given_outs = [i for p, i in out_numbers.items() if p in read]
    wanted = [i for i, g in enumerate(gradients) if g is not None]
    results = tuple(gradients[i] for i in wanted)
    inputs = [*(args[i] for i in given_args), *(outputs[i] for i in given_outs), *(c for _, c in cotangents)]
    unpacking = []
    if kept:
        with tracectx(backward):
            collection = CollectionProxy(list(kept), name="saved" if not backward.has_name("saved") else None)
            inputs.insert(0, collection)
        unpacking = [
            prims.unpack_sequence.bind(collection, len(kept), output=list(kept)),
            release.bind(collection, output=None),
        ]
    function = function_of_lines(f"{name}_backward", inputs, lines, results, backward.names, unpacking=unpacking)
    backwards.add(del_last_used(function), sign=True)
    emptied = inputs[0].name if kept else ""
    second = BlockFunction(f"{name}_backward", backwards.traces, emptied, module=block.module)
    return Parts(
        forward=first,
        backward=second,
        saves=bool(kept),
        inputs=tuple(given_args),
        outputs=tuple(given_outs),
        cotangents=tuple(i for i, _ in cotangents),
        gradients=tuple(wanted),
        results=results,
    )


# ---- fusions ----


class Region(NamedTuple):
    """A fusion, and the numbers of its inputs and outputs: values are numbered in the order in which they appear."""

    fusion: BoundSymbol
    inputs: Sequence[int]
    outputs: Sequence[int]


def share_fusions(trace: TraceCtx) -> TraceCtx:
    """Compiles equal fusions once (torchcompile).

    Takes: a lowered forward or backward.
    Gives: a call of the first of equal fusions in the place of each. Each function knows what it was compiled from.
    No-op when: no two fusions are equal.
    """
    keep_regions(trace)
    first: dict[Hashable, Region] = {}
    lines, shared = [], False
    for bsym in trace.bound_symbols:
        if bsym.sym.is_fusion and isinstance(bsym.sym.executor, TorchCompileExecutor):
            numbers: dict[str, int] = {}
            key = _key(bsym, numbers)
            region = Region(bsym, _numbers(bsym.args, numbers), _numbers(bsym.output, numbers))
            known = first.setdefault(key, region)
            if known is not region:
                bsym, shared = _call(known, region), True
        lines.append(bsym)
    if not shared:
        return trace
    new = from_trace(trace)
    new.bound_symbols = lines
    return new


def _key(fusion: BoundSymbol, numbers: dict[str, int]) -> Hashable:
    """Equal for two fusions if they do the same. Fills ``numbers``, by the names of values."""
    parts = tuple(_part(b, numbers) for b in fusion.subsymbols)
    return parts, tuple(sorted(_numbers(fusion.args, numbers))), tuple(sorted(_numbers(fusion.output, numbers)))


def _part(bsym: BoundSymbol, numbers: dict[str, int]) -> Hashable:
    flat, spec = tree_flatten_with_dataclass((bsym.args, bsym.kwargs, bsym.output))
    values = tuple(_value(v, numbers) for v in flat)
    return bsym.sym.id, bsym.sym.name, values, str(spec), tuple(_part(b, numbers) for b in bsym.subsymbols)


def _value(value: Any, numbers: dict[str, int]) -> Hashable:
    if isinstance(value, TensorProxy):
        number = numbers.setdefault(value.name, len(numbers))
        return number, tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, Proxy):
        return numbers.setdefault(value.name, len(numbers)), type(value), getattr(value, "value", None)
    return type(value), value if isinstance(value, Hashable) else id(value)


def _numbers(proxies: Iterable[Proxy], numbers: dict[str, int]) -> list[int]:
    return [numbers.setdefault(p.name, len(numbers)) for p in proxies]


def _call(known: Region, region: Region) -> BoundSymbol:
    """The call of a known fusion with the values of an equal one."""
    inputs = dict(zip(region.inputs, region.fusion.args, strict=True))
    outputs = dict(zip(region.outputs, region.fusion.output, strict=True))
    return calling_function_of(
        known.fusion,
        region.fusion,
        args=[inputs[n] for n in known.inputs],
        output=[outputs[n] for n in known.outputs],
    )
