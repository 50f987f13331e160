"""The layout of a bucket's members on the wire.

A bucket is one row for each rank: the rank's parts of the members, flattened, one after the other. Rows of shards have
equal lengths; rows of whole parameters are as long as the parameters that the rank owns. Tensors are passed and
returned in the order of the bucket's members. Their places are computed once for each bucket: a step costs one or two
views for each member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

from passes.plan.plan import Member, Shape, ShardedParameter, Split

import torch
from thunder.core import dtypes

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

    A *seat* is a rank's number among those that share parameters, and so that of its part. ``received`` has, for each
    rank, the elements of each member that are in its rows and in this rank's part; ``sent``, for each seat, those that
    are in this rank's rows and in the part of the seat.
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
    split = p.cut.split
    rows = _rows(p, rank) if split.dim == 0 else range(split.size)
    return [i for i, at in enumerate(rows) if at // split.inner % split.length == seat]


def _elements(p: ShardedParameter, rank: int, seat: int) -> int:
    """The elements of a parameter that are in a rank's rows and in the part of a seat."""
    split, rows = p.cut.split, _rows(p, rank)
    if split.dim != 0:
        return len(rows) * math.prod(p.used_shape[1:])  # each row has as much of each part
    first, end = (_before(at, split, seat) for at in (rows.start, rows.stop))
    return (end - first) * math.prod(p.full_shape[1:])


def _before(row: int, split: Split, seat: int) -> int:
    """How many of the first rows are in the part of a seat."""
    each, rest = divmod(row, split.length * split.inner)
    return each * split.inner + min(max(rest - seat * split.inner, 0), split.inner)
