"""GradScaler: an overflow on one rank makes all skip the step, whatever the precision."""

from contextlib import nullcontext

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from sharded_training import overflow_on_one_rank
from torch import nn


@on_ranks(2)
@pytest.mark.parametrize("which", [0, 1])
def test_an_overflow_concerns_the_model_that_has_it(which):
    """Two models on two groups in one function. One overflows on one rank: no rank takes its step, and all ranks take
    the step of the other."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)]
    for model, group in zip(models, (dist.group.WORLD, dist.new_group([0, 1])), strict=True):
        shardtrace.fsdp(model, mp_policy="fp16", mesh=group)
    factors = [torch.ones(2), torch.ones(2)]
    factors[which][0] = 60000.0
    step = thunder.jit(lambda x, a, b: (models[0](x) * a).sum() + (models[1](x) * b).sum())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    before = [model.weight.detach().clone() for model in models]
    scaler.scale(step(torch.ones(2, 4), *factors)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [torch.equal(m.weight, w) for m, w in zip(models, before, strict=True)] == [which == 0, which == 1]
    assert scaler.get_scale() == 8


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "owner"])
def test_an_overflow_on_one_rank_makes_all_skip_the_step(strategy):
    overflow_on_one_rank(strategy)


@on_ranks(2)
def test_parameters_that_are_not_fp16():
    """Autocast computes in fp16, or a loss overflows in fp32. One of the optimizers unscales by itself."""
    for around, factor in ((torch.autocast("cpu", torch.float16), 60000.0), (nullcontext(), 3e38)):
        for options in ({}, {"fused": True}):
            model = nn.Linear(4, 2, bias=False)
            cmodel = thunder.jit(shardtrace.fsdp(model))
            optimizer = torch.optim.SGD(cmodel.parameters(), lr=0.1, **options)
            scaler, before = torch.amp.GradScaler("cpu", init_scale=16.0), model.weight.detach().clone()
            for scale, first in ((16.0, 1.0), (8.0, factor)):
                with around:
                    result = cmodel(torch.ones(2, 4))
                scaler.scale((result * torch.tensor([first, 1.0], dtype=result.dtype)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                assert scaler.get_scale() == scale
                assert torch.equal(before, model.weight) == (scale == 8)
                before = model.weight.detach().clone()


@on_ranks(2)
def test_a_rank_without_gradients():
    model = shardtrace.fsdp(nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 0:
        model.weight.grad = torch.full_like(model.weight, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8
