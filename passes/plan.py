"""The sharding plan: plain data that the passes read. Nothing here touches a module or a process.

A parameter of shape ``(rows, *rest)`` is split along dim 0 into ``world_size`` equal shards of ``ceil(rows /
world_size)`` rows; the last shards are padded with zeros. A 0-dim parameter is treated as shape ``(1,)``, so that
rank 0 holds its value and the others hold padding. A parameter without elements is not sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from passes.cost import CostModel, default_cost_model
from passes.layout import Layout

from thunder.core import dtypes
from thunder.core.codeutils import ContextObject

Shape = tuple[int, ...]


def shard_shape(full_shape: Shape, world_size: int) -> Shape:
    """The shape of each rank's (padded) shard of a parameter of shape ``full_shape``."""
    rows, *rest = full_shape or (1,)
    return (-(-rows // world_size), *rest)


@dataclass(frozen=True, eq=False)
class Plan:
    """How one model is sharded.

    Args:
        model: name of the model's class, for messages.
        group: the process group over which parameters are sharded; only collectives look into it.
        world_size: ranks in ``group``.
        regather: gather parameters again in backward (ZeRO-3) instead of keeping them (ZeRO-2).
        bucketing: "none", "layer", "block", or a size in MB (of unsharded parameters).
        prefetch: buckets whose gather is issued ahead of use.
        max_inflight_bytes: bytes of buckets whose collective is issued and not waited for; None: so many as
            ``prefetch + 1`` of the trace's largest bucket take.
        cost: how long collectives and compute take.
        direct: ranks exchange messages (passes/direct.py) instead of calling a collective of the backend.
        averages: the backend's reduce_scatter can average.
        guard: called at each step; raises if a parameter is no longer the one that was sharded.
        agree: called with the ordered collectives of each compiled trace; raises on every rank if ranks differ.
        announce: called with an error of this rank, so that the others raise where they come to agree.
    """

    model: str
    group: Any
    world_size: int
    regather: bool = True
    bucketing: str | float = "block"
    prefetch: int = 1
    max_inflight_bytes: int | None = None
    cost: CostModel = default_cost_model("cpu", "gloo")  # noqa: RUF009  frozen
    direct: bool = False
    averages: bool = False
    guard: Callable[[], None] | None = None
    agree: Callable[[list[str]], None] | None = None
    announce: Callable[[str], None] | None = None


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter of a plan: ``name`` and ``layer`` are qualified names in the model, ``block`` that of the
    repeated block that holds it (None outside), ``index`` its place among the model's parameters."""

    plan: Plan
    name: str
    full_shape: Shape
    layer: str
    block: str | None = None
    index: int = 0

    @cached_property
    def shard_shape(self) -> Shape:
        return shard_shape(self.full_shape, self.plan.world_size)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """For each rank, where its shard without padding starts and stops in the flattened parameter."""
        size, end = math.prod(self.shard_shape), math.prod(self.full_shape)
        return tuple((min(r * size, end), min((r + 1) * size, end)) for r in range(self.plan.world_size))


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter's place in a bucket: ``trainable`` members get their gradient reduced."""

    parameter: ShardedParameter
    trainable: bool

    @cached_property
    def numel(self) -> int:
        """Elements of one shard."""
        return math.prod(self.parameter.shard_shape)


class Bucket(ContextObject):
    """Parameters of one dtype and device that are gathered by one collective and reduced by another.

    On the wire a bucket is ``world_size`` rows; row r holds rank r's shards, flattened, one after the other. Thunder
    prints a ContextObject by its name, so that a trace reads ``all_gather((w, b), h_0)``.
    """

    def __init__(self, label: str, name: str, plan: Plan, members: tuple[Member, ...], dtype: dtypes.dtype) -> None:
        super().__init__(name, self)  # ``name`` is an identifier, unique in its trace
        self.label = label  # what users know: the qualified name of a module
        self.plan = plan
        self.members = members
        self.dtype = dtype
        self.numel = sum(m.numel for m in members)  # of one row: elements that a rank contributes

    @cached_property
    def trainable(self) -> Bucket | None:
        """The bucket of the members whose gradients are reduced; None if all are frozen."""
        members = tuple(m for m in self.members if m.trainable)
        if len(members) == len(self.members):
            return self
        return Bucket(self.label, f"{self.name}_trainable", self.plan, members, self.dtype) if members else None

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.members, self.plan.world_size, self.dtype.bytes)

    @cached_property
    def packed(self) -> Layout:
        """Of the small members alone: they travel together where ranks exchange messages."""
        return Layout([self.members[i] for i in self.layout.small], self.plan.world_size, self.dtype.bytes)

    @property
    def bytes(self) -> int:
        """Bytes of the unsharded bucket, padding included: what a collective moves for the whole group."""
        return self.numel * self.plan.world_size * self.dtype.bytes

    def __repr__(self) -> str:
        names = ", ".join(m.parameter.name for m in self.members)
        return f"Bucket({self.name}: {names})"


def inflight_limits(buckets: Iterable[Bucket]) -> dict[Plan, int]:
    """For each plan of a trace's buckets, the bytes that its collectives may have in flight at once.

    One bucket alone may be larger.
    """
    largest: dict[Plan, int] = {}
    for bucket in buckets:
        largest[bucket.plan] = max(largest.get(bucket.plan, 0), bucket.bytes)
    return {
        plan: (plan.prefetch + 1) * size if plan.max_inflight_bytes is None else plan.max_inflight_bytes
        for plan, size in largest.items()
    }


@dataclass
class Enlisted:
    """What one tracing found: which trace inputs are sharded parameters.

    A proxy is known by its ``history`` (Thunder's record of where the value came from), which survives renaming.
    """

    by_history: dict[int, tuple[Any, ShardedParameter]] = field(default_factory=dict)

    def add(self, history: Any, parameter: ShardedParameter) -> None:
        self.by_history[id(history)] = (history, parameter)  # holding it keeps the id from being reused

    def get(self, proxy: Any) -> ShardedParameter | None:
        found = self.by_history.get(id(getattr(proxy, "history", None)))
        return found[1] if found else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(dict.fromkeys(parameter.plan for _, parameter in self.by_history.values()))
