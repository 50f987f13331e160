"""Buckets: the parameters that one collective carries, their layout on the wire, and how they are grouped.

A bucket is one row for each rank: the rank's parts of the members, flattened, one after the other. Rows of shards have
equal lengths; rows of whole parameters are as long as the parameters that the rank owns. Tensors are passed and
returned in the order of the bucket's members. Their places are computed once for each bucket: a step costs one or two
views for each member.

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
from typing import Any, NamedTuple, Protocol

from passes.plan.cost import DEFAULT_LINKS, Link
from passes.plan.plan import BucketPlan, Ends, Member, Placement, Shape, ShardedParameter, Split, Wire

import torch
from thunder.core import dtypes
from thunder.core.codeutils import ContextObject

# ---- layouts ----


SMALL = 64 * 1024  # bytes of a shard, below which a separate message or allocation costs more than a copy
ALIGNMENT = 16  # bytes at which kernels for GPUs read vectors
UNITS = 4096  # limit of the length of a permutation


class Layout(Protocol):
    """The place of each member of a bucket.

    ``dtype`` is the one on the wire: packing casts. ``row_sizes`` are the elements of each rank's row, ``numel`` those
    of this rank's. ``small`` are the indices of members that take fewer than ``SMALL`` bytes on a rank; ``large`` are
    those of the others.
    """

    dtype: torch.dtype
    row_sizes: list[int]
    numel: int
    small: tuple[int, ...]
    large: tuple[int, ...]

    def flat_row(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the shards as one row: without a copy if they are adjacent in memory (``fsdp`` makes a bucket's
        shards adjacent), else with one copy."""

    def pieces(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the row without a copy, as one flat tensor or as one for each shard."""

    def unpack_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Turns the flat buffer of all ranks' rows into the unsharded parameters."""

    def pack_rows(self, tensors: Sequence[torch.Tensor], *, divisor: float = 1) -> torch.Tensor:
        """Inverts :meth:`unpack_rows`: returns the flat buffer of the tensors, each divided by ``divisor``."""

    def unpack_row(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns this rank's shards as views of its row."""


class Place(NamedTuple):
    """A member's shard in a row, and its parameter: the shapes and contiguous strides of both."""

    start: int  # where the shard starts in a row, in elements
    numel: int  # elements of the shard
    shard: Shape
    shard_strides: Shape
    full: Shape
    full_strides: Shape


class ShardLayout:
    """The :class:`Layout` of shards: ``world_size`` equal rows. Replicated parameters are whole, in one row."""

    def __init__(self, members: Sequence[Member], world_size: int, dtype: dtypes.dtype) -> None:
        sizes = [m.numel for m in members]
        self.dtype = dtypes.to_torch_dtype(dtype)
        self.world_size = world_size
        self.sizes = sizes
        self.numel = sum(sizes)
        self.places = [_place(m, start) for m, start in zip(members, accumulate(sizes, initial=0), strict=False)]
        self.row_sizes = [self.numel] * world_size
        self.padded = any(math.prod(p.full) < p.numel * world_size for p in self.places)
        self.scalars = any(not p.full for p in self.places)
        self.small, self.large = _by_size(sizes, dtype.bytes)
        self.beside = self._side_by_side(1)
        self.aligned = self._side_by_side(max(1, ALIGNMENT // dtype.bytes))

    def flat_row(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return _joined(self.pieces(shards))

    def pieces(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        first = shards[0]
        if len(shards) == 1:
            return [first.reshape(-1)]
        at, itemsize = first.data_ptr(), first.element_size()
        room = first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() - at
        if (
            room >= self.numel * itemsize  # addresses in this range belong to one storage
            and list(map(torch.Tensor.data_ptr, shards)) == [at + p.start * itemsize for p in self.places]
            and all(map(torch.Tensor.is_contiguous, shards))
        ):
            return [first.as_strided((self.numel,), (1,))]
        return [s.reshape(-1) for s in shards]

    def unpack_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies nothing for one parameter or one rank. Several parameters are copied once each, so that they are
        contiguous: a large one into memory of its own, freed after its last use; small ones side by side."""
        places, world_size = self.places, self.world_size
        if len(places) == 1 or world_size == 1:
            at = rows.storage_offset()
            return tuple([rows.as_strided(p.full, p.full_strides, at + p.start) for p in places])
        if rows.device.type == "cpu" and self.permutation is not None:
            beside = rows.view(-1, self.unit).index_select(0, self.permutation)
            return tuple([beside.as_strided(p.full, p.full_strides, world_size * p.start) for p in places])
        offsets, elements = self.beside if rows.device.type in ("cpu", "meta") else self.aligned
        beside = rows.new_empty(elements)
        columns = [
            rows.new_empty(world_size, size)
            if offset is None
            else beside.as_strided((world_size, size), (size, 1), offset)
            for size, offset in zip(self.sizes, offsets, strict=True)
        ]
        torch.split_with_sizes_copy(rows.view(world_size, self.numel), self.sizes, dim=1, out=columns)
        return tuple(
            column.as_strided(p.full, p.full_strides, offset or 0)
            for column, p, offset in zip(columns, places, offsets, strict=True)
        )

    def _side_by_side(self, aligned: int) -> tuple[list[int | None], int]:
        """The offsets of the small members, which are unpacked side by side at multiples of ``aligned`` elements, and
        the elements that they take."""
        offsets: list[int | None] = [None] * len(self.sizes)
        end = 0
        for i in self.small:
            offsets[i] = end
            end += -(-self.world_size * self.sizes[i] // aligned) * aligned
        return offsets, end

    @cached_property
    def unit(self) -> int:
        """The largest number of elements of which each member's shard is a multiple."""
        return math.gcd(*self.sizes)

    @cached_property
    def permutation(self) -> torch.Tensor | None:
        """The unit in the buffer of all rows that belongs at each place when the members are side by side.

        On a CPU one selection by it costs less than a copy for each member. None if there are large members or many
        units.
        """
        if self.large or self.world_size * self.numel > UNITS * self.unit:
            return None
        units = torch.arange(self.world_size * self.numel // self.unit).view(self.world_size, -1)
        columns = units.split([size // self.unit for size in self.sizes], dim=1)
        return torch.cat([column.reshape(-1) for column in columns])

    def pack_rows(self, tensors: Sequence[torch.Tensor], *, divisor: float = 1) -> torch.Tensor:
        tensors = _summed(tensors, self.places) if self.scalars else tensors
        one_by_one = self.padded and tensors[0].device.type == "cpu"  # a copy of each member, and none of padded ones
        rows = tensors[0].new_empty(self.world_size, self.numel, dtype=self.dtype)
        (self._fill_one_by_one if one_by_one else self._fill_at_once)(rows, tensors)
        return (rows if divisor == 1 else rows.div_(divisor)).view(-1)

    def _fill_one_by_one(self, rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        rows.zero_()
        for tensor, p in zip(tensors, self.places, strict=True):
            flat = tensor.reshape(-1)
            whole = flat.numel() // p.numel  # ranks whose shards have no padding
            rows[:whole, p.start : p.start + p.numel] = flat[: whole * p.numel].view(whole, p.numel)
            if rest := flat.numel() - whole * p.numel:
                rows[whole, p.start : p.start + rest] = flat[whole * p.numel :]

    def _fill_at_once(self, rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """On a GPU one kernel, which casts and pads with zeros, if the tensors are contiguous."""
        tensors = [tensor.contiguous() for tensor in tensors]
        torch._chunk_cat(tensors, dim=0, num_chunks=self.world_size, out=rows)

    def unpack_row(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        at = row.storage_offset()
        return tuple([row.as_strided(p.shard, p.shard_strides, at + p.start) for p in self.places])


class OwnerLayout:
    """The :class:`Layout` of whole parameters, each on the rank that owns it: uneven rows.

    A member's ``start`` is its offset in the buffer of all rows. Each member is contiguous there: nothing is unpacked.
    """

    def __init__(self, members: Sequence[Member], world_size: int, dtype: dtypes.dtype) -> None:
        owners = [m.parameter.owner for m in members]
        self.dtype = dtypes.to_torch_dtype(dtype)
        self.sizes = [m.parameter.full_numel for m in members]
        self.by_owner = sorted(range(len(members)), key=lambda i: owners[i])
        self.mine = [i for i in self.by_owner if owners[i] == members[i].parameter.plan.rank]
        self.row_sizes = [0] * world_size
        starts = [0] * len(members)
        at = 0
        for i in self.by_owner:
            starts[i] = at
            at += self.sizes[i]
            self.row_sizes[owners[i]] += self.sizes[i]
        self.places = [_place(m, start) for m, start in zip(members, starts, strict=True)]
        self.numel = sum(self.sizes[i] for i in self.mine)
        self.scalars = any(not p.full for p in self.places)
        self.small, self.large = _by_size(self.sizes, dtype.bytes)

    def flat_row(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return _joined(self.pieces(shards))

    def pieces(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [shards[i].reshape(-1) for i in self.mine] or [shards[0].new_empty(0)]

    def unpack_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(rows.as_strided(p.full, p.full_strides, p.start) for p in self.places)

    def pack_rows(self, tensors: Sequence[torch.Tensor], *, divisor: float = 1) -> torch.Tensor:
        tensors = _summed(tensors, self.places) if self.scalars else tensors
        rows = tensors[0].new_empty(sum(self.sizes), dtype=self.dtype)
        torch.cat([tensors[i].reshape(-1) for i in self.by_owner], out=rows)
        return rows if divisor == 1 else rows.div_(divisor)

    def unpack_row(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shards, at = {}, row.storage_offset()
        for i in self.mine:
            shards[i] = row.as_strided(self.places[i].full, self.places[i].full_strides, at)
            at += self.sizes[i]
        return tuple(shards[i] if i in shards else row.new_empty(place.shard) for i, place in enumerate(self.places))


def summed_to(grad: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Sums a gradient over the dims in which its parameter was broadcast.

    Thunder leaves this sum for a 0-dim tensor to torch's autograd engine, which computes it on receipt of the gradient.
    """
    return grad if tuple(grad.shape) == shape else grad.sum_to_size(shape)


def _summed(tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> list[torch.Tensor]:
    return [summed_to(tensor, p.full).reshape(p.full or (1,)) for tensor, p in zip(tensors, places, strict=True)]


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _by_size(sizes: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices of the small and of the large members, whose ``sizes`` are in elements of ``itemsize`` bytes."""
    small = tuple(i for i, size in enumerate(sizes) if size * itemsize < SMALL)
    large = tuple(i for i, size in enumerate(sizes) if size * itemsize >= SMALL)
    return small, large


def _place(member: Member, start: int) -> Place:
    shard, full = member.parameter.shard_shape, member.parameter.full_shape
    return Place(start, member.numel, shard, _strides(shard), full, _strides(full))


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


# ---- parts of parameters ----


class CutLayout:
    """The messages between ranks for a bucket of which each rank computes with a part of the members.

    A *seat* is a rank's number among those that share parameters, and so that of its part, whose chunks are single.
    ``received`` has, for each rank, the elements of each member that are in its rows and in this rank's part; ``sent``,
    for each seat, those that are in this rank's rows and in the part of the seat.
    """

    def __init__(self, members: Sequence[Member], rank: int) -> None:
        self.parameters = [m.parameter for m in members]
        self.seats: tuple[int, ...] = self.parameters[0].cut.plan.seats
        self.rank = rank
        self.received = [[_elements(p, r, self.seats[rank]) for p in self.parameters] for r in range(len(self.seats))]
        self.sent = [[_elements(p, rank, seat) for p in self.parameters] for seat in range(max(self.seats) + 1)]
        self._positions: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def own_rows(self, number: int, shard: torch.Tensor) -> torch.Tensor:
        """The shard of a member without padding."""
        return shard[: len(_rows(self.parameters[number], self.rank))]

    def positions(self, number: int, seat: int, device: torch.device) -> torch.Tensor:
        """Where, along the dim that is cut, this rank's rows of a member are in the part of a seat. Made once."""
        key = number, seat, device
        if key not in self._positions:
            found = positions_of(self.parameters[number], self.rank, seat)
            self._positions[key] = torch.tensor(found, dtype=torch.long, device=device)
        return self._positions[key]


def _rows(p: ShardedParameter, rank: int) -> range:
    """The rows of a parameter that a rank holds, without padding."""
    each = p.shard_shape[0]
    return range(min(rank * each, p.full_shape[0]), min((rank + 1) * each, p.full_shape[0]))


def positions_of(p: ShardedParameter, rank: int, seat: int) -> list[int]:
    """Where, along the dim that is cut, a rank's rows are in the part of a seat."""
    split, held = p.cut.split, p.cut.plan.chunks_of(seat)
    rows = _rows(p, rank) if split.dim == 0 else range(split.size)
    chunks = ((start + chunk * each, each) for start, each in split.blocks() for chunk in held)
    found = (range(max(start, rows.start), min(start + each, rows.stop)) for start, each in chunks)
    return [at - rows.start for own in found for at in own]


def _elements(p: ShardedParameter, rank: int, seat: int) -> int:
    """The elements of a parameter that are in a rank's rows and in the part of a seat."""
    split, rows = p.cut.split, _rows(p, rank)
    if split.dim != 0:
        return len(rows) * math.prod(p.used_shape[1:])  # each row has as much of each part
    chunks = p.cut.plan.chunks_of(seat)
    count = sum(_before(rows.stop, split, chunk) - _before(rows.start, split, chunk) for chunk in chunks)
    return count * math.prod(p.full_shape[1:])


def _before(row: int, split: Split, chunk: int) -> int:
    """How many of the first rows are in a chunk."""
    return sum(min(max(row - start - chunk * each, 0), each) for start, each in split.blocks())


# ---- buckets ----


class Bucket(ContextObject):
    """Parameters of one dtype and device that are gathered by one collective and reduced by another.

    Thunder prints a ContextObject by its name: a trace reads ``all_gather((w, b), h_0)``. ``dtype`` is the dtype on the
    wire; :mod:`passes.plan.bucket` defines the layout there. A bucket with a ``wire`` travels by it, in one direction:
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
        key = id(plan), keys[id(use)], use.dtype, use.device, use.parameter.cut and id(use.parameter.cut.plan)
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
