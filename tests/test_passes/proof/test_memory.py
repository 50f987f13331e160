"""Writes into memory that is read later by another name. (By the same name, the value has another number.)"""

import shardtrace  # noqa: F401  isort: split
from passes.proof.prove import hazards

from thunder.core import prims
from thunder.core.devices import cpu
from thunder.core.dtypes import float32
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx


def trace_of(read):
    """A trace that writes ``y`` into ``x``, of which ``v`` is a view, and then reads what ``read`` says."""
    trace = TraceCtx()
    with tracectx(trace):
        x, y = (TensorProxy(name, shape=(4,), device=cpu, dtype=float32, requires_grad=False) for name in "xy")
        v = prims.reshape(x, (2, 2))
        written = prims.copy_(y, x, grad_enabled=False)
        out = prims.sin({"v": v, "written": written, "x": x, "y": y}[read])
        prims.python_return(out)
    return trace


def test_a_view_of_written_memory_is_read():
    (found,) = hazards(trace_of("v"), None)
    assert "is read after its memory was written" in found


def test_other_reads():
    for read in ("written", "x", "y"):
        assert [*hazards(trace_of(read), None)] == []
