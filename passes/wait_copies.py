"""Pass (CPU offload): the program waits for copies from host memory at the end of a trace.

    wait_copies(memory_0)       the last line of a trace that copies to or from host memory

An optimizer may then read the gradients and change the shards there. The device waits for each copy by itself, when it
needs it.
"""

from __future__ import annotations

from passes.analysis.recognise import bucket_of, is_gather, is_offload, is_return, issues_future
from passes.comm import symbols

from thunder.core.codeutils import ContextObject
from thunder.core.trace import TraceCtx, from_trace


def wait_copies(trace: TraceCtx) -> TraceCtx:
    """Lets the program wait for copies to and from host memory.

    Takes: a scheduled forward or backward.
    Gives: this line for each host memory that the trace copies to or from, before it returns.
    No-op when: the trace copies nothing to or from host memory.
    """
    copies = (b for b in trace.bound_symbols if issues_future(b) and (is_gather(b) or is_offload(b)))
    memories = dict.fromkeys(host for b in copies if (host := bucket_of(b).plan.host) is not None)
    if not memories:
        return trace
    new = from_trace(trace)
    at = next(i for i, b in enumerate(trace.bound_symbols) if is_return(b))
    lines = [
        symbols.wait_copies.bind(ContextObject(f"memory_{i}", memory), output=None) for i, memory in enumerate(memories)
    ]
    new.bound_symbols = [*trace.bound_symbols[:at], *lines, *trace.bound_symbols[at:]]
    return new
