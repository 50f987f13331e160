from shardtrace import ShardingStrategy
from shardtrace.strategy import parse_bucketing_strategy, parse_sharding_strategy

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
