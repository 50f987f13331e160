"""Gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardtrace.model.state import sharded_states

from torch import nn


@contextmanager
def no_sync(model: nn.Module, *, reduce_each: bool = False) -> Iterator[None]:
    """Inside, backward adds up gradients on each rank without reducing them; the first step outside reduces the sum.

    Forward belongs inside too: what becomes of gradients is decided there, as with PyTorch's DDP. Also
    ``model.no_sync()``. ::

        for i, (x, y) in enumerate(batches):
            with shardtrace.no_sync(model) if (i + 1) % 4 else nullcontext():
                (cmodel(x, y) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    Thunder compiles a step of its own for inside, and one for the step that reduces. The sums are whole, of all
    parameters, on every rank: 4 bytes for each element (fp32, also where gradients are of lower precision, unless
    ``fsdp(accumulation_dtype=None)``), from the first step inside until they are reduced. Nothing is sent for gradients
    inside. ``zero_grad`` does not know of the sums; an exception that leaves the context drops them.

    Args:
        model: a sharded module, one that contains sharded modules, or what ``thunder.jit`` made of it.
        reduce_each: reduce in each step all the same, and add up this rank's shards in ``.grad``: no memory beyond that
            of the shards' gradients, and the traffic of a reduction in each step. Then nothing is special inside.

    Raises:
        ValueError: if the model is not sharded.
        RuntimeError: at the next forward, if a parameter that was used inside is not used by the step that reduces.
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
