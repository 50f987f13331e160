"""Ranks with different numbers of batches."""

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn


@on_ranks(2)
def test_the_mean_over_ranks_that_have_a_batch():
    torch.manual_seed(0)
    model, one = nn.Linear(3, 2), nn.Linear(3, 2)
    one.load_state_dict(model.state_dict())
    everyones = [torch.randn(3, 4, 3), torch.randn(1, 4, 3)]  # three batches and one
    cmodel = thunder.jit(shardtrace.fsdp(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, one)]
    found = []
    for step, (x, weight) in enumerate(shardtrace.join(cmodel, everyones[dist.get_rank()])):
        found.append(weight)
        (cmodel(x).square().mean() * weight).backward()
        one(torch.cat([b[step] for b in everyones if step < len(b)])).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert found == ([1.0, 2.0, 2.0] if dist.get_rank() == 0 else [1.0, 0.0, 0.0])
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(one.state_dict()))

    mine = [torch.ones(1, 3)] if dist.get_rank() == 0 else []
    with pytest.raises(RuntimeError, match=r"1 rank\(s\) have no batch at all"):
        next(shardtrace.join(model, mine))
    assert list(shardtrace.join(model, [])) == []


def test_one_rank(fake_ranks):
    fake_ranks(1)
    assert list(shardtrace.join(shardtrace.fsdp(nn.Linear(2, 2)), "ab")) == [("a", 1.0), ("b", 1.0)]
    with pytest.raises(ValueError, match="not sharded"):
        next(shardtrace.join(nn.Linear(2, 2), "ab"))
