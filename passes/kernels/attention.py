"""scaled_dot_product_attention on CPUs, by torch's fused kernel. On CUDA, Thunder's own executor ``sdpa`` does this.

The kernel takes no dropout, no broadcast heads and no values of another width than the keys. Eager PyTorch then
computes the products one by one, and so does Thunder's decomposition.
"""

from __future__ import annotations

import math
from typing import Any

from passes.compat.lines import shape_of
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

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

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
