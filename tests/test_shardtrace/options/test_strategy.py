from shardtrace import ShardingStrategy
from shardtrace.options.strategy import assign, parse_bucketing_strategy, parse_rules, parse_sharding_strategy

import pytest
import torch.distributed.fsdp
from thunder.distributed import FSDPBucketingStrategy, FSDPType


@pytest.mark.parametrize(
    ("spelling", "strategy"),
    [
        ("zero3", ShardingStrategy.ZERO3),
        ("ZeRO2", ShardingStrategy.ZERO2),
        ("FULL_SHARD", ShardingStrategy.ZERO3),
        ("shard_grad_op", ShardingStrategy.ZERO2),
        (ShardingStrategy.ZERO2, ShardingStrategy.ZERO2),
        (FSDPType.ZERO3, ShardingStrategy.ZERO3),
        (torch.distributed.fsdp.ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.ZERO2),
        (torch.distributed.fsdp.ShardingStrategy.NO_SHARD, ShardingStrategy.DDP),
        (torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_ZERO3),
        (torch.distributed.fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.HYBRID_ZERO2),
        ("shard_grad", ShardingStrategy.ZERO2),
        ("DDP", ShardingStrategy.DDP),
        ("Owner", ShardingStrategy.OWNER),
    ],
)
def test_strategies_as_the_neighbours_spell_them(spelling, strategy):
    assert parse_sharding_strategy(spelling) is strategy


@pytest.mark.parametrize(
    ("spelling", "bucketing"),
    [("Block", "block"), ("none", "none"), (FSDPBucketingStrategy.LAYER, "layer"), (25, 25.0), (0.5, 0.5)],
)
def test_bucketings(spelling, bucketing):
    assert parse_bucketing_strategy(spelling) == bucketing


def test_the_first_pattern_that_matches_counts():
    rules = parse_rules({"embed.*": "ddp", "*.bias": "zero2", "*": "zero3"})
    names = ["embed.weight", "embed.bias", "h.0.bias", "h.0.weight"]
    assert [s.value for s in assign(rules, names).values()] == ["ddp", "ddp", "zero2", "zero3"]
