"""Strategies for Lightning's Fabric and Trainer. Importing this module registers both as "shardtrace". ::

    import shardtrace.lightning
    from lightning.fabric import Fabric

    fabric = Fabric(strategy="shardtrace", devices=2)  # or strategy=ShardtraceStrategy(sharding_strategy="zero2")
    trainer = lightning.pytorch.Trainer(strategy="shardtrace", devices=2)  # or ShardtraceTrainerStrategy(...)

Needs Lightning: ``pip install 'shardtrace[lightning]'``.
"""

from shardtrace.options.policies import needs

needs("lightning", extra="lightning", what="shardtrace.lightning")

from shardtrace.lightning.strategy import (  # noqa: E402
    ShardtraceStrategy,
    ShardtraceTrainerStrategy,
    jitted,
)

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

__all__ = ["ShardtraceStrategy", "ShardtraceTrainerStrategy", "jitted"]

for registry, strategy in (STRATEGY_REGISTRY, ShardtraceStrategy), (StrategyRegistry, ShardtraceTrainerStrategy):
    registry.register("shardtrace", strategy, description="FSDP by shardtrace, compiled by Thunder", override=True)
