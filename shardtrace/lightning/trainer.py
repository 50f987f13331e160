"""The strategy for Lightning's Trainer: it shards the LightningModule, whose steps call what compiles itself."""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from shardtrace.checkpoint import full_optimizer_state_dict, load_full_optimizer_state_dict
from shardtrace.lightning.sharding import building, check_precision, environment, sampling, seconds, sharded
from shardtrace.trainers.huggingface import check_files
from shardtrace.training.full import full_state_dict
from shardtrace.training.gradients import no_sync

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

AVERAGE = "_average_model"  # of the callbacks that average weights


class ShardtraceTrainerStrategy(DDPStrategy):
    """Trains with ``lightning.pytorch.Trainer(strategy="shardtrace", devices=2)``, or with an object of this class.

    The Trainer shards the LightningModule in place by :func:`shardtrace.fsdp`, after ``configure_model`` and before
    ``configure_optimizers``. ``training_step`` and its relatives are called as they are. The module, and each submodule
    that they call, compiles its own forward; what else they compute, such as the loss, runs in PyTorch.

    Checkpoints are those of a single process: one file of whole tensors, which the first rank writes and every rank
    reads. "bf16-mixed" and "16-mixed" also gather parameters and reduce gradients in the lower precision.

    Args:
        sharding_strategy: as for :func:`shardtrace.fsdp`.
        mesh: for hybrid strategies, a DeviceMesh or its shape (replicas, shards); for ``context_parallel``, (data,
            context).
        timeout: how long ranks wait for each other.
        process_group_backend, start_method: as for Lightning's DDPStrategy.
        options: further arguments of :func:`shardtrace.fsdp`, without ``InitPolicy.device`` and ``Checks.timeout``.

    Raises:
        TypeError: for a precision plugin that it does not work with.
    """

    def __init__(
        self,
        *,
        sharding_strategy: Any = "zero3",
        mesh: DeviceMesh | tuple[int, int] | None = None,
        timeout: timedelta | None = timedelta(seconds=300),
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        super().__init__(timeout=timeout, process_group_backend=process_group_backend, start_method=start_method)
        self.seconds = seconds(timeout)
        self.mesh, self.options = mesh, {"sharding_strategy": sharding_strategy, **options}

    # ---- processes ----

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision: Precision | None) -> None:
        check_precision(precision)
        self._precision_plugin = precision

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return sampling(self, super().distributed_sampler_kwargs)

    def setup_environment(self) -> None:
        with environment(self):
            super().setup_environment()

    def teardown(self) -> None:
        """Leaves shards where they are, so that the model can be used again."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ---- the model ----

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with building(self.precision_plugin.tensor_init_context(), empty_init):
            yield

    def setup(self, trainer: Trainer) -> None:
        if self._layer_sync is not None:
            raise ValueError("ShardtraceTrainerStrategy does not convert BatchNorm layers: leave sync_batchnorm out")
        super(DDPStrategy, self).setup(trainer)  # without DistributedDataParallel
        for callback in trainer.callbacks:
            if isinstance(getattr(callback, AVERAGE, None), nn.Module):
                callback.setup(trainer, self._module, "fit")  # averages what it copied before the module was sharded
                average: Any = getattr(callback, AVERAGE)
                average.state_dict = functools.partial(_whole_state_dict, average)

    def model_to_device(self) -> None:
        """Leaves the module where it is: shards are moved, so that no device holds the whole module."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return sharded(self, model, self.precision_plugin.precision)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self.model is not None
        with no_sync(self.model):
            yield

    # ---- checkpoints ----

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank copies its rows of a checkpoint into shards."""
        return True

    def load_checkpoint(self, checkpoint_path: Any, **kwargs: Any) -> dict[str, Any]:
        check_files(self._module, checkpoint_path, "the checkpoint to load")
        return super().load_checkpoint(checkpoint_path, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole module on the first rank, and an empty one on the others. A collective."""
        return full_state_dict(self._module, rank0_only=True, cpu=True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of the optimizer in a single process on the first rank. A collective."""
        return full_optimizer_state_dict(
            self._module, getattr(optimizer, "_optimizer", optimizer), rank0_only=True, cpu=True
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_full_optimizer_state_dict(self._module, optimizer, state)

    @property
    def _module(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module


def _whole_state_dict(module: nn.Module, **options: Any) -> Any:
    """What a callback saves of a sharded module, when it is called without options."""
    return type(module).state_dict(module, **options) if options else full_state_dict(module, rank0_only=True, cpu=True)
