"""Pass: the activations of chosen blocks are computed again in backward instead of being saved.

Thunder's autodiff repeats in backward what is tagged RECOMPUTE_IN_BACKWARD and needed there. Tagged here are the lines
of a block, but for those that make what other lines use: of each block its inputs are saved, and no more. So are the
lines that Thunder tagged where the model itself calls ``torch.utils.checkpoint``. In both, Note [Not twice] holds.

Note [Not twice]. A random line would draw other numbers, and one that reads or writes what is updated in place would
see or make other values: what such lines compute is saved. Of random numbers by themselves the smallest form is: of a
dropout, which draws numbers and compares them with its probability, the boolean mask, one byte for each element. Of a
symbol with a grad rule of its own, such as attention with dropout on CUDA, it is the result and what the rule needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from passes.analysis.recognise import (
    is_decomposed_by_autodiff,
    is_random,
    is_repeatable,
    names,
    nbytes,
    updated_in_place,
)

from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx


class Call:
    """A call of a checkpointed block, as a tag of its lines."""


def mark_block(lines: Iterable[BoundSymbol]) -> None:
    """Marks lines that were just traced as those of one call. Of a block within a block the outer one counts."""
    call = Call()
    for bsym in lines:
        inner = {tag for tag in bsym.tags if isinstance(tag, Call)}
        bsym.tags -= inner
        bsym.tags.add(call)


def checkpoint_activations(computation: TraceCtx) -> TraceCtx:
    """Returns the computation with the lines tagged that are to run again.

    A composite symbol of which only some parts may run twice is replaced by its parts, as autodiff would do anyway.
    """
    lines = computation.bound_symbols
    by_thunder = {o.name: o for b in lines for o in b.flat_proxy_outs if ProxyTag.RECOMPUTE_IN_BACKWARD in o.tags}
    calls = [_call(b) for b in lines]
    if not by_thunder and not any(calls):
        return computation
    new = from_trace(computation)
    swap = _untagged(new, by_thunder)
    facts = Facts(_results(lines, calls), frozenset(updated_in_place(computation)), set())
    for bsym, call in zip(lines, calls, strict=True):
        again = call is not None or any(o.name in by_thunder for o in bsym.flat_proxy_outs)
        new.bound_symbols += _tagged(bsym.from_bsym_swap_proxies(swap), facts, again=again)
    return new


class Facts(NamedTuple):
    """Names of values: what blocks give to other lines or the function returns, what is updated in place, and what is
    computed from random numbers alone."""

    results: frozenset[str]
    updated: frozenset[str]
    drawn: set[str]


def _untagged(trace: TraceCtx, tagged: dict[str, Proxy]) -> dict[Variable, Proxy]:
    """The same values without Thunder's tag: here lines are tagged, which a line's parts inherit."""
    swap = {}
    for name, old in tagged.items():
        trace.names.discard(name)
        with tracectx(trace):
            swap[variableify(old)] = old.replace(tags=old.tags - {ProxyTag.RECOMPUTE_IN_BACKWARD})
    return swap


def _call(bsym: BoundSymbol) -> Call | None:
    return next((tag for tag in bsym.tags if isinstance(tag, Call)), None)


def _results(lines: Sequence[BoundSymbol], calls: Sequence[Call | None]) -> frozenset[str]:
    """What is returned, and what a block computes and lines that are not its own read."""
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
    elif is_decomposed_by_autodiff(bsym):
        for part in bsym.subsymbols:
            yield from _tagged(part, facts, again=True)
    else:
        if _is_drawn(bsym, facts):
            facts.drawn.update(o.name for o in bsym.flat_proxy_outs)
        yield bsym


def _may_run_again(bsym: BoundSymbol, facts: Facts) -> bool:
    outputs, inputs = names(bsym.flat_proxy_outs), names(bsym.flat_proxy_args)
    return (
        is_repeatable(bsym)
        and outputs.isdisjoint(facts.results)
        and (outputs | inputs).isdisjoint(facts.updated)
        and not _is_drawn(bsym, facts)
    )


def _is_drawn(bsym: BoundSymbol, facts: Facts) -> bool:
    """Random numbers, or what is computed from them alone and takes no more memory."""
    inputs = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
    if not inputs:
        return is_random(bsym)
    return names(inputs) <= facts.drawn and nbytes(bsym.flat_proxy_outs) <= nbytes(inputs)
