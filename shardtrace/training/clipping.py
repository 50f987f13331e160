"""Gradient clipping by the norm of all gradients, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

from passes.compat import all_gather_single
from passes.plan import Placement
from shardtrace.model.state import link_of, sharded_states
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from torch import nn


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
    number from each rank): every rank must call it, even a rank without gradients.

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
    group = _group_of(params)
    grads = [p.grad for p in params if p.grad is not None and p.numel() and _counts_here(p, group)]
    norm = torch.nn.utils.get_total_norm(grads, norm_type, False, foreach)
    if group is not None and not is_alone(group):
        norm = _over_ranks(norm.to(_device(params)), norm_type, group)
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


def _group_of(params: list[torch.Tensor]) -> dist.ProcessGroup | None:
    """The process group of the models that own the parameters; None if no parameter is sharded."""
    states = {link.state for p in params if (link := link_of(p)) is not None}
    groups = {state.group: state.model_name for state in states}
    if len(groups) > 1:
        raise ValueError(
            f"the parameters are of models on different process groups ({', '.join(sorted(groups.values()))}): "
            "clip each model's parameters separately"
        )
    return next(iter(groups), None)


def _counts_here(parameter: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """True on exactly one of the ranks that hold the same elements."""
    link = link_of(parameter)
    if link is not None and link.entry.home.placement is not Placement.REPLICATE:
        replicas = link.state.groups.outer if link.entry.home.group is not link.state.group else None
        return replicas is None or replicas.rank() == 0
    return group is None or group.rank() == 0


def _device(params: list[torch.Tensor]) -> torch.device:
    """A device whose tensors the group can send: where a model computes, not where its shards live between uses."""
    return next((link.entry.device for p in params if (link := link_of(p)) is not None), params[0].device)


def _over_ranks(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm of all ranks' norms. They are gathered, because some backends lose NaN in a reduction."""
    norms = norm.new_empty(group.size())
    with communicating("the norms of the gradients of all ranks", group):
        all_gather_single(norms, norm.reshape(1), group=group)
    return torch.linalg.vector_norm(norms, norm_type)
