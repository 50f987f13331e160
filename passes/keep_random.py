"""Pass: random numbers are drawn once, in forward; backward reads the same numbers.

Thunder's fusions repeat cheap lines of forward in backward (thunder.core.rematerialization), except for lines that are
tagged RANDOM_OP, and Thunder's own randn and randint are not tagged. A second draw would give other numbers and wrong
gradients. This pass therefore tags every random line. If autodiff takes a line apart, only its random parts are tagged:
the other parts, such as the product of a dropout, may be repeated.
"""

from __future__ import annotations

from passes.analysis.recognise import is_random, may_be_taken_apart, names

from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transforms import is_constant_for_vjp

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
    new.bound_symbols = [_tagged(b) for b in computation.bound_symbols]
    return new


def _tagged(bsym: BoundSymbol) -> BoundSymbol:
    if not is_random(bsym):
        return bsym
    tags = bsym.tags if may_be_taken_apart(bsym) else bsym.tags | {OpTags.RANDOM_OP}
    return bsym.from_bsym(subsymbols=[_tagged(part) for part in bsym.subsymbols], tags=tags)


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
