"""Pass: collectives of sequences are issued as early as their operands exist, and waited for as late as they are used.

    ft3 = all_gather_sequence(k, dim2_of_16)        right after k
    ...                                             compute that needs no keys
    keys = wait_all_gather_sequence(ft3, ...)       right before the attention

Compute lines keep their order, and so do collectives: it is a function of the trace, which is equal on all ranks.
"""

from __future__ import annotations

from passes.analysis.recognise import (
    is_backward,
    is_deletion,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    is_unpack,
    names,
)

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used


def overlap_sequence(trace: TraceCtx) -> TraceCtx:
    """Lets collectives of sequences run beside compute.

    Takes: a lowered forward or backward, or that of a block.
    Gives: each collective of a sequence issued right after the line that makes its operand, and waited for right before
    the first line that reads its result.
    No-op when: the trace has none.
    """
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    if not any(map(is_sequence_issue, lines)):
        return trace
    issues: dict[str, list[BoundSymbol]] = {}  # by operand
    for b in filter(is_sequence_issue, lines):
        issues.setdefault(b.args[0].name, []).append(b)
    waits = {b.output.name: b for b in lines if is_sequence_wait(b)}  # by result
    new = from_trace(trace)
    new.bound_symbols = _placed(lines, issues, waits)
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


def _placed(
    lines: list[BoundSymbol], issues: dict[str, list[BoundSymbol]], waits: dict[str, BoundSymbol]
) -> list[BoundSymbol]:
    placed: list[BoundSymbol] = []
    ready: list[BoundSymbol] = []  # whose operands exist, before the first line of compute

    def add(bsym: BoundSymbol) -> None:
        placed.append(bsym)
        for o in bsym.flat_proxy_outs:
            for issue in issues.pop(o.name, ()):
                if is_unpack(bsym):
                    ready.append(issue)
                else:
                    add(issue)

    for bsym in lines:
        if is_sequence_issue(bsym) or is_sequence_wait(bsym):
            continue
        if not is_unpack(bsym):
            while ready:
                add(ready.pop(0))
        read = names(bsym.args) if is_return(bsym) else names(bsym.flat_proxy_args)
        for name in [name for name in waits if name in read]:
            add(waits.pop(name))
        add(bsym)
    return placed
