"""shardtrace: FSDP as a compiler, for lightning-thunder.

    import shardtrace, torch

    model = shardtrace.fsdp(model)                     # in place: each rank holds 1/N of every parameter
    optimizer = torch.optim.AdamW(model.parameters())
    model(x, y).backward(); optimizer.step()           # the first call compiles the model

``thunder.jit(model)`` around it does the same. Import this package before ``thunder``: it makes Thunder importable on
torch 2.13 to 2.15 (:mod:`passes.compat`).
"""

import passes  # noqa: F401  first, because it makes Thunder importable
from passes import Collective, VerificationError
from passes.kernels import executor
from shardtrace.api import ddp, fsdp
from shardtrace.checkpoint import (
    AsyncCheckpointer,
    Checkpoint,
    CheckpointError,
    export_safetensors,
    full_optimizer_state_dict,
    latest_checkpoint,
    load_checkpoint,
    load_full_optimizer_state_dict,
    load_safetensors,
    save_checkpoint,
    sharded_state_dict,
)
from shardtrace.doctor import VERSION as _version
from shardtrace.inspector import CollectiveRow, Inspection, MemoryRow, Profile, inspect, profile
from shardtrace.inspector.checking import Check, Difference, Proof, block_traces, check, collectives, memory, prove
from shardtrace.inspector.timeline import MemorySnapshot, memory_snapshot
from shardtrace.model.shards import init_empty_weights
from shardtrace.options.policies import (
    Checks,
    CommPolicy,
    CompilePolicy,
    ContextParallel,
    InitPolicy,
    MemoryBudget,
    TensorParallel,
)
from shardtrace.options.strategy import ShardingStrategy
from shardtrace.parallel import DDP, FSDP
from shardtrace.planner.contract import MemoryBudgetError
from shardtrace.planner.planning import plan
from shardtrace.planner.training_plan import NoPlanFitsError, PlanError, TrainingPlan
from shardtrace.ranks.consensus import RankMismatchError
from shardtrace.ranks.failure import RankFailedError
from shardtrace.ranks.mesh import init_process_group
from shardtrace.training.full import (
    Generator,
    full_gradients,
    full_params,
    full_state_dict,
    iter_full_params,
    load_full_state_dict,
    sync_buffers,
)
from shardtrace.training.methods import register_forward_method
from shardtrace.training.step import clip_grad_norm_, join, no_sync, shard_sequence, split_parameters

__version__ = _version
kernels = executor
"""An executor with which the lines of a sharded model call torch's own functions, forward and backward.

A sharded model has it by default if ``thunder.jit`` is given no executors. Add it to executors of your own choice:
``thunder.jit(model, executors=["sdpa", shardtrace.kernels, "torchcompile"])``, which then compiles these same lines.
Beside nvFuser only what is better not fused is torch's own: attention, convolutions, batch norm and cross entropy.
"""

__all__ = [
    "DDP",
    "FSDP",
    "AsyncCheckpointer",
    "Check",
    "Checkpoint",
    "CheckpointError",
    "Checks",
    "Collective",
    "CollectiveRow",
    "CommPolicy",
    "CompilePolicy",
    "ContextParallel",
    "Difference",
    "Generator",
    "InitPolicy",
    "Inspection",
    "MemoryBudget",
    "MemoryBudgetError",
    "MemoryRow",
    "MemorySnapshot",
    "NoPlanFitsError",
    "PlanError",
    "Profile",
    "Proof",
    "RankFailedError",
    "RankMismatchError",
    "ShardingStrategy",
    "TensorParallel",
    "TrainingPlan",
    "VerificationError",
    "block_traces",
    "check",
    "clip_grad_norm_",
    "collectives",
    "ddp",
    "export_safetensors",
    "fsdp",
    "full_gradients",
    "full_optimizer_state_dict",
    "full_params",
    "full_state_dict",
    "init_empty_weights",
    "init_process_group",
    "inspect",
    "iter_full_params",
    "join",
    "kernels",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "memory",
    "memory_snapshot",
    "no_sync",
    "plan",
    "profile",
    "prove",
    "register_forward_method",
    "save_checkpoint",
    "shard_sequence",
    "sharded_state_dict",
    "split_parameters",
    "sync_buffers",
]
