"""The layout of a bucket on the wire, without processes: all ranks' packed rows unpack to the same values."""

from passes.plan.bucket import SMALL, UNITS, Bucket
from passes.plan.plan import BucketPlan, Member, Placement, ShardedParameter, shard_shape

import pytest
import torch
from thunder.core import dtypes

SHAPES = [(5, 3), (), (1, 4), (8,), (2, 1, 3)]


def bucket_of(shapes, world_size, trainable=True):
    plan = BucketPlan("Model", world_size=world_size)
    members = tuple(Member(ShardedParameter(plan, f"p{i}", s, ""), trainable) for i, s in enumerate(shapes))
    return Bucket("root", "b_root", plan, members, dtypes.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1], SHAPES[1:2], [(8, UNITS), (8,)], [(UNITS + 1, 3), (7,)]])
def test_unpacking_inverts_packing(shapes, world_size):
    bucket = bucket_of(shapes, world_size)
    tensors = tuple(torch.randn(s) for s in shapes)
    rows = bucket.layout.pack_rows(tensors)
    assert rows.shape == (world_size * bucket.numel,)
    for tensor, again in zip(tensors, bucket.layout.unpack_rows(rows), strict=True):
        torch.testing.assert_close(again, tensor, rtol=0, atol=0)
        assert again.is_contiguous()


@pytest.mark.parametrize("shapes", [[(4, 3), (8,)], [(4, 3), (5,), ()]])  # without and with padding
def test_a_row_gives_shards_back(shapes):
    bucket = bucket_of(shapes, 2)
    tensors = tuple(torch.randn(s) for s in shapes)
    for row, rank in zip(bucket.layout.pack_rows(tensors).view(2, -1), range(2), strict=True):
        for shard, tensor in zip(bucket.layout.unpack_row(row), tensors, strict=True):
            rows = tensor.reshape(-1, *tensor.shape[1:])[rank * len(shard) : (rank + 1) * len(shard)]
            torch.testing.assert_close(shard[: len(rows)], rows, rtol=0, atol=0)
            assert not shard[len(rows) :].any()


@pytest.mark.parametrize("owners", [(0, 1, 0, 1, 0), (1, 1, 1, 1, 1), (2, 0, 2, 0, 1)])
def test_rows_of_owners_are_what_each_owns(owners):
    """Packed on any rank and cut into rows, the tensors come back: to each owner its own, to all ranks all of them."""
    tensors = tuple(torch.randn(s) for s in SHAPES)
    for rank in range(3):
        plan = BucketPlan("Model", world_size=3, rank=rank, placement=Placement.OWNER)
        members = tuple(
            Member(ShardedParameter(plan, f"p{i}", s, "", owner=o), True)
            for i, (s, o) in enumerate(zip(SHAPES, owners, strict=True))
        )
        layout = Bucket("root", "b_root", plan, members, dtypes.float32).layout
        rows = layout.pack_rows(tensors)
        shards = layout.unpack_row(rows.split(layout.row_sizes)[rank])
        assert torch.equal(layout.flat_row(shards), rows.split(layout.row_sizes)[rank])
        for tensor, full, shard, owner in zip(tensors, layout.unpack_rows(rows), shards, owners, strict=True):
            assert torch.equal(full, tensor)
            assert torch.equal(shard, tensor) if owner == rank else not shard.numel()


def test_small_members_are_unpacked_by_units():
    """The unit of shards of 8 and of 4 elements is 4. A permutation of more than UNITS units is not kept."""
    layout = bucket_of([(8, 2), (8,)], 2).layout
    assert layout.permutation.tolist() == [0, 1, 3, 4, 2, 5]
    assert bucket_of([(UNITS + 1, 3), (7,)], 2).layout.permutation is None


def test_large_members_keep_no_memory_but_their_own():
    bucket = bucket_of([(2, SMALL), (5,), (3, SMALL), (4,)], 2)
    assert bucket.layout.large == (0, 2)
    rows = torch.zeros(2 * bucket.numel)
    full = bucket.layout.unpack_rows(rows)
    assert [t.untyped_storage().nbytes() for t in full] == [4 * n for n in (2 * SMALL, 10, 4 * SMALL, 10)]
    assert full[1].untyped_storage().data_ptr() == full[3].untyped_storage().data_ptr()  # small ones share


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_one_kernel_packs_what_single_copies_pack(world_size, wire):
    """The kernel for GPUs: also with padding, a cast, and gradients that are not contiguous."""
    plan = BucketPlan("Model", world_size=world_size)
    members = tuple(Member(ShardedParameter(plan, f"p{i}", s, ""), True) for i, s in enumerate(SHAPES) if s)
    layout = Bucket("root", "b_root", plan, members, dtypes.to_dtype(getattr(torch, wire))).layout
    tensors = [torch.randn(s[::-1], dtype=torch.bfloat16).permute(*reversed(range(len(s)))) for s in SHAPES if s]
    one_by_one, at_once = (torch.full((world_size, layout.numel), 7.0, dtype=layout.dtype) for _ in range(2))
    layout._fill_one_by_one(one_by_one, tensors)
    layout._fill_at_once(at_once, tensors)
    assert torch.equal(one_by_one, at_once)


def test_small_members_begin_where_kernels_for_gpus_read_vectors():
    layout = bucket_of([(6,), (3, 5), (2, SMALL), (4,)], 2).layout
    assert layout.aligned == ([0, 8, None, 28], 32)  # 16 bytes are four elements
    assert layout.beside == ([0, 6, None, 26], 30)
    layout.beside = layout.aligned
    tensors = tuple(torch.randn(s) for s in ((6,), (3, 5), (2, SMALL), (4,)))
    for tensor, again in zip(tensors, layout.unpack_rows(layout.pack_rows(tensors)), strict=True):
        assert torch.equal(tensor, again)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_each_row_is_a_rank_and_padding_is_zero(world_size):
    bucket = bucket_of([(5, 3)], world_size)
    table = bucket.layout.pack_rows((torch.ones(5, 3),)).view(world_size, *shard_shape((5, 3), world_size))
    assert table.sum() == 15
    assert (table.flatten(0, 1)[:5] == 1).all()


def test_gradients_are_divided_before_they_are_summed():
    """In fp16 a sum over ranks of 60000 would overflow."""
    bucket = bucket_of([(4,)], 2)
    rows = bucket.layout.pack_rows((torch.full((4,), 60000.0, dtype=torch.float16),), divisor=2)
    assert torch.isfinite(rows + rows).all()


def test_gradient_of_a_scalar_may_come_unreduced():
    assert bucket_of([()], 2).layout.pack_rows((torch.ones(2, 3),)).tolist() == [6.0, 0.0]


def test_frozen_members_are_not_reduced():
    bucket = bucket_of([(4,), (2,)], 2, trainable=False)
    assert bucket.trainable is None
    mixed = Bucket("m", "m", bucket.plan, (bucket.members[0], bucket_of([(2,)], 2).members[0]), dtypes.float32)
    assert len(mixed.trainable.members) == 1
    assert mixed.bytes == 2 * (2 + 1) * 4


@pytest.mark.parametrize(
    ("full", "world_size", "expected"),
    [
        ((64, 8), 2, (32, 8)),
        ((5, 3), 2, (3, 3)),
        ((1, 4), 8, (1, 4)),
        ((), 3, (1,)),
        ((3, 0), 2, (2, 0)),
        ((0, 2), 2, (0, 2)),
    ],
)
def test_shard_shape(full, world_size, expected):
    assert shard_shape(full, world_size) == expected
