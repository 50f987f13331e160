"""Attention, by torch's fused kernels.

These kernels are those of CPUs. On CUDA, Thunder's own executor ``sdpa`` does this.

The kernel takes no dropout, no broadcast heads and no values of another width than the keys. Eager PyTorch then
computes the products one by one, and so does Thunder's decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from passes.compat.jit import shape_of
from passes.kernels.registration import (
    FLOATING,
    HALF,
    Differentiated,
    Flops,
    Gradients,
    Shapes,
    implements,
    is_floating,
    kernel,
    like,
)
from passes.plan.plan import ContextPlan

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

aten = torch.ops.aten
Mask = tuple[bool, ...]


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """The numbers that a mask adds to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask if mask is None else mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)


def _dense(a: torch.Tensor) -> torch.Tensor:
    return a if a.stride(-1) == 1 else a.contiguous()


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
        _dense(query), _dense(key), _dense(value), 0.0, causal, attn_mask=_additive(mask, query), scale=scale
    )
    return found


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    wanted: Mask,
) -> tuple[torch.Tensor | None, ...]:
    added = _additive(mask, query)
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _dense(grad), _dense(query), _dense(key), _dense(value), out, logsumexp, 0.0, causal, attn_mask=added,
        scale=scale,
    )  # fmt: skip
    of_mask = _mask_gradient(grad, query, key, value, out, logsumexp, mask, scale) if wanted[3] else None
    return (*(g if want else None for g, want in zip(found, wanted, strict=False)), of_mask)


def _mask_gradient(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """The gradient of the scores, P * (grad V^T - rowsum(grad * out)), summed to the shape of the mask. The fused
    kernel does not return it, and no mask is causal at the same time."""
    assert mask is not None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.transpose(-2, -1)).mul_(scale).add_(mask)
    weights = scores.sub_(logsumexp.unsqueeze(-1)).exp_()
    inner = (grad * out).sum(-1, keepdim=True)
    return weights.mul_((grad @ value.transpose(-2, -1)).sub_(inner)).sum_to_size(mask.shape).to(mask.dtype)


def _attention_meta(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, mask: TensorProxy | None, causal: bool, scale: float
) -> tuple[TensorProxy, TensorProxy]:
    return like(query), like(query, query.shape[:3], dtypes.float32 if query.dtype in HALF else query.dtype)


def _is_added(mask: TensorProxy | None) -> bool:
    """True for a mask of numbers, which may have a gradient."""
    return mask is not None and mask.dtype in FLOATING


def _flops(query: int, by_key: int, by_value: int) -> Flops:
    """Of ``by_key`` products with the keys' width and ``by_value`` with the values', for each pair of a query and a
    key.

    ``query`` is its index among the tensors; keys and values follow. Queries are (..., queries, width), keys
    (..., keys, width). A causal mask does not lower the count, as in ``torch.utils.flop_counter``.
    """

    def count(tensors: Shapes, outs: Shapes) -> int:
        (*rows, width), keys, values = tensors[query : query + 3]
        return 2 * math.prod(rows) * keys[-2] * (by_key * width + by_value * values[-1])

    return count


attention_flops = _flops(query=0, by_key=1, by_value=1)  # Q K^T and P V
# By key: recomputed scores, gradients of Q and K. By value: gradients of P and V. The output's gradient comes first.
attention_backward_flops = _flops(query=1, by_key=3, by_value=2)

attention_forward = kernel("scaled_dot_product_attention", _attention_meta, _forward, flops=attention_flops)
attention_backward = kernel(
    "scaled_dot_product_attention_backward",
    lambda grad, query, key, value, out, logsumexp, mask, causal, scale, wanted: (
        like(query), like(key), like(value), like(mask) if _is_added(mask) else None,
    ),
    _backward,
    masked=True,
    flops=attention_backward_flops,
)  # fmt: skip


def _supported(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None,
    dropout_p: float,
    is_causal: bool,
    **others: Any,
) -> bool:
    if not is_floating(query, key, value) or query.device.type != "cpu" or dropout_p:
        return False
    q, k, v = shape_of(query), shape_of(key), shape_of(value)
    if not (len(q) == len(k) == len(v) == 4 and q[:2] == k[:2] == v[:2] and q[3] == k[3] == v[3] and k[2] == v[2]):
        return False
    return attn_mask is None or (not is_causal and _accepts(attn_mask, query, (*q[:3], k[2])))


def _accepts(mask: TensorProxy, query: TensorProxy, scores: tuple[int, ...]) -> bool:
    """True for a mask of two or four dimensions that is broadcast to the scores."""
    shape = shape_of(mask)
    return (
        mask.dtype in FLOATING | {dtypes.bool8}
        and mask.device == query.device
        and len(shape) in (2, 4)
        and all(d in (1, s) for d, s in zip(reversed(shape), reversed(scores), strict=False))
    )


@implements(ltorch.scaled_dot_product_attention, supported=_supported, fusible=False)
def scaled_dot_product_attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Differentiated:
    out, logsumexp = attention_forward(query, key, value, attn_mask, is_causal, scale)

    def gradients(grad: TensorProxy) -> Gradients:
        found = attention_backward(
            grad,
            query,
            key,
            value,
            out,
            logsumexp,
            attn_mask,
            is_causal,
            scale,
            (True, True, True, _is_added(attn_mask)),
        )
        return zip((query, key, value, attn_mask), found, strict=True)

    return out, gradients


# ---- parts of a sequence ----


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
