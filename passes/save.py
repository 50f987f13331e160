"""Passes that decide what forward saves for backward, and what backward computes again.

``fit_memory``: what a step recomputes, how it computes a loss and which parameters stay gathered is chosen so that it
fits into the memory that ``fsdp`` was given. The choice is made by the planner, for the trace that was recorded.

``checkpoint_activations``: the activations of chosen blocks are recomputed in backward instead of being saved.

Thunder's autodiff repeats in backward all lines that are tagged RECOMPUTE_IN_BACKWARD and needed there. This pass tags
the lines of a block, except for those whose results other lines use, so that a block saves only its inputs. It treats
the lines that Thunder tagged, because the model itself calls ``torch.utils.checkpoint``, in the same way. Note
[Not twice] holds for both. Of a call that is cheap it tags only the lines that :mod:`passes.analysis.flops` finds.

Note [Not twice]. A random line would draw other numbers, and a line that reads or writes values that are updated in
place would see or make other values. The results of such lines are saved. Random numbers are saved in their smallest
form: a dropout saves its boolean mask, one byte for each element. A symbol with its own grad rule, such as attention
with dropout on CUDA, saves its result and what the rule needs.

``keep_random``: random numbers are drawn once, in forward; backward reads the same numbers.

Thunder's fusions repeat cheap lines of forward in backward (thunder.core.rematerialization), except for lines that are
tagged RANDOM_OP, and Thunder's own randn and randint are not tagged. A second draw would give other numbers and wrong
gradients. This pass therefore tags every random line. If autodiff takes a line apart, only its random parts are tagged:
the other parts, such as the product of a dropout, may be repeated.

``regather``: values that are computed only from parameters are recomputed in backward instead of being saved.

Thunder's autodiff repeats in backward all lines that are tagged RECOMPUTE_IN_BACKWARD and needed there. The whole chain
must carry the tag, from the gather to the last view or cast of a parameter. A chain that ends too early saves its last
link, and with it the memory of the whole parameter.

``save_shards``: saves the shard if a fusion would save a gathered parameter for backward.

Thunder moves cheap lines from a fusion of forward into one of backward (thunder.core.rematerialization), together with
their inputs. These include parameters that forward gathered, because Thunder does not know of the gather in backward.
This pass lets backward read what its own gather brings, and adds a gather for a parameter that has none.

``keep_secondary``: forward keeps a second shard inside the node, from which backward gathers.

    second = keep_shards(full, b_0_secondary)       forward: this rank's part of the gathered parameters, in the node
    future = all_gather(second, b_0_secondary)      backward: gathers from the ranks of the node, not from all

Autodiff has made a backward that gathers from all ranks again, and a forward that saves this rank's shards for it. The
pass saves the second shards in their place. They hold the values that forward has used, in the dtype of their use.

Source: ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209), hpZ.

``offload_activations``: what chosen blocks save for backward is kept in the memory of the host.

    x2, saved = Block_forward(x1, ...)
    future = store((saved, x1), away_h_1)       forward: copied while the next block computes
    stored = wait_store(future, away_h_1)       after the next block: saved for backward in place of the values
    future = load(stored, away_h_1)             backward: ahead of the block before it
    saved, x1 = wait_load(future, away_h_1)     ahead of Block_backward

What a block saves is its list, and those of its inputs that forward computes and that nothing reads after it. Gathered
parameters stay, and so does what shares memory with inputs or results that stay. At most two blocks have their values
on the device at once, beside those that were not chosen.

The order of the lines is that of the program: a copy to the host has the time of the next block, a copy back the time
of the block before it. :func:`passes.analysis.verify.races` proves the order of reads, writes and frees. The planner
composes such steps by :func:`stored` and :func:`loaded` (``shardtrace/planner/compose.py``).

The last three see forward first, and tell the backward that follows what was saved in the place of what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from passes.analysis.calls import ON_HOST, Block, Saving, block_function, block_of, called_module, unique_name, way_of
from passes.analysis.flops import cheap_lines
from passes.analysis.liveness import saved_memory
from passes.analysis.recognise import (
    applies_parameters,
    bucket_of,
    constant_inputs,
    is_backward,
    is_collective,
    is_constant,
    is_decomposed_by_autodiff,
    is_deletion,
    is_gather,
    is_issue,
    is_random,
    is_repeatable,
    is_return,
    is_sequence_issue,
    is_unpack,
    is_wait,
    may_be_taken_apart,
    module_of,
    names,
    nbytes,
    unsharded_values,
    updated_in_place,
)
from passes.comm.symbols import LOAD, STORE, Away, keep_shards, synchronize, unshard
from passes.compat.jit import differentiating_executor
from passes.kernels.executors import executor as kernels
from passes.kernels.executors import lines_of_kernels
from passes.plan import Bucket, HostMemory

from thunder.core import prims
from thunder.core.devices import to_torch_device
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import is_constant_for_vjp
from thunder.executors.passes import del_last_used


class Call:
    """A call of a checkpointed block, as a tag of its lines. ``cheap``: backward repeats only its cheap lines."""

    def __init__(self, *, cheap: bool = False) -> None:
        self.cheap = cheap


def mark_block(lines: Iterable[BoundSymbol], *, cheap: bool = False) -> None:
    """Marks lines that were just traced as those of one call. If blocks are nested, the outer one counts."""
    call = Call(cheap=cheap)
    for bsym in lines:
        inner = {tag for tag in bsym.tags if isinstance(tag, Call)}
        bsym.tags -= inner
        bsym.tags.add(call)


class Contract(Protocol):
    """A limit of a step's memory, and who keeps to it."""

    def choose(self, computation: TraceCtx) -> Mapping[str, str]:
        """What blocks are to recompute and keep in host memory, by their names, as :func:`way_of` reads it. Sets the
        facts of other choices. Raises if nothing fits."""

    def check(self, trace: TraceCtx) -> None:
        """Raises if the step of this forward or backward, which will run, does not fit."""


