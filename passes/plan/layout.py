"""How the members of a bucket lie in memory on the wire.

A bucket is a row for each rank, which holds what that rank has of the members, flattened, one after the other: equal
rows of shards, or rows of as much as each rank owns. Tensors come and go in the order of the bucket's members. Where
they lie is worked out once for each bucket: at each step a member costs one or two views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from thunder.core import dtypes

if TYPE_CHECKING:
    from passes.plan.plan import Member, Shape

SMALL = 64 * 1024  # bytes of a shard: below, a message or an allocation of its own costs more than a copy


class Place(NamedTuple):
    """A member's shard in a row, and its parameter: shapes, and the strides of both laid out in that order."""

    start: int  # of the shard in a row, in elements
    numel: int  # of the shard
    shard: Shape
    shard_strides: Shape
    full: Shape
    full_strides: Shape


class Layout:
    """Where each member of a bucket of shards lies: ``world_size`` equal rows.

    Members whose shards are below ``SMALL`` bytes count as small. ``dtype`` is the one on the wire: packing casts.
    """

    def __init__(self, members: Sequence[Member], world_size: int, dtype: dtypes.dtype) -> None:
        sizes = [m.numel for m in members]
        self.dtype = dtypes.to_torch_dtype(dtype)
        self.world_size = world_size
        self.sizes = sizes
        self.numel = sum(sizes)
        self.places = [_place(m, start) for m, start in zip(members, accumulate(sizes, initial=0), strict=False)]
        self.row_sizes = [self.numel] * world_size  # elements
        self.padded = any(math.prod(p.full) < p.numel * world_size for p in self.places)
        self.scalars = any(not p.full for p in self.places)
        self._split_by_size(sizes, dtype.bytes)
        self.offsets: list[int | None] = [None] * len(sizes)  # of the small ones side by side when they are unpacked
        self.beside = 0  # and the elements of them all
        for i in self.small:
            self.offsets[i] = self.beside
            self.beside += world_size * sizes[i]

    def _split_by_size(self, sizes: list[int], itemsize: int) -> None:
        self.small = tuple(i for i, size in enumerate(sizes) if size * itemsize < SMALL)
        self.large = tuple(i for i, size in enumerate(sizes) if size * itemsize >= SMALL)

    def flat_row(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The shards as one row: without a copy where they already lie one after the other in memory, as ``fsdp`` puts
        those of a bucket; else in one copy."""
        pieces = self.pieces(shards)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def pieces(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The row in as few flat tensors as hold it without a copy: one, or one of each shard."""
        first = shards[0]
        if len(shards) == 1:
            return [first.reshape(-1)]
        at, itemsize = first.data_ptr(), first.element_size()
        room = first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() - at
        if (
            room >= self.numel * itemsize  # in one storage, for its memory is no other's
            and [s.data_ptr() for s in shards] == [at + p.start * itemsize for p in self.places]
            and all(s.is_contiguous() for s in shards)
        ):
            return [first.as_strided((self.numel,), (1,))]
        return [s.reshape(-1) for s in shards]

    def unpack_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Turns the gathered ``(world_size * numel,)`` buffer into the unsharded parameters.

        A bucket of one parameter, or of one rank, needs no copy. With several, each is copied out once, so that it is
        contiguous: a large one into memory of its own, which is free as soon as it is not used any more, small ones
        side by side.
        """
        places, world_size = self.places, self.world_size
        if len(places) == 1 or world_size == 1:
            at = rows.storage_offset()
            return tuple(rows.as_strided(p.full, p.full_strides, at + p.start) for p in places)
        beside = rows.new_empty(self.beside)
        columns = [
            rows.new_empty(world_size, size)
            if offset is None
            else beside.as_strided((world_size, size), (size, 1), offset)
            for size, offset in zip(self.sizes, self.offsets, strict=True)
        ]
        torch.split_with_sizes_copy(rows.view(world_size, self.numel), self.sizes, dim=1, out=columns)
        return tuple(
            column.as_strided(p.full, p.full_strides, offset or 0)
            for column, p, offset in zip(columns, places, self.offsets, strict=True)
        )

    def pack_rows(self, tensors: Sequence[torch.Tensor], *, divisor: int = 1) -> torch.Tensor:
        """The inverse of :meth:`unpack_rows`: a ``(world_size * numel,)`` buffer of the tensors, each divided
        by ``divisor``."""
        tensors = self._summed(tensors)
        allocate = tensors[0].new_zeros if self.padded else tensors[0].new_empty
        rows = allocate(self.world_size, self.numel, dtype=self.dtype)
        if self.padded:
            for tensor, p in zip(tensors, self.places, strict=True):
                flat = tensor.reshape(-1)
                whole = flat.numel() // p.numel  # ranks whose shards have no padding
                rows[:whole, p.start : p.start + p.numel] = flat[: whole * p.numel].view(whole, p.numel)
                if rest := flat.numel() - whole * p.numel:
                    rows[whole, p.start : p.start + rest] = flat[whole * p.numel :]
        else:
            columns = [tensor.reshape(self.world_size, size) for tensor, size in zip(tensors, self.sizes, strict=True)]
            torch.cat(columns, dim=1, out=rows)
        return (rows if divisor == 1 else rows.div_(divisor)).view(-1)

    def _summed(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self.scalars:
            return tensors
        return [summed_to(tensor, p.full) for tensor, p in zip(tensors, self.places, strict=True)]

    def unpack_row(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's shards as views of its row."""
        at = row.storage_offset()
        return tuple(row.as_strided(p.shard, p.shard_strides, at + p.start) for p in self.places)


class OwnedLayout(Layout):
    """Where each member of a bucket lies whose members are whole, each on the rank that owns it: uneven rows.

    A member's ``start`` is in the buffer of all rows, where it lies in one piece: nothing has to be unpacked.
    """

    def __init__(self, members: Sequence[Member], world_size: int, dtype: dtypes.dtype) -> None:
        self.dtype = dtypes.to_torch_dtype(dtype)
        self.world_size = world_size
        self.sizes = [m.parameter.full_numel for m in members]
        self.by_owner = sorted(range(len(members)), key=lambda i: members[i].parameter.owner)
        self.mine = [i for i in self.by_owner if members[i].parameter.owner == members[i].parameter.plan.rank]
        self.row_sizes = [0] * world_size
        starts = [0] * len(members)
        at = 0
        for i in self.by_owner:
            starts[i] = at
            at += self.sizes[i]
            self.row_sizes[members[i].parameter.owner] += self.sizes[i]
        self.places = [_place(m, start) for m, start in zip(members, starts, strict=True)]
        self.numel = sum(self.sizes[i] for i in self.mine)
        self.scalars = any(not p.full for p in self.places)
        self._split_by_size(self.sizes, dtype.bytes)

    def pieces(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [shards[i].reshape(-1) for i in self.mine] or [shards[0].new_empty(0)]

    def unpack_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(rows.as_strided(p.full, p.full_strides, p.start) for p in self.places)

    def pack_rows(self, tensors: Sequence[torch.Tensor], *, divisor: int = 1) -> torch.Tensor:
        tensors = self._summed(tensors)
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
    """Sums a gradient over the dims by which its parameter was broadcast.

    Thunder leaves that to the end for 0-dim tensors (torch's autograd engine does it where it receives a gradient).
    """
    return grad if tuple(grad.shape) == shape else grad.sum_to_size(shape)


def _place(member: Member, start: int) -> Place:
    shard, full = member.parameter.shard_shape, member.parameter.full_shape
    return Place(start, member.numel, shard, _strides(shard), full, _strides(full))


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
