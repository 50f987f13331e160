"""A bucket that is gathered and reduced by the calls of the backend, compared with what it should become."""

from __future__ import annotations

from typing import Any

import shardtrace  # noqa: F401  before thunder: makes it importable on the newest torch
from passes.comm import native
from passes.plan import Bucket, BucketPlan, Member, Placement, PlainRuntime, ShardedParameter
from shardtrace.model.shards import Home, shard

import torch
from thunder.core import dtypes

CPU = torch.device("cpu")
SHAPES: list[tuple[int, ...]] = [(300, 128), (5,), (), (7, 3), (1, 2**15)]  # the last shard is padding on most ranks
EVEN: list[tuple[int, ...]] = [(12, 4), (48,), (4, 12), (24, 2)]  # not padded on 2, 3, 4 ranks; 4 owners hold as much


def exchange_bucket(
    placement: Placement,
    shapes: list[tuple[int, ...]],
    kind: torch.dtype,
    group: Any,
    *,
    wire: torch.dtype | None = None,
    device: torch.device = CPU,
    sums: bool = False,
) -> None:
    """Gathers and reduces a bucket, twice at once. ``wire`` is the dtype of its reductions. ``sums``: they divide what
    they have added up."""
    rank, ranks = group.rank(), group.size()
    if placement is Placement.SHARD:
        shapes = [s or (1,) for s in shapes]  # a scalar has no rows to share
    plan = BucketPlan(
        "Model", ranks, rank, placement=placement, averages=not sums, sums=sums, runtime=PlainRuntime(group)
    )
    owners = [min(i, ranks - 1) for i in range(len(shapes))]
    members = tuple(
        Member(ShardedParameter(plan, f"p{i}", s, "", dtype=dtypes.to_dtype(kind), owner=o), True)
        for i, (s, o) in enumerate(zip(shapes, owners, strict=True))
    )
    bucket = Bucket("root", "b_root", plan, members, dtypes.to_dtype(wire or kind))
    homes = [Home(placement, group, owner) for owner in owners]
    torch.manual_seed(0)
    full = [torch.randn(s).to(device, kind) for s in shapes]

    def shards(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(shard(t, home).clone() for t, home in zip(tensors, homes, strict=True))

    if placement is not Placement.REPLICATE and wire is None:
        futures = [native.issue_all_gather(shards(t), bucket) for t in (full, [-t for t in full])]
        for future, sign in zip(futures, (1, -1), strict=True):
            assert device != CPU or future.received.isnan().all()
            for got, expected in zip(native.finish_all_gather(future, bucket), full, strict=True):
                assert torch.equal(got, sign * expected)

    grads = tuple(t * (rank + 1) for t in full)
    large = (torch.full(shapes[0], 60000.0).to(device, kind), *grads[1:])  # in fp16 a sum of these overflows
    reduce = native.issue_all_reduce if placement is Placement.REPLICATE else native.issue_reduce_scatter
    futures = [reduce(grads, bucket), reduce(large, bucket)]
    reduced, constant = (native.finish_reduce_scatter(future, bucket) for future in futures)
    mean = shards([t.float() * (ranks + 1) / 2 for t in full])
    tolerance = (1e-5, 1e-6) if kind == torch.float32 else (2e-2, 2e-2)
    for got, expected in zip(reduced, mean, strict=True):
        assert got.dtype == kind
        torch.testing.assert_close(got.float(), expected.view_as(got), rtol=tolerance[0], atol=tolerance[1])
    assert torch.isfinite(constant[0]).all() or (sums and kind == torch.float16)