def fit_memory(computation: TraceCtx, *, contract: Contract | None) -> TraceCtx:
    """Chooses what a step recomputes, so that it fits into the memory that ``fsdp`` was given.

    Takes: a computation as it was recorded.
    Gives: marks on the blocks that are to be recomputed. Other choices are facts of the compilation.
    No-op when: no memory was given, or nothing needs to be recomputed.
    """
    return computation if contract is None else mark_blocks(computation, contract.choose(computation))


def verify_memory(trace: TraceCtx, *, contract: Contract | None) -> TraceCtx:
    """Refuses a step that would not fit into the memory that ``fsdp`` was given.

    Takes: the final forward, then the final backward.
    Gives: the same trace.
    No-op when: no memory was given, or the step fits.
    """
    if contract is not None:
        contract.check(trace)
    return trace


def mark_blocks(computation: TraceCtx, recomputed: Mapping[str, str]) -> TraceCtx:
    """Marks the lines of blocks that are to be recomputed: all of them ("full"), or the "cheap" ones. Those of a
    function are marked in a copy of it, which other choices for the same computation share. Calls of functions that
    are to keep what they save in host memory have a tag."""
    if not recomputed:
        return computation
    new = from_trace(computation)
    for name, group in groupby(computation.bound_symbols, lambda b: block_around(b, recomputed)):
        if name is None:
            new.bound_symbols += group
            continue
        what, on_host = way_of(recomputed[name])
        lines = [_recomputing(b, what, new) for b in group]
        if what:
            mark_block([b for b in lines if block_of(b) is None], cheap=what == "cheap")
        for bsym in lines if on_host else ():
            bsym.tags |= {ON_HOST} if block_of(bsym) is not None else set()
        new.bound_symbols += lines
    return new


def block_around(bsym: BoundSymbol, blocks: Collection[str]) -> str | None:
    """The name of the block that a line calls or belongs to; None if it is none of these."""
    name = called_module(bsym) or module_of(bsym) or ""
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return name or None


def _recomputing(bsym: BoundSymbol, what: str, trace: TraceCtx) -> BoundSymbol:
    """A copy of a line, which may be marked; or the call of a block whose lines are marked."""
    if (block := block_of(bsym)) is None or not what:
        return bsym.from_bsym(tags=set(bsym.tags))
    if what not in block.recomputing:
        inside = (b for b in block.trace.bound_symbols if not (is_unpack(b) or is_return(b)))
        lines = [b.from_bsym(tags=set(b.tags)) for b in inside]
        mark_block(lines, cheap=what == "cheap")
        name = unique_name(trace, block.name)
        marked = Block(name, lines, block.inputs, block.outputs, block.trace.names, block.module)
        block.recomputing[what] = marked
    return bsym.from_bsym(sym=block.recomputing[what].symbol, tags=set(bsym.tags))


