"""chunk. Backward joins the gradients of the parts, as for split. Thunder pads those of a chunk and adds them."""

from __future__ import annotations

from passes.comm.properties import Property
from passes.compat.lines import shape_of
from passes.kernels.registration import Differentiated, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
from thunder.core.proxies import TensorProxy


def _meta(a: TensorProxy, chunks: int, dim: int) -> tuple[TensorProxy, ...]:
    return tuple(like(a, part.shape) for part in torch.empty(shape_of(a), device="meta").chunk(chunks, dim))


chunk_forward = kernel("chunk", _meta, torch.chunk, tags=(Property.VIEW,))


@implements(ltorch.chunk, supported=lambda a, **others: is_floating(a))
def chunk(a: TensorProxy, chunks: int, dim: int = 0) -> Differentiated:
    return chunk_forward(a, chunks, dim), lambda *grads: [(a, ltorch.cat(grads, dim))]
