"""Buckets: the parameters that one collective carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from passes.plan.layout import Layout, OwnerLayout, ShardLayout
from passes.plan.plan import BucketPlan, Member, Placement
from passes.plan.wire import Ends, Wire

import torch
from thunder.core import dtypes
from thunder.core.codeutils import ContextObject


class Bucket(ContextObject):
    """Parameters of one dtype and device that are gathered by one collective and reduced by another.

    Thunder prints a ContextObject by its name: a trace reads ``all_gather((w, b), h_0)``. ``dtype`` is the dtype on the
    wire; :mod:`passes.plan.layout` defines the layout there. A bucket with a ``wire`` travels by it, in one direction:
    ``plain`` is the bucket without it.
    """

    def __init__(
        self,
        label: str,
        name: str,
        plan: BucketPlan,
        members: tuple[Member, ...],
        dtype: dtypes.dtype,
        wire: Wire | None = None,
        plain: Bucket | None = None,
    ) -> None:
        super().__init__(name, self)  # ``name`` is an identifier, unique in its trace
        self.label = label  # the name that users see: the qualified name of a module
        self.plan = plan
        self.members = members
        self.dtype = dtype
        self.wire = wire
        self.plain = plain
        self.numel = sum(m.numel for m in members)  # elements that this rank contributes
        self.full_numel = sum(m.parameter.full_numel for m in members)  # elements of all ranks, padding included

    @cached_property
    def rest_dtype(self) -> dtypes.dtype:
        """The dtype of the members' shards."""
        return self.members[0].parameter.dtype or self.dtype

    @cached_property
    def reduced_dtype(self) -> dtypes.dtype:
        """The dtype of reduced gradients: that of the members' shards, or the one on the wire if the plan's outer group
        reduces them next, in the same dtype."""
        return self.rest_dtype if self.plan.outer is None else self.dtype

    @cached_property
    def torch_reduced_dtype(self) -> torch.dtype:
        return dtypes.to_torch_dtype(self.reduced_dtype)

    def carried_by(self, wire: Wire | None) -> Bucket:
        """The bucket on a wire. The same one if there is none, or if the wire does not take it."""
        if wire is None or not wire.takes(self):
            return self
        name = "_".join(filter(None, [self.name, wire.name, "grads" if wire.reduces else ""]))
        return Bucket(self.label, name, self.plan, self.members, self.dtype, wire, self)

    @cached_property
    def prepared(self) -> Any:
        """The result of the wire's ``prepare`` for this bucket; None without a wire."""
        return self.wire.prepare(self) if self.wire is not None else None

    @cached_property
    def work(self) -> Ends:
        """The work of its wire on the device; none without a wire."""
        return self.wire.work(self) if self.wire is not None else Ends()

    @cached_property
    def trainable(self) -> Bucket | None:
        """The bucket of the trainable members, in the dtype of their reduction and on its wire; None if all members are
        frozen."""
        if self.plain is not None:
            return self.plain.trainable
        members = tuple(m for m in self.members if m.trainable)
        if not members:
            return None
        dtype = self.plan.reduced_dtype(self.rest_dtype)
        same = len(members) == len(self.members) and dtype == self.dtype and self.wire is None
        reduced = self if same else Bucket(self.label, f"{self.name}_trainable", self.plan, members, dtype)
        return reduced.carried_by(self.plan.reduction)

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
        plain = Bucket(self.label, f"{(self.plain or self).name}_replicas", plan, members, self.dtype)
        return plain.carried_by(plan.reduction)

    def secondary_of(self, places: Sequence[int]) -> Bucket:
        """Some of the members as a bucket of second shards, in the dtype of their use."""
        plan = self.plan.secondary
        assert plan is not None
        plain = self.plain or self
        chosen = [self.members[i] for i in places]
        members = tuple(
            Member(replace(m.parameter, plan=plan, dtype=plain.dtype, rest_device=""), m.trainable) for m in chosen
        )
        return Bucket(self.label, f"{plain.name}_secondary", plan, members, plain.dtype)

    @cached_property
    def layout(self) -> Layout:
        return self.layout_of(self.members)

    @cached_property
    def packed(self) -> Layout:
        """The layout of only the small members, which travel together if ranks exchange messages."""
        return self.layout_of([self.members[i] for i in self.layout.small])

    def layout_of(self, members: Sequence[Member]) -> Layout:
        """The layout of some of the members, as if the bucket had no others."""
        plan = self.plan
        if plan.placement is Placement.OWNER:
            return OwnerLayout(members, plan.world_size, self.dtype)
        return ShardLayout(members, plan.world_size if plan.placement is Placement.SHARD else 1, self.dtype)

    @property
    def crossings(self) -> int:
        """How often each byte crosses the link: twice for an all_reduce (a reduce_scatter and an all_gather)."""
        return 2 if self.plan.placement is Placement.REPLICATE else 1

    @property
    def bytes(self) -> int:
        """Bytes of the unsharded bucket, padding included. A collective moves these for the whole group."""
        return self.wire.bytes(self) if self.wire is not None else self.full_numel * self.dtype.bytes

    @cached_property
    def member_bytes(self) -> tuple[int, ...]:
        """The share of each member in ``bytes``, by its elements."""
        ends = accumulate((m.parameter.full_numel for m in self.members), initial=0)
        return tuple(b - a for a, b in pairwise(end * self.bytes // self.full_numel for end in ends))

    @property
    def travels_as(self) -> str:
        """The dtype on the wire, in short, or the name of the wire."""
        return (self.wire.name if self.wire is not None else "") or str(self.dtype.shortname())

    def __repr__(self) -> str:
        names = ", ".join(m.parameter.name for m in self.members)
        return f"Bucket({self.name}: {names})"


def inflight_limits(buckets: Iterable[Bucket]) -> dict[BucketPlan, int]:
    """The bytes that collectives may have in flight at once, for each plan of a trace's buckets.

    A single bucket may be larger.
    """
    largest: dict[BucketPlan, int] = {}
    for bucket in buckets:
        largest[bucket.plan] = max(largest.get(bucket.plan, 0), bucket.bytes)
    return {
        plan: (plan.prefetch + 1) * size if plan.max_inflight_bytes is None else plan.max_inflight_bytes
        for plan, size in largest.items()
    }
