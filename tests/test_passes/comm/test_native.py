"""A bucket's collectives over a backend that behaves like nccl: asynchronous, late, averaging."""

import copy
from contextlib import nullcontext

import shardtrace
from passes.plan import BucketPlan, Placement

import pytest
import thunder
import torch
import torch.distributed as dist
from exchange import EVEN, SHAPES, exchange_bucket
from late import late_groups
from ranks import on_ranks
from thunder.core import dtypes
from torch import nn


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
        for placement in Placement:
            exchange_bucket(placement, EVEN, kind, group, sums=True)
        exchange_bucket(Placement.SHARD, EVEN, kind, group, wire=torch.float32, sums=True)
        uneven = {"allgather", "reduce_scatter"}  # lists of tensors: a broadcast or a reduction for each rank
        assert uneven & set(group.issued) == uneven
        group.issued.clear()
        exchange_bucket(Placement.OWNER, EVEN[: group.size()], kind, group)
        assert set(group.issued) == {"all_gather_single", "reduce_scatter_single"}


@pytest.mark.parametrize(
    ("ranks", "dtype", "divisors"),
    [
        (64, dtypes.float16, (8, 8)),
        (8, dtypes.float16, (4, 2)),
        (3, dtypes.float16, (2, 1.5)),
        (2, dtypes.float16, (2, 1)),
        (64, dtypes.bfloat16, (1, 64)),
    ],
)
def test_divisors_of_sums(ranks, dtype, divisors):
    """In fp16 the powers of two of FSDP2."""
    assert BucketPlan("Model", ranks, sums=True).divisors(dtype) == divisors
    assert BucketPlan("Model", ranks).divisors(dtype) == (ranks, 1)
    assert BucketPlan("Model", ranks, averages=True).divisors(dtype) == (1, 1)


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
    """Two micro-batches for each step, a clipped gradient, a checkpoint that is loaded by others, as in one process.
    With several strategies, gradients are added up before they are divided."""
    torch.manual_seed(0)
    single = Net()
    batches = torch.randn(4, 2, 3, 4)  # batch, rank, row
    with late_groups() as group:
        sums = isinstance(strategy, dict)
        model = shardtrace.fsdp(
            copy.deepcopy(single),
            sharding_strategy=strategy,
            mesh=group,
            comm_policy=shardtrace.CommPolicy(sum_reductions=sums),
        )
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


def test_gradients_are_not_cast_between_the_two_reductions_of_a_hybrid_strategy(fake_ranks):
    fake_ranks(4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shardtrace.fsdp(nn.Linear(4, 4), sharding_strategy="hybrid_zero3", mesh=mesh, mp_policy="bf16")
    cmodel = thunder.jit(model)
    cmodel(torch.ones(3, 4)).sum().backward()
    lines = {b.sym.name: b for b in thunder.last_backward_traces(cmodel)[-1].bound_symbols}
    reduced, averaged = lines["wait_reduce_scatter"], lines["wait_all_reduce"]
    assert {o.dtype for o in reduced.flat_proxy_outs} == {dtypes.bfloat16}
    assert {o.dtype for o in averaged.flat_proxy_outs} == {dtypes.float32}
    assert lines["all_reduce"].args[0] == reduced.output
