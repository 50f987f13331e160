"""The compiler of shardtrace: passes over Thunder's traces that shard parameters and that insert, schedule and verify
collectives. Pure: a trace in, a new trace out. Touches no module, optimizer, file or environment.

``import passes``, and so ``import shardtrace``, makes Thunder importable on torch 2.13 to 2.15 (:mod:`passes.compat`).
"""

from passes.compat.versions import import_thunder, install

install()
import_thunder()

from passes.analysis.liveness import Collective, collectives  # noqa: E402
from passes.analysis.printing import readable  # noqa: E402
from passes.analysis.verify import VerificationError, verify  # noqa: E402
from passes.compat.jit import print_traces_as, trace_faster  # noqa: E402
from passes.pipeline import Pass, PassAfterLowering, PassBeforeAutodiff  # noqa: E402
from passes.plan import Bucket, BucketPlan, CostModel, Device, Link, ShardedParameter, TracedParameters, Wire  # noqa: E402

print_traces_as(readable)
trace_faster()

__all__ = [
    "Bucket",
    "BucketPlan",
    "Collective",
    "CostModel",
    "Device",
    "Link",
    "Pass",
    "PassAfterLowering",
    "PassBeforeAutodiff",
    "ShardedParameter",
    "TracedParameters",
    "VerificationError",
    "Wire",
    "collectives",
    "verify",
]
