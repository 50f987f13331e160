"""The sharding plan: plain data that the passes read. Nothing here touches a module or a process.

Each parameter has its place at rest (:class:`Placement`): in shards, a shard on each rank; whole on one owner rank; or
whole on every rank. A parameter without elements is not the plan's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from passes.plan.cost import CostModel, default_cost_model
from passes.plan.host_memory import HostMemory
from passes.plan.runtime import Axis, PlainRuntime, Runtime

from thunder.core import dtypes

Shape = tuple[int, ...]


class Placement(Enum):
    """Where a parameter is at rest, and so what brings it to its use and its gradient back.

    SHARD: dim 0 of ``(rows, *rest)`` is split into equal shards of ``ceil(rows / world_size)`` rows, of which the last
    ones are padded with zeros; a 0-dim parameter counts as shape ``(1,)``. all_gather, reduce_scatter.
    OWNER: whole on the rank that owns it, ``(0, *rest)`` on the others. broadcast, reduce.
    REPLICATE: whole on every rank. Nothing, all_reduce.
    """

    SHARD = "shard"
    OWNER = "owner"
    REPLICATE = "replicate"


def shard_shape(full_shape: Shape, world_size: int) -> Shape:
    """The shape of each rank's (padded) shard of a parameter of shape ``full_shape``."""
    rows, *rest = full_shape or (1,)
    return (-(-rows // world_size), *rest)


@dataclass(frozen=True, eq=False)
class Plan:
    """How a model, or the part of it that has one strategy, is sharded.

    Args:
        model: name of the model's class, for messages.
        world_size: ranks over which parameters are sharded.
        rank: this rank's number among them.
        strategy: its name, for messages.
        placement: where parameters are at rest.
        axis: which process group of ``runtime`` those ranks are.
        outer: how the shards themselves are placed in another group (hybrid strategies: replicated).
        host: host memory, if that is where parameters are at rest; None: they are on the device that computes.
        param_dtype: dtype of floating-point parameters from gather to use; None: the one that they have at rest.
        reduce_dtype: dtype in which their gradients are averaged; None: the one in which they are computed.
        sum_dtype: dtype in which gradients of lower precision are added up over steps; None: the one that they are
            computed in.
        regather: gather parameters again in backward (ZeRO-3) instead of keeping them (ZeRO-2).
        bucketing: "none", "layer", "block", "model", or a size in MB (of unsharded parameters).
        prefetch: buckets whose gather is issued ahead of use.
        max_inflight_bytes: bytes of buckets whose collective is issued and not waited for; None: so many as
            ``prefetch + 1`` of the trace's largest bucket take.
        cost: how long collectives and compute take.
        direct: ranks exchange messages (passes/direct.py) instead of calling a collective of the backend.
        averages: the backend's reduce_scatter can average.
        runtime: the rank on which the model's steps run, the same object for all plans of a model.
    """

    model: str
    world_size: int
    rank: int = 0
    strategy: str = "zero3"
    placement: Placement = Placement.SHARD
    axis: Axis = Axis.ALL
    outer: Plan | None = None
    host: HostMemory | None = None
    param_dtype: dtypes.dtype | None = None
    reduce_dtype: dtypes.dtype | None = None
    sum_dtype: dtypes.dtype | None = dtypes.float32
    regather: bool = True
    bucketing: str | float = "block"
    prefetch: int = 1
    max_inflight_bytes: int | None = None
    cost: CostModel = default_cost_model("cpu", "gloo")  # noqa: RUF009  frozen
    direct: bool = False
    averages: bool = False
    runtime: Runtime = field(default_factory=PlainRuntime)

    @property
    def group(self) -> Any:
        """The process group that its collectives run on."""
        return self.runtime.group(self.axis)

    def unsharded_dtype(self, dtype: dtypes.dtype) -> dtypes.dtype:
        """In which a parameter that has ``dtype`` at rest is gathered and used."""
        return self.param_dtype if self.param_dtype is not None and dtypes.is_float_dtype(dtype) else dtype

    def reduced_dtype(self, dtype: dtypes.dtype) -> dtypes.dtype:
        """In which the gradient of a parameter that has ``dtype`` at rest is averaged."""
        return self.reduce_dtype if self.reduce_dtype is not None else self.unsharded_dtype(dtype)

    def summed_dtype(self, dtype: dtypes.dtype) -> dtypes.dtype:
        """In which gradients of a parameter that has ``dtype`` at rest are added up over steps."""
        computed = self.unsharded_dtype(dtype)
        return self.sum_dtype if self.sum_dtype is not None and computed.bytes < self.sum_dtype.bytes else computed


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter of a plan: ``name`` and ``layer`` are qualified names in the model, ``block`` that of the
    repeated block that holds it (None outside), ``index`` its place among the model's parameters, ``dtype`` the one
    that it has at rest (None: that of its bucket), ``owner`` the rank of the group that has it where one does."""

    plan: Plan
    name: str
    full_shape: Shape
    layer: str
    block: str | None = None
    index: int = 0
    dtype: dtypes.dtype | None = None
    owner: int = 0

    @cached_property
    def shard_shape(self) -> Shape:
        """What this rank holds at rest."""
        if self.plan.placement is Placement.SHARD:
            return shard_shape(self.full_shape, self.plan.world_size)
        if self.plan.placement is Placement.REPLICATE or self.owner == self.plan.rank:
            return self.full_shape
        return (0, *self.full_shape[1:])

    @cached_property
    def full_numel(self) -> int:
        """Elements of the parameter while it is unsharded, padding included."""
        sharded = self.plan.placement is Placement.SHARD
        return self.plan.world_size * math.prod(self.shard_shape) if sharded else math.prod(self.full_shape)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """For each rank, where what it holds of the flattened parameter starts and stops; padding is not in it."""
        end, ranks = math.prod(self.full_shape), range(self.plan.world_size)
        if self.plan.placement is Placement.OWNER:
            return tuple((0, end if r == self.owner else 0) for r in ranks)
        size = math.prod(self.shard_shape)
        return tuple((min(r * size, end), min((r + 1) * size, end)) for r in ranks)


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter's place in a bucket: ``trainable`` members get their gradient reduced."""

    parameter: ShardedParameter
    trainable: bool

    @cached_property
    def numel(self) -> int:
        """Elements of one shard."""
        return math.prod(self.parameter.shard_shape)
