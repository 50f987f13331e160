"""PyTorch's own tools around a sharded model. (GradScaler: tests/test_passes/test_share_overflow.py.)"""

import shardtrace

import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from ranks import on_ranks
from sharded_training import ROWS, full_gradients, my_rows, sharded_zoo
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


@on_ranks(2)
def test_averages_of_parameters(tmp_path):
    """torch's moving and equal averages on shards. A checkpoint of them loads into an unsharded model."""
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
        torch.manual_seed(0)
        models = [Zoo(), sharded_zoo()]
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
    shardtrace.save_checkpoint(tmp_path, average, step=3)
    plain = AveragedModel(Zoo())
    shardtrace.load_checkpoint(tmp_path, plain)
    torch.testing.assert_close(dict(plain.state_dict()), dict(full))


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
    torch.testing.assert_close(full_gradients(model), {name: p.grad for name, p in single.named_parameters()})


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
    gradients = full_gradients(model)
    for name, p in single.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=2e-2, atol=1e-3)