def checkpoint_activations(computation: TraceCtx) -> TraceCtx:
    """Recomputes the activations of chosen blocks in backward instead of saving them.

    Takes: a computation whose lines tell the checkpointed call that they belong to.
    Gives: a tag on the lines that are to run again.
    No-op when: no call is checkpointed.

    If only some parts of a composite symbol may run twice, its parts replace it, as autodiff would do anyway.
    """
    lines = list(_taken_apart(computation.bound_symbols))
    by_thunder = {o.name: o for b in lines for o in b.flat_proxy_outs if ProxyTag.RECOMPUTE_IN_BACKWARD in o.tags}
    calls = [_call(b) for b in lines]
    if not by_thunder and not any(calls):
        return computation
    new = from_trace(computation)
    swap = _untagged(new, by_thunder)
    facts = Facts(_results(lines, calls), frozenset(updated_in_place(computation)), set(), new)
    chosen = _chosen(lines, calls, facts)
    for i, bsym in enumerate(lines):
        again = i in chosen or any(o.name in by_thunder for o in bsym.flat_proxy_outs)
        new.bound_symbols += _tagged(bsym.from_bsym_swap_proxies(swap), facts, again=again)
    return new


def _taken_apart(lines: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """The lines, with the parts of those of cheap calls that autodiff would take apart."""
    for bsym in lines:
        call = _call(bsym)
        if call is not None and call.cheap and is_decomposed_by_autodiff(bsym):
            yield from _taken_apart(part.from_bsym(tags=part.tags | bsym.tags) for part in bsym.subsymbols)
        else:
            yield bsym


def _chosen(lines: Sequence[BoundSymbol], calls: Sequence[Call | None], facts: Facts) -> set[int]:
    """The numbers of the lines that are to run again if they may."""
    found: dict[Call, list[int]] = {}
    for i, call in enumerate(calls):
        if call is not None:
            found.setdefault(call, []).append(i)
    chosen: set[int] = set()
    for call, numbers in found.items():
        if call.cheap:
            cheap = cheap_lines([lines[i] for i in numbers], facts.results, facts.trace.names)
            numbers = [numbers[k] for k in cheap]
        chosen.update(numbers)
    return chosen


class Facts(NamedTuple):
    """Names of values: results of blocks that other lines use or the function returns, values that are updated in
    place, and values that are computed only from random numbers."""

    results: frozenset[str]
    updated: frozenset[str]
    drawn: set[str]
    trace: TraceCtx  # the new one


def _untagged(trace: TraceCtx, tagged: dict[str, Proxy]) -> dict[Variable, Proxy]:
    """The same values without Thunder's tag. This pass tags lines instead, because a line's parts inherit its tags."""
    swap = {}
    for name, old in tagged.items():
        trace.names.discard(name)
        with tracectx(trace):
            swap[variableify(old)] = old.replace(tags=old.tags - {ProxyTag.RECOMPUTE_IN_BACKWARD})
    return swap


def _call(bsym: BoundSymbol) -> Call | None:
    return next((tag for tag in bsym.tags if isinstance(tag, Call)), None)


def _results(lines: Sequence[BoundSymbol], calls: Sequence[Call | None]) -> frozenset[str]:
    """The names of values that are returned, or that a block computes and other lines read."""
    found = names(lines[-1].args[0]["output"])
    made_in: dict[str, Call | None] = {}
    for bsym, call in zip(lines[:-1], calls, strict=False):
        found.update(a.name for a in bsym.flat_proxy_args if made_in.get(a.name, call) not in (call, None))
        for o in bsym.flat_proxy_outs:
            made_in.setdefault(o.name, call)
    return frozenset(found)


def _tagged(bsym: BoundSymbol, facts: Facts, *, again: bool) -> Iterator[BoundSymbol]:
    if not again:
        yield bsym
    elif _may_run_again(bsym, facts):
        # Thunder repeats a symbol without a gradient as it is, and a collective's parts have names, such as a future's
        apart = is_constant_for_vjp(bsym) and any(map(is_sequence_issue, bsym.subsymbols))
        if apart and not all(map(is_constant_for_vjp, bsym.subsymbols)):  # only its result is detached, and so is saved
            yield bsym
            return
        for part in bsym.subsymbols if apart else (bsym,):
            yield part.from_bsym(tags=part.tags | bsym.tags | {BoundSymbolTag.RECOMPUTE_IN_BACKWARD})
    elif may_be_taken_apart(bsym):
        for part in _parts(bsym, facts.trace):
            yield from _tagged(part, facts, again=True)
    else:
        if _is_drawn(bsym, facts):
            facts.drawn.update(o.name for o in bsym.flat_proxy_outs)
        yield bsym


def _parts(bsym: BoundSymbol, trace: TraceCtx) -> Sequence[BoundSymbol]:
    """The lines that may replace one: several kernels, if it would become these, or its subsymbols."""
    if differentiating_executor(bsym) == kernels and len(lines := lines_of_kernels(bsym, trace)) > 1:
        return lines
    return bsym.subsymbols


def _may_run_again(bsym: BoundSymbol, facts: Facts) -> bool:
    outputs, inputs = names(bsym.flat_proxy_outs), names(bsym.flat_proxy_args)
    return (
        is_repeatable(bsym)
        and outputs.isdisjoint(facts.results)
        and (outputs | inputs).isdisjoint(facts.updated)
        and not _is_drawn(bsym, facts)
    )


def _is_drawn(bsym: BoundSymbol, facts: Facts) -> bool:
    """True for a line that draws random numbers, or computes only from them and takes no more memory."""
    inputs = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
    if not inputs:
        return is_random(bsym)
    return names(inputs) <= facts.drawn and nbytes(bsym.flat_proxy_outs) <= nbytes(inputs)


# Random functions whose gradient is zero for any numbers.
WITHOUT_GRADIENT = frozenset({"torch.randint_like", "torch.poisson", "torch.binomial"})


def keep_random(computation: TraceCtx) -> TraceCtx:
    """Lets backward use the random numbers that forward has drawn.

    Takes: a computation.
    Gives: a tag on each random line, or on its random parts.
    No-op when: no line is random.

    Raises:
        NotImplementedError: if Thunder would differentiate a random function by calling it again.
    """
    if not any(is_random(b) for b in computation.bound_symbols):
        return computation
    _refuse_second_calls(computation)
    new = from_trace(computation)
    new.bound_symbols = [_drawn_once(b) for b in computation.bound_symbols]
    return new


def _drawn_once(bsym: BoundSymbol) -> BoundSymbol:
    if not is_random(bsym):
        return bsym
    tags = bsym.tags if may_be_taken_apart(bsym) else bsym.tags | {OpTags.RANDOM_OP}
    return bsym.from_bsym(subsymbols=[_drawn_once(part) for part in bsym.subsymbols], tags=tags)


def _refuse_second_calls(computation: TraceCtx) -> None:
    """Raises if the gradient of a random function would call it again, as thunder.torch does for functions that it
    registers automatically."""
    differentiated = {a.name for a in computation.args if getattr(a, "requires_grad", False)}
    for bsym in computation.bound_symbols:
        if is_constant_for_vjp(bsym) or differentiated.isdisjoint(names(bsym.flat_proxy_args)):
            continue
        differentiated |= names(bsym.flat_proxy_outs)
        if function := _called_twice(bsym):
            raise NotImplementedError(
                f"{function} is random, and Thunder would take its gradient from numbers drawn anew, which is wrong: "
                "draw the numbers with torch.rand, torch.randn, torch.bernoulli or torch.nn.functional.dropout, and "
                "compute with them"
            )


def _called_twice(bsym: BoundSymbol) -> str:
    """The id of the random function that the gradient of a line calls again; empty if there is none."""
    if OpTags.AUTO_REGISTERED in (bsym.sym.tags or ()):
        return str(bsym.sym.id) if is_random(bsym) and bsym.sym.id not in WITHOUT_GRADIENT else ""
    return next(filter(None, map(_called_twice, bsym.subsymbols)), "")


def regather(computation: TraceCtx, *, unsharded: Collection[str] = ()) -> TraceCtx:
    """Recomputes in backward what is computed only from parameters (ZeRO-3).

    Takes: a computation in which buckets are synchronized.
    Gives: a tag on the gathers of ZeRO-3 buckets, and on all lines that depend only on their parameters and constants.
    No-op when: no bucket is gathered again in backward.

    Random lines are not tagged, because a second draw would differ, and lines whose results are returned are not. A
    composite symbol may mix parameters with activations, as a product does that first broadcasts its weight. It is
    replaced by its parts if autodiff would do so anyway, so that the parts that use only parameters can be tagged.

    ``unsharded`` are the names of inputs that are gathered parameters, which backward will be given again: a block's.
    """
    if not unsharded and not any(_is_regathered(b) for b in computation.bound_symbols):
        return computation
    returned = names(computation.bound_symbols[-1].args[0])
    derived = Derived(set(unsharded), constant_inputs(computation) - set(unsharded), returned)
    new = from_trace(computation)
    for bsym in computation.bound_symbols:
        new.bound_symbols += _gathered_again(bsym, derived)
    return new


class Derived(NamedTuple):
    """Names of values: those computed from parameters and constants, constants and buffers, and those that backward
    does not compute again: returned values, and what parameters make of a constant (a rank without an image runs its
    tower on zeros, and must send what the others send)."""

    parameters: set[str]
    constants: set[str]
    activations: set[str]


def _is_regathered(bsym: BoundSymbol) -> bool:
    return bsym.sym.id == synchronize.id and bsym.args[1].plan.regather


def _gathered_again(bsym: BoundSymbol, derived: Derived) -> Iterator[BoundSymbol]:
    if applies_parameters(bsym, derived.parameters):
        derived.activations.update(o.name for o in bsym.flat_proxy_outs)
    if _is_regathered(bsym) or _is_derived(bsym, derived):
        outputs = {o.name for o in bsym.flat_proxy_outs}
        if outputs.isdisjoint(derived.activations):
            derived.parameters.update(outputs)
            yield bsym.from_bsym(tags=bsym.tags | {BoundSymbolTag.RECOMPUTE_IN_BACKWARD})
            return
    elif _has_derived_part(bsym, derived) and is_decomposed_by_autodiff(bsym):
        for part in bsym.subsymbols:
            yield from _gathered_again(part.from_bsym(tags=part.tags | bsym.tags), derived)
        return
    elif is_constant(bsym) or _is_derived_constant(bsym, derived):
        derived.constants.update(o.name for o in bsym.flat_proxy_outs)
    yield bsym.from_bsym()


def _is_derived(bsym: BoundSymbol, derived: Derived) -> bool:
    """True for a line that computes the same values each time, from parameters and constants only."""
    tensors = {a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)}
    return (
        not tensors.isdisjoint(derived.parameters)
        and tensors <= derived.parameters | derived.constants
        and not is_return(bsym)
        and is_repeatable(bsym)
    )


