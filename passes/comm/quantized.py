"""Wires that round what they carry: parameters on their way to their use, gradients on their way to their shards.

Values are packed in blocks of eight or four bits with a scale for each block. A block's scale maps its largest
magnitude to the largest code, so that zero stays zero and no value saturates. A block with an inf or NaN has a scale
that is not finite, and none of its values is finite when it is unpacked.

Source: block-wise scaling as in ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209), symmetric.

The messages of a rounded bucket are rows, one for each rank. A GPU takes long to launch a kernel: it works on all
members of a bucket, in the rows of all ranks, as one tensor. A CPU's caches are small: it works on one member after the
other, in the rows of all ranks, and copies none before.

A gather rounds each rank's shards, at rest, once; this rank's own go through the same rounding, so that all ranks
compute with equal parameters. Gradients of a rounded parameter are those of its shard (a straight-through estimator).

A reduction rounds each rank's part of a gradient once and sends it to the rank that owns the shard, which adds up all
parts in fp32 and divides the sum: one rounding, where a ring would round at each hop. Its own part stays exact. An
all_reduce consists of such a reduction to equal pieces of each parameter and a gather of these.

Large members are rounded in blocks. Small ones (biases, norms, 0-dim parameters) travel in the same message in their
own dtype.

Source: ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209), qwZ and qgZ; error feedback as in 1-bit SGD
(Seide et al., 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from passes.comm import native
from passes.plan import Bucket, Ends, Member, Placement, Wire
from passes.plan.bucket import Layout, summed_to
from passes.plan.cost import Kernels

import torch
from thunder.core import dtypes

# ---- values in blocks with a scale ----


LEAST = 1e-30  # a block of smaller magnitudes becomes zeros; the reciprocal of a scale stays finite
FP32 = 4  # bytes, as of a scale
FLOATS = {448: torch.float8_e4m3fn, 57344: torch.float8_e5m2}  # by their largest numbers


class Messages(NamedTuple):
    """Messages of equal length: the scales ``(rows, blocks)`` in fp32, and the codes ``(rows, blocks, bytes)``."""

    scales: torch.Tensor
    codes: torch.Tensor

    def part(self, blocks: slice, rows: slice = slice(None)) -> Messages:
        """Some of the blocks of each message, or of some messages."""
        return Messages(self.scales[rows, blocks], self.codes[rows, blocks])


@dataclass(frozen=True)
class Format:
    """A format of codes.

    ``largest`` is the largest code, ``bits`` those of a code, ``block`` the number of values that share a scale.
    Integers round to nearest: the error of a value is at most ``scale / 2``, where ``scale`` is the largest magnitude
    of the block divided by ``largest``. ``is_float``: the codes are torch's float8 numbers of which that is the
    largest, e4m3fn (448) or e5m2 (57344). Their error is at most a 16th or an 8th of the value, or ``scale / 1024`` or
    ``scale / 131072``, whichever is larger.

    A message is the scales of all blocks, then their codes. The last block is padded with zeros. Messages of equal
    length are the rows of one tensor: what is done to all of them costs no more launches than for one.
    """

    name: str
    largest: int
    bits: int
    block: int
    is_float: bool = False

    def __post_init__(self) -> None:
        if self.is_float and (self.largest not in FLOATS or self.bits != 8):
            known = " or ".join(f"{dtype} ({largest})" for largest, dtype in FLOATS.items())
            raise ValueError(f"format {self.name!r} of {self.bits} bits up to {self.largest} is not {known}")

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """The bytes of the message of ``numel`` values, a multiple of 4."""
        return self.blocks(numel) * (FP32 + self._block_bytes)

    def messages(self, rows: torch.Tensor) -> Messages:
        """The messages in a tensor of bytes, ``(rows, nbytes)``. Its rows begin at multiples of 4 bytes."""
        blocks = rows.shape[1] // (FP32 + self._block_bytes)
        cut = blocks * FP32
        return Messages(rows[:, :cut].view(torch.float32), rows[:, cut:].unflatten(1, (blocks, self._block_bytes)))

    def pack(self, values: torch.Tensor, messages: Messages, *, chunk: int, error: torch.Tensor | None = None) -> None:
        """Writes the messages of ``values``, ``(rows, numel)`` and floating point.

        Works on ``chunk`` values at a time, which bounds the memory that it needs besides. ``error``, of the same
        shape, is added to the values, and becomes the part of the sum that the messages lose (0 where it is not
        finite).
        """
        work = values.new_empty(self._largest_piece(values.shape, chunk), dtype=torch.float32)
        for rows, start, stop in self._pieces(values.shape, chunk):
            source = self._in_blocks(values[rows, start:stop], copy=error is not None)
            if error is not None:
                source.flatten(1)[:, : stop - start].add_(error[rows, start:stop])
            blocks = slice(start // self.block, start // self.block + source.shape[1])
            scaled = work[: source.numel()].view(source.shape)
            largest = torch.abs(source, out=scaled).amax(2).clamp_(min=LEAST)
            scale = torch.div(largest, self.largest, out=messages.scales[rows, blocks])
            torch.mul(source, scale.reciprocal().unsqueeze(2), out=scaled)
            codes = messages.codes[rows, blocks]
            self._encode(scaled, codes)
            if error is not None:
                lost = source.addcmul_(self._decode(codes, scaled), scale.unsqueeze(2), value=-1).nan_to_num_(0, 0, 0)
                error[rows, start:stop].copy_(lost.flatten(1)[:, : stop - start])

    def unpack(self, messages: Messages, values: torch.Tensor, *, chunk: int) -> None:
        """Writes the values of messages into a tensor ``(rows, numel)`` of any floating-point dtype."""
        for rows, start, stop in self._pieces(values.shape, chunk):
            blocks = slice(start // self.block, self.blocks(stop))
            codes, scale = messages.codes[rows, blocks], messages.scales[rows, blocks].unsqueeze(2)
            place = values[rows, start:stop]
            if values.dtype == torch.float32 and (stop - start) % self.block == 0:
                self._decode(codes, place.unflatten(1, (-1, self.block))).mul_(scale)
            else:
                place.copy_(self._decode(codes).mul_(scale).flatten(1)[:, : stop - start])

    def add(self, messages: Messages, values: torch.Tensor, *, chunk: int, share: float, at_once: bool = False) -> None:
        """Adds the values of all messages, multiplied by ``share``, to a flat tensor in fp32, one after the other.

        ``at_once``: adds the whole blocks of messages to each other first, in one launch, with other roundings.
        """
        whole = len(values) // self.block
        in_blocks, rest = values[: whole * self.block].view(whole, self.block), values[whole * self.block :]
        step = max(1, chunk // self.block // (len(messages.scales) if at_once else 1))
        for start in range(0, whole, step):
            place = in_blocks[start : start + step]
            part = messages.part(slice(start, start + len(place)))
            scales = part.scales.unsqueeze(2)
            if at_once:
                place.add_(self._decode(part.codes).mul_(scales).sum(0), alpha=share)
                continue
            for codes, scale in zip(part.codes, scales, strict=True):
                place.addcmul_(self._decode(codes), scale, value=share)
        for codes, scale in zip(messages.codes, messages.scales, strict=True) if len(rest) else ():
            rest.add_(self._decode(codes[-1]).mul_(scale[-1])[: len(rest)], alpha=share)

    # ---- what it costs ----

    def pack_work(self, numel: int, width: int, *, chunk: int, error: bool = False, rows: int = 1) -> Kernels:
        """The work of :meth:`pack` for rows of ``numel`` values of ``width`` bytes each, except for scales."""
        work = Kernels(6, 5 * FP32) + self._encoding  # abs, amax, clamp, divide, reciprocal, multiply
        if width < FP32 or error:
            work += Kernels(1, width + FP32)
        if error:  # add, subtract what was written, replace what is not finite, copy
            work += Kernels(4, (2 * FP32 + 2) + 3 * FP32 + 2 * FP32 + (FP32 + 2)) + self._decoding
        return self._in_chunks(work, rows, numel, chunk)

    def unpack_work(self, numel: int, width: int, *, chunk: int, rows: int = 1) -> Kernels:
        """The work of :meth:`unpack` for as many values."""
        work = self._decoding + (Kernels(1, 2 * FP32) if width == FP32 else Kernels(2, 3 * FP32 + width))
        return self._in_chunks(work, rows, numel, chunk)

    def add_work(self, numel: int, *, chunk: int, rows: int = 1, at_once: bool = False) -> Kernels:
        """The work of :meth:`add` for as many values."""
        together = rows if at_once else 1
        pieces = -(-self.blocks(numel) // max(1, chunk // (together * self.block)))
        # at once: multiply, add up, add
        work = Kernels(3, 3 * FP32 * rows + 4 * FP32) if at_once else Kernels(rows, 3 * FP32 * rows)
        decoded = self._decoding * (1 if at_once else rows)
        return Kernels(pieces * (decoded.number + work.number), (self._decoding.bytes * rows + work.bytes) * numel)

    def _in_chunks(self, work: Kernels, rows: int, numel: int, chunk: int) -> Kernels:
        """``work`` is that of a chunk, with the bytes of one value."""
        return Kernels(work.number * sum(1 for _ in self._pieces((rows, numel), chunk)), work.bytes * rows * numel)

    @property
    def _encoding(self) -> Kernels:
        """The work of :meth:`_encode` for a chunk, with the bytes of one value."""
        if self.is_float:
            return Kernels(1, FP32 + 1)
        round_, halves = Kernels(1, 2 * FP32), Kernels(1, 1.5 * FP32)  # the latter reads both halves, writes one
        return round_ + (halves + Kernels(1, (FP32 + 1) / 2) if self.bits == 4 else Kernels(1, FP32 + 1))

    @property
    def _decoding(self) -> Kernels:
        """The work of :meth:`_decode` for a chunk, with the bytes of one value."""
        if self.is_float and FLOATS[self.largest] == torch.float8_e4m3fn:  # widen, shift, mask, copy, multiply
            return Kernels(5, 3 + 4 + 4 + (2 + FP32) + 2 * FP32)
        if self.bits == 4:  # for each half: shift or add, shift, copy
            return Kernels(6, 2 * (1 + 1 + (0.5 + FP32 / 2)))
        return Kernels(1, 1 + FP32)

    # ---- its parts ----

    @property
    def _block_bytes(self) -> int:
        return self.block * self.bits // 8

    def _pieces(self, shape: Sequence[int], chunk: int) -> Iterator[tuple[slice, int, int]]:
        """Rows, and a start and a stop in them: whole blocks, about ``chunk`` values each, and the short last blocks
        of all rows."""
        rows, numel = shape
        whole, step = numel // self.block * self.block, max(1, chunk // self.block) * self.block
        together = max(1, step // max(whole, 1))  # rows
        for row in range(0, rows, together):
            for start in range(0, whole, step):
                yield slice(row, row + together), start, min(start + step, whole)
        if whole < numel:
            yield slice(rows), whole, numel

    def _largest_piece(self, shape: Sequence[int], chunk: int) -> int:
        """The elements of the largest piece, padded to whole blocks."""
        rows, numel = shape
        width = self.blocks(numel) * self.block
        return max(rows * self.block, min(rows * width, max(chunk, self.block)))

    def _in_blocks(self, values: torch.Tensor, *, copy: bool) -> torch.Tensor:
        """The values in fp32, ``(rows, blocks, block)``, padded with zeros. A view of them if it can be, or a
        ``copy``."""
        rows, numel = values.shape
        if not copy and values.dtype == torch.float32 and numel % self.block == 0 and values.stride(1) == 1:
            return values.unflatten(1, (-1, self.block))
        work = values.new_empty(rows, self.blocks(numel) * self.block, dtype=torch.float32)
        work[:, :numel].copy_(values)
        if numel % self.block:
            work[:, numel:].zero_()
        return work.unflatten(1, (-1, self.block))

    def _encode(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        """Writes the codes. Overwrites ``scaled``."""
        if self.is_float:
            codes.view(FLOATS[self.largest]).copy_(scaled)
            return
        rounded = scaled.round_()
        if self.bits == 4:  # a byte is ``low + 16 * high``, of a code of each half of the block
            low, high = rounded.chunk(2, dim=-1)
            rounded = low.add_(high, alpha=16)
        codes.view(torch.int8).copy_(rounded)

    def _decode(self, codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The codes as fp32, the last dim a block, in ``out`` if it is given."""
        values = codes.new_empty(*codes.shape[:-1], self.block, dtype=torch.float32) if out is None else out
        signed = codes.view(torch.int8)
        if self.is_float and (FLOATS[self.largest] != torch.float8_e4m3fn or not codes.is_cpu):
            return values.copy_(codes.view(FLOATS[self.largest]))
        if self.is_float:
            # the bits of e4m3 are those of an fp16 2**8 times smaller: torch's own cast takes ten times as long here
            wide = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
            return values.copy_(wide.view(torch.float16)).mul_(2.0**8)
        if self.bits == 8:
            return values.copy_(signed)
        low, high = values.chunk(2, dim=-1)
        low.copy_((signed << 4).bitwise_right_shift_(4))  # shifts keep the sign
        high.copy_((signed + 8).bitwise_right_shift_(4))  # rounds off ``low``, which lies in -7 ... 7
        return values


