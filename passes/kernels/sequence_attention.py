"""Causal attention of the queries that one rank holds, for gathered keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from passes.plan.sequence import ContextPlan

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class CausalAttention:
    """A function of queries (..., positions of this rank, width) and whole keys and values (..., length, width).

    Each chunk of queries sees the keys up to its own last position. Queries beyond the end of the sequence, whose
    results nobody reads, see all keys.
    """

    plan: ContextPlan
    length: int

    __name__ = "causal_attention"

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        size, outs = self.plan.chunk(self.length), []
        for number, q in zip(self.plan.chunks_of(self.plan.rank), query.split(size, -2), strict=True):
            end = min((number + 1) * size, self.length)
            k, v = key[..., :end, :], value[..., :end, :]
            outs.append(scaled_dot_product_attention(q, k, v, **self._mask(q, number * size, end), **options))
        return torch.cat(outs, -2)

    def _mask(self, query: torch.Tensor, start: int, end: int) -> dict[str, Any]:
        if start == 0 and end == query.shape[-2]:
            return {"is_causal": True}
        if end - start == query.shape[-2] and query.is_cuda and type(query) is torch.Tensor:
            return {"attn_mask": causal_lower_right(query.shape[-2], end)}  # a fused kernel; no mask in memory
        positions = torch.arange(start, start + query.shape[-2], device=query.device)
        return {"attn_mask": positions[:, None] >= torch.arange(end, device=query.device)}