def _is_derived_constant(bsym: BoundSymbol, derived: Derived) -> bool:
    """True for a line that computes only from constants, such as a cast or slice of a mask."""
    tensors = {a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)}
    return bool(tensors) and tensors <= derived.constants and is_repeatable(bsym)


def _has_derived_part(bsym: BoundSymbol, derived: Derived) -> bool:
    if not any(a.name in derived.parameters for a in bsym.flat_proxy_args):
        return False
    return any(_is_derived(part, derived) or _has_derived_part(part, derived) for part in bsym.subsymbols)


class Swapped(NamedTuple):
    """A gathered parameter, the ``place``-th member of a bucket, that is replaced by its shard among what is saved."""

    bucket: Bucket
    place: int
    shard: TensorProxy


def save_shards(trace: TraceCtx, *, swapped: dict[str, Swapped]) -> TraceCtx:
    """Saves the shard where a fusion would save a gathered parameter (ZeRO-3).

    Takes: a lowered forward, then its backward.
    Gives: a forward that saves shards, a backward that reads them. Forward fills ``swapped``, by the names of gathered
    parameters, for backward.
    No-op when: no gathered parameter is saved.
    """
    if is_backward(trace):
        return _read_shards(trace, swapped) if swapped else trace
    swapped.clear()
    if (saving := Saving.of(trace)) is None:
        return trace
    for bsym in saving.lines:
        if is_wait(bsym) and is_gather(bsym) and bucket_of(bsym).plan.regather:
            shards = saving.issues[bsym.args[0].name].args[0]
            for i, (full, shard) in enumerate(zip(bsym.flat_proxy_outs, shards, strict=True)):
                if full.name in saving.only_saved:
                    swapped[full.name] = Swapped(bucket_of(bsym), i, shard)
    if not swapped:
        return trace
    new = from_trace(trace)
    saved = tuple(swapped[p.name].shard if p.name in swapped else p for p in saving.saved)
    new.bound_symbols = [*saving.lines, saving.returning(saved)]
    return del_last_used(new)


