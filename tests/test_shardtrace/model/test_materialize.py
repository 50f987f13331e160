"""The first values of shards, from one rank or from the meta device, and the peak memory of sharding."""

import resource

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Zoo
from ranks import on_ranks
from torch import nn


@on_ranks(2)
@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_from(source):
    torch.manual_seed(dist.get_rank())
    model = Zoo()
    model.shift.fill_(dist.get_rank())
    torch.manual_seed(source)
    expected = Zoo()
    expected.shift.fill_(source)
    shardtrace.fsdp(model, init_policy=shardtrace.InitPolicy(broadcast_from=source))
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(expected.state_dict()), rtol=0, atol=0)


@on_ranks(2)
def test_replicas_start_equal():
    """DDP and hybrids take over the first rank's values."""
    torch.manual_seed(dist.get_rank())
    model = shardtrace.ddp(nn.Linear(4, 4))
    values = [torch.empty_like(model.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(values, model.weight.detach())
    assert all(torch.equal(v, values[0]) for v in values)


class Meta(nn.Module):
    """Parameters, a buffer and tied weights that reset_parameters can initialize."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)))


@on_ranks(2)
@pytest.mark.parametrize("with_init_fn", [False, True])
def test_meta_device(with_init_fn):
    def init(module):
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)

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
    shardtrace.fsdp(
        model, init_policy=shardtrace.InitPolicy(device="cpu", param_init_fn=init if with_init_fn else None)
    )
    assert model.head.weight is model.embedding.weight
    full = shardtrace.full_state_dict(model)
    for name, value in expected.state_dict().items():
        if not (with_init_fn and "norm." in name and name not in dict(model.named_parameters())):  # init skips it
            torch.testing.assert_close(full[name], value, rtol=0, atol=0, equal_nan=True)
    # the optimizer that was built on the meta device holds the parameters
    before = model.head.bias.detach().clone()
    thunder.jit(model)(torch.arange(4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.head.bias, before)


@on_ranks(2)
def test_fsdp_needs_no_more_memory_than_one_module():
    """Measures the host memory that fsdp() takes beyond the unsharded model."""
    width, depth = 2048, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    for p in model.parameters():
        p.data.fill_(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shardtrace.fsdp(model)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < width * width * 4
