"""What the rank processes run. Each function is called on all ranks at once; asserts there fail the test."""

from __future__ import annotations

from typing import Any

import shardtrace  # isort: split

import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens


def reference(
    steps: int, optimizer: str, build: Any = Zoo, rows: int = 12
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of the single-process model on the whole batch."""
    torch.manual_seed(0)
    model = build()
    opt = make_optimizer(optimizer, model.parameters())
    losses = []
    for step in range(steps):
        loss = model(*tokens(rows, step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-2)  # the usual eps would hide gradients wrong by a factor


def my_rows(step: int, rows: int = 12) -> tuple[torch.Tensor, ...]:
    each = rows // dist.get_world_size()
    start = dist.get_rank() * each
    return tuple(t[start : start + each] for t in tokens(rows, step))


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_zoo(strategy: str, bucketing: Any, optimizer: str = "adamw", steps: int = 3) -> Any:
    """Trains the sharded Zoo on this rank's rows; returns its collectives."""
    expected_losses, expected = reference(steps, optimizer)
    torch.manual_seed(0)
    model = Zoo()
    assert shardtrace.fsdp(model, sharding_strategy=strategy, bucketing_strategy=bucketing) is model
    cmodel = thunder.jit(model)
    opt = make_optimizer(optimizer, cmodel.parameters())
    losses = []
    for step in range(steps):
        loss = cmodel(*my_rows(step))
        loss.backward()
        opt.step()
        assert model.unused.grad is None
        assert model.frozen.grad is None
        opt.zero_grad()
        losses.append(mean_over_ranks(loss))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    full = shardtrace.full_state_dict(cmodel)
    assert list(full) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert model.head.weight is model.embedding.weight
    rows = shardtrace.collectives(cmodel)
    # with no_grad, in eval, and with other shapes
    model.eval()
    with torch.no_grad():
        logits = cmodel(tokens(2, 9)[0])
    with shardtrace.full_params(model):
        torch.testing.assert_close(logits, model(tokens(2, 9)[0]), rtol=1e-5, atol=1e-6)
    assert {c.kind for c in shardtrace.collectives(cmodel)} == {"all_gather"}
    return [tuple(row) for row in rows]
