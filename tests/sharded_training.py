"""Sharded training on the ranks of a test, and what it is compared with: one process that trains on the whole batch."""

from __future__ import annotations

from typing import Any

import shardtrace  # isort: split

import thunder
import torch
import torch.distributed as dist
from late import late_groups
from models import Weighted, Zoo, tokens
from torch.distributed.tensor import DTensor

ROWS = 12  # of a batch, over all ranks

# The collectives that gather parameters, by strategy.
GATHERS = {"ddp": set[str](), "owner": {"broadcast"}}


# ---- one process ----


def reference(steps: int, optimizer: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of the unsharded Zoo after ``steps`` on the whole batch."""
    torch.manual_seed(0)
    model = Zoo()
    opt = make_optimizer(optimizer, model.parameters())
    losses = []
    for step in range(steps):
        loss = model(*tokens(ROWS, step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def expected_gradients(step: int, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the unsharded Zoo for ``count`` batches as one."""
    torch.manual_seed(0)
    model = Zoo()
    loss = model(*tokens(count * ROWS, step))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-2)  # the usual eps would hide gradients wrong by a factor


# ---- each rank ----


def whole(t: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, which is a collective; another tensor itself."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def local(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor itself."""
    return t.to_local() if isinstance(t, DTensor) else t


def sharded_zoo(strategy: Any = "zero3", *, seed: int = 0, mesh: tuple[int, int] | None = None, **options: Any) -> Zoo:
    """A sharded Zoo with the values of ``seed``. ``mesh`` is the shape of a mesh (replicate, shard)."""
    torch.manual_seed(seed)
    if mesh is not None:
        options["mesh"] = dist.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    return shardtrace.fsdp(Zoo(), sharding_strategy=strategy, **options)


def zoo_and_optimizer(strategy: Any = "zero3", *, seed: int = 0) -> tuple[Zoo, torch.optim.Optimizer]:
    """A sharded Zoo and its AdamW. Hybrid strategies use four ranks as two replicas of two shards."""
    model = sharded_zoo(strategy, seed=seed, mesh=(2, 2) if str(strategy).startswith("hybrid") else None)
    return model, make_optimizer("adamw", model.parameters())


def micro_batches(step: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    """``count`` batches of ``ROWS`` rows."""
    return list(zip(*(t.split(ROWS) for t in tokens(count * ROWS, step)), strict=True))


def my_rows(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """This rank's part of a batch of ``ROWS`` rows."""
    each = ROWS // dist.get_world_size()
    return tuple(t[dist.get_rank() * each :][:each] for t in batch)


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_zoo(
    strategy: Any,
    bucketing: Any = "block",
    optimizer: str = "adamw",
    steps: int = 3,
    mesh: Any = None,
    precision: str | None = None,
    executors: list[str] | None = None,
    late: bool = False,
    evaluate: bool = False,
) -> Any:
    """Train the sharded Zoo on this rank's rows, compare it with the reference, and return its collectives.

    ``mesh`` is the shape of a mesh (replicate, shard). In bf16 the numbers are only near those of the reference.
    ``late``: over groups that behave like nccl's. ``evaluate``: compares logits without gradients, too.
    """
    if late:
        with late_groups(mesh) as groups:
            return train_zoo(strategy, bucketing, optimizer, steps, groups, precision, executors, evaluate=evaluate)
    expected_losses, expected = reference(steps, optimizer)
    torch.manual_seed(0)
    model = Zoo()
    options: dict[str, Any] = {"sharding_strategy": strategy, "bucketing_strategy": bucketing, "mp_policy": precision}
    if isinstance(mesh, tuple):
        mesh = dist.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    options["mesh"] = mesh
    if precision is not None:
        # buffers and parameters without elements keep their dtype: in fp32 they would make all that follows fp32
        model.shift, model.nothing.data = model.shift.bfloat16(), model.nothing.data.bfloat16()
    assert shardtrace.fsdp(model, **options) is model
    exact: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-6} if precision is None else {"rtol": 5e-2, "atol": 5e-2}
    cmodel = thunder.jit(model, executors=executors)
    opt = make_optimizer(optimizer, cmodel.parameters())
    losses = []
    for step in range(steps):
        loss = cmodel(*my_rows(tokens(ROWS, step)))
        loss.backward()
        opt.step()
        assert model.unused.grad is None
        assert model.frozen.grad is None
        opt.zero_grad()
        losses.append(mean_over_ranks(loss))
    torch.testing.assert_close(losses, expected_losses, **exact)
    full = shardtrace.full_state_dict(cmodel)
    assert list(full) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value, **exact, check_dtype=False, msg=lambda m, n=name: f"{n}: {m}")
    assert model.head.weight is model.embedding.weight
    rows = [tuple(row) for row in shardtrace.collectives(cmodel)]
    if not evaluate:
        return rows
    # with no_grad, in eval, and with other shapes
    model.eval()
    with torch.no_grad():
        logits = cmodel(tokens(2, 9)[0])
    with shardtrace.full_params(model):
        torch.testing.assert_close(logits.float(), model(tokens(2, 9)[0]), **exact)
    if isinstance(strategy, str):
        assert {c.kind for c in shardtrace.collectives(cmodel)} == GATHERS.get(strategy, {"all_gather"})
    return rows


def overflow_on_one_rank(strategy: str, **options: Any) -> None:
    """Train in fp16 with PyTorch's GradScaler. The gradient of a row that one rank holds overflows: no rank steps."""
    torch.manual_seed(0)
    model = Weighted()
    cmodel = thunder.jit(shardtrace.fsdp(model, sharding_strategy=strategy, mp_policy="fp16", **options))
    optimizer = torch.optim.SGD(cmodel.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def step(factors: torch.Tensor) -> list[torch.Tensor]:
        scaler.scale(cmodel(torch.ones(2, 4), factors)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    before = [p.detach().clone() for p in model.parameters()]
    after = step(torch.ones(6))
    assert scaler.get_scale() == 16
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.numel())
    too_much = torch.ones(6)
    too_much[0] = 60000.0
    assert all(torch.equal(a, b) for a, b in zip(after, step(too_much), strict=True))
    assert scaler.get_scale() == 8
    assert all(torch.isfinite(p).all() for p in model.parameters())
