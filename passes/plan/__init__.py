"""The sharding plan as frozen data: placements, buckets, layouts and rates. Touches no trace and no process."""

from passes.plan.bucket import Bucket, inflight_limits
from passes.plan.cost import CostModel, Device, Kernels, Link, Work, default_cost_model
from passes.plan.plan import (
    BucketPlan,
    Ends,
    Member,
    Placement,
    Shape,
    ShardedParameter,
    TracedParameters,
    Wire,
    shard_shape,
)
from passes.plan.runtime import Axis, Gradients, HostMemory, Keep, Level, PlainRuntime, Progress, Runtime, Step

__all__ = [
    "Axis",
    "Bucket",
    "BucketPlan",
    "CostModel",
    "Device",
    "Ends",
    "Gradients",
    "HostMemory",
    "Keep",
    "Kernels",
    "Level",
    "Link",
    "Member",
    "Placement",
    "PlainRuntime",
    "Progress",
    "Runtime",
    "Shape",
    "ShardedParameter",
    "Step",
    "TracedParameters",
    "Wire",
    "Work",
    "default_cost_model",
    "inflight_limits",
    "shard_shape",
]
