"""How the members of a bucket lie in memory on the wire.

A bucket is ``world_size`` rows of ``bucket.numel`` elements; row r holds rank r's shards, flattened, one after the
other. Tensors come and go in the order of the bucket's members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.plan import Bucket, Shape

import torch


def flat_row(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The shards as one row: without a copy where they already lie one after the other in memory, as ``fsdp`` puts
    those of a bucket; else in one copy."""
    first = shards[0]
    if len(shards) == 1:
        return first.reshape(-1)
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for shard in shards:
        if shard.data_ptr() != at or not shard.is_contiguous() or shard.untyped_storage().data_ptr() != storage:
            return torch.cat([s.reshape(-1) for s in shards])
        at += shard.numel() * shard.element_size()
    return first.as_strided(((at - first.data_ptr()) // first.element_size(),), (1,))


def unpack_rows(rows: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """Turns the gathered ``(world_size * numel,)`` buffer into the unsharded parameters.

    A bucket of one parameter needs no copy; with several, each is copied out once, so that it is contiguous and keeps
    no other's memory.
    """
    world_size, table = bucket.plan.world_size, rows.view(bucket.plan.world_size, bucket.numel)
    if len(bucket.members) == 1:
        columns = [table]
    else:
        sizes = [m.numel for m in bucket.members]
        columns = [rows.new_empty(world_size, size) for size in sizes]
        torch.split_with_sizes_copy(table, sizes, dim=1, out=columns)
    full = []
    for column, m in zip(columns, bucket.members, strict=True):
        shape = m.parameter.full_shape
        padded = column.view(-1, *m.parameter.shard_shape[1:])
        full.append(padded[: shape[0]] if shape else padded[0])
    return tuple(full)


def pack_rows(tensors: Sequence[torch.Tensor], bucket: Bucket, *, divisor: int = 1) -> torch.Tensor:
    """The inverse of :func:`unpack_rows`: a ``(world_size * numel,)`` buffer of the tensors divided by ``divisor``."""
    world_size = bucket.plan.world_size
    padded = any(m.parameter.shard_shape[0] * world_size != (m.parameter.full_shape or (1,))[0] for m in bucket.members)
    allocate = tensors[0].new_zeros if padded else tensors[0].new_empty
    rows = allocate(world_size, bucket.numel)
    start = 0
    for tensor, m in zip(tensors, bucket.members, strict=True):
        columns = rows[:, start : start + m.numel]
        # ranks whose shards have no padding, and the elements of the next one
        whole, rest = divmod(math.prod(m.parameter.full_shape), m.numel)
        flat = summed_to(tensor, m.parameter.full_shape).reshape(-1)
        _write(columns[:whole], flat[: whole * m.numel].view(whole, m.numel), divisor)
        if rest:
            _write(columns[whole, :rest], flat[whole * m.numel :], divisor)
        start += m.numel
    return rows.view(-1)


def unpack_row(row: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """This rank's shards as views of its row."""
    pieces = row.split([m.numel for m in bucket.members])
    return tuple(piece.view(m.parameter.shard_shape) for piece, m in zip(pieces, bucket.members, strict=True))


def summed_to(grad: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Sums a gradient over the dims by which its parameter was broadcast.

    Thunder leaves that to the end for 0-dim tensors (torch's autograd engine does it where it receives a gradient).
    """
    return grad if tuple(grad.shape) == shape else grad.sum_to_size(shape)


def _write(target: torch.Tensor, source: torch.Tensor, divisor: int) -> None:
    if divisor == 1:
        target.copy_(source)
    else:
        torch.div(source, divisor, out=target)
