"""What the rank processes run. Each function is called on all ranks at once; asserts there fail the test."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any
from unittest import mock

import shardtrace  # isort: split

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Block, Zoo, tokens


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


# What brings parameters to their use.
GATHERS = {"ddp": set[str](), "owner": {"broadcast"}}


def train_zoo(
    strategy: Any,
    bucketing: Any = "block",
    optimizer: str = "adamw",
    steps: int = 3,
    mesh: tuple[int, int] | None = None,
    precision: str | None = None,
    executors: list[str] | None = None,
) -> Any:
    """Trains the sharded Zoo on this rank's rows; returns its collectives.

    ``mesh`` is the shape of a mesh (replicate, shard). In bf16 numbers are only near those of the reference.
    """
    expected_losses, expected = reference(steps, optimizer)
    torch.manual_seed(0)
    model = Zoo()
    options: dict[str, Any] = {"sharding_strategy": strategy, "bucketing_strategy": bucketing, "mp_policy": precision}
    if mesh is not None:
        options["mesh"] = torch.distributed.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    if precision is not None:
        # what keeps its dtype, buffers and parameters without elements, makes all after it fp32
        model.shift, model.nothing.data = model.shift.bfloat16(), model.nothing.data.bfloat16()
    assert shardtrace.fsdp(model, **options) is model
    exact = {"rtol": 1e-5, "atol": 2e-6} if precision is None else {"rtol": 5e-2, "atol": 5e-2}
    cmodel = thunder.jit(model, executors=executors)
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
    torch.testing.assert_close(losses, expected_losses, **exact)
    full = shardtrace.full_state_dict(cmodel)
    assert list(full) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value, **exact, check_dtype=False, msg=lambda m, n=name: f"{n}: {m}")
    assert model.head.weight is model.embedding.weight
    rows = shardtrace.collectives(cmodel)
    # with no_grad, in eval, and with other shapes
    model.eval()
    with torch.no_grad():
        logits = cmodel(tokens(2, 9)[0])
    with shardtrace.full_params(model):
        torch.testing.assert_close(logits.float(), model(tokens(2, 9)[0]), **exact)
    if isinstance(strategy, str):
        assert {c.kind for c in shardtrace.collectives(cmodel)} == GATHERS.get(strategy, {"all_gather"})
    return [tuple(row) for row in rows]


def train_fused(strategy: str, bucketing: str) -> None:
    """With an executor that fuses lines, and moves some from forward into backward; regions run as they are."""
    with mock.patch.object(torch, "compile", lambda function, **options: function):
        rows = train_zoo(strategy, bucketing, steps=2, executors=["sdpa", "torchcompile"])
    again = [names for kind, phase, _, _, _, names in rows if (kind, phase) == ("all_gather", "backward")]
    assert sum("blocks.1.norm" in names for names in again) == (strategy == "zero3")


def losses_of_ddp(steps: int = 20) -> None:
    """ZeRO-3 losses of the example's tiny GPT are those of DDP. (ZeRO-2: tests/test_examples.py.)"""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "gpt2"))
    from model import CONFIGS, GPT

    def train(wrap: Any) -> list[float]:
        torch.manual_seed(0)
        run = wrap(GPT(CONFIGS["tiny"]))
        optimizer = torch.optim.AdamW(run.parameters(), lr=3e-4)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(steps):
            rows = torch.randint(0, 256, (2 * dist.get_world_size(), 33), generator=generator)
            mine = rows[2 * dist.get_rank() :][:2]
            loss = run(mine[:, :-1], mine[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
        return losses

    expected = train(torch.nn.parallel.DistributedDataParallel)
    losses = train(lambda model: thunder.jit(shardtrace.fsdp(model)))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


class Mixed(torch.nn.Module):
    """Parameters in three dtypes, in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)])
        self.layers[1].to(torch.bfloat16)
        self.layers[2].to(torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().square().mean()


def mixed_dtypes(strategy: str) -> None:
    torch.manual_seed(0)
    expected, model = Mixed(), Mixed()
    model.load_state_dict(expected.state_dict())
    x = torch.randn(4 * dist.get_world_size(), 4)
    cmodel = thunder.jit(shardtrace.fsdp(model, sharding_strategy=strategy, bucketing_strategy=100))
    expected(x).backward()
    cmodel(x[4 * dist.get_rank() :][:4]).backward()
    assert {(c.kind, c.dtype) for c in shardtrace.collectives(cmodel)} >= {
        (kind, dtype) for kind in ("all_gather", "reduce_scatter") for dtype in ("f32", "bf16", "f16")
    }
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == q.dtype
        mine = q.grad[dist.get_rank() * p.shape[0] :][: p.shape[0]]
        torch.testing.assert_close(
            p.grad[: mine.shape[0]], mine, rtol=2e-2, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def retain_and_accumulate() -> None:
    """Gradients add up over backward passes, and hooks on shards run."""
    model = torch.nn.Linear(4, 6)
    cmodel = thunder.jit(shardtrace.fsdp(model))
    seen = []
    model.weight.register_hook(lambda grad: seen.append(grad.shape))
    cmodel(torch.ones(2, 4)).sum().backward()
    once = model.weight.grad.clone()
    cmodel(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.grad, 2 * once)
    assert seen == [model.weight.shape] * 2


def peak_of_fsdp() -> float:
    """Host memory that fsdp() takes beyond the unsharded model, in units of its largest module."""
    import resource

    width, depth = 2048, 12
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth)))
    for p in model.parameters():
        p.data.fill_(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shardtrace.fsdp(model)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * 1024 / (width * width * 4)


# ---- shardtrace.full, consensus, materialize, groups ----


def state_dicts() -> None:
    torch.manual_seed(0)
    model = Zoo()
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    cmodel = thunder.jit(shardtrace.fsdp(model))
    full = shardtrace.full_state_dict(cmodel, cpu=True)
    assert list(full) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=0)
    assert full["head.weight"] is full["embedding.weight"]
    on_first = shardtrace.full_state_dict(model, rank0_only=True)
    assert list(on_first) == (list(expected) if dist.get_rank() == 0 else [])

    other = {k: v + 1 for k, v in expected.items()}
    assert shardtrace.load_full_state_dict(cmodel, other) == ([], [])
    with shardtrace.full_params(model):
        for name, value in other.items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
        model.scale.data.fill_(7.0)
    assert shardtrace.full_state_dict(model)["scale"] == 7
    with shardtrace.full_params(model, writeback=False):
        model.scale.data.fill_(8.0)
    assert shardtrace.full_state_dict(model)["scale"] == 7

    loaded = shardtrace.load_full_state_dict(model, expected if dist.get_rank() == 0 else {}, broadcast_from=0)
    assert loaded == ([], [])
    torch.testing.assert_close(shardtrace.full_state_dict(model), dict(full), rtol=0, atol=0)
    partial = {"scale": torch.tensor(3.0)}
    missing, unexpected = shardtrace.load_full_state_dict(model, partial, strict=False)
    assert len(missing) == len(expected) - 1
    assert not unexpected
    assert shardtrace.full_state_dict(model)["scale"] == 3
    # plain state dicts of shards round-trip too
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


def wrong_state_dict(broken_on: int | None) -> None:
    """A state dict that does not fit, on one rank or on all."""
    model = shardtrace.fsdp(Zoo())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    good = {k: v + 1 for k, v in shardtrace.full_state_dict(model).items()}
    if broken_on in (None, dist.get_rank()):
        del good["scale"]
        good["position"] = torch.zeros(2, 2)
    try:
        shardtrace.load_full_state_dict(model, good)
    finally:
        for k, v in model.state_dict().items():
            assert torch.equal(v, before[k]), f"{k} was changed"


def full_params_call() -> None:
    model = shardtrace.fsdp(Zoo())
    cmodel = thunder.jit(model)
    inputs, targets = tokens(4)
    with torch.no_grad():
        expected = cmodel(inputs, targets)
        with shardtrace.full_params(model):
            torch.testing.assert_close(model(inputs, targets), expected)
            try:
                cmodel(inputs, targets)
            except RuntimeError as error:
                assert "was called inside full_params" in str(error)  # noqa: PT017
            else:
                raise AssertionError("the jitted model ran inside full_params")
        torch.testing.assert_close(cmodel(inputs, targets), expected)


def broadcast_from(source: int) -> None:
    torch.manual_seed(dist.get_rank())
    model = Zoo()
    model.shift.fill_(dist.get_rank())
    torch.manual_seed(source)
    expected = Zoo()
    expected.shift.fill_(source)
    shardtrace.fsdp(model, broadcast_from=source)
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(expected.state_dict()), rtol=0, atol=0)


class Meta(torch.nn.Module):
    """Parameters, a buffer and tied weights that reset_parameters can make."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))


def meta_device(with_init_fn: bool) -> None:
    def init(module: torch.nn.Module) -> None:
        for p in module.parameters(recurse=False):
            torch.nn.init.normal_(p)

    with torch.device("meta"):
        model = Meta()
        expected = Meta()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected.to_empty(device="cpu")
    expected.head.weight = expected.embedding.weight  # to_empty unties
    torch.manual_seed(3)
    for module in expected.modules():
        if with_init_fn:
            init(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(3)
    shardtrace.fsdp(model, device="cpu", param_init_fn=init if with_init_fn else None)
    assert model.head.weight is model.embedding.weight
    full = shardtrace.full_state_dict(model)
    for name, value in expected.state_dict().items():
        if not (with_init_fn and "norm." in name and name not in dict(model.named_parameters())):  # undefined by init
            torch.testing.assert_close(full[name], value, rtol=0, atol=0, equal_nan=True)
    # the optimizer that was built on the meta device holds the parameters
    before = model.head.bias.detach().clone()
    thunder.jit(model)(torch.arange(4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.head.bias, before)


def on_different_groups() -> None:
    """Two models in one process, one over all ranks, one over the first two; a third rank has only the first."""
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    wide, narrow = Zoo(), Zoo()
    expected = {k: v.clone() for k, v in narrow.state_dict().items()}
    shardtrace.fsdp(wide)
    models = [thunder.jit(wide)]
    if dist.get_rank() < 2:
        models.append(thunder.jit(shardtrace.fsdp(narrow, mesh=pair, sharding_strategy="zero2")))
    for _ in range(2):
        for cmodel in models:
            cmodel(*my_rows(0)).backward()
    if dist.get_rank() < 2:
        full = shardtrace.full_state_dict(narrow)
        torch.testing.assert_close(dict(full), expected, rtol=0, atol=0)


def differs(how: str, on: int) -> None:
    """One rank builds another model."""
    width, dtype, depth, name = 6, torch.float32, 2, "a"
    frozen = False
    if dist.get_rank() == on:
        width, dtype, depth, name, frozen = {
            "shape": (5, dtype, depth, name, frozen),
            "dtype": (width, torch.bfloat16, depth, name, frozen),
            "depth": (width, dtype, 3, name, frozen),
            "name": (width, dtype, depth, "b", frozen),
            "frozen": (width, dtype, depth, name, True),
        }[how]
    model = torch.nn.Sequential()
    for i in range(depth):
        model.add_module(f"{name}{i}", torch.nn.Linear(width, width, dtype=dtype).requires_grad_(not frozen))
    try:
        shardtrace.fsdp(model, timeout=20)
    finally:
        assert all(p.shape[0] == width for p in model.parameters()), "half sharded"


def refuses_on_one_rank(on: int) -> None:
    model = torch.nn.Linear(4, 4)
    if dist.get_rank() == on:
        model.weight.grad = torch.zeros(4, 4)
    shardtrace.fsdp(model, timeout=20)


def does_not_come(on: int) -> None:
    if dist.get_rank() != on:
        shardtrace.fsdp(torch.nn.Linear(4, 4), timeout=0.5)


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        return self.left(self.right(x)) if order == "left" else self.right(self.left(x))


def runs_in_another_order() -> None:
    cmodel = thunder.jit(shardtrace.fsdp(Branches(), bucketing_strategy="layer", timeout=20))
    cmodel(torch.ones(2, 4), "right" if dist.get_rank() == 0 else "left")


def compiles_alone() -> None:
    """One rank alone sees a new shape: the collectives are the same, so nothing needs to be compared again."""
    cmodel = thunder.jit(shardtrace.fsdp(Branches(), timeout=2))
    for rows in (3, 3 + dist.get_rank(), 3):
        cmodel(torch.ones(rows, 4), "left").sum().backward()


class Counts(torch.nn.Linear):
    """Has extra state, a buffer of a dtype that gloo does not know, and a parameter of one row."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 3
        self.row = torch.nn.Parameter(torch.randn(1, 1000))
        self.register_buffer("table", torch.arange(5, dtype=torch.int16))

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def extra_state_and_odd_buffers() -> None:
    model = Counts()
    if dist.get_rank() == 1:
        model.table += 7
    shardtrace.fsdp(model, broadcast_from=1)
    assert model.table.tolist() == [7, 8, 9, 10, 11]
    full = shardtrace.full_state_dict(model)
    assert full["row"].untyped_storage().nbytes() == 4000
    full["_extra_state"] = 5
    assert shardtrace.load_full_state_dict(model, full) == ([], [])
    assert model.calls == 5
    full["_extra_state"] = 6
    shardtrace.load_full_state_dict(model, full if dist.get_rank() == 1 else {}, broadcast_from=1)
    assert model.calls == 6


def errors_inside_full_params() -> None:
    """The shards come back whatever happens inside."""
    model = shardtrace.fsdp(torch.nn.Linear(4, 6))
    before = [p.detach().clone() for p in model.parameters()]
    for error, change in ((KeyError, lambda: {}["x"]), (RuntimeError, lambda: resize(model))):
        try:
            with shardtrace.full_params(model):
                change()
        except error:
            pass
        else:
            raise AssertionError("no error")
        for p, values in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.detach(), values, rtol=0, atol=0)
    with shardtrace.full_params(model):
        assert model.weight.shape == (6, 4)


def resize(model: torch.nn.Module) -> None:
    model.weight.data = torch.zeros(2, 2)


def changed_on_one_rank(on: int) -> None:
    model = torch.nn.Linear(4, 4)
    cmodel = thunder.jit(shardtrace.fsdp(model, timeout=20))
    if dist.get_rank() == on:
        model.half()
    cmodel(torch.ones(2, 4))


def exchange_bucket(dtype: str) -> None:
    """Gathers and reduces a bucket of large members, whole and padded, and of small ones, by messages."""
    from passes.comm import direct
    from passes.plan import Bucket, Member, Placement, PlainRuntime, Plan, ShardedParameter
    from passes.plan.layout import SMALL
    from shardtrace.model.home import Home, shard

    from thunder.core import dtypes

    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    plan = Plan("Model", world_size=ranks, rank=rank, direct=True, runtime=PlainRuntime(group))
    home = Home(Placement.SHARD, group)
    kind = getattr(torch, dtype)
    shapes = [(300, 512), (5,), (301, 512), (), (1, 2**17)]  # the last one's shard is padding on all ranks but one
    members = tuple(Member(ShardedParameter(plan, f"p{i}", s, ""), True) for i, s in enumerate(shapes))
    bucket = Bucket("root", "b_root", plan, members, dtypes.to_dtype(kind))
    assert bucket.layout.large == (0, 2, 4)
    assert all(m.numel * kind.itemsize >= SMALL for m in (members[i] for i in bucket.layout.large))

    torch.manual_seed(0)
    full = [torch.randn(s).to(kind) for s in shapes]
    shards = tuple(shard(t, home) for t in full)
    futures = [direct.issue_all_gather(shards, bucket) for _ in range(2)]  # two in flight at once
    for future in futures:
        for got, expected in zip(direct.finish_all_gather(future, bucket), full, strict=True):
            assert torch.equal(got, expected)

    grads = tuple(t * (rank + 1) for t in full)
    large = (torch.full((300, 512), 60000.0).to(kind), *grads[1:])  # in fp16 a sum of these overflows
    futures = [direct.issue_reduce_scatter(grads, bucket), direct.issue_reduce_scatter(large, bucket)]
    reduced, constant = (direct.finish_reduce_scatter(future, bucket) for future in futures)
    mean = [t.float() * (ranks + 1) / 2 for t in full]
    for got, expected in zip(reduced, mean, strict=True):
        tolerance = {} if kind == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got.float(), shard(expected, home), **tolerance)
    assert torch.isfinite(constant[0]).all()


class Weighted(torch.nn.Module):
    """Two linear layers; ``factors`` weigh the outputs of the last, and so the rows of its weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.first(x))) * factors).sum()


def overflow_on_one_rank(strategy: str, **options: Any) -> None:
    """fp16 with PyTorch's GradScaler: the gradient of one row overflows, which one rank has; no rank takes the step."""
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


def casts_at_the_edge() -> None:
    """Inputs and outputs are cast as PyTorch's policy says; shards and buffers keep their dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 6)
            self.register_buffer("shift", torch.ones(6))

        def forward(self, inputs: dict[str, torch.Tensor], n: int) -> dict[str, torch.Tensor]:
            out = self.linear(inputs["x"]) * n
            return {"out": out, "shifted": out + self.shift, "ids": inputs["ids"]}

    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float16)
    cmodel = thunder.jit(shardtrace.fsdp(Model(), mp_policy=policy))
    result = cmodel({"x": torch.ones(2, 4), "ids": torch.arange(2)}, 2)
    assert {key: value.dtype for key, value in result.items()} == {
        "out": torch.float16, "shifted": torch.float16, "ids": torch.int64,
    }  # fmt: skip
    result["shifted"].sum().backward()
    assert {p.dtype for p in cmodel.parameters()} == {p.grad.dtype for p in cmodel.parameters()} == {torch.float32}
    assert {b.dtype for b in cmodel.buffers()} == {torch.float32}

    plain = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    cmodel = thunder.jit(shardtrace.fsdp(torch.nn.Linear(4, 6), mp_policy=plain))
    with pytest.raises(Exception, match="dtype"):
        cmodel(torch.ones(2, 4))


def replicas_start_equal() -> None:
    """DDP and hybrids take over the first rank's values."""
    torch.manual_seed(dist.get_rank())
    model = shardtrace.ddp(torch.nn.Linear(4, 4))
    values = [torch.empty_like(model.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(values, model.weight.detach())
    assert all(torch.equal(v, values[0]) for v in values)


def profiled_step(late: float) -> None:
    """Rank 0 profiles steps for which rank 1 is so many seconds late: gradients are as before, and waits are long."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    cmodel, inputs = thunder.jit(shardtrace.fsdp(model, check_steps=False)), torch.randn(3, 6) + dist.get_rank()

    def gradients() -> list[Any]:
        cmodel.zero_grad()
        cmodel(inputs).sum().backward()
        return [p.grad for p in cmodel.parameters()]

    before, began = gradients(), time.perf_counter()
    if dist.get_rank() == 1:
        for _ in range(2):
            time.sleep(late)
            gradients()
        return
    with shardtrace.profile(cmodel) as profiled:
        after = [gradients() for _ in range(2)]
    ended = time.perf_counter()
    for again in after:
        assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))

    assert profiled.steps == 2
    predicted, shown = shardtrace.inspect(cmodel), shardtrace.inspect(cmodel, profile=profiled)
    assert (predicted.times, shown.times) == ("predicted", "measured")
    forward, backward = (phase.timeline for phase in shown.record.phases)
    assert all(a < b for clock in (forward, backward) for a, b in pairwise(clock.starts))
    assert late / 2 < backward.end < (ended - began) / 2
    assert late / 2 < sum(row.exposed for row in shown.collectives if row.phase == "forward")
    rows = shown.collectives
    assert [row.issue for row in rows] == [row.issue for row in predicted.collectives]
    assert all(row.start < row.stop - row.exposed and row.times == "measured" for row in rows)
    assert str(shown).count("step, measured") == 1
    assert "measured time" in shown._repr_html_()
    assert shardtrace.inspect(cmodel).times == "predicted"


# ---- passes.checkpoint_activations ----


class Dropped(torch.nn.Module):
    """Zoo's block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.block(x), 0.2)


def checkpointed(strategy: str, precision: str | None, bucketing: Any) -> None:
    """Gradients of a step are those without checkpointing, bit for bit."""
    found = []
    for checkpointing in (None, Dropped):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), Dropped(), Dropped())
        options = {"sharding_strategy": strategy, "mp_policy": precision, "bucketing_strategy": bucketing}
        shardtrace.fsdp(model, activation_checkpointing=checkpointing, **options)
        cmodel = thunder.jit(model)
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            cmodel(torch.randn(3, 6)).float().pow(2).mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
