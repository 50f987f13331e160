"""A bucket's collectives over a backend that behaves like nccl: asynchronous, late, averaging."""

import copy
from contextlib import nullcontext

import shardtrace
from passes.comm import native
from passes.comm.overflow import finish_share_overflow, issue_share_overflow
from passes.plan import Bucket, Member, OverflowFlag, Placement, PlainRuntime, Plan, ShardedParameter
from shardtrace.model.home import Home, shard

import pytest
import thunder
import torch
import torch.distributed as dist
from late import late_groups
from ranks import on_ranks
from thunder.core import dtypes
from torch import nn

SHAPES = [(300, 128), (5,), (), (7, 3), (1, 2**15)]  # the last one's shard is padding on all ranks but one
EVEN = [(12, 4), (48,), (4, 12), (24, 2)]  # no shard is padded on 2, 3 or 4 ranks; 4 owners have equal rows


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_two_ranks(dtype):
    exchange_buckets(dtype)


@on_ranks(3)
def test_three_ranks():
    exchange_buckets("float32")


@on_ranks(4)
def test_four_ranks():
    exchange_buckets("float32")


def exchange_buckets(dtype):
    kind = getattr(torch, dtype)
    with late_groups() as group:
        group.patience = 30.0  # no rank is busy with anything else
        for shapes in (SHAPES, EVEN):
            for placement in Placement:
                exchange_bucket(placement, shapes, kind, group)
        exchange_bucket(Placement.SHARD, SHAPES, kind, group, wire=torch.float32)
        share_flags(group)
        uneven = {"allgather", "reduce_scatter"}  # lists of tensors: a broadcast or a reduction for each rank
        assert uneven & set(group.issued) == uneven
        group.issued.clear()
        exchange_bucket(Placement.OWNER, EVEN[: group.size()], kind, group)
        assert set(group.issued) == {"all_gather_single", "reduce_scatter_single"}


def exchange_bucket(placement, shapes, kind, group, wire=None):
    """Gathers and reduces a bucket, twice at once. ``wire`` is the dtype of its reductions."""
    rank, ranks = group.rank(), group.size()
    plan = Plan("Model", ranks, rank, placement=placement, averages=True, runtime=PlainRuntime(group))
    owners = [min(i, ranks - 1) for i in range(len(shapes))]
    members = tuple(
        Member(ShardedParameter(plan, f"p{i}", s, "", dtype=dtypes.to_dtype(kind), owner=o), True)
        for i, (s, o) in enumerate(zip(shapes, owners, strict=True))
    )
    bucket = Bucket("root", "b_root", plan, members, dtypes.to_dtype(wire or kind))
    homes = [Home(placement, group, owner) for owner in owners]
    torch.manual_seed(0)
    full = [torch.randn(s).to(kind) for s in shapes]

    def shards(tensors):
        return tuple(shard(t, home).clone() for t, home in zip(tensors, homes, strict=True))

    if placement is not Placement.REPLICATE and wire is None:
        futures = [native.issue_all_gather(shards(t), bucket) for t in (full, [-t for t in full])]
        for future, sign in zip(futures, (1, -1), strict=True):
            assert future.output.isnan().all()
            for got, expected in zip(native.finish_all_gather(future, bucket), full, strict=True):
                assert torch.equal(got, sign * expected)

    grads = tuple(t * (rank + 1) for t in full)
    large = (torch.full(shapes[0], 60000.0).to(kind), *grads[1:])  # in fp16 a sum of these overflows
    reduce = native.issue_all_reduce if placement is Placement.REPLICATE else native.issue_reduce_scatter
    futures = [reduce(grads, bucket), reduce(large, bucket)]
    reduced, constant = (native.finish_reduce_scatter(future, bucket) for future in futures)
    mean = shards([t.float() * (ranks + 1) / 2 for t in full])
    exact = {"rtol": 1e-5, "atol": 1e-6} if kind == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for got, expected in zip(reduced, mean, strict=True):
        assert got.dtype == kind
        torch.testing.assert_close(got.float(), expected.view_as(got), **exact)
    assert torch.isfinite(constant[0]).all()


def share_flags(group):
    plan = Plan("Model", group.size(), group.rank(), placement=Placement.REPLICATE, runtime=PlainRuntime(group))
    flag = OverflowFlag("overflow_0", plan)
    for value in (1.0, float("inf")):
        grads = (torch.tensor([value if group.rank() == 1 else 2.0, 3.0]), torch.empty(0))
        future = issue_share_overflow(grads, flag)
        assert future.flag.isnan()
        finish_share_overflow(future)
        assert bool(grads[0].isfinite().all()) == (value == 1)


class Net(nn.Module):
    """Rows that two ranks share evenly, unevenly, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().sum()


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "owner", {"blocks.0.*": "ddp", "blocks.1.*": "owner", "*": "zero2"}])
def test_accumulation_clipping_and_checkpoints(strategy, tmp_path):
    """Two micro-batches for each step, a clipped gradient, a checkpoint that is loaded by others, as in one process."""
    torch.manual_seed(0)
    single = Net()
    batches = torch.randn(4, 2, 3, 4)  # batch, rank, row
    with late_groups() as group:
        model = shardtrace.fsdp(copy.deepcopy(single), sharding_strategy=strategy, mesh=group)
        cmodel = thunder.jit(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, model)]
        for i, batch in enumerate(batches):
            (single(batch.flatten(0, 1)) / 2).backward()  # a sum over all rows, where ranks average their own sums
            with model.no_sync() if i % 2 == 0 else nullcontext():
                cmodel(batch[dist.get_rank()]).backward()
            if i % 2:
                norms = [
                    torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5),
                    shardtrace.clip_grad_norm_(model, 0.5),
                ]
                torch.testing.assert_close(norms[1], norms[0])
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for name, value in shardtrace.full_state_dict(model).items():
            torch.testing.assert_close(value, single.state_dict()[name])
        shardtrace.save_checkpoint(tmp_path, model, optimizers[1], step=1)
        other = shardtrace.fsdp(Net(), sharding_strategy="zero3", mesh=group)
        shardtrace.load_checkpoint(tmp_path, other)
        for name, value in shardtrace.full_state_dict(other).items():
            torch.testing.assert_close(value, single.state_dict()[name])
