"""What rank processes run to test parameters at rest in host memory. See tests/workers.py."""

from __future__ import annotations

from typing import Any

import shardtrace  # isort: split

import thunder
import torch
from hosts import slow_host
from models import Zoo
from step_workers import expected_gradients, full_gradients, micro_batches, mine
from torch.distributed.fsdp import CPUOffloadPolicy
from workers import make_optimizer, mean_over_ranks, my_rows, overflow_on_one_rank, reference


def build(strategy: Any = "zero3", seed: int = 0, mesh: tuple[int, int] | None = None, **options: Any) -> Zoo:
    torch.manual_seed(seed)
    if mesh is not None:
        options["mesh"] = torch.distributed.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    return shardtrace.fsdp(
        Zoo(), sharding_strategy=strategy, device="cpu", offload_policy=CPUOffloadPolicy(), **options
    )


def train(strategy: Any, steps: int = 3, **options: Any) -> tuple[list[float], Zoo]:
    model = build(strategy, **options)
    cmodel = thunder.jit(model)
    optimizer = make_optimizer("adamw", model.parameters())
    losses = []
    for step in range(steps):
        loss = cmodel(*my_rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, model


def train_and_compare(strategy: Any, mesh: tuple[int, int] | None = None) -> None:
    expected_losses, expected = reference(3, "adamw")
    with slow_host(direct=strategy == "owner"):  # gloo gathers no uneven rows
        losses, model = train(strategy, mesh=mesh)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=2e-6)
    for name, value in shardtrace.full_state_dict(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    with shardtrace.full_params(model):
        torch.testing.assert_close(model.position, expected["position"], rtol=1e-5, atol=2e-6)
    for entry in model._shardtrace.entries:
        assert (entry.home.host is None) == (entry.strategy.value == "ddp")
        assert entry.home.host is None or entry.home.host.sends > 0


def accumulate_clip_and_checkpoint(folder: str) -> None:
    with slow_host():
        model, other = build(), build(seed=1)
    cmodel, optimizer = thunder.jit(model), make_optimizer("adamw", model.parameters())
    *inside, last = micro_batches(0, 3)
    with model.no_sync():
        for batch in inside:
            (cmodel(*mine(batch)) / 3).backward()
    (cmodel(*mine(last)) / 3).backward()
    _, expected = expected_gradients(0, 3)
    found = full_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
    norm = shardtrace.clip_grad_norm_(model, 0.1)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(expected.values()), rtol=1e-5, atol=1e-6)
    optimizer.step()

    shardtrace.save_checkpoint(folder, model, optimizer, step=1)
    loaded = make_optimizer("adamw", other.parameters())
    shardtrace.load_checkpoint(folder, other, loaded)
    found = shardtrace.full_state_dict(other)
    for name, value in shardtrace.full_state_dict(model).items():
        assert torch.equal(value, found[name])
    shardtrace.load_full_state_dict(other, found, broadcast_from=0)


def overflow() -> None:
    with slow_host():
        overflow_on_one_rank("zero3", device="cpu", offload_policy=CPUOffloadPolicy())
