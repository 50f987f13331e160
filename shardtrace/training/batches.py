"""Batches of ranks, and buffers, which each rank holds whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from passes.comm.sequence import Part, local_part
from passes.plan.plan import Split
from shardtrace.model.state import ShardedState, sharded_states
from shardtrace.model.tracing import plan_of
from shardtrace.options.policies import ExpertParallel
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone
from shardtrace.record.calls import Path, map_tensors

import torch
import torch.distributed as dist
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
        A copy of the structure with parts. The batch itself if the model takes whole sequences, or if each rank has
        its own batch (``expert_parallel``).

    Raises:
        ValueError: if the model is not sharded, or a sequence does not divide into 2 N chunks.
    """
    _, (state, *_) = sharded_states(model)
    plan, options = plan_of(state), state.options.context
    if plan is None or options is None or plan.ranks == 1 or isinstance(options, ExpertParallel):
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


Batch = TypeVar("Batch")


def join(model: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Iterate over this rank's batches until all ranks have used theirs, all in step. ::

        for (x, y), weight in shardtrace.join(model, loader):
            (cmodel(x, y) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    Every step of a sharded model is a collective, so that a rank that has no batch left must go on with the others. It
    gets its last batch again, with weight 0. A rank that has a batch gets the weight N / (ranks that have one): the
    gradient is then the mean over these ranks. Buffers, such as those of batch norm, see the repeated batches.

    A collective of one number before each step. Leave the loop in the same step on all ranks. PyTorch's ``Join`` does
    the same for DDP, where a rank need not run the model to take part.

    Args:
        model: the sharded model, before or after ``thunder.jit``.
        batches: this rank's batches; may be endless on some ranks only if the loop is left.

    Yields:
        A batch, and the factor of its loss.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: on every rank, if a rank has no batch at all while another one has.
    """
    _, states = sharded_states(model)
    iterator = iter(batches)
    last: list[Batch] = []
    while True:
        has, now = True, last
        try:
            now = [next(iterator)]
        except StopIteration:
            has = False
        having, empty = _count(states[0], has, first=not now)
        if not having:
            return
        if empty:
            raise RuntimeError(
                f"{empty} rank(s) have no batch at all, and so none that they could repeat in step with the others: "
                "give each rank at least one"
            )
        last = now
        yield now[0], states[0].group.size() / having if has else 0.0


def _count(state: ShardedState, has: bool, *, first: bool) -> tuple[int, int]:
    """The number of ranks that have a batch, and of those that never had one."""
    if is_alone(state.group):
        return int(has), int(first and not has)
    device = state.entries[0].device if state.entries else torch.device("cpu")
    counts = torch.tensor([int(has), int(first and not has)], device=device)
    with communicating("the number of ranks that have a batch", state.group):
        dist.all_reduce(counts, group=state.group)
    having, empty = counts.tolist()
    return having, empty
