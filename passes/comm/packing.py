"""The rows of a rounded bucket, one for each rank, and the messages in them.

A GPU takes long to launch a kernel: it works on all members of a bucket, in the rows of all ranks, as one tensor. A
CPU's caches are small: it works on one member after the other, in the rows of all ranks, and copies none before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from passes.comm.quantize import Format, Messages
from passes.plan import Bucket, Kernels, Placement
from passes.plan.layout import Layout

import torch
from thunder.core import dtypes

ROUNDED = (dtypes.float32, dtypes.bfloat16, dtypes.float16)  # dtypes at rest that are rounded
SMALLEST = 1024  # elements of a member in a rank's row, below which rounding saves next to nothing
ALIGNMENT = 16  # bytes at which rows begin
# Elements that are rounded at once: what a CPU's cache holds, what occupies a GPU.
CPU_CHUNK, GPU_CHUNK = 2**18, 2**24

Stacks = Sequence[tuple[int, torch.Tensor]]  # rows of bytes, ``(rows, bytes)``, and the rank of the first of them


class Packing:
    """The rows of a bucket.

    A rank's row has a message of its members that are ``rounded``, one after the other in whole blocks, then the
    ``exact`` ones as their layout has them, in the dtype of the bucket. Rows are padded to ``ALIGNMENT``. Adjacent rows
    of the same members are a stack, which :meth:`cut` makes a tensor: those of all ranks if members are sharded, one if
    they have owners.
    """

    def __init__(self, bucket: Bucket, format: Format) -> None:
        plan = bucket.plan
        whole = self.whole = plan.placement is Placement.OWNER  # members are on the rank that owns them
        self.rank, self.format, self.dtype = plan.rank, format, bucket.layout.dtype
        self.numels = [m.parameter.full_numel // (1 if whole else plan.world_size) for m in bucket.members]
        large = bucket.rest_dtype in ROUNDED and plan.world_size > 1
        self.rounded = tuple(i for i, numel in enumerate(self.numels) if large and numel >= SMALLEST)
        self.exact = tuple(i for i in range(len(self.numels)) if i not in self.rounded)
        self.at_once = not plan.direct  # ranks send messages to each other only between CPUs
        self.chunk = chunk_of(on_cpu=plan.direct)
        self.exact_layout = self._layout(bucket, self.exact)
        self.rounded_layout = self._layout(bucket, self.rounded)
        self.blocks: list[dict[int, slice]] = []  # for each rank, the blocks of its rounded members
        self.exact_rows: list[slice] = []  # for each rank, the bytes of its exact members
        self.row_bytes: list[int] = []
        for rank in range(plan.world_size):
            end, blocks = 0, dict[int, slice]()
            for i in self.rounded:
                if not whole or bucket.members[i].parameter.owner == rank:
                    blocks[i] = slice(end, end := end + format.blocks(self.numels[i]))
            at = format.nbytes(end * format.block)
            exact = self.exact_layout.row_sizes[rank] * bucket.dtype.bytes if self.exact_layout is not None else 0
            self.blocks.append(blocks)
            self.exact_rows.append(slice(at, at + exact))
            self.row_bytes.append(-(-(at + exact) // ALIGNMENT) * ALIGNMENT)
        ranks, mine = plan.world_size, plan.rank
        self.stacks = [(rank, 1) for rank in range(ranks)] if whole else [(0, ranks)]
        around = [(0, mine), (mine + 1, ranks - mine - 1)]
        self.others = [stack for stack in (self.stacks if whole else around) if stack[0] != mine and stack[1]]

    @staticmethod
    def _layout(bucket: Bucket, members: Sequence[int]) -> Layout | None:
        return bucket.layout_of([bucket.members[i] for i in members]) if members else None

    def work(self, one: Callable[[int, int], Kernels], *, rows: int, share: float) -> Kernels:
        """The work on the rounded members in so many rows: on a tensor of some of them it is ``one(columns, rows)``.
        If members have owners, each is in one row, and a ``share`` of the ranks works on it: the mean over ranks."""
        numels = [self.numels[i] for i in self.rounded]
        if self.whole:
            return sum((one(numel, 1) for numel in numels), Kernels()) * share
        return sum((one(numel, rows) for numel in ([sum(numels)] if self.at_once else numels)), Kernels())

    @property
    def exact_bytes(self) -> int:
        """The bytes of the exact members of all rows."""
        return sum(place.stop - place.start for place in self.exact_rows)

    @property
    def own_numel(self) -> int:
        """The elements of the blocks of this rank's row."""
        return self._width(self.rank)

    # ---- rows ----

    def bytes_of(self, stacks: Sequence[tuple[int, int]]) -> int:
        return sum(count * self.row_bytes[first] for first, count in stacks)

    def cut(self, flat: torch.Tensor, stacks: Sequence[tuple[int, int]]) -> Stacks:
        """The rows of stacks in a flat tensor of bytes that has nothing else."""
        pieces = flat.split_with_sizes([count * self.row_bytes[first] for first, count in stacks])
        return [(first, p.view(count, -1)) for p, (first, count) in zip(pieces, stacks, strict=True) if len(p)]

    def without_own(self, flat: torch.Tensor) -> torch.Tensor:
        """The rows of the other ranks, from those of all. A copy if they are on both sides."""
        start = sum(self.row_bytes[: self.rank])
        before, after = flat[:start], flat[start + self.row_bytes[self.rank] :]
        return torch.cat([before, after]) if len(before) and len(after) else before if len(before) else after

    def exact_of(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """The elements of exact members in rows, from that of rank ``first`` on."""
        found = rows[:, self.exact_rows[first]]
        return found.view(self.dtype) if found.numel() else found.to(self.dtype)

    def messages(self, rows: torch.Tensor, first: int) -> Messages:
        """The messages of rounded members in rows from that of rank ``first`` on, which has some."""
        return self.format.messages(rows[:, : self.format.nbytes(self._width(first))])

    def pack(self, values: torch.Tensor, messages: Messages, error: torch.Tensor | None = None) -> None:
        """Rounds the parts of a member, or those of all members side by side."""
        self.format.pack(values, messages, chunk=self.chunk, error=error)

    def unpack(self, rows: torch.Tensor, first: int) -> dict[int, torch.Tensor]:
        """The parts of each rounded member, ``(rows, elements)`` and contiguous, in the dtype of the bucket."""
        members, ranks = self.blocks[first], len(rows)
        if not members:
            return {}
        messages = self.messages(rows, first)
        if self.at_once:
            values = rows.new_empty(ranks, self._width(first), dtype=self.dtype)
            self.format.unpack(messages, values, chunk=self.chunk)
            return self._apart(values, first)
        found = {i: rows.new_empty(ranks, self.numels[i], dtype=self.dtype) for i in members}
        for i, values in found.items():
            self.format.unpack(messages.part(members[i]), values, chunk=self.chunk)
        return found

    def add(self, rows: torch.Tensor, own: torch.Tensor, share: float) -> None:
        """Adds what other ranks send for this one to its own parts, multiplied by ``share``."""
        members = self.blocks[self.rank]
        if not members:
            return
        messages = self.messages(rows, self.rank)
        if self.at_once:
            self.format.add(messages, own, chunk=self.chunk, share=share, at_once=True)
            return
        for i, blocks in members.items():
            self.format.add(messages.part(blocks), self.own_part(own, i), chunk=self.chunk, share=share)

    def _width(self, rank: int) -> int:
        """The elements of the blocks of a row."""
        return sum(place.stop - place.start for place in self.blocks[rank].values()) * self.format.block

    # ---- members ----

    def own_part(self, own: torch.Tensor, i: int) -> torch.Tensor:
        """The part of a member in a flat tensor of the blocks of this rank's row, without padding."""
        start = self.blocks[self.rank][i].start * self.format.block
        return own[start : start + self.numels[i]]

    def parts(self, flat: torch.Tensor, i: int, first: int, ranks: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The parts of a member in rows from that of rank ``first`` on: the first of some rows, and their parts. The
        last ones, which have padding, are a copy."""
        if i not in self.blocks[first]:
            return
        start, numel = 0 if self.whole else first, self.numels[i]
        complete = min(max(flat.numel() // numel - start, 0), ranks)
        if complete:
            yield 0, flat[start * numel :][: complete * numel].view(complete, numel)
        if complete < ranks:
            rest = flat[(start + complete) * numel :]
            yield complete, padded(rest[: (ranks - complete) * numel], (ranks - complete) * numel).view(-1, numel)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts of members side by side, each padded to whole blocks. The same tensor if there is one, not padded."""
        block = self.format.block
        wide = [p if p.shape[1] % block == 0 else torch.nn.functional.pad(p, (0, -p.shape[1] % block)) for p in parts]
        return wide[0] if len(wide) == 1 else torch.cat(wide, dim=1)

    def joined_shards(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's row of rounded members, without a copy if they are adjacent in memory."""
        if self.rounded_layout is not None and not any(self.numels[i] % self.format.block for i in self.rounded):
            return self.rounded_layout.flat_row([shards[i] for i in self.rounded]).unsqueeze(0)
        return self.joined([shards[i].reshape(1, -1) for i in self.blocks[self.rank]])

    def _apart(self, values: torch.Tensor, first: int) -> dict[int, torch.Tensor]:
        """Inverts :meth:`joined`."""
        members = self.blocks[first]
        widths = [(place.stop - place.start) * self.format.block for place in members.values()]
        if len(widths) == 1 or len(values) == 1:
            columns = list(values.split_with_sizes(widths, dim=1))
        else:
            columns = [values.new_empty(len(values), width) for width in widths]
            torch.split_with_sizes_copy(values, widths, dim=1, out=columns)
        return {i: c[:, : self.numels[i]].contiguous() for i, c in zip(members, columns, strict=True)}


def chunk_of(*, on_cpu: bool) -> int:
    """The elements that are rounded at once."""
    return CPU_CHUNK if on_cpu else GPU_CHUNK


def padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """A flat tensor with zeros at its end, or the same one if it has ``numel`` elements."""
    return flat if flat.numel() == numel else torch.nn.functional.pad(flat, (0, numel - flat.numel()))
