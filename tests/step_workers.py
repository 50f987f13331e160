"""What rank processes run to test the step around a sharded model: accumulation, clipping. See tests/workers.py."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import shardtrace  # isort: split

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from workers import mean_over_ranks

ROWS = 12  # of a micro-batch, over all ranks


def build(strategy: Any, mesh: tuple[int, int] | None = None, **options: Any) -> Zoo:
    torch.manual_seed(0)
    if mesh is not None:
        options["mesh"] = torch.distributed.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    return shardtrace.fsdp(Zoo(), sharding_strategy=strategy, **options)


def micro_batches(step: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    """Of all ranks together."""
    return list(zip(*(t.split(ROWS) for t in tokens(count * ROWS, step)), strict=True))


def mine(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    each = ROWS // dist.get_world_size()
    return tuple(t[dist.get_rank() * each :][:each] for t in batch)


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name, each gradient as that of the unsharded parameter. (Put in the shards' place, to be gathered as they are.)"""
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for _, p in model.named_parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        found = shardtrace.full_state_dict(model)
        for name, p in model.named_parameters():
            p.copy_(values[name])
    return {name: found[name] for name in names}


def expected_gradients(step: int, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Zoo()
    loss = model(*tokens(count * ROWS, step))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def accumulate(strategy: Any, mesh: tuple[int, int] | None = None, reduce_each: bool = False) -> None:
    """Four micro-batches give the gradients of one batch; the first three send none, or all do."""
    model = build(strategy, mesh)
    cmodel = thunder.jit(model)
    for step in range(2):  # the second runs what is compiled
        model.zero_grad()
        total = 0.0
        for i, batch in enumerate(batches := micro_batches(step, 4)):
            last = i + 1 == len(batches)
            with nullcontext() if last else model.no_sync(reduce_each=reduce_each):
                loss = cmodel(*mine(batch)) / len(batches)
                loss.backward()
            sends = any("reduce" in c.kind for c in shardtrace.collectives(cmodel))
            assert sends == (last or reduce_each)
            assert all((p.grad is None) != sends for p in (model.position, model.scale, model.blocks[1].down))
            total += mean_over_ranks(loss)
        expected_loss, expected = expected_gradients(step, 4)
        torch.testing.assert_close(total, expected_loss, rtol=1e-6, atol=1e-6)
        found = full_gradients(model)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert not model._shardtrace.runtime.kept.by_parameter
    assert thunder.cache_misses(cmodel) == (1 if reduce_each else 2)


def sums_in_fp32() -> None:
    """Gradients in bf16: many small ones added to a large one are lost in bf16, and are not in fp32."""
    kept = {}
    for dtype in (torch.float32, None):
        model = torch.nn.Linear(4, 4, bias=False)
        shardtrace.fsdp(model, mp_policy="bf16", accumulation_dtype=dtype)
        cmodel = thunder.jit(model)
        for i in range(9):
            with model.no_sync() if i < 8 else nullcontext():
                cmodel(torch.full((1, 4), 1.0 if i == 0 else 2.0**-9)).sum().backward()
            if i == 0:
                (total,) = model._shardtrace.runtime.kept.by_parameter.values()
                assert total.dtype == (dtype or torch.bfloat16)
        kept[dtype] = model.weight.grad[0, 0].item()
    assert kept == {torch.float32: 1 + 8 * 2.0**-9, None: 1.0}


class Switch(torch.nn.Module):
    """Uses one or both of its layers, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def left_behind() -> str:
    """The reducing step does not use a parameter that the others used; then all is well again."""
    model = shardtrace.fsdp(Switch())
    cmodel, x = thunder.jit(model), torch.ones(2, 4)
    with model.no_sync():
        cmodel(x, True).sum().backward()
    cmodel(x, False).sum().backward()
    try:
        cmodel(x, False)
    except RuntimeError as error:
        message = str(error)
    else:
        raise AssertionError("gradients were lost in silence")
    cmodel(x, True).sum().backward()
    return message


def dropped_by_an_exception() -> None:
    model = shardtrace.fsdp(torch.nn.Linear(4, 4))
    cmodel, x = thunder.jit(model), torch.ones(2, 4)
    cmodel(x).sum().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    try:
        with shardtrace.no_sync(cmodel):
            cmodel(x).sum().backward()
            raise KeyError
    except KeyError:
        pass
    cmodel(x).sum().backward()
    assert torch.equal(model.weight.grad, expected)


def with_thunders_own_no_sync() -> None:
    model = shardtrace.fsdp(torch.nn.Linear(4, 4))
    cmodel, x = thunder.jit(model), torch.ones(2, 4)
    with cmodel.no_sync():
        cmodel(x).sum().backward()
    assert model.weight.grad is None
    cmodel(x).sum().backward()
    once = model.weight.grad.clone()
    model.zero_grad()
    cmodel(x).sum().backward()
    assert torch.equal(once, 2 * model.weight.grad)


# ---- clip_grad_norm_ ----


def clip(strategy: Any, mesh: tuple[int, int] | None = None) -> None:
    """Norms and clipped gradients are torch's of the single-process model on the whole batch."""
    torch.manual_seed(0)
    single, model = Zoo(), build(strategy, mesh)
    cmodel = thunder.jit(model)
    for norm_type in (2, 1.0, 3.5, float("inf")):
        single.zero_grad()
        model.zero_grad()
        single(*tokens(ROWS)).backward()
        cmodel(*mine(tokens(ROWS))).backward()
        expected = torch.nn.utils.clip_grad_norm_((p for p in single.parameters() if p.numel()), 0.1, norm_type)
        target = cmodel if norm_type == 1 else (p for p in cmodel.parameters())
        found = shardtrace.clip_grad_norm_(target, 0.1, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        gradients = full_gradients(model)
        for name, p in single.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-7)
    before = full_gradients(model)
    shardtrace.clip_grad_norm_(model, 1e6)
    torch.testing.assert_close(full_gradients(model), before, rtol=0, atol=0)


def clip_nonfinite(value: float) -> list[str]:
    """An inf or NaN on one rank is one on all, in each norm."""
    model = shardtrace.fsdp(torch.nn.Linear(4, 4))
    messages = []
    for norm_type in (2.0, float("inf")):
        thunder.jit(model)(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == 1:
            model.bias.grad[0] = value
        before = model.weight.grad.clone()
        try:
            shardtrace.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        except RuntimeError as error:
            messages.append(str(error))
        torch.testing.assert_close(model.weight.grad, before, rtol=0, atol=0, equal_nan=True)
        norm = shardtrace.clip_grad_norm_(model, 1.0, norm_type)
        assert torch.equal(norm, torch.tensor(value)) or (norm.isnan() and value != value)
    return messages


# ---- ranks that are about to run different steps, and ranks that fail ----


def different_steps(how: str, check_steps: bool | None) -> None:
    """All have compiled the same steps; then the first rank runs another one than the others."""
    model = shardtrace.fsdp(torch.nn.Linear(4, 4), check_steps=check_steps, timeout=20)
    cmodel, x = thunder.jit(model), torch.ones(2, 4)

    def step(kind: str) -> None:
        with torch.no_grad() if kind == "eval" else model.no_sync() if kind == "kept" else nullcontext():
            loss = cmodel(x).sum()
        if kind != "eval":
            loss.backward()

    for kind in ("kept", "eval", "reduced"):
        step(kind)
    lines = [b.sym.name for b in thunder.last_traces(cmodel)[-1].bound_symbols]
    assert ("check_ranks" in lines) == (check_steps is not False)
    step(how if dist.get_rank() == 0 else "reduced")


def time_of_checks(steps: int = 50) -> dict[str, float]:
    """Seconds of an empty step of tiny parameters, checked and not."""
    import time

    found = {}
    for check in (False, True):
        model = shardtrace.fsdp(torch.nn.Linear(4, 4), check_steps=check)
        cmodel, x = thunder.jit(model), torch.ones(2, 4)
        with torch.no_grad():
            cmodel(x)
            start = time.perf_counter()
            for _ in range(steps):
                cmodel(x)
        found[f"check_steps={check}"] = (time.perf_counter() - start) / steps
    return found


def optimizers() -> None:
    """Fused and foreach optimizers, and a schedule of the learning rate, on shards: as on the whole."""
    torch.manual_seed(0)
    single, model = Zoo(), build("zero3")
    cmodel = thunder.jit(model)
    initial = {name: value.clone() for name, value in single.state_dict().items()}

    def steps(kind: str, run: Any, parameters: Any, batch: Any) -> None:
        if kind == "sgd":
            optimizer: Any = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=0.05, eps=1e-2, **{kind: True})
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        for step in range(4):
            run(*batch(step)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    for kind in ("fused", "foreach", "sgd"):
        single.load_state_dict(initial)
        shardtrace.load_full_state_dict(model, initial)
        steps(kind, single, (p for p in single.parameters() if p.requires_grad), lambda step: tokens(ROWS, step))
        steps(kind, cmodel, cmodel.parameters(), lambda step: mine(tokens(ROWS, step)))
        found = shardtrace.full_state_dict(model)
        for name, value in single.state_dict().items():
            message = f"{kind}: {name}: {{}}".format
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=message)


def autocast() -> None:
    """torch.autocast around a sharded model: as around the whole one."""
    torch.manual_seed(0)
    single = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    model.load_state_dict(single.state_dict())
    cmodel, x = thunder.jit(shardtrace.fsdp(model)), torch.randn(2 * dist.get_world_size(), 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = single(x), cmodel(x[2 * dist.get_rank() :][:2])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected[2 * dist.get_rank() :][:2], rtol=2e-2, atol=1e-2)
    expected.float().square().mean().backward()
    found.float().square().mean().backward()
    gradients = full_gradients(model)
    for name, p in single.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=2e-2, atol=1e-3)


def all_leave_a_step() -> None:
    """All ranks skip a batch that fails in the middle of forward, and train on as if it had not been there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    single = copy.deepcopy(model)
    shardtrace.fsdp(model, bucketing_strategy="layer", timeout=20)
    cmodel, words = thunder.jit(model), torch.tensor([1, 2])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, model)]
    for step in range(4):
        if step == 2:
            with pytest.raises(IndexError):
                cmodel(words + 10)
            continue
        for run, optimizer in zip((single, cmodel), optimizers, strict=True):
            optimizer.zero_grad()
            run(words).square().sum().backward()
            optimizer.step()
    found = shardtrace.full_state_dict(model)
    for name, value in single.state_dict().items():
        torch.testing.assert_close(found[name], value)
