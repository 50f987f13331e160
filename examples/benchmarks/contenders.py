"""The contenders: one function for each system. It turns a whole model into one that trains on this rank's share.

The model, the data, the optimizer and the step around it are the same for all (``training.py``).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import shardtrace  # before thunder: makes it importable on the newest torch

import thunder
import thunder.distributed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mixture import Experts
from model import GPT, Block


@dataclass(frozen=True)
class World:
    """The ranks and the device of a contender. The collectives of ``group`` do nothing if its backend is "fake"."""

    group: dist.ProcessGroup
    device: torch.device

    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.group, self.device.type)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]


@dataclass(frozen=True)
class Contender:
    """One system in one configuration. The report prints its speed over ``peer``, the FSDP2 contender with the same
    resharding."""

    name: str
    build: Callable[[GPT, World], nn.Module]
    peer: str | None = None
    communicates: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")
    rounds: bool = False  # what it sends: fsdp refuses to round for a single rank, which sends nothing

    def start(self, model: GPT, world: World, make: MakeOptimizer) -> tuple[nn.Module, Any]:
        """The model that trains, and what has ``step`` and ``zero_grad``."""
        built = self.build(model, world)
        return built, make(built.parameters())


@dataclass(frozen=True)
class DeepSpeed(Contender):
    """DeepSpeed's engine with its defaults, except that it does not clip, as no other contender does, and that its
    bucket of gradients is as large as the model: by default it takes 2 GB. Its operator in shared memory is off: it
    would bypass a slow link."""

    build: Callable[[GPT, World], nn.Module] = lambda model, world: model
    communicates: bool = False  # it has no group of ours: no run on a no-op backend
    devices: tuple[str, ...] = ("cpu",)
    stage: int = field(kw_only=True)

    def start(self, model: GPT, world: World, make: MakeOptimizer) -> tuple[nn.Module, Any]:
        deepspeed = importlib.import_module("deepspeed")
        bucket = sum(p.numel() for p in model.parameters())
        config = {
            "train_micro_batch_size_per_gpu": 1,  # a number that only its reports use
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": bucket},
            "zero_allow_untested_optimizer": True,
        }
        plain = F.linear
        with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=make(model.parameters()), config=config, dist_init_required=False
            )
        its, F.linear = F.linear, plain  # ZeRO-3 replaces torch's function, for the other contenders, too
        engine.register_forward_pre_hook(lambda *_: setattr(F, "linear", its))
        engine.register_forward_hook(lambda *_: setattr(F, "linear", plain), always_call=True)
        return engine, engine


def use_shardtrace(
    model: GPT, world: World, *, strategy: str, executors: list[str] | None = None, **options: Any
) -> nn.Module:
    shardtrace.fsdp(model, sharding_strategy=strategy, mesh=world.group, **options)
    return thunder.jit(model, executors=executors)


def use_fsdp2(model: GPT, world: World, *, reshard: bool, compiled: bool = False) -> nn.Module:
    """FSDP2 as PyTorch documents it: each block, then the root. ``compiled`` compiles block by block."""
    options: dict[str, Any] = {"mesh": world.mesh(), "reshard_after_forward": reshard}
    for block in model.h:
        if compiled:
            block.compile()
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def use_thunder_fsdp(model: GPT, world: World) -> nn.Module:
    # It takes no group and copies the default one, which is the wrong one for the run on a no-op backend.
    copy = "thunder.distributed.transforms.fsdp_v2.copy_default_process_group"
    with mock.patch(copy, return_value=world.group):
        return thunder.distributed.fsdp(thunder.jit(model), device=world.device)


def use_ddp(model: GPT, world: World) -> nn.Module:
    ddp = DistributedDataParallel(model, process_group=world.group)
    if dist.get_backend(world.group) == "fake":  # its futures hold no tensor, but DDP expects the reduced one
        ddp.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))
    return ddp


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    devices: list[int | str | torch.device] = (
        [] if tensor.device.type == "cpu" else [tensor.device]
    )  # a future takes only results on these
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future


def use_single(model: GPT, world: World, *, how: Callable[[nn.Module], Any] = lambda model: model) -> nn.Module:
    """This rank's batch without communication. All ranks run at once and compete for the cores."""
    return how(model)