def _read_shards(trace: TraceCtx, swapped: dict[str, Swapped]) -> TraceCtx:
    new = from_trace(trace)
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    unpacked = {o.name: o for b in lines if is_unpack(b) for o in b.flat_proxy_outs if o.name in swapped}
    if not unpacked:
        return trace
    shards = {variableify(full): swapped[name].shard for name, full in unpacked.items()}
    full_of, gathers = _unsharded(new, lines, unpacked, swapped, shards)
    for b in lines:
        if is_unpack(b):
            new.bound_symbols.append(b.from_bsym_swap_proxies(shards, skip_inputs=True))
        else:
            new.bound_symbols += gathers
            gathers = []
            new.bound_symbols.append(b.from_bsym_swap_proxies(full_of, skip_output=True))
    return del_last_used(new, clear_mutable_collections=True)


def _unsharded(
    trace: TraceCtx,
    lines: list[BoundSymbol],
    unpacked: dict[str, TensorProxy],
    swapped: dict[str, Swapped],
    shards: dict[Variable, TensorProxy],
) -> tuple[dict[Variable, TensorProxy], list[BoundSymbol]]:
    """Returns what replaces each parameter that forward would have saved, and the gathers that backward lacks."""
    brought = {
        m.parameter: full
        for b in lines
        if is_wait(b) and is_gather(b)
        for m, full in zip(bucket_of(b).members, b.flat_proxy_outs, strict=True)
    }
    found: dict[Variable, TensorProxy] = {}
    missing: dict[Bucket, list[str]] = {}
    for name, full in unpacked.items():
        bucket, place, _ = swapped[name]
        parameter = bucket.members[place].parameter
        if parameter in brought:
            found[variableify(full)] = brought[parameter]
        else:
            missing.setdefault(bucket, []).append(name)
    trace.push_scope([])
    with tracectx(trace):
        for bucket, members in missing.items():
            part = Bucket(
                bucket.label,
                f"{bucket.name}_saved",
                bucket.plan,
                tuple(bucket.members[swapped[name].place] for name in members),
                bucket.dtype,
                bucket.wire,
            )
            outputs = unshard(tuple(shards[variableify(unpacked[name])] for name in members), part)
            found |= {variableify(unpacked[name]): full for name, full in zip(members, outputs, strict=True)}
    return found, trace.pop_scope()


