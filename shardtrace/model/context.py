"""Sequences that ranks hold in parts: what tracing is told of them, and whether ranks were given the same batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from passes.comm.sequence import Part, gather_sequence
from passes.facts import Facts
from passes.plan.sequence import ContextPlan, Split
from passes.split_sequence import Context
from shardtrace.model.state import ShardedState
from shardtrace.ranks.consensus import compare
from shardtrace.ranks.mesh import is_alone, transport

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import TensorProxy


def context_of(states: Sequence[ShardedState], facts: Facts) -> Context | None:
    """How the models' sequences are split over ranks; None if each rank has whole ones.

    Raises RuntimeError if another model of the jitted function splits them in another way.
    """
    found = [_context_of(state) for state in states]
    known = facts.context if facts.models else found[0]
    for state, context in zip(states, found, strict=True):
        if not _is_same(context, known):
            raise RuntimeError(
                f"{state.model_name} is computed together with a model that splits sequences over other ranks, or in "
                "another way, or not at all: pass the same mesh and the same context_parallel to fsdp() for both, or "
                "jit them apart"
            )
    return known


def _context_of(state: ShardedState) -> Context | None:
    plan, options = plan_of(state), state.options.context
    if plan is None or options is None:
        return None
    return Context(plan, options.sequence_dim, returns_parts=options.returns == "part")


def plan_of(state: ShardedState) -> ContextPlan | None:
    """The ranks that hold the parts of the model's sequences; None if each rank has whole ones."""
    group, options = state.groups.context, state.options.context
    if group is None or options is None:
        return None
    direct = transport(group, {e.device.type for e in state.entries}).direct
    return ContextPlan(group.size(), group.rank(), attention=options.attention, direct=direct, runtime=state.runtime)


def _is_same(one: Context | None, other: Context | None) -> bool:
    """Whether sequences are split alike, over the same ranks."""

    def ways(context: Context | None) -> tuple[Any, ...]:
        if context is None or context.plan.ranks == 1:
            return ()
        plan = context.plan
        return plan.runtime.group(plan.axis), plan.attention, context.dim, context.returns_parts

    return ways(one) == ways(other)


def takes_parts(state: ShardedState) -> bool:
    """Whether ranks give the model their parts of a sequence."""
    group, options = state.groups.context, state.options.context
    return group is not None and group.size() > 1 and options is not None and options.arguments == "part"


def check_alone(state: ShardedState, call: Callable[..., Any]) -> None:
    """Raises RuntimeError if a jitted function around a model that takes parts could compute with parts itself."""
    function = get_compile_data().fn
    if takes_parts(state) and function is not state.model and getattr(function, "__wrapped__", None) is not call:
        raise RuntimeError(
            f'{state.model_name} takes parts of sequences (arguments="part"), but is called in a jitted function that '
            'would see whole ones: jit the model alone, or choose ContextParallel(arguments="whole")'
        )


def wholes(state: ShardedState, context: Context | None) -> Callable[[TensorProxy], TensorProxy]:
    """Gives for the proxy of an argument that of the whole value of which it is a part. The trace gathers it, once."""
    if context is None or not takes_parts(state):
        return lambda proxy: proxy
    dim, ranks, made = context.dim, context.plan.ranks, dict[str, TensorProxy]()

    def whole_of(p: TensorProxy) -> TensorProxy:
        if p.ndim <= dim or p.shape[dim] < 2:
            return p
        if p.shape[dim] % 2:
            raise RuntimeError(
                f"argument {p.name!r} of {state.model_name} has {p.shape[dim]} positions in dimension {dim}, but a "
                "part of a sequence has two chunks of equal length: cut it with shardtrace.shard_sequence"
            )
        if p.name not in made:
            made[p.name] = gather_sequence(p, Part(context.plan, Split.along(dim, ranks * p.shape[dim])))
        return made[p.name]

    return whole_of


def compare_batches(state: ShardedState, given: Mapping[str, torch.Tensor]) -> None:
    """Raises RankMismatchError on all ranks of a sequence if they were given different batches. Compares the first one
    of these shapes, so that a rank that compiles again by itself does not wait for the others."""
    group = state.groups.context
    shapes = tuple((name, t.dtype, t.shape) for name, t in sorted(given.items()))
    if group is None or is_alone(group) or takes_parts(state) or shapes in state.compared:
        return
    compare(
        group,
        f"the batch that {state.model_name} is given",
        [f"{name}: {dtype} of shape {tuple(shape)}, {_digest(given[name])}" for name, dtype, shape in shapes],
        timeout=state.options.checks.timeout,
        hint="the ranks of one sequence need the same batch: let the sampler count the data ranks of the mesh",
    )
    state.compared.add(shapes)


def _digest(t: torch.Tensor) -> str:
    values = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    return f"digest {torch.hash_tensor(values).view(torch.int64).item()}" if t.numel() else "empty"
