"""Checkpoints: sharded when saved, resharded when loaded, complete or absent, and never a pickle."""

from shardtrace.checkpoint.files import CheckpointError, latest_checkpoint
from shardtrace.checkpoint.save import AsyncCheckpointer, Checkpoint, load_checkpoint, save_checkpoint
from shardtrace.checkpoint.state import full_optimizer_state_dict, load_full_optimizer_state_dict, sharded_state_dict
from shardtrace.checkpoint.weights import export_safetensors, load_safetensors

__all__ = [
    "AsyncCheckpointer",
    "Checkpoint",
    "CheckpointError",
    "export_safetensors",
    "full_optimizer_state_dict",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_safetensors",
    "save_checkpoint",
    "sharded_state_dict",
]