class Kept(NamedTuple):
    """The second shards of some members of a bucket, by the names of the first ones that forward would have saved."""

    bucket: Bucket
    second: dict[str, TensorProxy]


def keep_secondary(trace: TraceCtx, *, kept: list[Kept]) -> TraceCtx:
    """Keeps a second shard inside the node, from which backward gathers ("zero3_secondary").

    Takes: a lowered forward, then its backward.
    Gives: a forward that saves second shards, a backward that gathers from them. Forward fills ``kept`` for backward.
    No-op when: no plan has second shards.
    """
    if is_backward(trace):
        return _gather_second(trace, kept) if kept else trace
    kept.clear()
    if (saving := Saving.of(trace)) is None:
        return trace
    new = from_trace(trace)
    inserted: dict[int, list[BoundSymbol]] = {}  # by the line that they precede
    for at, wait in enumerate(saving.lines):
        if not (is_wait(wait) and is_gather(wait)) or bucket_of(wait).plan.secondary is None:
            continue
        shards = saving.issues[wait.args[0].name].args[0]
        places = [i for i, shard in enumerate(shards) if shard.name in saving.only_saved]
        if not places:
            continue
        second = bucket_of(wait).secondary_of(places)
        new.push_scope([])
        with tracectx(new):
            outputs = keep_shards(tuple(wait.flat_proxy_outs[i] for i in places), second)
        kept.append(Kept(second, {shards[i].name: o for i, o in zip(places, outputs, strict=True)}))
        inserted.setdefault(_first_use(saving.lines, at), []).extend(new.pop_scope())
    if not kept:
        return trace
    seconds = {name: second for k in kept for name, second in k.second.items()}
    saved = tuple(seconds.get(p.name, p) for p in saving.saved)
    for i, bsym in enumerate([*saving.lines, saving.returning(saved)]):
        new.bound_symbols += [*inserted.get(i, []), bsym]
    return del_last_used(new)


def _first_use(lines: list[BoundSymbol], wait: int) -> int:
    """The first line of compute that uses what a line waits for; the end if there is none."""
    made = names(lines[wait].flat_proxy_outs)
    uses = (i for i in range(wait + 1, len(lines)) if not is_collective(lines[i]))
    return next((i for i in uses if made & names(lines[i].flat_proxy_args)), len(lines))


