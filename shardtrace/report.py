"""What a jitted model does in a step, read from its traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import passes
from passes import Collective

import thunder


def collectives(cmodel: Callable[..., Any]) -> list[Collective]:
    """The collectives of the last call of a jitted model or function, in the order in which they are issued.

    Forward first, then the backward that belongs to it, if there is one. Each is a named tuple: ``kind``
    ("all_gather", "reduce_scatter"), ``phase`` ("forward", "backward"), ``bucket``, ``dtype``, ``bytes`` (of the
    unsharded bucket, with padding) and ``parameters`` (names).

    Raises:
        TypeError: if ``cmodel`` was not jitted or not called yet.
    """
    forward = thunder.last_traces(cmodel)
    # on a cache hit Thunder renews last_traces alone: the backward that belongs to it is in the cache
    entries = thunder.compile_stats(cmodel).interpreter_cache
    uncached = thunder.last_backward_traces(cmodel)
    backward: list[Any] = next((e.backward_traces for e in entries if e.computation_traces is forward), uncached)
    last = next((t for t in reversed(forward) if t.bound_symbols), None)
    rows = passes.collectives(last) if last is not None else []
    return rows + (passes.collectives(backward[-1]) if backward else [])
