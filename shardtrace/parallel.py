"""A drop-in for scripts that wrap their model in torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardtrace.api import fsdp
from shardtrace.options.policies import InitPolicy
from shardtrace.ranks.mesh import Mesh
from shardtrace.training.gradients import no_sync, set_sync, syncs

from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs


class DistributedDataParallel(nn.Module):
    """Takes the place of torch's class: ``from shardtrace.parallel import DistributedDataParallel as DDP``.

    The model is ``.module``, sharded in place and compiled at its first call. By default each rank has whole
    parameters, so that one rank may evaluate the model or save its state dict by itself. A model that ``torch.compile``
    has wrapped is taken out of it.

    Args:
        module: the model.
        device_ids: a list of this rank's device, or None: as for :func:`shardtrace.fsdp`.
        process_group: the ranks; default: all.
        options: of :func:`shardtrace.fsdp`, with ``sharding_strategy="ddp"`` as default. What only torch's class has
            changes nothing: unused parameters have no gradient, and buffers stay as they are on each rank
            (:func:`shardtrace.sync_buffers`).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        *,
        process_group: Mesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        ours = inspect.signature(fsdp).parameters.keys() | {"bucket_cap_mb"}
        dropped = inspect.signature(Torchs).parameters.keys() - ours
        given: dict[str, Any] = {"sharding_strategy": "ddp", "mesh": process_group}
        given |= {name: value for name, value in options.items() if name not in dropped}
        if device_ids:
            given.setdefault("init_policy", InitPolicy(device=device_ids[0]))
        compiled: nn.Module = getattr(module, "_orig_mod", module)  # of torch.compile
        self.module = fsdp(compiled, **given)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients add up on each rank, as in :func:`shardtrace.no_sync`."""
        return no_sync(self.module)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False: steps are as inside :meth:`no_sync`, until it is True again."""
        return syncs(self.module)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        set_sync(self.module, value)