def _gather_second(trace: TraceCtx, kept: list[Kept]) -> TraceCtx:
    new = from_trace(trace)
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    unpacked = {o.name: o for b in lines if is_unpack(b) for o in b.flat_proxy_outs}
    seconds = {variableify(unpacked[n]): second for k in kept for n, second in k.second.items() if n in unpacked}
    bucket_of_shard = {name: k.bucket for k in kept for name in k.second}
    futures: dict[str, Bucket] = {}
    for b in lines:
        if is_issue(b) and is_gather(b) and b.args[0][0].name in bucket_of_shard:
            bucket = futures[b.output.name] = bucket_of_shard[b.args[0][0].name]
            assert len(b.args[0]) == len(bucket.members)
            b = b.from_bsym(args=(b.args[0], bucket))
        elif is_wait(b) and b.args[0].name in futures:
            b = b.from_bsym(args=(b.args[0], futures[b.args[0].name]))
        new.bound_symbols.append(b.from_bsym_swap_proxies(seconds))
    return del_last_used(new, clear_mutable_collections=True)


# ---- offload_activations ----


class Trip(NamedTuple):
    """Values of a block that are saved in host memory: their copies, and the values as forward knows them."""

    away: Away
    copies: Proxy
    values: tuple[Proxy, ...]


def offload_activations(trace: TraceCtx, *, trips: list[Trip]) -> TraceCtx:
    """Keeps in host memory what chosen blocks save for backward.

    Takes: a lowered forward, then its backward.
    Gives: a forward that copies what these blocks save to the host, a backward that copies it back. Forward fills
    ``trips`` for backward.
    No-op when: no block that is a function is chosen.
    """
    backwards = is_backward(trace)
    if not backwards:
        trips.clear()
    if not (trips if backwards else any(ON_HOST in b.tags for b in trace.bound_symbols)):
        return trace
    new = from_trace(trace)
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    if backwards:
        parts = next(b.output for b in lines if _unpacks(b, "saved_for_backward"))
        saved = [p for part in parts for b in lines if _unpacks(b, part.name) for p in b.output]
        new.bound_symbols = given(
            loaded(lines, trips, new), [*_without(saved, trips), *(trip.copies for trip in trips)]
        )
        return del_last_used(new, clear_mutable_collections=True)
    if (saving := Saving.of(trace)) is None:
        return trace
    lines, found = stored(lines, saving.only_saved, unsharded_values(trace), new)
    if not found:
        return trace
    trips += found
    tensors, others = (_without(parts, trips) for parts in (saving.saved, saving.other))
    others += [trip.copies for trip in trips]
    lines[-1] = lines[-1].from_bsym(args=(saving.result, (tuple(tensors), tuple(others))))
    new.bound_symbols = lines
    return del_last_used(new)


def _without(saved: Iterable[Proxy], trips: Sequence[Trip]) -> list[Proxy]:
    gone = {v.name for trip in trips for v in trip.values}
    return [p for p in saved if p.name not in gone]


def given(backward: Sequence[BoundSymbol], saved: Sequence[Proxy]) -> list[BoundSymbol]:
    """The lines of a backward that is given ``saved``: it unpacks two lists, of tensors and of all else."""
    lists: Sequence[Proxy] = next(b.output for b in backward if _unpacks(b, "saved_for_backward"))
    parts = {p.name: [s for s in saved if isinstance(s, TensorProxy) != bool(i)] for i, p in enumerate(lists)}
    known = {b.args[0].name for b in backward if b.sym.id == prims.PrimIDs.UNPACK_SEQUENCE}
    lines = []
    for bsym in backward:
        if bsym.sym.id == prims.PrimIDs.UNPACK_SEQUENCE and bsym.args[0].name in parts:
            found = parts[bsym.args[0].name]
            bsym = bsym.from_bsym(args=(bsym.args[0], len(found)), output=found)
        lines.append(bsym)
        if _unpacks(bsym, "saved_for_backward"):  # a list that was empty is not unpacked yet
            for p in lists:
                if p.name not in known and (found := parts[p.name]):
                    lines.append(prims.unpack_sequence.bind(p, len(found), output=found))
    return lines


def _unpacks(bsym: BoundSymbol, name: str) -> bool:
    return bsym.sym.id == prims.PrimIDs.UNPACK_SEQUENCE and bsym.args[0].name == name


