"""Values in blocks of eight or four bits with a scale for each block. Knows no parameter and no rank.

A block's scale maps its largest magnitude to the largest code, so that zero stays zero and no value saturates. A block
with an inf or NaN has a scale that is not finite, and none of its values is finite when it is unpacked.

Source: block-wise scaling as in ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209), symmetric.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from passes.plan.cost import Kernels

import torch

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
