"""A strategy for Lightning Fabric. Importing this module registers it as "shardtrace". ::

    import shardtrace.lightning
    from lightning.fabric import Fabric

    fabric = Fabric(strategy="shardtrace", devices=2)  # or strategy=ShardtraceStrategy(sharding_strategy="zero2")

Needs Lightning: ``pip install 'shardtrace[lightning]'``.
"""

from shardtrace.options.extras import needs

needs("lightning", extra="lightning", what="shardtrace.lightning")

from shardtrace.lightning.strategy import ShardtraceStrategy, jitted  # noqa: E402

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402

__all__ = ["ShardtraceStrategy", "jitted"]

STRATEGY_REGISTRY.register(
    "shardtrace",
    ShardtraceStrategy,
    description="FSDP by shardtrace, compiled by Thunder",
    override=True,
)