# ---- what is stored and loaded ----


def stored(
    forward: Sequence[BoundSymbol], saved: Collection[str], parameters: Collection[str], new: TraceCtx
) -> tuple[list[BoundSymbol], list[Trip]]:
    """The lines of a forward that stores what chosen blocks save, and what it stores.

    Args:
        forward: lines without deletions. The last one, which returns, stays as it is.
        saved: the names of what is saved for backward and not returned.
        parameters: the names of unsharded values.
        new: the trace in which the lines will be.
    """
    made = names([b.flat_proxy_outs for b in forward if not is_unpack(b)])
    may_go = made - set(parameters) - names(forward[-1].args[0])
    last = {a.name: i for i, b in enumerate(forward[:-1]) for a in b.flat_proxy_args}
    lines, waits, trips = list[BoundSymbol](), list[BoundSymbol](), list[Trip]()
    hosts: dict[Any, HostMemory] = {}
    for i, bsym in enumerate(forward):
        if is_return(bsym):
            lines += waits
        lines.append(bsym)
        if block_function(bsym) is None:
            continue
        lines += waits
        waits = []
        inputs = {a.name: a for a in bsym.flat_proxy_args if a.name in may_go and last[a.name] == i}
        if ON_HOST in bsym.tags and (found := _trip(bsym, inputs, saved, hosts, new)):
            trip, (issue, wait) = found
            lines.append(issue)
            waits.append(wait)
            trips.append(trip)
    return lines, trips


def _trip(
    bsym: BoundSymbol,
    inputs: Mapping[str, Proxy],
    saved: Collection[str],
    hosts: dict[Any, HostMemory],
    new: TraceCtx,
) -> tuple[Trip, list[BoundSymbol]] | None:
    """The values that a called block stores, and the lines that store them; None if it saves nothing of its own.
    ``inputs`` of the call are not read after it."""
    part = block_function(bsym)
    assert part is not None
    pairs = [(p.name, a.name) for p, a in zip(part.trace.args, bsym.args, strict=True) if a.name in inputs]
    memory = saved_memory(part, [p for p, _ in pairs], [p for p, a in pairs if a in saved])
    lists = [o for o in bsym.output if isinstance(o, AnyProxy)]
    leaving = [a for name, a in inputs.items() if name in saved]
    values = (*lists, *leaving)
    if not memory.bytes:
        return None
    device = next(o.device for o in bsym.output if isinstance(o, TensorProxy))
    if device not in hosts:  # each has streams of its own
        hosts[device] = HostMemory(to_torch_device(device))
    moves: list[bool | Sequence[bool]] = [*(memory.own for _ in lists), *(True for _ in leaving)]
    away = Away(called_module(bsym) or part.name, hosts[device], moves, memory.bytes, values)
    new.push_scope([])
    with tracectx(new):
        copies = STORE(values, away)
    return Trip(away, copies, values), new.pop_scope()


def loaded(backward: Sequence[BoundSymbol], trips: Sequence[Trip], new: TraceCtx) -> list[BoundSymbol]:
    """The lines of a backward that loads what forward has stored. ``backward`` are lines without deletions."""
    ahead: dict[int, list[BoundSymbol]] = {}
    swap: dict[Variable, Proxy] = {}
    calls = [i for i, b in enumerate(backward) if block_function(b) is not None]
    reads = ((a.name, i) for i, b in enumerate(backward) if not is_unpack(b) for a in b.flat_proxy_args)
    first = dict(reversed([*reads]))
    for trip in trips:
        if (use := min((first[v.name] for v in trip.values if v.name in first), default=None)) is None:
            continue
        new.push_scope([])
        with tracectx(new):
            found = LOAD(trip.copies, trip.away)
        issue, wait = new.pop_scope()
        swap |= {variableify(v): f for v, f in zip(trip.values, found, strict=True)}
        before = max((i for i in calls if i < use), default=use)
        ahead.setdefault(before, []).append(issue)
        ahead.setdefault(use, []).append(wait)
    return [*_with(backward, ahead, swap)]


def _with(
    lines: Sequence[BoundSymbol], ahead: dict[int, list[BoundSymbol]], swap: dict[Variable, Proxy]
) -> Iterator[BoundSymbol]:
    for i, bsym in enumerate(lines):
        yield from ahead.get(i, ())
        yield bsym if is_unpack(bsym) else bsym.from_bsym_swap_proxies(swap, skip_output=True)
