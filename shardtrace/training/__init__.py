"""The functions that a training script calls around a step."""

from shardtrace.training.accumulation import no_sync
from shardtrace.training.buffers import sync_buffers, warn_of_differing_buffers
from shardtrace.training.clipping import clip_grad_norm_
from shardtrace.training.full import full_params, full_state_dict, load_full_state_dict, sharded_entries
from shardtrace.training.optimizers import refuse_wrong_optimizers
from shardtrace.training.split import split_parameters

__all__ = [
    "clip_grad_norm_",
    "full_params",
    "full_state_dict",
    "load_full_state_dict",
    "no_sync",
    "refuse_wrong_optimizers",
    "sharded_entries",
    "split_parameters",
    "sync_buffers",
    "warn_of_differing_buffers",
]
