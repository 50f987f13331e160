"""Values in blocks of eight or four bits with a scale for each block. Knows no parameter and no rank.

A block's scale maps its largest magnitude to the largest code, so that zero stays zero and no value saturates. A block
with an inf or NaN has a scale that is not finite, and none of its values is finite when it is unpacked.

Source: block-wise scaling as in ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209), symmetric.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from passes.plan.cost import Kernels

import torch

LEAST = 1e-30  # a block of smaller magnitudes becomes zeros; the reciprocal of a scale stays finite
FP32 = 4  # bytes, as of a scale


@dataclass(frozen=True)
class Format:
    """A format of codes.

    ``largest`` is the largest code, ``bits`` those of a code, ``block`` the number of values that share a scale.
    Integers round to nearest: the error of a value is at most ``scale / 2``, where ``scale`` is the largest magnitude
    of the block divided by ``largest``. ``is_float``: float8_e4m3fn, whose error is at most a 16th of the value or
    ``scale / 1024``, whichever is larger.

    A message is the scales of all blocks, then their codes. The last block is padded with zeros.
    """

    name: str
    largest: int
    bits: int
    block: int
    is_float: bool = False

    def nbytes(self, numel: int) -> int:
        """The bytes of the message of ``numel`` values, a multiple of 4."""
        return self._blocks(numel) * (FP32 + self._block_bytes)

    def pack(
        self, values: torch.Tensor, message: torch.Tensor, *, chunk: int, error: torch.Tensor | None = None
    ) -> None:
        """Writes the message of ``values``, flat and floating point, into a tensor of ``nbytes`` bytes (uint8).

        Works on ``chunk`` values at a time, which bounds the memory that it needs besides. ``error``, flat and as long,
        is added to the values, and becomes the part of the sum that the message loses (0 where it is not finite).
        """
        scales, codes = self._parts(message, values.numel())
        work = self._work(values, chunk)
        for start, stop in self._chunks(values.numel(), chunk):
            source = self._in_blocks(values[start:stop], copy=error is not None)
            if error is not None:
                source.view(-1)[: stop - start].add_(error[start:stop])
            blocks = slice(start // self.block, start // self.block + len(source))
            scaled = work[: len(source)]
            largest = torch.abs(source, out=scaled).amax(1).clamp_(min=LEAST)
            scale = torch.div(largest, self.largest, out=scales[blocks])
            torch.mul(source, scale.reciprocal()[:, None], out=scaled)
            self._encode(scaled, codes[blocks])
            if error is not None:
                source.addcmul_(self._decode(codes[blocks], scaled), scale[:, None], value=-1).nan_to_num_(0, 0, 0)
                error[start:stop].copy_(source.view(-1)[: stop - start])

    def unpack(self, message: torch.Tensor, values: torch.Tensor, *, chunk: int, add: float | None = None) -> None:
        """Writes the values of a message into a flat tensor of any floating-point dtype.

        ``add``: adds them to it instead, multiplied by this number.
        """
        scales, codes = self._parts(message, values.numel())
        for start, stop in self._chunks(values.numel(), chunk):
            blocks = slice(start // self.block, start // self.block - (start - stop) // self.block)
            place, scale = values[start:stop], scales[blocks, None]
            in_place = values.dtype == torch.float32 and (stop - start) % self.block == 0
            if in_place and add is None:
                self._decode(codes[blocks], place.view(-1, self.block)).mul_(scale)
            elif in_place and add is not None:
                place.view(-1, self.block).addcmul_(self._decode(codes[blocks]), scale, value=add)
            else:
                decoded = self._decode(codes[blocks]).mul_(scale).view(-1)[: stop - start]
                place.copy_(decoded) if add is None else place.add_(decoded, alpha=add)

    # ---- what it costs ----

    def pack_work(self, numel: int, width: int, *, chunk: int, error: bool = False) -> Kernels:
        """The work of :meth:`pack` for ``numel`` values of ``width`` bytes each, without the bytes of scales."""
        copied = width < FP32 or error
        work = Kernels(6, 5 * FP32) + self._encoding  # abs, amax, clamp, divide, reciprocal, multiply
        work += Kernels(2, width + FP32) if copied else Kernels()
        if error:  # add, subtract what was written, replace what is not finite, copy
            work += Kernels(4, (2 * FP32 + 2) + 3 * FP32 + 2 * FP32 + (FP32 + 2)) + self._decoding
        return self._in_chunks(work, numel, chunk)

    def unpack_work(self, numel: int, width: int, *, chunk: int, add: bool = False) -> Kernels:
        """The work of :meth:`unpack` for as many values."""
        if width == FP32:
            work = self._decoding + Kernels(1, (3 if add else 2) * FP32)
        else:
            work = self._decoding + Kernels(2, 3 * FP32 + (2 if add else 1) * width)
        return self._in_chunks(work, numel, chunk)

    def _in_chunks(self, work: Kernels, numel: int, chunk: int) -> Kernels:
        """``work`` is that of a chunk, with the bytes of one value."""
        return Kernels(work.number * sum(1 for _ in self._chunks(numel, chunk)), work.bytes * numel)

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
        if self.is_float:  # widen, shift, mask, copy, multiply
            return Kernels(5, 3 + 4 + 4 + (2 + FP32) + 2 * FP32)
        if self.bits == 4:  # for each half: shift or add, shift, copy
            return Kernels(6, 2 * (1 + 1 + (0.5 + FP32 / 2)))
        return Kernels(1, 1 + FP32)

    # ---- its parts ----

    @property
    def _block_bytes(self) -> int:
        return self.block * self.bits // 8

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _parts(self, message: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales ``(blocks,)`` and the codes ``(blocks, bytes)`` of a message."""
        blocks = self._blocks(numel)
        cut = blocks * FP32
        return message[:cut].view(torch.float32), message[cut:].view(blocks, self._block_bytes)

    def _chunks(self, numel: int, chunk: int) -> Iterator[tuple[int, int]]:
        """Starts and stops of whole blocks, about ``chunk`` values each, and of the last block if it is short."""
        whole, step = numel // self.block * self.block, max(1, chunk // self.block) * self.block
        yield from ((start, min(start + step, whole)) for start in range(0, whole, step))
        if whole < numel:
            yield whole, numel

    def _work(self, values: torch.Tensor, chunk: int) -> torch.Tensor:
        """Memory for the blocks of a chunk, in fp32."""
        blocks = min(self._blocks(values.numel()), max(1, chunk // self.block))
        return values.new_empty(blocks, self.block, dtype=torch.float32)

    def _in_blocks(self, values: torch.Tensor, *, copy: bool) -> torch.Tensor:
        """The values in fp32, ``(blocks, block)``, padded with zeros. A view of them if it can be, or a ``copy``."""
        if not copy and values.dtype == torch.float32 and values.numel() % self.block == 0 and values.is_contiguous():
            return values.view(-1, self.block)
        blocks = self._blocks(values.numel())
        work = values.new_empty(blocks, self.block, dtype=torch.float32)
        flat = work.view(-1)
        flat[: values.numel()].copy_(values)
        flat[values.numel() :].zero_()
        return work

    def _encode(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        """Writes the codes. Overwrites ``scaled``."""
        if self.is_float:
            codes.view(torch.float8_e4m3fn).copy_(scaled)
            return
        rounded = scaled.round_()
        if self.bits == 4:  # a byte is ``low + 16 * high``, of a code of each half of the block
            low, high = rounded.chunk(2, dim=1)
            rounded = low.add_(high, alpha=16)
        codes.view(torch.int8).copy_(rounded)

    def _decode(self, codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The codes as fp32, ``(blocks, block)``, in ``out`` if it is given."""
        values = codes.new_empty(len(codes), self.block, dtype=torch.float32) if out is None else out
        signed = codes.view(torch.int8)
        if self.is_float:
            # the bits of e4m3 are those of an fp16 2**8 times smaller: torch's own cast takes ten times as long
            wide = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
            return values.copy_(wide.view(torch.float16)).mul_(2.0**8)
        if self.bits == 8:
            return values.copy_(signed)
        low, high = values.chunk(2, dim=1)
        low.copy_((signed << 4).bitwise_right_shift_(4))  # shifts keep the sign
        high.copy_((signed + 8).bitwise_right_shift_(4))  # rounds off ``low``, which lies in -7 ... 7
        return values


INT8 = Format("int8", largest=127, bits=8, block=256)
INT4 = Format("int4", largest=7, bits=4, block=128)
FP8 = Format("fp8", largest=448, bits=8, block=256, is_float=True)
