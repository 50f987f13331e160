from types import SimpleNamespace

import shardtrace
from passes.plan import Placement, shard_shape
from shardtrace.model.shards import Home, shard

import thunder
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch import nn


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(2, 9))
def test_shards_put_together_are_the_tensor_and_zeros(shape, world_size):
    full = torch.randn(shape) + 10  # only the padding is zero
    groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: world_size) for r in range(world_size)]
    shards = [shard(full, Home(Placement.SHARD, group)) for group in groups]
    if not full.numel():
        assert all(s.shape == full.shape for s in shards)
        return
    assert {tuple(s.shape) for s in shards} == {shard_shape(tuple(shape), world_size)}
    together = torch.cat(shards)
    assert torch.equal(together[: shape[0]], full)
    assert not together[shape[0] :].any()


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())  # not contiguous
        self.part = nn.Parameter(torch.arange(12.0).reshape(3, 4)[:, 1:3])  # within other memory

    def forward(self, x):
        return (x @ self.weight @ self.part).square()


@on_ranks(2)
def test_a_parameter_that_is_not_contiguous():
    x = torch.ones(2, 4)
    single = Turned()
    single(x).sum().backward()
    for strategy in ("zero3", "owner", {"part": "ddp", "*": "zero3"}):
        model = shardtrace.fsdp(Turned(), sharding_strategy=strategy)
        thunder.jit(model)(x).sum().backward()
        values, gradients = shardtrace.full_state_dict(model), shardtrace.full_gradients(model)
        for name, p in single.named_parameters():
            torch.testing.assert_close(values[name], p.detach())
            torch.testing.assert_close(gradients[name], p.grad)
        with shardtrace.full_params(model):
            torch.testing.assert_close(model.weight, single.weight)
