"""Rounded buckets on real ranks: every transport and placement, their bytes, and what all ranks must agree on."""

from unittest import mock

import shardtrace  # noqa: F401
from passes.comm import symbols
from passes.comm.quantized import FP8, INT4, INT8, gather_wire, reduction_wire
from passes.plan import Bucket, BucketPlan, Member, Placement, PlainRuntime, ShardedParameter
from shardtrace.model.shards import Home, shard

import pytest
import torch
import torch.distributed as dist
from late import late_groups
from ranks import on_ranks
from thunder.core import dtypes
from torch.utils._python_dispatch import TorchDispatchMode

# Large members, with and without padding; a vector, a scalar; one whose last shard is nothing but padding.
SHAPES = [(300, 40), (5,), (90, 64), (), (4, 700)]


def bucket_of(group, placement=Placement.SHARD, dtype=torch.float32, *, direct=True, shapes=SHAPES, **plan):
    rank, ranks = group.rank(), group.size()
    plan = BucketPlan("M", ranks, rank, placement=placement, direct=direct, runtime=PlainRuntime(group), **plan)
    kind = dtypes.to_dtype(dtype)
    if placement is Placement.SHARD:
        shapes = [s or (1,) for s in shapes]  # a scalar has no rows to share
    members = tuple(
        Member(ShardedParameter(plan, f"p{i}", s, "", dtype=kind, owner=i % ranks, index=i), True)
        for i, s in enumerate(shapes)
    )
    return Bucket("root", "b_root", plan, members, plan.unsharded_dtype(kind))


def shards_of(bucket, full):
    group = bucket.plan.group
    return tuple(
        shard(t, Home(bucket.plan.placement, group, m.parameter.owner)).clone()
        for t, m in zip(full, bucket.members, strict=True)
    )


def tensors(bucket, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(m.parameter.full_shape).to(dtype) for m in bucket.members]


@on_ranks(2)
def test_two_ranks():
    group = dist.group.WORLD
    exchange(group, direct=True)
    with late_groups() as late:
        exchange(late, direct=False)


@on_ranks(3)
def test_three_ranks():
    exchange(dist.group.WORLD, direct=True)
    with late_groups() as late:
        exchange(late, direct=False)


def exchange(group, *, direct):
    for dtype in (torch.float32, torch.bfloat16):
        for placement in (Placement.SHARD, Placement.OWNER):
            for format in (INT8, FP8):
                gathers_equal_values_on_all_ranks(bucket_of(group, placement, dtype, direct=direct), format)
        for placement in Placement:
            for format in (INT8, INT4):
                adds_up_what_was_rounded_once(bucket_of(group, placement, dtype, direct=direct), format)
    computes_in_another_dtype(group, direct=direct)
    keeps_an_overflow(group, direct=direct)
    feeds_errors_back(group, direct=direct)
    sums_exactly_what_is_representable(group, direct=direct)
    waits_for_what_it_sends(group, direct=direct)


def gathers_equal_values_on_all_ranks(plain, format):
    bucket = plain.carried_by(gather_wire(format))
    dtype = bucket.layout.dtype
    full = tensors(bucket, dtype)
    got = gathered(bucket, full)
    packing = bucket.prepared
    assert (packing.rounded, packing.exact) == ((0, 2, 4), (1, 3))
    for i, (value, expected) in enumerate(zip(got, full, strict=True)):
        assert (value.dtype, value.shape) == (dtype, expected.shape)
        if i in packing.exact:
            assert torch.equal(value, expected)
        else:
            assert not torch.equal(value, expected)  # this rank's own rows are rounded, too
            torch.testing.assert_close(value, expected, rtol=0.07, atol=0.05)
        same_everywhere(value, bucket.plan.group)


def waits_for_what_it_sends(group, *, direct):
    """A rank that owns nothing in a bucket receives nothing, and must keep what it sends until it has been sent."""
    shapes = [(1024, 512)]
    bucket = bucket_of(group, Placement.OWNER, direct=direct, shapes=shapes).carried_by(reduction_wire(INT8))
    for _ in range(3):
        (got,) = reduced(bucket, [torch.ones(*shapes)])
        assert torch.equal(got, torch.ones(*shapes) if group.rank() == 0 else torch.empty(0, 512))


def gathered(bucket, full):
    symbol = symbols._pair("all_gather")
    shards = shards_of(bucket, full)
    futures = [symbol[0](shards, bucket) for _ in range(2)]  # two in flight at once
    first, second = (symbol[1](future, bucket) for future in futures)
    assert all(map(torch.equal, first, second))
    return first


def same_everywhere(value, group):
    others = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(others, value.contiguous(), group=dist.group.WORLD)
    assert all(torch.equal(other, value) for other in others)


