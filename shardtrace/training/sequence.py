"""Parts of batches, for ranks that share sequences."""

from __future__ import annotations

from typing import TypeVar

from passes.comm.sequence import Part, local_part
from passes.plan.sequence import Split
from shardtrace.model.context import plan_of
from shardtrace.model.state import sharded_states
from shardtrace.record.results import Path, map_tensors

import torch
from torch import nn

T = TypeVar("T")


def shard_sequence(model: nn.Module, batch: T) -> T:
    """This rank's part of a batch, for a model whose sequences are split (``context_parallel``).

    Each tensor (batch, sequence, ...) becomes (batch, sequence / N, ...): of 2 N chunks of the sequence, rank r of N
    has the chunks r and 2 N - 1 - r, so that causal attention has the same work on all ranks. Tensors without the
    dimension of the sequence, or of size 1 there, stay whole. ::

        context = ContextParallel("context", arguments="part", returns="part")
        model = shardtrace.fsdp(model, mesh=mesh, context_parallel=context)
        x, y = shardtrace.shard_sequence(model, (x, y))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / tokens_of_whole_batch

    Args:
        model: sharded, before or after ``thunder.jit``.
        batch: a tensor, or any structure of tensors, whole.

    Returns:
        A copy of the structure with parts, or the batch itself if this model's sequences are whole.

    Raises:
        ValueError: if the model is not sharded, or a sequence does not divide into 2 N chunks.
    """
    _, (state, *_) = sharded_states(model)
    plan, options = plan_of(state), state.options.context
    if plan is None or options is None or plan.ranks == 1:
        return batch
    dim = options.sequence_dim

    def cut(t: torch.Tensor, path: Path) -> torch.Tensor:
        if t.dim() <= dim or t.shape[dim] == 1:
            return t
        if t.shape[dim] % (2 * plan.ranks):
            name = "".join(f"[{key!r}]" for _, key in path)
            raise ValueError(
                f"batch{name} has {t.shape[dim]} positions in dimension {dim}, which do not divide into "
                f"{2 * plan.ranks} chunks for {plan.ranks} ranks: pad it to a multiple of {2 * plan.ranks}, or give "
                'the model whole batches with ContextParallel(arguments="whole")'
            )
        return local_part(t, Part(plan, Split.along(dim, t.shape[dim])))

    found: T = map_tensors(batch, cut)
    return found