INT8 = Format("int8", largest=127, bits=8, block=256)
INT4 = Format("int4", largest=7, bits=4, block=128)
FP8 = Format("fp8", largest=448, bits=8, block=256, is_float=True)


# ---- rows and the messages in them ----


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


# ---- the wires ----


ERROR = torch.bfloat16  # the dtype of errors that are kept


def gather_wire(format: Format) -> Wire:
    """The wire that gathers parameters in a format. It takes buckets in which it has something to round."""
    wire = _Gather(format)
    return Wire(
        issue=wire.issue,
        finish=wire.finish,
        bytes=lambda bucket: sum(bucket.prepared.row_bytes),
        name=format.name,
        takes=lambda bucket: bucket.plan.placement is not Placement.REPLICATE and bool(Packing(bucket, format).rounded),
        prepare=lambda bucket: Packing(bucket, format),
        work=wire.work,
    )


def reduction_wire(format: Format, *, error_feedback: bool = False) -> Wire:
    """The wire that reduces gradients in a format.

    ``error_feedback``: each rank keeps what the rounding of its parts has lost, and adds it to those of the next step:
    2 bytes for each element that it sends to others.
    """
    reduce = _Reduce(format, error_feedback)
    all_reduce = _AllReduce(reduce)

    def how(bucket: Bucket) -> _Reduce | _AllReduce:
        return all_reduce if bucket.plan.placement is Placement.REPLICATE else reduce

    return Wire(
        issue=lambda grads, bucket: how(bucket).issue(grads, bucket),
        finish=lambda future, bucket: how(bucket).finish(future, bucket),
        bytes=lambda bucket: how(bucket).bytes(bucket),
        name=format.name,
        takes=lambda bucket: bool(Packing(_as_shards(bucket), format).rounded),
        prepare=lambda bucket: how(bucket).prepare(bucket),
        state=lambda bucket, device: how(bucket).state(bucket, device),
        reduces=True,
        work=lambda bucket: how(bucket).work(bucket),
    )