def reduced(bucket, grads):
    replicated = bucket.plan.placement is Placement.REPLICATE
    issue, finish = symbols._pair("all_reduce" if replicated else "reduce_scatter")
    return finish(issue(tuple(grads), bucket), bucket)


def rounded(format, values):
    """Each block of a flat tensor, rounded."""
    message, result = (
        format.messages(torch.empty(1, format.nbytes(len(values)), dtype=torch.uint8)),
        torch.empty(1, len(values)),
    )
    format.pack(values.unsqueeze(0), message, chunk=2**17)
    format.unpack(message, result, chunk=2**17)
    return result[0]


def adds_up_what_was_rounded_once(plain, format):
    bucket = plain.carried_by(reduction_wire(format))
    plan, dtype = bucket.plan, bucket.layout.dtype
    ranks = plan.world_size
    got = reduced(bucket, tensors(bucket, dtype, seed=plan.rank))
    all_grads = [tensors(bucket, dtype, seed=rank) for rank in range(ranks)]
    for i, value in enumerate(got):
        whole = [grads[i] for grads in all_grads]
        mean = sum(g.float() for g in whole) / ranks
        expected = shards_of(bucket, [mean] * len(got))[i]
        if plan.placement is Placement.REPLICATE:
            same_everywhere(value, plan.group)
        assert value.shape == expected.shape
        tolerance = {"rtol": 0, "atol": 4 / format.largest / 2 + 4 / 127 / 2}  # of one rounding, and of the second trip
        if i in (1, 3):
            tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(value.float(), expected, **tolerance)
    if plan.placement is Placement.SHARD:  # exactly: one rounding, in the blocks of a shard, added up in fp32
        i, n = 2, bucket.members[2].numel
        parts = [torch.nn.functional.pad(g[i].float().flatten(), (0, n * ranks - g[i].numel())) for g in all_grads]
        mine = [part[plan.rank * n :][:n] for part in parts]
        sums = sum(m if rank == plan.rank else rounded(format, m) for rank, m in enumerate(mine)) / ranks
        last_bit = 1e-5 if dtype == torch.float32 else 8e-3  # sums in another order
        torch.testing.assert_close(got[i].float().flatten(), sums.to(dtype).float(), rtol=last_bit, atol=1e-5)


def computes_in_another_dtype(group, *, direct):
    """Shards in fp32 are rounded once, not cast before."""
    bucket = bucket_of(group, direct=direct, param_dtype=dtypes.bfloat16).carried_by(gather_wire(INT8))
    exact = bucket_of(group, direct=direct).carried_by(gather_wire(INT8))
    for got, expected in zip(gathered(bucket, tensors(bucket)), gathered(exact, tensors(bucket)), strict=True):
        assert torch.equal(got, expected.bfloat16())


def keeps_an_overflow(group, *, direct):
    """A gradient that is not finite on one rank is not finite in the sum of its block."""
    bucket = bucket_of(group, dtype=torch.float16, direct=direct).carried_by(reduction_wire(INT4))
    for bad in (float("inf"), float("nan")):
        grads = tensors(bucket, torch.float16)
        if group.rank() == group.size() - 1:
            grads[0][0, 0] = grads[1][0] = bad
        got = reduced(bucket, grads)
        lost = torch.tensor([(~t.isfinite()).sum() for t in (got[0], got[1])])
        dist.all_reduce(lost)
        assert lost[0] > 1 == lost[1]
        assert all(t.isfinite().all() for t in got[2:])


def feeds_errors_back(group, *, direct):
    plain = bucket_of(group, direct=direct)
    rounded, corrected = (
        bucket_of(group, direct=direct).carried_by(reduction_wire(INT4, error_feedback=on)) for on in (False, True)
    )
    grads = tensors(plain, seed=group.rank())
    exact = reduced(plain, grads)
    for i in (0, 2):
        sums = {True: 0, False: 0}
        for bucket, on in ((rounded, False), (corrected, True)):
            bucket.plan.runtime.errors.clear()
            for _ in range(20):
                sums[on] = sums[on] + reduced(bucket, grads)[i] / 20
        errors = {on: (mean - exact[i]).abs().mean() for on, mean in sums.items()}
        assert errors[True] < errors[False] / 8
    errors = corrected.plan.runtime.errors
    assert {key[1] for key in errors} == {0, 2, 4}
    others = group.size() - 1
    assert sum(e.numel() for e in errors.values()) == others * sum(corrected.members[i].numel for i in (0, 2, 4))


