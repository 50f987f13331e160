"""Pass: the activations of chosen blocks are recomputed in backward instead of being saved.

Thunder's autodiff repeats in backward all lines that are tagged RECOMPUTE_IN_BACKWARD and needed there. This pass tags
the lines of a block, except for those whose results other lines use, so that a block saves only its inputs. It treats
the lines that Thunder tagged, because the model itself calls ``torch.utils.checkpoint``, in the same way. Note
[Not twice] holds for both. Of a call that is cheap it tags only the lines that :mod:`passes.analysis.cheap` finds.

Note [Not twice]. A random line would draw other numbers, and a line that reads or writes values that are updated in
place would see or make other values. The results of such lines are saved. Random numbers are saved in their smallest
form: a dropout saves its boolean mask, one byte for each element. A symbol with its own grad rule, such as attention
with dropout on CUDA, saves its result and what the rule needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from passes.analysis.cheap import cheap_lines
from passes.analysis.recognise import (
    is_decomposed_by_autodiff,
    is_random,
    is_repeatable,
    may_be_taken_apart,
    names,
    nbytes,
    updated_in_place,
)
from passes.compat.lines import differentiating_executor
from passes.kernels.registration import executor as kernels
from passes.kernels.registration import lines_of_kernels

from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx


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
        yield bsym.from_bsym(tags=bsym.tags | {BoundSymbolTag.RECOMPUTE_IN_BACKWARD})
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
