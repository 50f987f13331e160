"""A strategy for Lightning Fabric. Importing this module registers it as "shardtrace". ::

    import shardtrace.lightning
    from lightning.fabric import Fabric

    fabric = Fabric(strategy="shardtrace", devices=2)  # or strategy=ShardtraceStrategy(sharding_strategy="zero2")

Needs Lightning: ``pip install 'shardtrace[lightning]'``.
"""

from shardtrace.lightning.strategy import ShardtraceStrategy, jitted

from lightning.fabric.strategies import STRATEGY_REGISTRY

__all__ = ["ShardtraceStrategy", "jitted"]

STRATEGY_REGISTRY.register(
    "shardtrace",
    ShardtraceStrategy,
    description="FSDP by shardtrace, compiled by Thunder",
    override=True,
)
