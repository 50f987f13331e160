"""A script in the style of nanoGPT: with the drop-in for DistributedDataParallel, and sharded as from-ddp.md says."""

import copy

import shardtrace
from shardtrace.parallel import DistributedDataParallel as DDP

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(i, rank):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * i + rank))


def train(model, wrap):
    """Three steps of two microbatches, as a script for DistributedDataParallel has them."""
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped = wrap(torch.compile(model), device_ids=None, find_unused_parameters=True) if wrap is DDP else wrap(model)
    raw, losses = wrapped.module, []
    for i in range(6):
        if i % 2 == 0 and rank == 0:  # evaluation
            wrapped.eval()
            with torch.no_grad():
                losses.append(wrapped(torch.ones(1, 4)).sum().item())
            wrapped.train()
        wrapped.require_backward_grad_sync = i % 2 == 1
        (wrapped(batch(i, rank)).square().mean() / 2).backward()
        if i % 2 == 1:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return losses, raw.state_dict()


@on_ranks(2)
def test_a_script_for_ddp():
    model = net()
    expected = train(copy.deepcopy(model), nn.parallel.DistributedDataParallel)
    found = train(model, DDP)
    assert found[0] == pytest.approx(expected[0])
    torch.testing.assert_close(found[1], expected[1])


def train_and_save(model, sharded):
    """Five steps. Each rank evaluates its own batches; the best model so far is kept, as whole tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model = shardtrace.fsdp(model) if sharded else nn.parallel.DistributedDataParallel(model)
    best, kept = torch.tensor(torch.inf), []
    for i in range(5):
        with torch.no_grad():
            loss = model(batch(100 + i, dist.get_rank())).square().mean()
        dist.all_reduce(loss)
        if loss < best:
            best = loss
            if sharded:
                states = shardtrace.full_state_dict(model), shardtrace.full_optimizer_state_dict(model, optimizer)
            else:
                states = model.module.state_dict(), optimizer.state_dict()
            kept.append((i, *copy.deepcopy(states)))
        model(batch(i, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return kept


@on_ranks(2)
def test_a_sharded_script_saves_what_ddp_saves():
    found, expected = train_and_save(net(), True), train_and_save(net(), False)
    assert len(expected) > 1
    torch.testing.assert_close(found, expected)
    _, state, moments = found[-1]
    plain = net()
    plain.load_state_dict(state)
    torch.optim.AdamW(plain.parameters()).load_state_dict(moments)
    resumed = shardtrace.fsdp(net())
    optimizer = torch.optim.AdamW(resumed.parameters())
    resumed.load_state_dict(state)
    shardtrace.load_full_optimizer_state_dict(resumed, optimizer, moments)
    torch.testing.assert_close(shardtrace.full_optimizer_state_dict(resumed, optimizer), moments)


@on_ranks(2)
def test_options_of_fsdp():
    wrapped = DDP(net(), sharding_strategy="zero3", bucket_cap_mb=25)
    assert wrapped.module[0].weight.to_local().shape == (3, 4)
    with wrapped.no_sync():
        wrapped(torch.ones(2, 4)).sum().backward()
    assert wrapped.module[0].weight.grad is None
    assert "module.0.weight" in wrapped.state_dict()
    assert shardtrace.full_state_dict(wrapped)["module.0.weight"].shape == (6, 4)
