"""Pass: no gradient, instead of zeros, for a parameter or an input that no gradient reaches.

    t30 = mark_unused(t29, uses_0)          before a gradient is reduced or kept: minus zero if none reaches it
    t32 = unless_unused(t31, uses_1)        the last lines of a backward: None if none has reached it on any rank

Zeros would move an optimizer's momentum and decay the parameter. A gradient reaches a value from its sources: from
outputs of the step that a backward comes from, and from the gradients that torch's backward of a line returns. Lines
are added only for values without a source that is always there.

Note [Minus zero]. Minus zero is the only number that leaves every other one, also plus zero, as it is when it is added.
A reduced gradient is all minus zero only if every rank has added that. So ranks agree without another collective,
as DDP does by a bitmap, and a sum that ``no_sync`` keeps says the same of all its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from passes.analysis.calls import part_of
from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_deletion,
    is_gather,
    is_sequence_wait,
    is_unpack,
    issues_future,
    waits_for_future,
)
from passes.comm.kept_gradients import accumulate, accumulated
from passes.comm.properties import Property
from passes.comm.symbols import symbol
from passes.kernels.torch_call import Line
from passes.plan.step import Sources, Unused

import torch
from thunder.core.codeutils import ContextObject
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import del_last_used

NOTHING = Sources()
ALWAYS = Sources([-1])  # of a value that has a gradient in each backward


class Uses(NamedTuple):
    """The sources of a gradient. ``shape`` is that of the parameter; ``sign`` tells whether a rank's minus zero stays
    minus zero; None if the gradient is not reduced."""

    sources: Sources
    unused: Unused
    shape: Sequence[int] = ()
    sign: bool | None = None


def drop_unused(trace: TraceCtx, *, unused: Unused) -> TraceCtx:
    """Gives no gradient, instead of zeros, to what no gradient reaches.

    Takes: a lowered backward, in which gradients are waited for. ``unused`` is filled when it runs.
    Gives: lines for each gradient that is not always there. Tells ``unused`` which calls of torch may return none.
    No-op when: every gradient is always there; in a forward.
    """
    *lines, last = (b for b in trace.bound_symbols if not is_deletion(b))
    cotangents = next((b for b in lines if is_unpack(b) and b.args and _name(b.args[0]) == "cotangents"), None)
    if not is_backward(trace) or cotangents is None:
        return trace
    flow = _Flow(len(cotangents.output), unused)
    found = {_name(o): flow.joined([Sources([i])]) for i, o in enumerate(cotangents.output) if isinstance(o, Proxy)}
    flow.follow(lines, found)
    unused.calls = flow.calls
    gradients = {g.name: g for g in last.flat_proxy_args if found.get(g.name, NOTHING) != ALWAYS}
    if not gradients:
        return trace
    new = from_trace(trace)
    new.bound_symbols, signs = _with_marks(new, lines, found, unused)
    new.push_scope([])
    with tracectx(new):
        kept = {
            name: unless_unused(g, _uses(new, Uses(found.get(name, NOTHING), unused, g.shape, signs.get(name))))
            for name, g in gradients.items()
        }
    args = tree_map(lambda x: kept.get(_name(x), x), last.args)
    new.bound_symbols += [*new.pop_scope(), last.from_bsym(args=args)]
    return del_last_used(new, clear_mutable_collections=True)


def _with_marks(
    trace: TraceCtx, lines: Iterable[BoundSymbol], found: dict[str, Sources], unused: Unused
) -> tuple[list[BoundSymbol], dict[str, bool]]:
    """The lines, with a mark on each gradient that is reduced or kept; and for each reduced one whether marks stay."""
    marked: list[BoundSymbol] = []
    signs: dict[str, bool] = {}
    for bsym in lines:
        if waits_for_future(bsym) and not is_gather(bsym):
            signs |= {o.name: bucket_of(bsym).wire is None for o in bsym.flat_proxy_outs}
        issues = issues_future(bsym) and not is_gather(bsym)
        if issues or bsym.sym.id in (accumulate.id, accumulated.id):
            trace.push_scope([])
            with tracectx(trace):
                grads = tuple(
                    mark_unused(g, _uses(trace, Uses(s, unused, m.parameter.full_shape)))
                    if (s := found.get(g.name, NOTHING)) != ALWAYS and g.name not in signs
                    else g
                    for g, m in zip(bsym.args[0], bucket_of(bsym).members, strict=True)
                )
            marked += trace.pop_scope()
            bsym = bsym.from_bsym(args=(grads, *bsym.args[1:]))
        if bsym.sym.id == accumulated.id:
            signs |= {o.name: True for o in bsym.flat_proxy_outs}
        marked.append(bsym)
    return marked, signs


class _Flow:
    """Finds the sources of values. ``calls`` are torch's backwards of lines, in the order in which they run."""

    def __init__(self, outputs: int, unused: Unused) -> None:
        self.outputs, self._unused = Sources(range(outputs)), unused
        self.calls: list[tuple[Sequence[Sources], int]] = []
        self._next = outputs

    def joined(self, sources: Iterable[Sources]) -> Sources:
        """The sources of what is computed from values with these."""
        read = NOTHING.union(*sources)
        return ALWAYS if read >= ALWAYS or read >= self.outputs else read

    def follow(self, lines: Iterable[BoundSymbol], found: dict[str, Sources]) -> None:
        """Fills ``found``, the sources by the names of values."""
        in_flight: dict[str, list[Sources]] = {}  # by the future: of each member of a bucket
        for bsym in lines:
            if is_unpack(bsym) or is_deletion(bsym):
                continue
            read = [found.get(a.name, NOTHING) for a in bsym.flat_proxy_args]
            part = part_of(bsym)
            if issues_future(bsym):
                in_flight[bsym.output.name] = read
            elif waits_for_future(bsym):
                found |= zip((o.name for o in bsym.flat_proxy_outs), in_flight[bsym.args[0].name], strict=True)
            elif bsym.sym.id == accumulated.id:
                found |= zip((o.name for o in bsym.flat_proxy_outs), read, strict=True)
            elif part is not None:
                own = dict(
                    zip(
                        (_name(a) for a in part.trace.args),
                        (found.get(_name(a), NOTHING) for a in bsym.args),
                        strict=True,
                    )
                )
                *inner, last = part.trace.bound_symbols
                self.follow(inner, own)
                found |= {_name(o): own.get(_name(r), NOTHING) for o, r in zip(bsym.output, last.args[0], strict=False)}
            elif isinstance(bsym.sym.id, Line) and bsym.sym.id.kind == "_backward" and not bsym.sym.id.call.is_certain:
                found |= self._of_call(bsym, found)
            else:
                self.follow(bsym.subsymbols, found)
                joined = self.joined(read)
                if is_sequence_wait(bsym) and joined and not joined <= self.outputs:
                    joined = ALWAYS  # other ranks' parts may have gradients
                for o in bsym.flat_proxy_outs:
                    found.setdefault(o.name, joined)

    def _of_call(self, bsym: BoundSymbol, found: dict[str, Sources]) -> dict[str, Sources]:
        """The sources of what torch's backward of a line returns: each gradient is one, since it may be None."""
        call = bsym.sym.id.call
        call.unused = self._unused
        given = [found.get(_name(a), NOTHING) for a in bsym.args[len(bsym.args) - len(call.returned) :]]
        first, self._next = self._next, self._next + len(call.wanted)
        self.calls.append((given, first))
        return {_name(o): Sources([first + i]) for i, o in enumerate(bsym.output)}


def _name(value: Any) -> str:
    return value.name if isinstance(value, Proxy) else ""


def _uses(trace: TraceCtx, uses: Uses) -> ContextObject:
    return ContextObject(trace.make_name(prefix="uses"), uses)


def _mark(gradient: torch.Tensor, uses: ContextObject) -> torch.Tensor:
    sources, unused, shape, _ = uses.obj
    return gradient.new_zeros(shape).neg_() if sources <= unused.absent else gradient


def _unless_unused(gradient: torch.Tensor, uses: ContextObject) -> torch.Tensor | None:
    sources, unused, _, sign = uses.obj
    if not sources <= unused.absent:
        return gradient
    if sign is None:
        return None
    parts = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return gradient if parts.any() or (sign and not parts.signbit().all()) else None


mark_unused = symbol("mark_unused", lambda gradient, uses: TensorProxy(like=gradient), _mark, properties=Property.VIEW)
unless_unused = symbol(
    "unless_unused", lambda gradient, uses: TensorProxy(like=gradient), _unless_unused, properties=Property.VIEW
)
