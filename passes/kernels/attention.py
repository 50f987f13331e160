"""Causal attention of a part of a sequence, by torch's fused kernels of CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from passes.plan.plan import ContextPlan

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

aten = torch.ops.aten


class Chunk(NamedTuple):
    """Consecutive queries, by their place among those of the rank, and their positions ``start`` to ``end``: fewer
    where the sequence has ended."""

    first: int
    stop: int
    start: int
    end: int


@dataclass(frozen=True)
class CausalAttention:
    """A function of queries (..., positions of this rank, width) and whole keys and values (..., length, width).

    Each chunk of queries sees all keys before it, and itself with a causal mask. Nobody reads the results for queries
    beyond the end of the sequence.
    """

    plan: ContextPlan
    length: int

    __name__ = "causal_attention"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        if _has_kernel(query, key, value) and not dropout_p:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            found: torch.Tensor = _InPieces.apply(query, key, value, tuple(self._chunks()), scale)
            return found
        outs = []
        for chunk in self._chunks():
            q = query[..., chunk.first : chunk.stop, :]
            k, v = (t[..., : chunk.end, :] for t in (key, value))
            outs.append(F.scaled_dot_product_attention(q, k, v, _mask(q, chunk), dropout_p, scale=scale))
        return torch.cat(outs, -2)

    def _chunks(self) -> Iterator[Chunk]:
        size = self.plan.chunk(self.length)
        for i, number in enumerate(self.plan.chunks_of(self.plan.rank)):
            start, end = (min(n * size, self.length) for n in (number, number + 1))
            yield Chunk(i * size, (i + 1) * size, start, end)


def _has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's fused kernel of the CPU takes them. Meta tensors stand for those of a device."""
    alike = query.ndim == 4 and query.shape[:2] == key.shape[:2] and query.shape[-1] == key.shape[-1] == value.shape[-1]
    takes = query.is_meta or query.dtype in (torch.float32, torch.float64, torch.bfloat16)
    return alike and query.device.type in ("cpu", "meta") and takes


def _mask(query: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """The mask of a chunk and all keys up to its end."""
    size, whole = chunk.stop - chunk.first, chunk.end - chunk.start == chunk.stop - chunk.first
    if query.is_cuda and whole and type(query) is torch.Tensor:
        return causal_lower_right(size, chunk.end)  # no mask in memory, if there is a fused kernel
    positions = torch.arange(chunk.start, chunk.start + size, device=query.device)
    return positions[:, None] >= torch.arange(chunk.end, device=query.device)


class _InPieces(torch.autograd.Function):
    """The attention of each chunk in two calls of torch's kernel: to the keys before it, and to its own keys with a
    causal mask. No mask is in memory. The results are joined by their sums of exponentials. The backward of each call
    takes the joined result and sums.

    Source: FlashAttention (Dao et al., 2022, section 3.1) and Ring Attention (Liu et al., 2023).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunks: tuple[Chunk, ...],
        scale: float,
    ) -> torch.Tensor:
        outs, sums = [], []
        for chunk in chunks:
            q = query[..., chunk.first : chunk.stop, :]
            found = []
            for begin, end, causal in _pieces(chunk):
                k, v = (t[..., begin:end, :] for t in (key, value))
                found.append(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale))
            out, total = found[0] if len(found) == 1 else _joined(*found)
            outs.append(out)
            sums.append(total)
        # in the order of memory (rows, positions, heads, width), as torch's kernel makes it: models transpose it
        result = torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2)
        sums_of_all = torch.cat(sums, -1)
        ctx.save_for_backward(query, key, value, result, sums_of_all)
        ctx.chunks, ctx.scale = chunks, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, result, sums = ctx.saved_tensors
        grads = tuple(torch.zeros_like(t) for t in (query, key, value))
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        for chunk in ctx.chunks:
            of_chunk = slice(chunk.first, chunk.stop)
            g, q, out = (t[..., of_chunk, :] for t in (grad, query, result))
            for begin, end, causal in _pieces(chunk):
                of_keys = slice(begin, end)
                found = backward(
                    g, q, key[..., of_keys, :], value[..., of_keys, :], out, sums[..., of_chunk], 0.0, causal,
                    scale=ctx.scale,
                )  # fmt: skip
                for whole, part, place in zip(grads, found, (of_chunk, of_keys, of_keys), strict=True):
                    whole[..., place, :] += part
        return (*grads, None, None)


def _joined(one: Any, other: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys of both, and the logarithm of its sum of exponentials."""
    (out, total), (out_of_other, total_of_other) = one, other
    joined = torch.logaddexp(total, total_of_other)
    first, second = ((t - joined).exp().unsqueeze(-1) for t in (total, total_of_other))
    return (out * first + out_of_other * second).to(out.dtype), joined


def _pieces(chunk: Chunk) -> Iterator[tuple[int, int, bool]]:
    """The keys that a chunk sees: those before it, then its own, of which each query sees those up to itself."""
    if chunk.start:
        yield 0, chunk.start, False
    if chunk.end > chunk.start:
        yield chunk.start, chunk.end, True
