"""The shards of a bucket lie in one buffer. A gather packs nothing."""

import copy
from dataclasses import replace

import shardtrace
from passes.plan import BucketPlan, Link, Member, ShardedParameter, default_cost_model
from passes.plan.bucket import ShardLayout

import torch
from models import Zoo
from sharded_training import local
from thunder.core import dtypes
from torch import nn


def flat_row(shards):
    plan = BucketPlan("Model", world_size=2)
    shapes = [(2 * s.shape[0], *s.shape[1:]) for s in shards]
    members = [Member(ShardedParameter(plan, f"p{i}", shape, ""), True) for i, shape in enumerate(shapes)]
    return ShardLayout(members, 2, dtypes.float32).flat_row(shards)


def buffers(model):
    """Names of the parameters in each shared buffer."""
    by_storage = {}
    for entry in model._shardtrace.entries:
        assert local(entry.shard).data_ptr() == entry.rows.data_ptr()
        by_storage.setdefault(entry.rows.untyped_storage().data_ptr(), []).append(entry.name)
    return [names for names in by_storage.values() if len(names) > 1]


def test_the_shards_of_a_block_share_a_buffer_without_gaps(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(Zoo())
    assert ["blocks.0.norm", "blocks.0.down", "blocks.0.up.weight", "blocks.0.up.bias"] in buffers(model)
    block = [entry.rows for entry in model._shardtrace.entries if entry.block == "blocks.0"]
    row = flat_row(block)
    assert row.data_ptr() == block[0].data_ptr() == model.blocks[0].norm.to_local().data_ptr()
    assert row.numel() == sum(t.numel() for t in block)
    assert torch.equal(row, torch.cat([t.reshape(-1) for t in block]))


def test_a_parameter_is_saved_without_the_others(fake_ranks, tmp_path):
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 63)), bucketing_strategy=100)
    assert buffers(model)
    for value in model.state_dict().values():
        torch.save(value.to_local(), tmp_path / "saved")
        assert (tmp_path / "saved").stat().st_size < value.to_local().nbytes + 2000


def test_each_parameter_has_its_own_where_each_travels_alone(fake_ranks):
    fake_ranks(2)
    assert buffers(shardtrace.fsdp(Zoo(), bucketing_strategy="none")) == []


def test_a_slow_link_splits_the_buffer_of_a_block(fake_ranks):
    fake_ranks(2)
    slow = replace(default_cost_model("cpu", "gloo"), link=Link(bandwidth=1e6, latency=1e-9))
    block = ["blocks.0.norm", "blocks.0.down", "blocks.0.up.weight", "blocks.0.up.bias"]
    split = buffers(shardtrace.fsdp(Zoo(), compile_policy=shardtrace.CompilePolicy(cost_model=slow)))
    assert not any({"blocks.0.down", "blocks.0.up.weight"} <= set(names) for names in split)
    assert block in buffers(
        shardtrace.fsdp(Zoo(), compile_policy=shardtrace.CompilePolicy(cost_model=slow), bucketing_strategy="block")
    )


def test_a_copy_of_the_model_has_buffers_of_its_own(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(Zoo())
    again = copy.deepcopy(model)
    assert buffers(again) == buffers(model)
    assert again.blocks[0].norm.to_local().data_ptr() != model.blocks[0].norm.to_local().data_ptr()


def test_other_memory_is_packed():
    a, b = torch.arange(3.0), torch.arange(4.0).view(2, 2)
    assert flat_row([a, b]).tolist() == [0, 1, 2, 0, 1, 2, 3]
    row = torch.arange(8.0)
    assert flat_row([row[:2], row[3:]]).tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert flat_row([row[4:], row[:4]]).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
