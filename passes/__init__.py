"""The compiler of shardtrace: passes over Thunder's traces that shard parameters, insert, schedule and verify
collectives. Pure: a trace in, a new trace out; no module, optimizer, file or environment is touched.

``import passes`` (and so ``import shardtrace``) makes Thunder importable on torch 2.13: see :mod:`passes.compat`.
"""

from passes import compat

compat.install()

from passes.insert_synchronize import insert_synchronize  # noqa: E402
from passes.pipeline import Compilation, Pass, PassAfterLowering, PassBeforeAutodiff, pipeline  # noqa: E402
from passes.plan import Bucket, Enlisted, Plan, ShardedParameter, Wire  # noqa: E402
from passes.regather import regather  # noqa: E402
from passes.schedule import schedule  # noqa: E402
from passes.shard_parameters import shard_parameters  # noqa: E402
from passes.traffic import Collective, collectives  # noqa: E402
from passes.verify import VerificationError, verify  # noqa: E402

__all__ = [
    "Bucket",
    "Collective",
    "Compilation",
    "Enlisted",
    "Pass",
    "PassAfterLowering",
    "PassBeforeAutodiff",
    "Plan",
    "ShardedParameter",
    "VerificationError",
    "Wire",
    "collectives",
    "insert_synchronize",
    "pipeline",
    "regather",
    "schedule",
    "shard_parameters",
    "verify",
]
