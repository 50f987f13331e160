"""What rank processes run to test faults that no other test has. See tests/test_faults.py."""

from __future__ import annotations

import warnings

import shardtrace  # isort: split

import thunder
import torch
import torch.distributed as dist
from step_workers import Switch
from torch import nn


def unused_on_one_rank() -> None:
    cmodel = thunder.jit(shardtrace.fsdp(Switch(), bucketing_strategy="layer", timeout=20))
    cmodel(torch.ones(2, 4), dist.get_rank() == 0)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())  # not contiguous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square()


def non_contiguous() -> None:
    single, model = Turned(), shardtrace.fsdp(Turned())
    x = torch.ones(2, 4)
    single(x).sum().backward()
    thunder.jit(model)(x).sum().backward()
    torch.testing.assert_close(shardtrace.full_state_dict(model)["weight"], single.weight.detach())
    torch.testing.assert_close(model.weight.grad, single.weight.grad[2 * dist.get_rank() :][:2])


def batch_norm_buffers() -> list[str]:
    """Returns what full_state_dict warns of, before and after they are made equal."""
    model = shardtrace.fsdp(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    thunder.jit(model)(torch.randn(8, 4) + dist.get_rank()).sum().backward()
    means = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model[1].running_mean)
    assert not torch.equal(means[0], means[1])
    said = []
    for sync in (lambda model: None, shardtrace.sync_buffers):
        sync(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = shardtrace.full_state_dict(model)["1.running_mean"]
        said.append([str(w.message) for w in caught])
    torch.testing.assert_close(found, torch.stack(means).mean(0))
    assert model[1].num_batches_tracked == 1
    assert said[1] == []
    return said[0]


def optimizer_built_before() -> None:
    """It holds the shards, with the state that it had: momentum of a step before is sharded like its parameter."""
    torch.manual_seed(0)
    single, model = nn.Linear(4, 6), nn.Linear(4, 6)
    model.load_state_dict(single.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, model)]
    cmodel = thunder.jit(shardtrace.fsdp(model))
    for run in (single, cmodel):
        run(torch.ones(2, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(shardtrace.full_state_dict(model), dict(single.state_dict()))


def converted_after_a_step() -> None:
    model = shardtrace.fsdp(nn.Linear(4, 4))
    cmodel = thunder.jit(model)
    cmodel(torch.ones(2, 4)).sum().backward()
    model.to(torch.bfloat16)
    cmodel(torch.ones(2, 4, dtype=torch.bfloat16))
