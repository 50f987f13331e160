"""Other ways to call ``fsdp``: a drop-in for torch's DistributedDataParallel, and plugins of ``thunder.compile``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from passes.compat.jit import allow_keyword_fn, jitted_module, replace_missing_fuser
from shardtrace.api import fsdp
from shardtrace.options.policies import InitPolicy
from shardtrace.options.strategy import ShardingStrategy, parse_sharding_strategy
from shardtrace.ranks.mesh import Mesh
from shardtrace.training.step import no_sync, set_sync, syncs

import thunder.plugins
import torch
import torch.distributed as dist
from thunder import Plugin
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as Torchs

# ---- torch's DistributedDataParallel ----


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


# ---- plugins of Thunder ----


_HYBRID = {
    ShardingStrategy.ZERO2: ShardingStrategy.HYBRID_ZERO2,
    ShardingStrategy.ZERO3: ShardingStrategy.HYBRID_ZERO3,
}


class FSDP(Plugin):
    """Shards the model that ``thunder.compile`` compiles, in place, with :func:`shardtrace.fsdp`. ::

        thunder.compile(model, plugins="shardtrace")  # the defaults of fsdp
        thunder.compile(model, plugins=[shardtrace.FSDP(sharding_strategy="zero2", mp_policy="bf16")])

    Parameters are shards from then on, as with ``fsdp``. An optimizer may be built before or after.

    Args:
        process_group: a ProcessGroup or a DeviceMesh, under the name of Thunder's plugins. A mesh with the dimensions
            ("ddp", "fsdp") makes "zero2" and "zero3" hybrid. ``mesh`` is the same.
        options: those of :func:`shardtrace.fsdp`.

    Raises:
        TypeError: if both ``process_group`` and ``mesh`` are given.
        RuntimeError: in ``thunder.compile`` or at the first call, if Thunder compiles anything but a module.
    """

    def __init__(self, *, process_group: dist.ProcessGroup | DeviceMesh | None = None, **options: Any) -> None:
        if process_group is not None:
            if options.get("mesh") is not None:
                raise TypeError("process_group and mesh are the same: pass one of them")
            options["mesh"] = process_group
        mesh = options.get("mesh")
        if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names == ("ddp", "fsdp"):
            strategy = parse_sharding_strategy(options.get("sharding_strategy", "zero3"))
            options["sharding_strategy"] = _HYBRID.get(strategy, strategy)
        self.options = options

    def setup_transforms(self) -> list[Transform]:
        return [_Shard(self.options)]


class DDP(FSDP):
    """Replicates the model that ``thunder.compile`` compiles, with :func:`shardtrace.ddp`, whose options it takes."""

    def __init__(self, **options: Any) -> None:
        if "sharding_strategy" in options:
            raise TypeError("shardtrace.DDP takes no sharding_strategy: use shardtrace.FSDP to choose one")
        super().__init__(**options)
        self.options["sharding_strategy"] = "ddp"


class _Shard(Transform):
    """Shards a jitted module when Thunder applies its transforms to it, before it traces anything."""

    sees_no_lines = True  # of the computation

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.done = False

    def transform_module(self, model: ThunderModule) -> None:
        module = jitted_module(model)
        if isinstance(module, torch.fx.GraphModule):
            raise RuntimeError('shardtrace shards modules, not graphs: use a recipe with interpreter="thunder.jit"')
        before = dict(module.named_buffers())
        fsdp(module, **self.options)
        for name, buffer in module.named_buffers():
            if model.get_buffer(name) is before.get(name):  # not one that another transform has set
                model.set_buffer(name, buffer)
        self.done = True

    def transform_traces_pre_prologue(self, prologue: Any, computation: Any, epilogue: Any, **options: Any) -> Any:
        if not self.done:
            raise RuntimeError(
                "shardtrace.FSDP shards modules, and thunder.compile was given a function: call shardtrace.fsdp(model) "
                "on the model that the function uses, without the plugin"
            )
        return prologue, computation, epilogue


replace_missing_fuser()
allow_keyword_fn()
thunder.plugins.register_plugin("shardtrace", FSDP)
thunder.plugins.register_plugin("shardtrace-ddp", DDP)
