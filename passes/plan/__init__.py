"""The sharding plan as frozen data: placements, buckets, layouts and rates. Touches no trace and no process."""

from passes.plan.bucket import Bucket, inflight_limits
from passes.plan.cost import CostModel, Device, Kernels, Link, Work, default_cost_model
from passes.plan.enlisted import Enlisted
from passes.plan.host_memory import HostMemory
from passes.plan.plan import Member, Placement, Plan, Shape, ShardedParameter, shard_shape
from passes.plan.runtime import Axis, PlainRuntime, Runtime
from passes.plan.step import Gradients, Progress, Step
from passes.plan.wire import Ends, Wire

__all__ = [
    "Axis",
    "Bucket",
    "CostModel",
    "Device",
    "Ends",
    "Enlisted",
    "Gradients",
    "HostMemory",
    "Kernels",
    "Link",
    "Member",
    "Placement",
    "PlainRuntime",
    "Plan",
    "Progress",
    "Runtime",
    "Shape",
    "ShardedParameter",
    "Step",
    "Wire",
    "Work",
    "default_cost_model",
    "inflight_limits",
    "shard_shape",
]
