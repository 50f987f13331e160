"""Pass: of many calls of equal blocks in a row, Thunder differentiates and lowers three.

The first iteration of a loop, the second and the last one stay in the computation, so that the passes of Thunder see no
more of them, however many there are:

    x1 = Block(x0, w0)                  x1 = Block(x0, w0)
    x2 = Block(x1, w1)                  x2 = Block(x1, w1)
    ...                                 x64 = Block(x2, w63)
    x64 = Block(x63, w63)

What lowering makes of the second one tells what it would have made of those left out. :mod:`passes.unroll` writes their
lines.
"""

from __future__ import annotations

from passes.analysis.loops import KEPT, GradientsOf, Rolled, Turn, loops_in, made_by, returning
from passes.analysis.recognise import is_return, is_unpack, names
from passes.compat import set_signature

from thunder.core.proxies import Proxy
from thunder.core.trace import TraceCtx, from_trace


def roll(computation: TraceCtx, *, rolled: Rolled, gradients_of: GradientsOf) -> TraceCtx:
    """Returns the computation with three iterations of each loop. Fills ``rolled`` for ``unroll``."""
    loops = list(loops_in(computation, gradients_of))
    rolled.begin(computation, loops)
    if not loops:
        return computation
    turns: dict[int, Turn | None] = {}  # by the ids of lines; None: left out
    ends: dict[str, Proxy] = {}  # what the last iterations read, and what they read instead
    absent: set[str] = set()
    for n, loop in enumerate(loops):
        for i in loop.left_out():
            turns.update((id(b), None) for b in loop.iterations[i])
            absent |= names(loop.inputs[i])
        for kept in range(KEPT):
            turns.update((id(b), Turn(n, kept, k)) for k, b in enumerate(loop.iterations[loop.number(kept)]))
        before, instead = (made_by(loop.iterations[i]) for i in (loop.last - 1, KEPT - 2))
        ends |= {old.name: new for old, new in zip(before, instead, strict=True)}
    new = from_trace(computation)
    new.args = tuple(p for p in computation.args if p.name not in absent)
    set_signature(new, computation.siginfo().name)
    for bsym in computation.bound_symbols:
        turn = turns.get(id(bsym))
        if turn is not None:
            args = tuple(ends.get(a.name, a) if isinstance(a, Proxy) else a for a in bsym.args)
            new.bound_symbols.append(bsym.from_bsym(args=args, tags=bsym.tags | {turn}))
        elif is_return(bsym):
            listed = zip(computation.args, bsym.args[0]["flat_args"], strict=True)
            new.bound_symbols.append(returning(bsym, [p for arg, p in listed if arg.name not in absent]))
        elif is_unpack(bsym) and not absent.isdisjoint(names(bsym.flat_proxy_outs)):
            if left := tuple(p for p in bsym.flat_proxy_outs if p.name not in absent):
                new.bound_symbols.append(bsym.from_bsym(args=(left,), output=left))
        elif id(bsym) not in turns:
            new.bound_symbols.append(bsym)
    return new
