"""Gradient clipping by the norm of all gradients, over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from weakref import WeakSet

from passes.compat.versions import all_gather_single
from passes.plan import Placement
from shardtrace.model.state import Link, ShardedState, link_of, sharded_states
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad

TORCHS_NORM = clip_grad._get_total_norm


def clip_grad_norm_(
    model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them, taken as one vector, is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` for sharded models: each element counts once, whichever ranks hold it, and
    padding never counts. Unsharded parameters are taken to be equal on all ranks, and count once. A collective (one
    number from each rank): every rank must call it, even a rank without gradients. (torch's own function does the same
    on ranks that have a gradient.)

    Args:
        model_or_params: a sharded model, before or after ``thunder.jit``, or parameters of such models.
        max_norm: the largest norm that is left unchanged.
        norm_type: p of the p-norm, greater than 0; ``float("inf")`` is the largest absolute value.
        error_if_nonfinite: raise if the norm is inf or NaN, and leave gradients unchanged.
        foreach: as in torch: one kernel for many gradients.

    Returns:
        The norm before clipping, a 0-dim tensor, equal on all ranks.

    Raises:
        ValueError: if ``norm_type`` is not positive, or if parameters belong to models on different process groups.
        RuntimeError: with ``error_if_nonfinite``, on every rank.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be more than 0, not {norm_type}")
    params = _parameters(model_or_params)
    links = [link_of(p) for p in params]
    norm = _total_norm([(p.grad, link) for p, link in zip(params, links, strict=True)], norm_type, foreach)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the {norm_type:g}-norm of all gradients is {norm.item()}: nothing was clipped; "
            "error_if_nonfinite=False would scale gradients by it"
        )
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def _parameters(model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(model_or_params, nn.Module):
        return list(sharded_states(model_or_params)[0].parameters())
    return [model_or_params] if isinstance(model_or_params, torch.Tensor) else list(model_or_params)


@functools.cache  # once for each process
def share_norms() -> WeakSet[ShardedState]:
    """Make ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` right for gradients of shards, whoever imported
    them: the norm over all ranks, which each must call.

    The first looks its norm up in its module at each call. Returns the set of the models whose gradients are known.
    """
    states: WeakSet[ShardedState] = WeakSet()

    @functools.wraps(TORCHS_NORM)
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        shards = {id(e.shard.grad): e.shard for state in states for e in state.entries if e.shard.grad is not None}
        links = [link_of(shards.get(id(grad))) for grad in grads]
        if not any(links):
            return TORCHS_NORM(grads, norm_type, error_if_nonfinite, foreach)
        norm = _total_norm(list(zip(grads, links, strict=True)), float(norm_type), foreach)
        return TORCHS_NORM([norm], norm_type, error_if_nonfinite)  # raises on every rank

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = get_total_norm
    return states


def _total_norm(
    grads: Sequence[tuple[torch.Tensor | None, Link | None]], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """The norm over all ranks of gradients and the links of their parameters."""
    group, devices = _group_of(grads), [link.entry.device for _, link in grads if link is not None]
    mine = [grad for grad, link in grads if grad is not None and grad.numel() and _counts_here(link, group)]
    norm = TORCHS_NORM(mine, norm_type, False, foreach)
    if group is None or is_alone(group):
        return norm
    # to a device whose tensors the group can send: where a model computes, not where its shards live between uses
    return _over_ranks(norm.to(devices[0]), norm_type, group)


def _group_of(grads: Iterable[tuple[torch.Tensor | None, Link | None]]) -> dist.ProcessGroup | None:
    """The process group of the models that own the parameters; None if no parameter is sharded."""
    states = {link.state for _, link in grads if link is not None}
    groups = {state.group: state.model_name for state in states}
    if len(groups) > 1:
        raise ValueError(
            f"the parameters are of models on different process groups ({', '.join(sorted(groups.values()))}): "
            "clip each model's parameters separately"
        )
    return next(iter(groups), None)


def _counts_here(link: Link | None, group: dist.ProcessGroup | None) -> bool:
    """True on exactly one of the ranks that hold the same elements."""
    if link is not None and link.entry.home.placement is not Placement.REPLICATE:
        replicas = link.state.groups.outer if link.entry.home.group is not link.state.group else None
        return replicas is None or replicas.rank() == 0
    return group is None or group.rank() == 0


def _over_ranks(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm of all ranks' norms. They are gathered, because some backends lose NaN in a reduction."""
    norms = norm.new_empty(group.size())
    with communicating("the norms of the gradients of all ranks", group):
        all_gather_single(norms, norm.reshape(1), group=group)
    return torch.linalg.vector_norm(norms, norm_type)