def sums_exactly_what_is_representable(group, *, direct):
    plain = bucket_of(group, direct=direct)
    grads = [torch.randint(-7, 8, s).float() for s in SHAPES]
    for grad in grads:
        grad.view(-1)[::4] = 7  # the largest of each block is the largest code
    for wire in (reduction_wire(INT4), reduction_wire(INT4, error_feedback=True)):
        for got, expected in zip(reduced(plain.carried_by(wire), grads), reduced(plain, grads), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


LARGER = [(300, 40), (5,), (130, 131), ()]


class Counting:
    """A group whose rank sends nothing and counts the bytes that it would."""

    def __init__(self, rank, size):
        self._rank, self._size, self.sent = rank, size, 0

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def send(self, out, *_):
        self.sent += out[0].nbytes
        return mock.MagicMock()

    def recv(self, *_):
        return mock.MagicMock()

    def all_to_all_single(self, received, rows, into, out, *_):
        assert (sum(out), out[self._rank], into[self._rank]) == (rows.nbytes, 0, 0)
        self.sent += rows.nbytes
        return mock.MagicMock()

    def all_gather_single(self, rows, row, *_):
        assert rows.nbytes == row.nbytes * self._size
        self.sent += row.nbytes * (self._size - 1)
        return mock.MagicMock()

    alltoall_base, _allgather_base = all_to_all_single, all_gather_single  # torch before 2.13


@pytest.mark.parametrize("direct_plan", [True, False])
@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_that_are_sent_are_those_that_are_counted(direct_plan, placement, ranks):
    """All ranks together send ``bytes * (N - 1)``, twice for an all_reduce (whose halves may differ)."""
    sent = {"gather": 0, "reduce": 0}
    for rank in range(ranks):
        group = Counting(rank, ranks)
        plain = bucket_of(group, placement, direct=direct_plan, shapes=LARGER)
        shards = [torch.zeros(m.parameter.shard_shape) for m in plain.members]
        if placement is not Placement.REPLICATE and direct_plan:
            gather = plain.carried_by(gather_wire(INT8))
            gather.wire.issue(tuple(shards), gather)
            sent["gather"], group.sent = sent["gather"] + group.sent, 0
        reduce = plain.carried_by(reduction_wire(INT8))
        reduce.wire.issue(tuple(torch.zeros(s) for s in LARGER), reduce)
        sent["reduce"] += group.sent
    assert sent["reduce"] == reduce.bytes * (ranks - 1)
    assert sent["gather"] in (0, sent["reduce"])
    assert reduce.bytes < 0.3 * plain.bytes


class Kernels(TorchDispatchMode):
    """Counts the kernels that are launched."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not (func.is_view or "empty" in func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("gather", "reduce"), [(INT8, INT8), (FP8, INT8), (FP8, INT4)])
@pytest.mark.parametrize("param_dtype", [None, dtypes.bfloat16])
def test_launches_of_a_step_do_not_grow_with_ranks(gather, reduce, param_dtype):
    """32 blocks of a GPT on 64 ranks: two gathers and a reduction of each. For nccl, on tensors without memory."""
    d = 1024
    block = [(3 * d, d), (3 * d,), (d, d), (d,), (4 * d, d), (4 * d,), (d, 4 * d), *[(d,)] * 5]
    launched = {}
    for ranks in (8, 64):
        group = Counting(5, ranks)
        plain = bucket_of(group, shapes=block, direct=False, param_dtype=param_dtype)
        dtype = plain.layout.dtype
        shards = tuple(torch.empty(m.parameter.shard_shape, device="meta") for m in plain.members)
        grads = tuple(torch.empty(shape, device="meta", dtype=dtype) for shape in block)
        counts = []
        for wire, values in ((gather_wire(gather), shards), (reduction_wire(reduce), grads)):
            bucket = plain.carried_by(wire)
            with Kernels() as kernels:
                bucket.wire.finish(bucket.wire.issue(values, bucket), bucket)
            counts.append(kernels.number)
        launched[ranks] = 32 * (2 * counts[0] + counts[1])
    print(launched)
    assert launched[8] == launched[64] < 2000


def test_buckets_that_a_wire_does_not_take():
    group = Counting(0, 2)
    small = bucket_of(group, shapes=[(5,), (20, 30), ()])
    assert small.carried_by(gather_wire(INT8)) is small
    integers = bucket_of(group, dtype=torch.int64)
    assert integers.carried_by(gather_wire(INT8)) is integers
    alone = bucket_of(Counting(0, 1))
    assert alone.carried_by(reduction_wire(INT8)) is alone
    assert small.carried_by(None) is small


def test_names_of_buckets():
    bucket = bucket_of(Counting(0, 2), gather=gather_wire(INT8), reduction=reduction_wire(INT4))
    gathered = bucket.carried_by(bucket.plan.gather)
    assert (gathered.name, gathered.travels_as) == ("b_root_int8", "int8")
    assert (gathered.plain, gathered.trainable) == (bucket, bucket.trainable)
    assert (bucket.trainable.name, bucket.trainable.travels_as) == ("b_root_int4_grads", "int4")
    assert sum(gathered.member_bytes) == gathered.bytes < bucket.bytes == sum(bucket.member_bytes)
