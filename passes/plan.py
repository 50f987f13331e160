"""The sharding plan: plain data that the passes read. Nothing here touches a module or a process.

Each parameter has its place at rest (:class:`Placement`): in shards, a shard on each rank; whole on one owner rank; or
whole on every rank. A parameter without elements is not the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from passes.cost import CostModel, default_cost_model
from passes.layout import Layout, OwnedLayout
from passes.offload import HostMemory

import torch
from thunder.core import dtypes
from thunder.core.codeutils import ContextObject

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


class Gradients(Enum):
    """What a compiled step does with the gradients of a plan: reduces them; keeps them, to be reduced by a later step;
    or adds those that were kept, if any, and reduces the sum."""

    REDUCED = "reduced"
    KEPT = "kept"
    ADDED = "added"


@dataclass(eq=False)
class Step:
    """One compiled step of a model: what it does with gradients (None: it computes none), and, when it is compiled, the
    collectives that it sends, in order, a text for each."""

    gradients: Gradients | None
    collectives: list[str] = field(default_factory=list)

    @cached_property
    def sends(self) -> str:
        """What it sends as one text, to be asked for when it runs, once all of it is compiled."""
        return "\n".join(self.collectives)


class Progress:
    """Where this rank is in the steps of a model. A step that sends nothing leaves it where it was."""

    def __init__(self) -> None:
        self.phase = "start"  # or "forward", or "backward"
        self.under_way = False  # in it, or after it
        self.sent = 0  # its collectives that were issued
        self._in_flight: dict[int, Callable[[], Any]] = {}  # what waits for them, by the id of the future

    def begin(self, step: Step, phase: str) -> None:
        if step.collectives:
            self.phase, self.under_way, self.sent = phase, True, 0

    def end(self, step: Step) -> None:
        if step.collectives:
            self.under_way = False

    def issued(self, future: Any, finish: Callable[[], Any]) -> None:
        self.sent += 1
        self._in_flight[id(future)] = finish  # which holds the future

    def finished(self, future: Any) -> None:
        self._in_flight.pop(id(future), None)

    def drain(self) -> None:
        """Waits for what an exception has left in flight; every rank must have left the same."""
        for finish in list(self._in_flight.values()):
            finish()

    def __str__(self) -> str:
        """ "after backward"; or "in backward, 3 collectives sent", if an exception has left it there."""
        return f"in {self.phase}, {self.sent} collectives sent" if self.under_way else f"after {self.phase}"


def shard_shape(full_shape: Shape, world_size: int) -> Shape:
    """The shape of each rank's (padded) shard of a parameter of shape ``full_shape``."""
    rows, *rest = full_shape or (1,)
    return (-(-rows // world_size), *rest)


@dataclass(frozen=True, eq=False)
class Plan:
    """How a model, or the part of it that has one strategy, is sharded.

    Args:
        model: name of the model's class, for messages.
        group: the process group over which parameters are sharded; only collectives look into it.
        world_size: ranks in ``group``.
        rank: this rank's number in ``group``.
        strategy: its name, for messages.
        placement: where parameters are at rest.
        outer: how the shards themselves are placed in another group (hybrid strategies: replicated).
        everyone: the process group of all ranks of the model.
        host: host memory, if that is where parameters are at rest; None: they are on the device that computes.
        param_dtype: of floating-point parameters from gather to use; None: the one that they have at rest.
        reduce_dtype: in which their gradients are averaged; None: the one in which they are computed.
        sum_dtype: in which gradients of lower precision are added up over steps; None: the one they are computed in.
        sums: where gradients are kept from step to step (passes/accumulate.py).
        regather: gather parameters again in backward (ZeRO-3) instead of keeping them (ZeRO-2).
        bucketing: "none", "layer", "block", "model", or a size in MB (of unsharded parameters).
        prefetch: buckets whose gather is issued ahead of use.
        max_inflight_bytes: bytes of buckets whose collective is issued and not waited for; None: so many as
            ``prefetch + 1`` of the trace's largest bucket take.
        cost: how long collectives and compute take.
        direct: ranks exchange messages (passes/direct.py) instead of calling a collective of the backend.
        averages: the backend's reduce_scatter can average.
        guard: called before each step; raises if it is not the one that is wanted now, or if a parameter is no longer
            the one that was sharded.
        meet: called before each step that will run; raises on every rank if ranks are about to run different ones.
        progress: what the lines of a step note where they are.
        blame: called with an error of a collective; raises a better one if another rank is the cause.
        agree: called with the ordered collectives of each compiled trace; raises on every rank if ranks differ.
        announce: called with an error of this rank, so that the others raise where they come to agree.
    """

    model: str
    group: Any
    world_size: int
    rank: int = 0
    strategy: str = "zero3"
    placement: Placement = Placement.SHARD
    outer: Plan | None = None
    everyone: Any = None
    host: HostMemory | None = None
    param_dtype: dtypes.dtype | None = None
    reduce_dtype: dtypes.dtype | None = None
    sum_dtype: dtypes.dtype | None = dtypes.float32
    sums: Any = None
    regather: bool = True
    bucketing: str | float = "block"
    prefetch: int = 1
    max_inflight_bytes: int | None = None
    cost: CostModel = default_cost_model("cpu", "gloo")  # noqa: RUF009  frozen
    direct: bool = False
    averages: bool = False
    guard: Callable[[Step], None] | None = None
    meet: Callable[[Step], None] | None = None
    progress: Progress | None = None
    blame: Callable[[Exception, str], None] | None = None
    agree: Callable[[list[str]], None] | None = None
    announce: Callable[[str], None] | None = None

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


@dataclass(frozen=True)
class Wire:
    """Another way to gather a bucket's shards, for a pass that puts it in place of the plan's: compressed, say.

    Args:
        issue: ``issue(shards, bucket)`` starts to send this rank's shards, and returns a future of any kind.
        finish: ``finish(future, bucket)`` waits, and returns the unsharded parameters in the dtype of their use.
        bytes: ``bytes(bucket)`` travel for the whole group.
    """

    issue: Callable[[tuple[torch.Tensor, ...], Bucket], Any]
    finish: Callable[[Any, Bucket], tuple[torch.Tensor, ...]]
    bytes: Callable[[Bucket], int]


class Bucket(ContextObject):
    """Parameters of one dtype and device that are gathered by one collective and reduced by another.

    Thunder prints a ContextObject by its name, so that a trace reads ``all_gather((w, b), h_0)``. How the members lie
    on the wire: :mod:`passes.layout`; ``dtype`` is the one that they have there. A bucket with a ``wire`` of its own is
    gathered by that, and never reduced.
    """

    def __init__(
        self,
        label: str,
        name: str,
        plan: Plan,
        members: tuple[Member, ...],
        dtype: dtypes.dtype,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(name, self)  # ``name`` is an identifier, unique in its trace
        self.label = label  # what users know: the qualified name of a module
        self.plan = plan
        self.members = members
        self.dtype = dtype
        self.wire = wire
        self.numel = sum(m.numel for m in members)  # elements that this rank contributes
        self.full_numel = sum(m.parameter.full_numel for m in members)  # and all ranks, padding included

    @property
    def rest_dtype(self) -> dtypes.dtype:
        """The dtype of the members' shards."""
        return self.members[0].parameter.dtype or self.dtype

    @cached_property
    def trainable(self) -> Bucket | None:
        """The bucket of the members whose gradients are reduced, as they are reduced; None if all are frozen."""
        members = tuple(m for m in self.members if m.trainable)
        dtype = self.plan.reduced_dtype(self.rest_dtype)
        if len(members) == len(self.members) and dtype == self.dtype:
            return self
        return Bucket(self.label, f"{self.name}_trainable", self.plan, members, dtype) if members else None

    @cached_property
    def outer(self) -> Bucket | None:
        """The members' shards as a bucket of the plan's outer plan; None if there is none."""
        plan = self.plan.outer
        if plan is None:
            return None
        members = tuple(
            Member(replace(m.parameter, plan=plan, full_shape=m.parameter.shard_shape), m.trainable)
            for m in self.members
        )
        return Bucket(self.label, f"{self.name}_replicas", plan, members, self.dtype)

    @cached_property
    def layout(self) -> Layout:
        return self._layout(self.members)

    @cached_property
    def packed(self) -> Layout:
        """Of the small members alone: they travel together where ranks exchange messages."""
        return self._layout([self.members[i] for i in self.layout.small])

    def _layout(self, members: Sequence[Member]) -> Layout:
        plan = self.plan
        if plan.placement is Placement.OWNER:
            return OwnedLayout(members, plan.world_size, self.dtype)
        return Layout(members, plan.world_size if plan.placement is Placement.SHARD else 1, self.dtype)

    @property
    def trips(self) -> int:
        """How often each byte goes through the link: an all_reduce is a reduce_scatter and an all_gather."""
        return 2 if self.plan.placement is Placement.REPLICATE else 1

    @property
    def bytes(self) -> int:
        """Bytes of the unsharded bucket, padding included: what a collective moves for the whole group."""
        return self.wire.bytes(self) if self.wire is not None else self.full_numel * self.dtype.bytes

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
    """What one tracing found: which trace inputs are sharded parameters, and the step that is being compiled.

    A proxy is known by its ``history`` (Thunder's record of where the value came from), which survives renaming.
    """

    by_history: dict[int, tuple[Any, ShardedParameter]] = field(default_factory=dict)
    steps: dict[Plan, Step] = field(default_factory=dict)

    def add(self, history: Any, parameter: ShardedParameter) -> None:
        self.by_history[id(history)] = (history, parameter)  # holding it keeps the id from being reused

    def get(self, proxy: Any) -> ShardedParameter | None:
        found = self.by_history.get(id(getattr(proxy, "history", None)))
        return found[1] if found else None

    def step_of(self, plan: Plan) -> Step:
        return self.steps.setdefault(plan, Step(Gradients.REDUCED))

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(dict.fromkeys(parameter.plan for _, parameter in self.by_history.values()))