class _Gather:
    def __init__(self, format: Format) -> None:
        self.format = format

    def issue(self, shards: tuple[torch.Tensor, ...], bucket: Bucket) -> native.InFlight:
        packing: Packing = bucket.prepared
        rank = packing.rank
        row = shards[0].new_empty(1, packing.row_bytes[rank], dtype=torch.uint8)
        if members := packing.blocks[rank]:
            parts = packing.messages(row, rank)
            if packing.at_once:
                packing.pack(packing.joined_shards(shards), parts)
            for i, blocks in members.items() if not packing.at_once else ():
                packing.pack(shards[i].reshape(1, -1), parts.part(blocks))
        if packing.exact_layout is not None:
            exact = packing.exact_layout.pieces([shards[i] for i in packing.exact])
            torch.cat(exact, out=packing.exact_of(row, rank).view(-1))
        return native.gather(row.view(-1), packing.row_bytes, bucket)

    def finish(self, future: native.InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        packing: Packing = bucket.prepared
        stacks = packing.cut(future.wait(), packing.stacks)
        full: dict[int, torch.Tensor] = {}
        if (layout := packing.exact_layout) is not None:
            exact = [packing.exact_of(rows, first).reshape(-1) for first, rows in stacks]
            flat = exact[0] if len(exact) == 1 else torch.cat(exact)
            full |= zip(packing.exact, layout.unpack_rows(flat), strict=True)
        for first, rows in stacks:
            full |= packing.unpack(rows, first)
        for i in packing.rounded:
            shape = bucket.members[i].parameter.full_shape
            full[i] = full[i].view(-1)[: math.prod(shape)].view(shape)
        return tuple(full[i] for i in range(len(bucket.members)))

    def work(self, bucket: Bucket) -> Ends:
        """The mean over ranks, which owners may differ from."""
        packing: Packing = bucket.prepared
        chunk, share, width = packing.chunk, 1 / bucket.plan.world_size, bucket.dtype.bytes
        rest, format, ranks = bucket.rest_dtype.bytes, self.format, bucket.plan.world_size
        issue = packing.work(lambda n, rows: format.pack_work(n, rest, chunk=chunk), rows=1, share=share)
        finish = packing.work(lambda n, rows: format.unpack_work(n, width, chunk=chunk, rows=rows), rows=ranks, share=1)
        if packing.at_once and len(packing.rounded) > 1 and not packing.whole:  # which are cut apart
            finish += Kernels(1, 2 * width * ranks * sum(packing.numels[i] for i in packing.rounded))
        if packing.exact:  # joined, at the end by ranks and by members
            issue += Kernels(1, 2 * share * packing.exact_bytes)
            finish += Kernels(2, 4 * packing.exact_bytes)
        return Ends(issue, finish)


class _Reducing(NamedTuple):
    """Parts of gradients in flight. ``own`` are this rank's parts of its shards: rounded members in fp32, divided and
    padded to whole blocks, exact ones in the dtype of the bucket."""

    parts: native.InFlight
    own: torch.Tensor
    own_exact: torch.Tensor | None


class _Reduce:
    def __init__(self, format: Format, error_feedback: bool) -> None:
        self.format, self.error_feedback = format, error_feedback

    def prepare(self, bucket: Bucket) -> Packing:
        return Packing(bucket, self.format)

    def bytes(self, bucket: Bucket) -> int:
        return sum(bucket.prepared.row_bytes)

    def state(self, bucket: Bucket, device: torch.device) -> list[torch.Tensor]:
        """For each rounded member, the errors of the parts that go to other ranks: ``(parts, elements of a part)``."""
        packing: Packing = bucket.prepared
        errors, found = bucket.plan.runtime.errors, []
        for i in packing.rounded if self.error_feedback else ():
            parts = sum(i in blocks for rank, blocks in enumerate(packing.blocks) if rank != packing.rank)
            key = bucket.plan.axis, bucket.members[i].parameter.index
            if key not in errors:
                errors[key] = torch.zeros(parts, packing.numels[i], dtype=ERROR, device=device)
            found.append(errors[key])
        return found

    def issue(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> _Reducing:
        packing: Packing = bucket.prepared
        at_once = packing.at_once and not self.error_feedback
        stacks = packing.stacks if at_once else packing.others
        sent = grads[0].new_empty(packing.bytes_of(stacks), dtype=torch.uint8)
        own = grads[0].new_empty(packing.own_numel, dtype=torch.float32)
        flat = {i: summed_to(grads[i], bucket.members[i].parameter.full_shape).reshape(-1) for i in packing.rounded}
        cut = packing.cut(sent, stacks)
        if at_once:
            self._pack_at_once(flat, cut, own, bucket)
        else:
            self._pack_each(flat, cut, own, bucket)
        own_exact = None
        if (layout := packing.exact_layout) is not None:
            exact = layout.pack_rows([grads[i] for i in packing.exact])
            own_exact = exact.split_with_sizes(layout.row_sizes)[packing.rank]
            for first, rows in cut:
                values = exact[sum(layout.row_sizes[:first]) :][: len(rows) * layout.row_sizes[first]]
                packing.exact_of(rows, first).copy_(values.view(len(rows), -1))
        if at_once:
            sent = packing.without_own(sent)
        return _Reducing(native.swap(sent, packing.row_bytes, bucket), own, own_exact)

    def _pack_at_once(self, flat: Mapping[int, torch.Tensor], cut: Stacks, own: torch.Tensor, bucket: Bucket) -> None:
        packing: Packing = bucket.prepared
        for first, rows in cut:
            members = packing.blocks[first]
            if not members:
                continue
            ranks = len(rows)
            values = packing.joined([padded(flat[i], ranks * packing.numels[i]).view(ranks, -1) for i in members])
            if first <= packing.rank < first + ranks:
                torch.mul(values[packing.rank - first].float(), 1 / bucket.plan.divisor, out=own)
            packing.pack(values, packing.messages(rows, first))

    def _pack_each(self, flat: Mapping[int, torch.Tensor], cut: Stacks, own: torch.Tensor, bucket: Bucket) -> None:
        packing: Packing = bucket.prepared
        rank, share = packing.rank, 1 / bucket.plan.divisor
        errors = dict(zip(packing.rounded, self.state(bucket, own.device), strict=False))
        for i in packing.blocks[rank]:
            start, stop = bucket.members[i].parameter.pieces[rank]
            mine = packing.own_part(own, i)
            torch.mul(flat[i][start:stop].float(), share, out=mine[: stop - start])
            mine[stop - start :].zero_()
        for first, rows in cut:
            members = packing.blocks[first]
            parts = packing.messages(rows, first) if members else None
            before = 0 if packing.whole else first - (first > rank)  # rows of errors: this rank has none
            for i, blocks in members.items():
                for at, values in packing.parts(flat[i], i, first, len(rows)):
                    here = slice(at, at + len(values))
                    error = errors[i][before:][here] if i in errors else None
                    assert parts is not None
                    packing.pack(values, parts.part(blocks, here), error)

    def finish(self, future: _Reducing, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        packing: Packing = bucket.prepared
        rank, dtype, share = packing.rank, bucket.torch_reduced_dtype, 1 / bucket.plan.divisor
        received, own = future.parts.wait(), future.own  # also if this rank only sends
        parts = received.view(bucket.plan.world_size - 1, packing.row_bytes[rank])
        packing.add(parts, own, share)
        own = own.to(dtype)
        reduced: dict[int, torch.Tensor] = {}
        for i in packing.rounded:
            shape = bucket.members[i].parameter.shard_shape
            mine = i in packing.blocks[rank]
            reduced[i] = packing.own_part(own, i).view(shape) if mine else own.new_empty(shape)
        if (layout := packing.exact_layout) is not None and future.own_exact is not None:
            exact, others = future.own_exact.float().mul_(share), packing.exact_of(parts, rank)
            if packing.at_once:
                exact.add_(others.sum(0, dtype=torch.float32), alpha=share)
            else:
                for part in others:
                    exact.add_(part, alpha=share)
            reduced |= zip(packing.exact, layout.unpack_row(exact.to(dtype)), strict=True)
        return tuple(reduced[i] for i in range(len(bucket.members)))

    def work(self, bucket: Bucket) -> Ends:
        """The mean over ranks, which owners may differ from."""
        packing: Packing = bucket.prepared
        width, chunk, ranks = bucket.dtype.bytes, packing.chunk, bucket.plan.world_size
        own, others = 1 / ranks, (ranks - 1) / ranks  # the parts that stay here, and that go to or come from others
        format, errors = self.format, self.error_feedback
        issue = packing.work(
            lambda n, rows: format.pack_work(n, width, chunk=chunk, error=errors, rows=rows),
            rows=ranks if packing.at_once else ranks - 1,
            share=others,
        ) + packing.work(lambda n, rows: Kernels(2, n * (width + FP32)), rows=1, share=own)
        finish = packing.work(
            lambda n, rows: format.add_work(n, chunk=chunk, rows=ranks - 1, at_once=packing.at_once), rows=1, share=own
        )
        if packing.exact:
            exact = Kernels(3, 4 * packing.exact_bytes)
            issue, finish = issue + exact, finish + exact
        return Ends(issue, finish)


class _TwoTrips(NamedTuple):
    """The bucket of an all_reduce as one of shards, on the wire that reduces these and on the one that gathers them."""

    scattered: Bucket
    gathered: Bucket


class _AllReduce:
    """A reduction to shards, which :meth:`finish` gathers. The shards are rounded to eight bits, whatever the format:
    their errors are in no feedback."""

    def __init__(self, reduce: _Reduce) -> None:
        self.scatter = Wire(
            issue=reduce.issue, finish=reduce.finish, bytes=reduce.bytes, prepare=reduce.prepare, reduces=True
        )
        self.gather = gather_wire(INT8)
        self.reduce = reduce

    def prepare(self, bucket: Bucket) -> _TwoTrips:
        shards = _as_shards(bucket)
        return _TwoTrips(shards.carried_by(self.scatter), shards.carried_by(self.gather))

    def bytes(self, bucket: Bucket) -> int:
        """The mean of both trips."""
        trips: _TwoTrips = bucket.prepared
        return -(-(trips.scattered.bytes + trips.gathered.bytes) // 2)

    def state(self, bucket: Bucket, device: torch.device) -> list[torch.Tensor]:
        return self.reduce.state(bucket.prepared.scattered, device)

    def work(self, bucket: Bucket) -> Ends:
        trips: _TwoTrips = bucket.prepared
        there, back = self.reduce.work(trips.scattered), trips.gathered.work
        return Ends(there.issue, there.finish + back.issue + back.finish, late=trips.gathered.bytes)

    def issue(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> _Reducing:
        flat = (summed_to(g, m.parameter.full_shape) for g, m in zip(grads, bucket.members, strict=True))
        return self.reduce.issue(tuple(g.reshape(-1) for g in flat), bucket.prepared.scattered)

    def finish(self, future: _Reducing, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        trips: _TwoTrips = bucket.prepared
        shards = self.reduce.finish(future, trips.scattered)
        wire = trips.gathered.wire
        assert wire is not None
        full = wire.finish(wire.issue(shards, trips.gathered), trips.gathered)
        pairs = zip(full, bucket.members, strict=True)
        return tuple(t.to(bucket.torch_reduced_dtype).view(m.parameter.full_shape) for t, m in pairs)


def _as_shards(bucket: Bucket) -> Bucket:
    """A bucket of replicated members as one of their flat shards. Any other bucket as it is."""
    if bucket.plan.placement is not Placement.REPLICATE:
        return bucket
    plan = replace(bucket.plan, placement=Placement.SHARD, outer=None, gather=None, reduction=None)

    def flat(m: Member) -> Member:
        return Member(replace(m.parameter, plan=plan, full_shape=(math.prod(m.parameter.full_shape),)), m.trainable)

    return Bucket(bucket.label, bucket.name, plan, tuple(map(flat, bucket.members)), bucket.dtype)
