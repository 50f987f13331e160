"""Messages between ranks. Only real ranks show that one sends the messages that another expects."""

import shardtrace  # noqa: F401
from passes.comm import direct
from passes.comm.native import PIECE
from passes.plan import Bucket, BucketPlan, Member, Placement, PlainRuntime, ShardedParameter
from passes.plan.bucket import SMALL
from shardtrace.model.shards import Home, shard

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from thunder.core import dtypes


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_two_ranks(dtype):
    exchange_bucket(dtype)


@on_ranks(3)
def test_three_ranks():
    exchange_bucket("float32")


def exchange_bucket(dtype):
    """Gathers and reduces by messages a bucket of large members, with and without padding, and of small ones. The last
    two large ones travel in pieces."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    plan = BucketPlan("Model", world_size=ranks, rank=rank, direct=True, runtime=PlainRuntime(group))
    home = Home(Placement.SHARD, group)
    kind = getattr(torch, dtype)
    shapes = [(300, 512), (5,), (901, 512), (1,), (1, 2**18)]  # the last one's shard is padding on all ranks but one
    members = tuple(Member(ShardedParameter(plan, f"p{i}", s, ""), True) for i, s in enumerate(shapes))
    bucket = Bucket("root", "b_root", plan, members, dtypes.to_dtype(kind))
    assert bucket.layout.large == (0, 2, 4)
    assert all(m.numel * kind.itemsize >= SMALL for m in (members[i] for i in bucket.layout.large))
    assert kind.itemsize == 2 or all(members[i].numel * kind.itemsize > PIECE for i in (2, 4))

    torch.manual_seed(0)
    full = [torch.randn(s).to(kind) for s in shapes]
    shards = tuple(shard(t, home) for t in full)
    futures = [direct.issue_all_gather(shards, bucket) for _ in range(2)]  # two in flight at once
    for future in futures:
        for got, expected in zip(direct.finish_all_gather(future, bucket), full, strict=True):
            assert torch.equal(got, expected)

    grads = tuple(t * (rank + 1) for t in full)
    large = (torch.full((300, 512), 60000.0).to(kind), *grads[1:])  # in fp16 a sum of these overflows
    futures = [direct.issue_reduce_scatter(grads, bucket), direct.issue_reduce_scatter(large, bucket)]
    reduced, constant = (direct.finish_reduce_scatter(future, bucket) for future in futures)
    mean = [t.float() * (ranks + 1) / 2 for t in full]
    for got, expected in zip(reduced, mean, strict=True):
        tolerance = {} if kind == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got.float(), shard(expected, home), **tolerance)
    assert torch.isfinite(constant[0]).all()
