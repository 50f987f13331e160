"""The collectives, the memory and the blocks of a jitted model's step, read from its traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import passes
from passes import Collective
from passes.analysis.calls import parts_in
from passes.analysis.liveness import StepLiveness, step_liveness
from passes.outline import traced_block
from shardtrace.inspector.rows import Rows
from shardtrace.proving import executed

import thunder
from thunder.core.trace import TraceCtx


def collectives(cmodel: Callable[..., Any]) -> Rows[Collective]:
    """The collectives of the last call of a jitted model or function, in order of issue.

    Those of forward come first, then those of its backward, if there is one. Each is a named tuple: ``kind``
    ("all_gather", "reduce_scatter"), ``phase`` ("forward", "backward"), ``bucket``, ``dtype``, ``bytes`` (of the
    unsharded bucket, with padding) and ``parameters`` (names). The list prints as a table.

    Raises:
        TypeError: if ``cmodel`` is not jitted or was not called yet.
    """
    traces = (trace for trace in executed(cmodel) if trace is not None)
    return Rows(row for trace in traces for row in passes.collectives(trace))


def memory(cmodel: Callable[..., Any], *, persistent: int = 0) -> StepLiveness:
    """Predicts the bytes of tensors during the last call of a jitted model or function, and during its backward.

    ``.forward`` and ``.backward`` (None if there is none) have ``.buffers`` and ``.lines``. A line is a named tuple of
    bytes: ``during`` is needed while the line runs, ``total`` is alive after it. The total consists of ``inputs``
    (shards and the batch), ``unsharded`` parameters, buffers ``in_flight``, ``activations``, tensors ``saved`` for
    backward, and ``gradients``. ``.peak`` is the peak of both traces.

    ``persistent`` bytes are added to every line. Use it for the optimizer's state, accumulated gradients, and
    parameters that the call does not use. The workspace of kernels and of the process group's backend is not included.

    Raises:
        TypeError: if ``cmodel`` is not jitted or was not called yet.
    """
    forward, backward = executed(cmodel)
    if forward is None:
        raise TypeError("memory() needs a call: call the jitted model first")
    return step_liveness(forward, backward, persistent=persistent)


def block_traces(cmodel: Callable[..., Any]) -> dict[str, tuple[TraceCtx, ...]]:
    """The functions of repeated blocks that the last call of a jitted model or function has compiled.

    Returns the traces of each function by its name, one for each pass; the last one runs. A block of class ``Block``
    has ``Block`` (as it was traced), ``Block_forward`` and ``Block_backward``; without gradients only ``Block``. Other
    kinds of the class, and calls that need other gradients, have a number: ``Block_2``. Empty if no block is called.

    Raises:
        TypeError: if ``cmodel`` is not jitted or was not called yet.
    """
    found: dict[str, tuple[TraceCtx, ...]] = {}
    for trace in thunder.last_traces(cmodel):
        found |= {block.name: (block.trace,) for b in trace.bound_symbols if (block := traced_block(b)) is not None}
    final = (trace for trace in executed(cmodel) if trace is not None)
    return found | {part.name: part.traces for part in parts_in(*final)}
