"""Strategies for Lightning's Fabric and Trainer. Importing this module registers both as "shardtrace". ::

    import shardtrace.lightning
    from lightning.fabric import Fabric

    fabric = Fabric(strategy="shardtrace", devices=2)  # or strategy=ShardtraceStrategy(sharding_strategy="zero2")
    trainer = lightning.pytorch.Trainer(strategy="shardtrace", devices=2)  # or ShardtraceTrainerStrategy(...)

Needs Lightning: ``pip install 'shardtrace[lightning]'``.
"""

# ruff: noqa: E402
from __future__ import annotations

from shardtrace.options.policies import Checks, InitPolicy, needs, sharing_dims

needs("lightning", extra="lightning", what="shardtrace.lightning")

import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from passes.compat.jit import jitted_module, unjitted
from shardtrace.api import fsdp
from shardtrace.checkpoint import (
    full_optimizer_state_dict,
    latest_checkpoint,
    load_checkpoint,
    load_full_optimizer_state_dict,
    load_safetensors,
    save_checkpoint,
)
from shardtrace.checkpoint.files import CheckpointError, decode, find_checkpoint, read_index
from shardtrace.checkpoint.state import agreement, model_state
from shardtrace.model.shards import init_empty_weights
from shardtrace.model.state import state_of, states_in
from shardtrace.planner.training_plan import mesh_dim_names
from shardtrace.ranks.mesh import init_process_group
from shardtrace.trainers import check_files
from shardtrace.training.full import full_state_dict, load_full_state_dict
from shardtrace.training.step import clip_grad_norm_, no_sync

import thunder
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.pytorch import strategies
from lightning.pytorch.plugins import precision as trainer_precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer import Trainer
from thunder.core.module import ThunderModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

__all__ = ["ShardtraceStrategy", "ShardtraceTrainerStrategy", "jitted"]


# ---- checkpoints of Fabric: a folder of shards, or one file as a single process writes it ----


Filter = Mapping[str, Callable[[str, Any], bool]]


@dataclass(frozen=True, eq=False)
class Parts:
    """The state that a script passes to ``fabric.save`` or ``fabric.load``: its sharded model, optimizers by key, and
    all other values."""

    key: str
    model: nn.Module
    optimizers: dict[str, Optimizer]
    others: dict[str, Any]

    @property
    def sorted_optimizers(self) -> list[Optimizer]:
        return [self.optimizers[key] for key in sorted(self.optimizers)]


def parts_of(state: Mapping[str, Any], call: str) -> Parts:
    """Raises ValueError unless the state has exactly one sharded model."""
    models = [key for key, value in state.items() if isinstance(value, nn.Module) and _is_sharded(value)]
    if len(models) != 1:
        raise ValueError(
            f"{call} takes one model that fabric.setup has sharded, state={{'model': model, ...}}; there are "
            f"{len(models)} in {[*state]}: use a path for each model"
        )
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    others = {key: value for key, value in state.items() if key != models[0] and key not in optimizers}
    return Parts(models[0], state[models[0]], optimizers, others)


def _is_sharded(module: nn.Module) -> bool:
    return bool(states_in(unjitted(module)))


# ---- a folder of shards ----


def save_shards(path: Path, parts: Parts) -> None:
    """Save to a folder. A save to the same folder replaces the one before once it is complete."""
    last = latest_checkpoint(path)
    step = 0 if last is None else int(last.name.removeprefix("step-")) + 1
    others = {key: _state_of(value) for key, value in parts.others.items()}
    extra = {"keys": [*others], "others": others}
    save_checkpoint(path, parts.model, parts.sorted_optimizers, step=step, extra=extra, keep_last=1)


