"""What the rank processes run for the tests of checkpoints. Each function is called on all ranks at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import shardtrace  # isort: split

import numpy
import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Zoo
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from workers import make_optimizer, mean_over_ranks, my_rows


def sharded_zoo(strategy: Any = "zero3", seed: int = 0) -> tuple[Zoo, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    hybrid = str(strategy).startswith("hybrid")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    model = shardtrace.fsdp(Zoo(), sharding_strategy=strategy, mesh=mesh)
    return model, make_optimizer("adamw", model.parameters())


def load_and_save(source: str, target: str, strategy: Any) -> None:
    """A new model, with a new optimizer, takes over a checkpoint and saves it again."""
    model, optimizer = sharded_zoo(strategy, seed=1)
    loaded = shardtrace.load_checkpoint(source, model, optimizer)
    assert shardtrace.save_checkpoint(target, model, optimizer, step=loaded.step).is_dir()


def resumes_bit_for_bit(path: str, strategy: Any, background: bool) -> None:
    """Four steps with random noise, and two steps of them again in a new model after a load: every bit is the same."""

    def run(model: Any, optimizer: Any, schedule: Any, steps: range, saves: Any = None) -> list[float]:
        cmodel, losses = thunder.jit(model), []
        for step in steps:
            tokens, targets = my_rows(step)
            loss = cmodel(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses += [mean_over_ranks(loss), random.random(), float(numpy.random.rand()), torch.rand(()).item()]
            if saves is not None and step == 1:
                saves(
                    path, model, optimizer, step=2, schedulers=schedule, scaler=scaler, extra=(dist.get_rank(), losses)
                )
        return losses

    def built(seed: int) -> tuple[Any, Any, Any]:
        model, optimizer = sharded_zoo(strategy, seed)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if background:
        with shardtrace.AsyncCheckpointer() as checkpointer:
            undisturbed = run(*built(0), range(4), checkpointer.save)
    else:
        undisturbed = run(*built(0), range(4), shardtrace.save_checkpoint)
    model, optimizer, schedule = built(1)
    other_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loaded = shardtrace.load_checkpoint(path, model, optimizer, schedulers=schedule, scaler=other_scaler)
    rank, losses = loaded.extra
    assert rank == dist.get_rank()
    assert other_scaler.state_dict() == scaler.state_dict()
    assert losses + run(model, optimizer, schedule, range(loaded.step, 4)) == undisturbed


def resumes_inside_an_accumulation(path: str) -> None:
    """Saved when ``no_sync`` has added up gradients: the step that reduces them, in a new model, is the same."""

    def built(seed: int) -> Any:
        torch.manual_seed(seed)
        return shardtrace.fsdp(torch.nn.Linear(3, 5))

    def step(cmodel: Any, seed: int) -> None:
        cmodel(torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))).sum().backward()

    model = built(0)
    cmodel = thunder.jit(model)
    with shardtrace.no_sync(model):
        step(cmodel, 0)
        step(cmodel, 1)
    shardtrace.save_checkpoint(path, model, step=0)
    step(cmodel, 2)
    other = built(1)
    shardtrace.load_checkpoint(path, other)
    step(thunder.jit(other), 2)
    assert torch.equal(model.weight.grad, other.weight.grad)
    assert model.weight.grad.abs().sum() > 0
    with pytest.raises(shardtrace.CheckpointError, match=r"inside an accumulation of gradients \(no_sync\) on 2 ranks"):
        shardtrace.load_checkpoint(path, torch.nn.Linear(3, 5))


def refuses(path: str, message: str, strategy: str = "zero3") -> None:
    """A load that raises on every rank leaves everything as it was."""
    model, optimizer = sharded_zoo(strategy)
    before = [p.detach().clone() for p in model.parameters()]
    generators = torch.get_rng_state()
    with pytest.raises(shardtrace.CheckpointError, match=message):
        shardtrace.load_checkpoint(path, model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), generators)
    assert not optimizer.state
    shardtrace.save_checkpoint(f"{path}/after", model, step=0)  # the ranks are still in step


def fails_to_write(path: str, on: int) -> None:
    """A full disk on one rank: an error on all of them, now or later, and the checkpoint before stays the latest."""
    from shardtrace.checkpoint import writer

    model, optimizer = sharded_zoo()
    first = shardtrace.save_checkpoint(path, model, optimizer, step=1)
    full = OSError(28, "No space left on device")
    message = f"step 2 was not saved to .*: rank {on}: OSError: .*No space left"
    with mock.patch.object(writer, "save_file", side_effect=full if dist.get_rank() == on else writer.save_file):
        with pytest.raises(shardtrace.CheckpointError, match=message):
            shardtrace.save_checkpoint(path, model, optimizer, step=2)
        with shardtrace.AsyncCheckpointer() as checkpointer:
            for again in (checkpointer.wait, lambda: checkpointer.save(path, model, optimizer, step=3)):
                checkpointer.save(path, model, optimizer, step=2)
                with pytest.raises(shardtrace.CheckpointError, match=message):
                    again()
    assert shardtrace.latest_checkpoint(path) == first
    with shardtrace.AsyncCheckpointer() as checkpointer:
        second = checkpointer.save(path, model, optimizer, step=2)
        third = checkpointer.save(path, model, optimizer, step=3, keep_last=1)
    assert shardtrace.latest_checkpoint(path) == third
    assert not second.exists()


def refuses_on_one_rank(path: str, on: int) -> None:
    model, _ = sharded_zoo()
    extra = {"loader": [object() if dist.get_rank() == on else 1]}
    with pytest.raises(shardtrace.CheckpointError, match=rf"ranks\.{on}\.extra\.loader\.0 is a object"):
        shardtrace.save_checkpoint(path, model, step=1, extra=extra)
    with pytest.raises(shardtrace.CheckpointError, match=r"the ranks differ in a checkpoint to save to .* step 0"):
        shardtrace.save_checkpoint(path, model, step=dist.get_rank())
    assert not Path(path).exists()


def factored(path: str) -> None:
    """An optimizer whose state has other shapes than the parameters."""
    model = shardtrace.fsdp(torch.nn.Linear(4, 6), sharding_strategy={"weight": "zero3", "*": "ddp"})
    optimizer = torch.optim.Adafactor(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(shardtrace.CheckpointError, match=r"optimizer\.state\.weight\.row_var has shape \(3, 1\)"):
        shardtrace.save_checkpoint(path, model, optimizer, step=1)


def plain_dcp(path: str, strategy: Any) -> None:
    """``sharded_state_dict`` with torch's own save and load, and across to FSDP2 and back."""
    model, _ = sharded_zoo(strategy)
    expected = shardtrace.full_state_dict(model)
    dcp.save({"model": shardtrace.sharded_state_dict(model)}, checkpoint_id=f"{path}/ours")
    other, _ = sharded_zoo(strategy, seed=1)
    dcp.load({"model": shardtrace.sharded_state_dict(other)}, checkpoint_id=f"{path}/ours")
    found = shardtrace.full_state_dict(other)
    assert all(torch.equal(found[key], value) for key, value in expected.items())

    fsdp2 = Zoo()
    del fsdp2.scale  # FSDP2 takes no 0-dim parameter
    fsdp2 = fully_shard(fsdp2)
    state = {"model": get_model_state_dict(fsdp2)}
    dcp.load(state, checkpoint_id=f"{path}/ours")
    set_model_state_dict(fsdp2, state["model"])
    for name, value in fsdp2.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, expected[name]), name
    dcp.save({"model": get_model_state_dict(fsdp2)}, checkpoint_id=f"{path}/fsdp2")
    last, _ = sharded_zoo(strategy, seed=2)
    mine = {key: value for key, value in shardtrace.sharded_state_dict(last).items() if key != "scale"}
    dcp.load({"model": mine}, checkpoint_id=f"{path}/fsdp2")
    found = shardtrace.full_state_dict(last)
    assert all(torch.equal(found[key], value) for key, value in expected.items() if key != "scale")


def export(path: str, strategy: Any, **options: Any) -> dict[str, torch.Tensor]:
    model, _ = sharded_zoo(strategy)
    expected = shardtrace.full_state_dict(model)
    shardtrace.export_safetensors(path, model, **options)
    with pytest.raises(shardtrace.CheckpointError, match="exists already"):
        shardtrace.export_safetensors(path, model, **options)
    return expected
