"""Checkpoints: sharded when saved, resharded when loaded, complete or absent, and never a pickle."""

from shardtrace.checkpoint.export import export_safetensors
from shardtrace.checkpoint.files import CheckpointError, latest_checkpoint
from shardtrace.checkpoint.load import Checkpoint, load_checkpoint
from shardtrace.checkpoint.optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from shardtrace.checkpoint.save import AsyncCheckpointer, save_checkpoint
from shardtrace.checkpoint.state import sharded_state_dict
from shardtrace.checkpoint.weights import load_safetensors

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
