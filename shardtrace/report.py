"""What a jitted model does in a step, read from its traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import passes
from passes import Collective
from passes.analysis.liveness import StepLiveness, step_liveness

import thunder
from thunder.core.trace import TraceCtx


def collectives(cmodel: Callable[..., Any]) -> list[Collective]:
    """The collectives of the last call of a jitted model or function, in the order in which they are issued.

    Forward first, then the backward that belongs to it, if there is one. Each is a named tuple: ``kind``
    ("all_gather", "reduce_scatter"), ``phase`` ("forward", "backward"), ``bucket``, ``dtype``, ``bytes`` (of the
    unsharded bucket, with padding) and ``parameters`` (names).

    Raises:
        TypeError: if ``cmodel`` was not jitted or not called yet.
    """
    traces = (trace for trace in _executed(cmodel) if trace is not None)
    return [row for trace in traces for row in passes.collectives(trace)]


def memory(cmodel: Callable[..., Any], *, persistent: int = 0) -> StepLiveness:
    """The memory of tensors during the last call of a jitted model or function and its backward, predicted in bytes.

    ``.forward`` and ``.backward`` (None if there is none) have ``.lines``, a named tuple for each line of the last
    trace: the bytes that are alive ``during`` it, in ``total`` after it, and of these ``inputs`` (shards, the batch),
    ``unsharded`` parameters, ``in_flight`` buffers of collectives, ``activations``, those ``saved`` for backward, and
    ``gradients``; and ``.buffers``. ``.peak`` is the most of both. ``persistent`` bytes are added throughout: those of
    the optimizer's state, gradients that are accumulated, and parameters that the call does not use. Not in it is
    what a kernel or the process group's backend takes for itself while it works.

    Raises:
        TypeError: if ``cmodel`` was not jitted or not called yet.
    """
    forward, backward = _executed(cmodel)
    if forward is None:
        raise TypeError("memory() is about a call: call the jitted model first")
    return step_liveness(forward, backward, persistent=persistent)


def _executed(cmodel: Callable[..., Any]) -> tuple[TraceCtx | None, TraceCtx | None]:
    """The last forward as it is executed, and the backward that belongs to it."""
    forward = thunder.last_traces(cmodel)
    # on a cache hit Thunder renews last_traces alone: the backward that belongs to it is in the cache
    entries = thunder.compile_stats(cmodel).interpreter_cache
    uncached = thunder.last_backward_traces(cmodel)
    backward: list[Any] = next((e.backward_traces for e in entries if e.computation_traces is forward), uncached)
    last = next((t for t in reversed(forward) if t.bound_symbols), None)
    return last, backward[-1] if backward else None
