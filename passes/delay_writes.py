"""Pass: what forward writes into buffers and arguments is written at its end, and returned.

    t5 = prims.copy_(t4, t_steps)                           before: anywhere
    return {"output": t3, "flat_args": [x, t_steps]}

    s = snapshot(t_steps)                                   after: t_steps is read here and nowhere else
    ...
    t5 = prims.copy_(t4, t_steps)
    return {"output": t3, "flat_args": [x, t5]}

Thunder's fusions do not look at writes. A fusion is dropped if no line reads a result of it, and autodiff leaves to
backward what forward does not return: hence the last line reads each write. Cheap lines of forward are repeated in
later fusions and in backward (thunder.core.rematerialization), when an input that is written holds another value: hence
such an input is read only once, by a line that no executor fuses.
"""

from __future__ import annotations

from collections.abc import Iterable

from passes.analysis.calls import block_of
from passes.analysis.recognise import is_return, is_unpack, names, updated_by
from passes.comm.properties import Property
from passes.comm.symbols import symbol
from passes.compat.jit import compile_data_and_stats
from passes.kernels.registration import fuses

import torch
from thunder.core import prims
from thunder.core.proxies import ProxyTag, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx


def _snapshot_meta(a: TensorProxy) -> TensorProxy:
    return TensorProxy(like=a, tags={ProxyTag.DETACHED_AUTOGRAD_GRAPH})  # what is written has no gradient


snapshot = symbol("snapshot", _snapshot_meta, torch.clone, properties=Property.PARTS)


def delay_writes(computation: TraceCtx) -> TraceCtx:
    """Writes into buffers and arguments when all lines have read them, and returns what was written.

    Takes: a computation whose lines write into its inputs.
    Gives: the writes at the end, and their results in the place of the inputs that are returned; a snapshot of each
    input that is written and that results depend on.
    No-op when: no line writes into an input, or no executor fuses.
    """
    written = _written(computation)
    if not written or not any(map(fuses, compile_data_and_stats()[0].executors_list)):
        return computation
    new = from_trace(computation)
    new.bound_symbols += [b for b in computation.bound_symbols if is_unpack(b)]
    now: dict[Variable, TensorProxy] = {}  # what each input holds after the lines so far
    for p in _needed(computation, written):
        with tracectx(new):
            now[variableify(p)] = snapshot(p)
    writes: list[BoundSymbol] = []
    results: dict[Variable, TensorProxy] = {}  # of the last write into each input
    for line in computation.bound_symbols:
        if is_unpack(line):
            continue
        if _target(line) in written:
            source, target = line.from_bsym_swap_proxies(now, skip_output=True).args[0], line.args[1]
            place = results.get(variableify(target), target)
            writes.append(line.from_bsym(args=(source, place)))
            now[variableify(target)] = now[variableify(line.output)] = source
            results[variableify(target)] = line.output
        elif is_return(line):
            new.bound_symbols += [*writes, line.from_bsym_swap_proxies(results)]
        else:
            new.bound_symbols.append(line.from_bsym_swap_proxies(now, skip_output=True))
    return new


def _target(line: BoundSymbol) -> str | None:
    """The name of the tensor that a line copies into."""
    return line.args[1].name if line.sym is prims.copy_ else None


def _written(computation: TraceCtx) -> set[str]:
    """The names of the inputs that are written by lines that only copy."""
    found = {name for b in computation.bound_symbols if (name := _target(b)) is not None}
    others = {name for b in computation.bound_symbols if _target(b) is None for name in updated_by(b)}
    return found & names(computation.args) - others


def _needed(computation: TraceCtx, written: set[str]) -> list[TensorProxy]:
    """The written inputs that something else depends on than what is written into them, as with a counter."""
    *lines, last = computation.bound_symbols
    sources: dict[str, set[str]] = {p.name: {p.name} & written for p in computation.args}
    _trace_back(lines, sources)
    found = {s for name in names(last.args[0]["output"]) for s in sources.get(name, ())}
    for line in lines:
        for target in updated_by(line):
            found |= {s for a in line.flat_proxy_args for s in sources.get(a.name, ())} - {target}
    return [p for p in computation.args if p.name in found and not p.requires_grad]


def _trace_back(lines: Iterable[BoundSymbol], sources: dict[str, set[str]]) -> None:
    """Adds to ``sources`` the inputs that the result of each line depends on."""
    for line in lines:
        given = [sources.get(a.name, set()) for a in line.flat_proxy_args]
        if (block := block_of(line)) is None or not any(given):
            sources.update((o.name, set().union(*given)) for o in line.flat_proxy_outs if o.name not in sources)
            continue
        inside = {p.name: sources.get(a.name, set()) for p, a in zip(block.inputs, line.args, strict=True)}
        _trace_back(block.trace.bound_symbols, inside)
        results = zip(line.output, block.outputs, strict=True)
        sources.update((o.name, inside.get(p.name, set())) for o, p in results)
