"""Gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardtrace.model.state import sharded_states

from torch import nn


@contextmanager
def no_sync(model: nn.Module, *, reduce_each: bool = False) -> Iterator[None]:
    """Add up gradients on each rank without reducing them. The first step outside the context reduces the sums.

    Run forward inside, too: it decides whether gradients are reduced, as with PyTorch's DDP. All forwards may come
    before the first backward; the backward of the step outside comes last. ``model.no_sync()`` is the same. ::

        for i, (x, y) in enumerate(batches):
            with shardtrace.no_sync(model) if (i + 1) % 4 else nullcontext():
                (cmodel(x, y) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    Thunder compiles one step for inside and one for the step that reduces. Every rank keeps the unsharded sums of all
    parameters from the first step inside until they are reduced: 4 bytes per element (fp32, even if gradients have a
    lower precision, unless ``CommPolicy.accumulation_dtype`` is None). No gradients are sent inside. ``zero_grad``
    leaves the sums alone; an exception that leaves the context drops them.

    Args:
        model: a sharded module, a module that contains sharded modules, or either one after ``thunder.jit``.
        reduce_each: reduce in each step nevertheless, and add up this rank's shards in ``.grad``. This takes no memory
            beyond the shards' gradients, and one reduction per step. The context then changes nothing.

    Raises:
        ValueError: if the model is not sharded.
        RuntimeError: at the next forward, if the step that reduces did not use a parameter that was used inside; in a
            backward of a step inside that comes after the one that reduces.
    """
    _, states = sharded_states(model)
    if reduce_each:
        yield
        return
    before = [state.runtime.keeps_gradients for state in states]
    for state in states:
        state.runtime.keeps_gradients = True
    try:
        yield
    except BaseException:
        for state in states:
            state.runtime.kept.clear()
        raise
    finally:
        for state, kept in zip(states, before, strict=True):
            state.runtime.keeps_gradients = kept