def alone(model: nn.Module) -> nn.Module:
    """As a model runs in a world of one."""
    return shardtrace.fsdp(model, mesh=_group_of_one())


@cache
def _group_of_one() -> dist.ProcessGroup:
    group, _ = dist.new_subgroups(1)
    return group


def contenders() -> list[Contender]:
    executor_sets: list[tuple[str, list[str] | None, tuple[str, ...]]] = [
        ("", None, ("cpu", "cuda")),
        (" torchcompile", ["sdpa", "torch_kernels", "torchcompile"], ("cpu", "cuda")),
    ]
    if thunder.nvfuser_executor is not None:
        executor_sets.append((" nvfuser", ["sdpa", "nvfuser"], ("cuda",)))
    ours = [
        Contender(
            f"shardtrace {strategy}{suffix}",
            partial(use_shardtrace, strategy=strategy, executors=executors),
            peer,
            devices=devices,
        )
        for suffix, executors, devices in executor_sets
        for strategy, peer in (("zero2", "fsdp2 keep"), ("zero3", "fsdp2 reshard"))
    ]
    both: dict[str, Any] = {"comm_policy": shardtrace.CommPolicy(gather_dtype="int8", reduce_wire="int8")}
    ours += [
        Contender(f"shardtrace {strategy} int8", partial(use_shardtrace, strategy=strategy, **both), peer, rounds=True)
        for strategy, peer in (("zero2", "fsdp2 keep"), ("zero3", "fsdp2 reshard"))
    ]
    deepspeed = [
        DeepSpeed(f"deepspeed zero{stage}", peer=peer, stage=stage)
        for stage, peer in ((2, "fsdp2 keep"), (3, "fsdp2 reshard"))
        if importlib.util.find_spec("deepspeed") is not None
    ]
    return [
        *ours,
        Contender("fsdp2 keep", partial(use_fsdp2, reshard=False)),
        Contender("fsdp2 reshard", partial(use_fsdp2, reshard=True)),
        Contender("fsdp2 keep compiled", partial(use_fsdp2, reshard=False, compiled=True), "fsdp2 keep"),
        Contender("fsdp2 reshard compiled", partial(use_fsdp2, reshard=True, compiled=True), "fsdp2 reshard"),
        Contender("thunder.distributed.fsdp", use_thunder_fsdp, "fsdp2 keep"),  # ZeRO-2, whatever strategy is requested
        *deepspeed,
        Contender("ddp", use_ddp, "fsdp2 keep"),
        Contender("single eager", use_single, "fsdp2 keep", communicates=False),
        Contender("single compiled", partial(use_single, how=torch.compile), "fsdp2 keep", communicates=False),
        Contender("single thunder", partial(use_single, how=thunder.jit), "fsdp2 keep", communicates=False),
        Contender("single shardtrace", partial(use_single, how=alone), "fsdp2 keep", communicates=False),
    ]


def with_experts_apart() -> list[Contender]:
    """For a mixture of experts: those of a block in a bucket of their own."""
    return [
        Contender(
            f"shardtrace {strategy} apart",
            partial(use_shardtrace, strategy=strategy, bucketing_strategy=(Block, Experts)),
            peer,
        )
        for strategy, peer in (("zero2", "fsdp2 keep"), ("zero3", "fsdp2 reshard"))
    ]


def chosen(only: str, device: str, experts: int, world_size: int) -> list[Contender]:
    """The contenders that run on a device over so many ranks. Raises SystemExit if ``only`` matches none of any."""
    every = [*contenders(), *(with_experts_apart() if experts else [])]
    found = [c for c in every if device in c.devices and re.search(only, c.name)]
    if not found:
        raise SystemExit(f"no contender matches {only!r}")
    return [c for c in found if world_size > 1 or not c.rounds]
