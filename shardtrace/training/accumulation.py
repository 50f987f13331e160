"""Gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from passes.compat.jit import unjitted
from passes.plan import Keep, Level
from shardtrace.model.state import ShardedState, link_of, own_state, part_of, state_of, states_in

from torch import nn


@contextmanager
def no_sync(model: nn.Module, *, reduce_each: bool | Literal["shard"] = False) -> Iterator[None]:
    """Add up gradients on each rank without reducing them. The first backward outside the context reduces the sums.

    A backward inside keeps its gradients, wherever its forward ran, as with FSDP2. All forwards may come before the
    first backward. ``model.no_sync()`` is the same. ::

        for i, (x, y) in enumerate(batches):
            with shardtrace.no_sync(model) if (i + 1) % 4 else nullcontext():
                (cmodel(x, y) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    Thunder compiles one step for inside and one for the step that reduces. A backward on the other side than its
    forward is compiled by itself. Every rank keeps the unsharded sums of all parameters from the first step inside
    until they are reduced: 4 bytes per element (fp32, even if gradients have a lower precision, unless
    ``CommPolicy.accumulation_dtype`` is None). No gradients are sent inside. ``zero_grad`` of an optimizer or a module
    drops the sums of its parameters, and so does an exception that leaves the context. Setting ``.grad`` to None by
    hand does not. ``optimizer.step()`` raises if its parameters have sums that are not reduced.

    Args:
        model: a sharded module, a module that contains sharded modules, or either one after ``thunder.jit``; or a
            submodule of a sharded one, whose gradients are then kept and those of others reduced.
        reduce_each: True: reduce in each step nevertheless, and add up this rank's shards in ``.grad``. This takes no
            memory beyond the shards' gradients, and one reduction per step. The context then changes nothing.
            "shard": with a hybrid strategy, reduce_scatter in each step, add up shards, and all_reduce them over the
            replicas only in the step outside. Other strategies reduce in each step.

    Raises:
        ValueError: if the model is not sharded.
        RuntimeError: at the next forward, if the step that reduces did not use a parameter that was used inside.
    """
    if reduce_each is True:
        yield
        return
    keep = keep_of(model, Level.REPLICAS if reduce_each == "shard" else Level.WHOLE)
    before = {state: state.runtime.keep for state in keep}
    for state, now in keep.items():
        state.runtime.keep = now
    try:
        yield
    except BaseException:
        for state in keep:
            state.runtime.kept.clear()
        raise
    finally:
        for state, kept in before.items():
            state.runtime.keep = kept


def keep_of(model: nn.Module, level: Level) -> dict[ShardedState, Keep]:
    """What the states of a model are to keep; those of its parameters, if it is a part of a sharded one."""
    module = unjitted(model)
    keep = {state: Keep(level) for state in states_in(module)}
    outer = part_of(module) if state_of(module) is None else None
    if outer is not None:
        links = (link_of(p) for p in module.parameters())
        mine = {id(link.entry) for link in links if link is not None and link.state is outer}
        indices = frozenset(i for i, entry in enumerate(outer.entries) if id(entry) in mine)
        if outer.runtime.keep is None:
            keep[outer] = Keep(level, indices)
    elif not keep:
        raise ValueError(f"{type(module).__name__} is not sharded: call shardtrace.fsdp(model) first")
    return keep


def set_sync(module: nn.Module, sync: bool, level: Level = Level.WHOLE) -> None:
    """Until it is called again, backwards of a sharded model reduce gradients, or are as inside :func:`no_sync`."""
    own_state(module).runtime.keep = None if sync else Keep(level)


def syncs(module: nn.Module) -> bool:
    """Whether steps of a sharded model reduce gradients in full."""
    return own_state(module).runtime.keep is None