def load_shards(path: Path, parts: Parts, state: MutableMapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Load a folder. Returns the values that the state does not ask for."""
    with agreement(model_state(parts.model), f"the checkpoint {path}", KeyError):
        _check_keys(parts.others, _keys_in(path), strict)
    found: dict[str, Any] = load_checkpoint(path, parts.model, parts.sorted_optimizers).extra["others"]
    return _restore(found, parts, state)


def _keys_in(path: Path) -> list[str]:
    pairs = read_index(find_checkpoint(path)).ranks[0]["extra"]
    try:
        return list(decode(dict(pairs["dict"])["keys"], {}))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} was not saved by fabric.save: load it by shardtrace.load_checkpoint") from None


# ---- one file ----


def save_file(path: Path, parts: Parts, filter_: Filter) -> None:
    """Save whole tensors to one file, which the first rank writes. A file at this path is replaced once it is
    complete."""
    full: dict[str, Any] = {parts.key: full_state_dict(parts.model, rank0_only=True, cpu=True)}
    for key, optimizer in parts.optimizers.items():
        full[key] = full_optimizer_state_dict(parts.model, optimizer, rank0_only=True, cpu=True)
    model = model_state(parts.model)
    with agreement(model, f"the model saved to {path}"):
        if model.rank == 0:
            full |= {key: _state_of(value) for key, value in parts.others.items()}
            for key, keeps in filter_.items():
                if isinstance(full[key], Mapping):
                    full[key] = {k: v for k, v in full[key].items() if keeps(k, v)}
            _write(path, full)


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: state_dict_type='full' writes a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, temporary)
        os.replace(temporary, path)
    except Exception as problem:  # of the disk, or of pickling: every rank raises it
        raise CheckpointError(f"cannot write {path}: {type(problem).__name__}: {problem}") from None


def load_file(
    path: Path, parts: Parts, state: MutableMapping[str, Any], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a file of whole tensors. Each rank reads only its rows. Returns the values that the state does not ask
    for."""
    found = read_file(path, parts.model, weights_only)
    with agreement(model_state(parts.model), f"the checkpoint {path}", KeyError):
        _check_keys(state, [*found], strict)
    if parts.key in found:
        load_full_state_dict(parts.model, found.pop(parts.key), strict=strict)
    for key, optimizer in parts.optimizers.items():
        if key in found:
            load_full_optimizer_state_dict(parts.model, optimizer, found.pop(key))
    return _restore(found, parts, state)


def load_raw(path: Path, model: nn.Module, *, strict: bool, weights_only: bool | None) -> None:
    """Load a whole state dict, from a file of torch.save or from safetensors files, into shards."""
    if path.is_dir() or path.suffix in (".safetensors", ".json"):
        load_safetensors(path, model, strict=strict)
    else:
        load_full_state_dict(model, read_file(path, model, weights_only), strict=strict)


def read_file(path: Path, model: nn.Module, weights_only: bool | None) -> dict[str, Any]:
    """The contents of a file of torch.save, mapped into memory. Raises CheckpointError on every rank."""
    with agreement(model_state(model), f"the file {path}"):
        try:
            found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        except Exception as problem:  # torch raises many kinds: every rank raises it
            raise CheckpointError(f"cannot load {path}: {type(problem).__name__}: {problem}") from None
    return found


# ---- both ----


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _check_keys(wanted: Mapping[str, Any], saved: list[str], strict: bool) -> None:
    missing = [key for key in wanted if key not in saved]
    if strict and missing:
        raise KeyError(f"{missing[0]!r} is not in the checkpoint, which has {saved}: pass strict=False to leave it out")


def _restore(found: dict[str, Any], parts: Parts, state: MutableMapping[str, Any]) -> dict[str, Any]:
    for key, value in parts.others.items():
        if key not in found:
            continue
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(found.pop(key))
        else:
            state[key] = found.pop(key)
    return found


# ---- what both have in common ----


M = TypeVar("M", bound=nn.Module)

# A mixed precision also gathers parameters and reduces gradients in the lower one, as Lightning's FSDPStrategy does.
_POLICIES = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


def check_precision(precision: Any) -> None:
    """Raises TypeError for a precision plugin, of Fabric or of the Trainer, that sharded models do not work with."""
    kinds = {cls.__name__ for cls in type(precision).__mro__} & {"DoublePrecision", "HalfPrecision", "MixedPrecision"}
    if not (precision is None or kinds or type(precision).__name__ == "Precision"):  # others replace layers or kernels
        raise TypeError(
            f"ShardtraceStrategy does not work with {type(precision).__name__}: use precision='32-true', "
            "'64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
        )


def seconds(timeout: timedelta | None) -> float:
    """How long ranks wait for each other."""
    return 300.0 if timeout is None else timeout.total_seconds()


@contextmanager
def environment(strategy: Any) -> Iterator[None]:
    """Around Lightning's own setup: the process group of ranks that torchrun has started, and the mesh."""
    if dist.is_torchelastic_launched() and strategy.process_group_backend is None:
        # torchrun may restart ranks, which Lightning's own group does not survive
        device = strategy.root_device
        strategy.accelerator.setup_device(device)
        init_process_group(device, timeout=strategy.seconds, **({"device_id": device} if device.type == "cuda" else {}))
    yield
    if isinstance(strategy.mesh, tuple):
        names = mesh_dim_names(strategy.options)
        strategy.mesh = init_device_mesh(strategy.root_device.type, strategy.mesh, mesh_dim_names=names)


def sampling(strategy: Any, usual: dict[str, Any]) -> dict[str, Any]:
    """How many replicas of the data there are, and which is this rank's: ranks that share a batch share theirs."""
    shared, mesh = sharing_dims(strategy.options), strategy.mesh
    if not shared or not isinstance(mesh, DeviceMesh):
        return usual
    others = [name for name in mesh.mesh_dim_names or () if name not in shared]
    replicas, rank = 1, 0
    for name in others:
        replicas, rank = replicas * mesh[name].size(), rank * mesh[name].size() + mesh.get_local_rank(name)
    return {"num_replicas": replicas, "rank": rank}


@contextmanager
def building(precision: Any, empty: bool | None) -> Iterator[None]:
    """Modules are built in host memory, or without memory for their parameters (``empty``)."""
    with precision:
        if empty:
            with init_empty_weights():
                yield
        else:
            yield


def sharded(strategy: Any, module: M, precision: str) -> M:
    """Shards the module in place by the strategy's options, unless it is sharded already."""
    if state_of(module) is not None:
        return module
    policy = _POLICIES.get(precision)
    options = {**({"mp_policy": policy} if policy is not None else {}), **strategy.options}
    init = replace(options.pop("init_policy", InitPolicy()), device=strategy.root_device)
    checks = replace(options.pop("checks", Checks()), timeout=strategy.seconds)
    return fsdp(module, mesh=strategy.mesh, init_policy=init, checks=checks, **options)


# ---- Fabric ----


class ShardtraceStrategy(DDPStrategy):
    """Trains with Lightning Fabric: ``Fabric(strategy=ShardtraceStrategy(), devices=2)``, or ``strategy="shardtrace"``.

    ``fabric.setup(model)`` shards the model in place with :func:`shardtrace.fsdp` and compiles it with
    ``thunder.jit``. Parameters stay the same objects, so that an optimizer may be built before or after. Everything
    else is as with Fabric's strategies: ``init_module(empty_init=True)`` builds a model without memory, which ``setup``
    initialises, one module at a time; ``no_backward_sync`` adds gradients up; ``clip_gradients`` takes the norm of the
    whole gradient.

    Precision "bf16-mixed" and "16-mixed" also gather parameters and reduce gradients in the lower precision; shards and
    optimizer state stay fp32.

    Args:
        sharding_strategy: as for :func:`shardtrace.fsdp`.
        state_dict_type: what ``fabric.save`` writes: "sharded", a folder in which each rank writes its shards, or
            "full", one file as a single process writes it. ``fabric.load`` takes either one, with any number of ranks,
            and a file that another strategy has saved.
        jit: compile the model with ``thunder.jit``. With False, pass ``fabric.setup`` the result of a ``thunder.jit``
            of your own, or jit a function that calls the model.
        executors: those of ``thunder.jit``.
        mesh: for hybrid strategies, a DeviceMesh or its shape (replicas, shards); for ``context_parallel`` or
            ``expert_parallel``, (data, context), for ``tensor_parallel``, (data, tensor), for both, (data, context,
            tensor).
        timeout: how long ranks wait for each other.
        process_group_backend, start_method, accelerator, parallel_devices, cluster_environment, precision: as for
            Fabric's DDPStrategy.
        options: further arguments of :func:`shardtrace.fsdp`, without ``InitPolicy.device`` and ``Checks.timeout``.

    Raises:
        TypeError: for a precision plugin or a CheckpointIO plugin that it does not work with.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=300),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        sharding_strategy: Any = "zero3",
        state_dict_type: Literal["full", "sharded"] = "sharded",
        jit: bool = True,
        executors: Sequence[Any] | None = None,
        mesh: DeviceMesh | tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"state_dict_type must be 'full' or 'sharded', not {state_dict_type!r}")
        self._backward_sync_control, self.seconds = _NoSync(), seconds(timeout)
        self.state_dict_type, self.jit, self.executors, self.mesh = state_dict_type, jit, executors, mesh
        self.options = {"sharding_strategy": sharding_strategy, **options}

    # ---- processes ----

    @property
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        check_precision(precision)
        self._precision = precision

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise TypeError(f"ShardtraceStrategy writes checkpoints itself, without {type(io).__name__}: leave it out")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return sampling(self, super().distributed_sampler_kwargs)

    def setup_environment(self) -> None:
        with environment(self):
            super().setup_environment()

    # ---- the model ----

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Modules are built in host memory, or without memory for their parameters (``empty_init=True``)."""
        return building(self.precision.module_init_context(), empty_init)

    def module_to_device(self, module: nn.Module) -> None:
        """Leaves the module where it is: ``setup_module`` moves shards, so that no device holds the whole module."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shards the module in place, unless it is sharded already, and compiles it."""
        module = sharded(self, module, self.precision.precision)
        if not isinstance(module, ThunderModule):
            if not self.jit:
                return module
            module = thunder.jit(module, executors=self.executors)
        _guard(module)
        return module

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clips by the norm of the whole gradient of the optimizer's parameters, over all ranks."""
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Saves a sharded model, its optimizers, and other values. Every rank must call it.

        Raises:
            ValueError: the state has no sharded model, or more than one.
            CheckpointError: on every rank, naming what cannot be saved.
        """
        if storage_options is not None:
            raise TypeError("ShardtraceStrategy takes no storage_options, because it uses no CheckpointIO")
        if filter and self.state_dict_type == "sharded":
            raise NotImplementedError("a sharded checkpoint is saved whole: use state_dict_type='full' with a filter")
        parts, path = parts_of(state, "save"), Path(self.broadcast(path))
        if self.state_dict_type == "sharded":
            save_shards(path, parts)
        else:
            save_file(path, parts, filter or {})

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a folder or a file that any number of ranks saved, in place. Every rank must call it.

        Returns:
            The values of the checkpoint that the state does not ask for.

        Raises:
            ValueError: the state has no sharded model, or more than one.
            KeyError, CheckpointError, RuntimeError: what does not fit, on every rank; nothing has been loaded then.
        """
        if not state:
            raise ValueError("ShardtraceStrategy loads into a sharded model: pass state={'model': model, ...}")
        if isinstance(state, Optimizer):
            raise ValueError(
                "an optimizer is loaded with its model: pass state={'model': model, 'optimizer': optimizer}"
            )
        path = Path(self.broadcast(path))
        if isinstance(state, nn.Module):
            load_raw(path, state, strict=strict, weights_only=weights_only)
            return {}
        parts = parts_of(state, "load")
        if path.is_dir():
            return load_shards(path, parts, state, strict=strict)
        return load_file(path, parts, state, strict=strict, weights_only=weights_only)


def jitted(model: nn.Module) -> ThunderModule:
    """The jitted module inside the result of ``fabric.setup``, for ``shardtrace.collectives``, ``inspect`` and others.

    Raises ValueError if there is none.
    """
    found = next((module for module in model.modules() if isinstance(module, ThunderModule)), None)
    if found is None:
        raise ValueError(f"there is no jitted module in {type(model).__name__}: pass the result of fabric.setup(model)")
    return found


def _guard(jitted: ThunderModule) -> None:
    """Makes a jitted module raise instead of running a step of another method, and keeps torch.compile out of it.

    Fabric calls a method such as ``training_step`` by putting it in the place of ``forward``, and Thunder does not look
    for another ``forward`` before it runs a compiled step.
    """
    module, run = jitted_module(jitted), jitted.forward
    forward = module.forward

    @torch.compiler.disable
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if module.forward != forward:
            module.forward = forward
            raise RuntimeError(
                f"only forward() of {type(module).__name__} is compiled, and Fabric calls another method through it: "
                "compute the loss in forward(), or pass ShardtraceStrategy(jit=False) and jit the method by thunder.jit"
            )
        return run(*args, **kwargs)

    jitted.forward = guarded


class _NoSync:
    """Fabric's interface for ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()


# ---- the Trainer ----


AVERAGE = "_average_model"  # of the callbacks that average weights


class ShardtraceTrainerStrategy(strategies.DDPStrategy):
    """Trains with ``lightning.pytorch.Trainer(strategy="shardtrace", devices=2)``, or with an object of this class.

    The Trainer shards the LightningModule in place by :func:`shardtrace.fsdp`, after ``configure_model`` and before
    ``configure_optimizers``. ``training_step`` and its relatives are called as they are. The module, and each submodule
    that they call, compiles its own forward; what else they compute, such as the loss, runs in PyTorch.

    Checkpoints are those of a single process: one file of whole tensors, which the first rank writes and every rank
    reads. "bf16-mixed" and "16-mixed" also gather parameters and reduce gradients in the lower precision.

    Args:
        sharding_strategy: as for :func:`shardtrace.fsdp`.
        mesh: for hybrid strategies, a DeviceMesh or its shape (replicas, shards); for ``context_parallel`` or
            ``expert_parallel``, (data, context), for ``tensor_parallel``, (data, tensor), for both, (data, context,
            tensor).
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
    def precision_plugin(self) -> trainer_precision.Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision: trainer_precision.Precision | None) -> None:
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
        super(strategies.DDPStrategy, self).setup(trainer)  # without DistributedDataParallel
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


for registry, strategy in (STRATEGY_REGISTRY, ShardtraceStrategy), (StrategyRegistry, ShardtraceTrainerStrategy):
    registry.register("shardtrace", strategy, description="FSDP by shardtrace, compiled by Thunder", override=True)
