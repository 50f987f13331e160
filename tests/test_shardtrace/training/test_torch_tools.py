"""PyTorch's own tools around a sharded model. (GradScaler: test_scaling.py.)"""

import shardtrace
from shardtrace.model.state import state_of

import pytest
import thunder
import torch
import torch.distributed as dist
from late import late_groups
from models import Zoo, tokens
from ranks import on_ranks
from sharded_training import ROWS, my_rows, sharded_zoo
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@on_ranks(2)
def test_optimizers_and_schedules():
    """Fused and foreach optimizers and a learning rate schedule on shards, compared with the unsharded model."""
    torch.manual_seed(0)
    single, model = Zoo(), sharded_zoo()
    cmodel = thunder.jit(model)
    initial = {name: value.clone() for name, value in single.state_dict().items()}

    def steps(kind, run, parameters, batch):
        if kind == "sgd":
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
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
        steps(kind, cmodel, cmodel.parameters(), lambda step: my_rows(tokens(ROWS, step)))
        found = shardtrace.full_state_dict(model)
        for name, value in single.state_dict().items():
            message = f"{kind}: {name}: {{}}".format
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=message)


def without_nothing(zoo):
    """A parameter without elements is no DTensor, and torch updates averages of all parameters together."""
    del zoo.nothing
    return zoo


@on_ranks(2)
def test_averages_of_parameters(tmp_path):
    """torch's moving and equal averages on shards. A checkpoint of them loads into an unsharded model."""
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
        torch.manual_seed(0)
        models = [without_nothing(Zoo()), without_nothing(sharded_zoo())]
        averages = [AveragedModel(model, **options) for model in models]
        for step in range(3):
            for model, average in zip(models, averages, strict=True):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.0 + step)
                average.update_parameters(model)
        single, average = averages
        full = shardtrace.full_state_dict(average)
        torch.testing.assert_close(dict(full), dict(single.state_dict()))
    shardtrace.save_checkpoint(tmp_path / "both", model, ema=average, step=3)
    shardtrace.save_checkpoint(tmp_path / "one", model, step=3)
    plain = without_nothing(Zoo())
    second = AveragedModel(plain)
    shardtrace.load_checkpoint(tmp_path / "both", plain, ema=second)
    torch.testing.assert_close(dict(second.state_dict()), dict(full))
    torch.testing.assert_close(dict(plain.state_dict()), dict(models[0].state_dict()))
    with pytest.raises(shardtrace.CheckpointError, match="holds no ema"):
        shardtrace.load_checkpoint(tmp_path / "one", plain, ema=second)
    with pytest.raises(shardtrace.CheckpointError, match="not sharded over the same ranks"):
        shardtrace.save_checkpoint(tmp_path / "other", model, ema=second, step=3)


@on_ranks(2)
def test_every_token_counts_the_same():
    """The recipe of the guide for batches with padding."""
    torch.manual_seed(0)
    single = torch.nn.Linear(3, 5)
    model = torch.nn.Linear(3, 5)
    model.load_state_dict(single.state_dict())
    x, labels = torch.randn(4, 3), torch.tensor([1, -100, 2, 4])  # the first rank has one token, the second two
    torch.nn.functional.cross_entropy(single(x), labels).backward()
    cmodel = thunder.jit(shardtrace.fsdp(model))
    rank = dist.get_rank()
    x, labels = x[2 * rank :][:2], labels[2 * rank :][:2]
    mine = (labels != -100).sum()
    everyones = mine.clone()
    dist.all_reduce(everyones)
    loss = torch.nn.functional.cross_entropy(cmodel(x), labels)
    (loss * mine * dist.get_world_size() / everyones).backward()
    expected = {name: p.grad for name, p in single.named_parameters()}
    torch.testing.assert_close(shardtrace.full_gradients(model), expected)

    def divided_by_tokens(strategy, mesh=None):
        model = torch.nn.Linear(3, 5)
        model.load_state_dict(single.state_dict())
        shardtrace.fsdp(
            model, sharding_strategy=strategy, mesh=mesh, comm_policy=shardtrace.CommPolicy(gradient_divide_factor=1)
        )
        total = torch.nn.functional.cross_entropy(thunder.jit(model)(x), labels, reduction="sum")
        (total / everyones).backward()
        torch.testing.assert_close(shardtrace.full_gradients(model), expected)

    for strategy in ("zero3", "owner", "ddp"):
        divided_by_tokens(strategy)
    with late_groups() as nccl:
        divided_by_tokens("zero2", nccl)


def test_divisors_of_hybrid_strategies(fake_ranks):
    """Shards take a part of the factor, and replicas their mean."""
    fake_ranks(8)
    mesh = dist.init_device_mesh("cpu", (4, 2))
    model = torch.nn.Linear(4, 4)
    shardtrace.fsdp(
        model, sharding_strategy="hybrid_zero3", mesh=mesh, comm_policy=shardtrace.CommPolicy(gradient_divide_factor=16)
    )
    (plan,) = state_of(model).plans.values()
    assert (plan.divisor, plan.outer.divisor) == (4, 4)


@pytest.mark.usefixtures("single_rank")
def test_a_divisor_in_a_world_of_one():
    for strategy in ("zero3", "ddp"):
        model = torch.nn.Linear(2, 1, bias=False)
        shardtrace.fsdp(
            model, sharding_strategy=strategy, comm_policy=shardtrace.CommPolicy(gradient_divide_factor=4.0)
        )
        thunder.jit(model)(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[0.25, 0.25]]


@on_ranks(2)
def test_autocast():
    """torch.autocast around a sharded model does what it does around the unsharded one."""
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
    gradients = shardtrace.full_gradients(model)
    for name, p in single.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=2e-2, atol=1e-3)


@on_ranks(2)
def test_names_in_a_profile():
    cmodel = thunder.jit(shardtrace.fsdp(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cmodel(torch.ones(1, 4)).sum().backward()
    found = {event.key for event in profile.key_averages()}
    rows = shardtrace.collectives(cmodel)
    assert {f"shardtrace::{wait}{row.kind} {row.bucket}" for row in rows for wait in ("", "wait_")} <= found
