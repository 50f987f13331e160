from types import SimpleNamespace

from passes.plan import Placement, shard_shape
from shardtrace.model.home import Home, shard

import torch
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(2, 9))
def test_shards_put_together_are_the_tensor_and_zeros(shape, world_size):
    full = torch.randn(shape) + 10  # nothing is zero but padding
    groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: world_size) for r in range(world_size)]
    shards = [shard(full, Home(Placement.SHARD, group)) for group in groups]
    if not full.numel():
        assert all(s.shape == full.shape for s in shards)
        return
    assert {tuple(s.shape) for s in shards} == {shard_shape(tuple(shape), world_size)}
    together = torch.cat(shards)
    rows = shape[0] if shape else 1
    assert torch.equal(together[:rows].reshape(shape), full)
    assert not together[rows:].any()
