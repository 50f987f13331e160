"""The overflow flag: 0 or NaN, summed over the ranks of a model so that all know of an overflow on one.

Gradients that are not finite are found by their norms. The sum is added to the first element of each gradient, so that
every optimizer on every rank sees a NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from passes.plan import Bucket

import torch
import torch.distributed as dist


class InFlight(NamedTuple):
    """The flag on the wire, and the gradients to which the sum is added."""

    work: Any
    flag: torch.Tensor
    grads: tuple[torch.Tensor, ...]


def issue_share_overflow(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    """Starts to add up the flag: NaN if one of this rank's gradients has an inf or NaN, else 0."""
    host = bucket.plan.host
    device = grads[0].device if host is None else host.device  # gradients on the host are out of nccl's reach
    grads = tuple(g for g in grads if g.numel())
    norms = torch._foreach_norm(grads, float("inf")) if grads else [torch.zeros(())]
    # 0 * inf and 0 * NaN are NaN. A sum keeps a NaN; the maximum of some backends does not.
    flag = torch.stack([n.to(device) for n in norms]).sum().float().mul(0).reshape(1)
    return InFlight(dist.all_reduce(flag, group=bucket.plan.group, async_op=True), flag, grads)


def finish_share_overflow(future: InFlight) -> None:
    future.work.wait()
    flags = {device: future.flag.to(device) for device in {g.device for g in future.grads}}
    for grad in future.grads:
        grad.view(-1)[:1].add_(flags[grad.device])
