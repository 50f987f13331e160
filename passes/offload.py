"""Pass: what chosen blocks save for backward is kept in the memory of the host.

    x2, saved = Block_forward(x1, ...)
    future = store((saved, x1), away_h_1)       forward: copied while the next block computes
    stored = wait_store(future, away_h_1)       after the next block: saved for backward in place of the values
    future = load(stored, away_h_1)             backward: ahead of the block before it
    saved, x1 = wait_load(future, away_h_1)     ahead of Block_backward

What a block saves is its list, and those of its inputs that forward computes and that nothing reads after it. Gathered
parameters stay, and so does what shares memory with inputs or results that stay. At most two blocks have their values
on the device at once, beside those that were not chosen.

The order of the lines is that of the program: a copy to the host has the time of the next block, a copy back the time
of the block before it. :func:`passes.analysis.verify.races` proves the order of reads, writes and frees.

The planner composes such steps by :func:`stored` and :func:`loaded` (``shardtrace/planner/compose.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from passes.analysis.calls import ON_HOST, Saving, block_function, called_module
from passes.analysis.liveness import saved_memory
from passes.analysis.recognise import is_backward, is_deletion, is_return, is_unpack, names, unsharded_values
from passes.comm.activations import LOAD, STORE, Away
from passes.plan import HostMemory

from thunder.core import prims
from thunder.core.devices import to_torch_device
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import del_last_used


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


# ---- lines ----


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
    """What the block that a line calls stores, and the lines that store it; None if it saves nothing of its own.
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
