"""Buckets: the parameters that one collective carries, and how they are grouped.

How parameters are grouped depends only on their plan and on the order of first use in a trace.

Note [Pieces]. The first gather of a step and its last reduction overlap with no compute. Split into p pieces, a block's
bucket shortens both waits to a p-th, and costs p - 1 more latencies for each collective of each block. What is best
follows from the link alone. It must have been measured, because the default constants stand for a slow one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from passes.plan.cost import DEFAULT_LINKS, Link
from passes.plan.layout import CutLayout, Layout, OwnerLayout, ShardLayout
from passes.plan.plan import BucketPlan, Ends, Member, Placement, ShardedParameter, Wire

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

    @property
    def is_cut(self) -> bool:
        """Whether a gather gives each rank its parts of the members, with which it computes."""
        return self.members[0].parameter.cut is not None

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

    @cached_property
    def cuts(self) -> CutLayout:
        """The messages between ranks if the members are cut."""
        return CutLayout(self.members, self.plan.rank)

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


# ---- grouping ----


MB = 2**20
MOST_PIECES = 4


class Use(NamedTuple):
    """A member with its dtype and device, which must be equal for two members to share a collective."""

    member: Member
    dtype: dtypes.dtype
    device: str

    @property
    def parameter(self) -> ShardedParameter:
        return self.member.parameter

    @property
    def bytes(self) -> int:
        """Bytes of the parameter when gathered, padding included."""
        return self.parameter.full_numel * self.parameter.plan.unsharded_dtype(self.dtype).bytes


class Group(NamedTuple):
    label: str
    uses: tuple[Use, ...]


def group_uses(uses: Iterable[Use]) -> list[Group]:
    """Groups parameters into buckets. Takes and returns them in order of first use.

    - "none": each parameter by itself.
    - "layer": the parameters that one module owns.
    - "block": the parameters of one repeated block, in pieces if its plan says so. Those outside the blocks are grouped
      by first use, so that an embedding neither waits for the head nor is held until it.
    - "model": all parameters.
    - a size in MB: as many consecutive parameters as fit; a larger one by itself.

    Parameters of different models, dtypes or devices never share a bucket, nor do whole ones and those that are cut.
    Within a bucket they are in the model's order, like their shards in memory.
    """
    uses = list(uses)
    keys = {id(u): key for u, key in zip(uses, _keys(uses), strict=True)}
    buckets: dict[Hashable, list[Use]] = {}
    for use in uses:
        plan = use.parameter.plan
        key = id(plan), keys[id(use)], use.dtype, use.device, use.parameter.cut is not None
        buckets.setdefault(key, []).append(use)
    return [Group(label, members) for bucket in buckets.values() for label, members in _pieces(bucket)]


def choose_pieces(block_bytes: int, blocks: int, world_size: int, link: Link) -> int:
    """The number of buckets for the parameters of a block, by Note [Pieces].

    Args:
        block_bytes: bytes of the unsharded parameters of the largest block.
        blocks: how many blocks there are.
        world_size: ranks that gather them.
        link: their link. A default one counts as unmeasured.
    """
    if world_size < 2 or link in DEFAULT_LINKS:
        return 1
    seconds = block_bytes * (world_size - 1) / world_size / link.bandwidth

    def costs(pieces: int) -> float:
        collectives = 3 * blocks  # a block is gathered twice at most, and reduced once
        return 2 * seconds / pieces + collectives * (pieces - 1) * link.latency

    return min(range(1, MOST_PIECES + 1), key=costs)


def _pieces(bucket: list[Use]) -> list[tuple[str, tuple[Use, ...]]]:
    """A bucket in pieces of consecutive parameters, each with its label. A larger parameter is a piece by itself."""
    plan, block = bucket[0].parameter.plan, bucket[0].parameter.block
    ordered = sorted(bucket, key=lambda u: u.parameter.index)
    pieces = [ordered]
    if plan.pieces > 1 and plan.bucketing == "block" and block is not None:
        pieces = _of_similar_size(ordered, plan.pieces)
    labels = [_label(bucket)] if len(pieces) == 1 else [_range(piece) for piece in pieces]
    return [(label, tuple(piece)) for label, piece in zip(labels, pieces, strict=True)]


def _of_similar_size(uses: list[Use], count: int) -> list[list[Use]]:
    limit = math.ceil(sum(u.bytes for u in uses) / count)
    pieces: list[list[Use]] = []
    size = 0
    for use in uses:
        if not pieces or size + use.bytes > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(use)
        size += use.bytes
    return pieces


def _keys(uses: list[Use]) -> list[Hashable]:
    """For each use, the key of its bucket among those of the same model, dtype and device."""
    keys: list[Hashable] = []
    size_index, size = 0, 0
    run = {id(u): i for i, (_, g) in enumerate(groupby(uses, lambda u: u.parameter.block)) for u in g}
    for use in uses:
        strategy, parameter = use.parameter.plan.bucketing, use.parameter
        if strategy == "none":
            keys.append(id(parameter))
        elif strategy == "model":
            keys.append("model")
        elif strategy == "layer":
            keys.append(parameter.layer)
        elif strategy == "block":
            keys.append(parameter.block if parameter.block is not None else ("outside", run[id(use)]))
        else:
            if size and size + use.bytes > float(strategy) * MB:
                size_index, size = size_index + 1, 0
            size += use.bytes
            keys.append(size_index)
    return keys


def _label(uses: list[Use]) -> str:
    """The name of a bucket for users: the common block or module, or the first and the last."""
    parameters = [u.parameter for u in uses]
    strategy = parameters[0].plan.bucketing
    if strategy == "none":
        return parameters[0].name
    if strategy == "model":
        return "model"
    blocks = {p.block for p in parameters}
    if strategy == "block" and len(blocks) == 1 and None not in blocks:
        return str(parameters[0].block)
    return _range(uses)


def _range(uses: list[Use]) -> str:
    first, last = uses[0].parameter.layer or "root", uses[-1].parameter.layer or "root"
    return first if first == last else f"{first}..{last}"
