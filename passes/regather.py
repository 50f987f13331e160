"""Pass (ZeRO-3): values that are computed only from parameters are recomputed in backward instead of being saved.

Thunder's autodiff repeats in backward all lines that are tagged RECOMPUTE_IN_BACKWARD and needed there. The whole chain
must carry the tag, from the gather to the last view or cast of a parameter. A chain that ends too early saves its last
link, and with it the memory of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from passes.analysis.recognise import (
    applies_parameters,
    constant_inputs,
    is_constant,
    is_decomposed_by_autodiff,
    is_repeatable,
    is_return,
    names,
)
from passes.comm.symbols import synchronize

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace


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
        new.bound_symbols += _tagged(bsym, derived)
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


def _tagged(bsym: BoundSymbol, derived: Derived) -> Iterator[BoundSymbol]:
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
            yield from _tagged(part.from_bsym(tags=part.tags | bsym.tags), derived)
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
