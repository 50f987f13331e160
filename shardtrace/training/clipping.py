"""Gradient clipping by the norm of all gradients, over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakSet

from passes.compat.versions import all_gather_single
from passes.plan import Placement
from shardtrace.model.state import ShardedState, link_of, sharded_states
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

TORCHS_NORM, TORCHS_CLIP = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_


def clip_grad_norm_(
    model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them, taken as one vector, is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` for sharded models, which may be given the model itself. Each
    element counts once, whichever ranks hold it. Unsharded parameters are taken to be equal on all ranks, and count
    once. A collective: every rank must call it.

    Args:
        model_or_params: a sharded model, before or after ``thunder.jit``, or parameters of such models.
        max_norm: the largest norm that is left unchanged.
        norm_type: p of the p-norm, greater than 0; ``float("inf")`` is the largest absolute value.
        error_if_nonfinite: raise if the norm is inf or NaN, and leave gradients unchanged.
        foreach: as in torch: one kernel for many gradients.

    Returns:
        The norm before clipping, a 0-dim tensor, equal on all ranks.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: with ``error_if_nonfinite``, on every rank.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be more than 0, not {norm_type}")
    params = _parameters(model_or_params)
    grads = ((p, p.grad) for p in params if p.grad is not None)
    counted = [grad for p, grad in grads if grad.numel() or link_of(p) is not None]  # which other ranks may have
    norm = torch.nn.utils.get_total_norm(counted, norm_type, foreach=foreach)
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
    """Make ``torch.nn.utils.clip_grad_norm_`` and the functions that it consists of right for all gradients of sharded
    models, whoever imported it: beside DTensors there may be plain tensors, shards in host memory that the ranks cannot
    send, and parameters that only one rank owns. Norms are plain tensors, and computed on the rows of each rank.

    Returns the set of the models whose gradients are known.
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
        owned = {i: spread for state in states if state.owns for i, spread in _owned(state)}
        spreads: dict[Spread, list[torch.Tensor]] = {}
        for grad in grads:
            spread = _spread(grad) if isinstance(grad, DTensor) else owned.get(id(grad), ALONE)
            spreads.setdefault(spread, []).append(grad)
        if spreads.keys() <= {ALONE}:
            return TORCHS_NORM(grads, norm_type, error_if_nonfinite, foreach)
        norms = [_norm(mine, spread, float(norm_type), foreach) for spread, mine in spreads.items()]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
        return TORCHS_NORM([total], norm_type, error_if_nonfinite)  # raises on every rank

    @functools.wraps(TORCHS_CLIP)
    def clip_grads_with_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        mine = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for kind in (True, False):  # foreach functions take one of them
            TORCHS_CLIP([p for p in mine if isinstance(p.grad, DTensor) is kind], *args, **kwargs)

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = get_total_norm
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = clip_grads_with_norm_
    return states


class Spread(NamedTuple):
    """The groups whose ranks hold different parts of a tensor, and the device whose tensors they can send."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device | None


ALONE = Spread((), None)  # of tensors that are taken to be equal on all ranks


def _spread(grad: DTensor) -> Spread:
    dims = (dim for dim, placement in enumerate(grad.placements) if placement.is_shard())
    return Spread(tuple(grad.device_mesh.get_group(dim) for dim in dims), torch.device(grad.device_mesh.device_type))


def _owned(state: ShardedState) -> Iterator[tuple[int, Spread]]:
    """The ids of the gradients of parameters that only one rank owns."""
    for e in state.entries:
        if e.home.placement is Placement.OWNER and e.shard.grad is not None:
            yield id(e.shard.grad), Spread((state.group,), e.device)


def _norm(grads: list[torch.Tensor], spread: Spread, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """The norm over all ranks of gradients that are spread alike."""
    mine = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = TORCHS_NORM([grad for grad in mine if grad.numel()], norm_type, False, foreach)
    for group in spread.groups:
        norm = norm if is_alone(group) else _over_ranks(norm.to(spread.device), norm_type, group)
    return norm


def _over_ranks(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm of all ranks' norms. They are gathered, because some backends lose NaN in a reduction."""
    norms = norm.new_empty(group.size())
    with communicating("the norms of the gradients of all ranks", group):
        all_gather_single(norms, norm.reshape(1), group=group)
    return torch.linalg.vector_norm(norms, norm_type)
