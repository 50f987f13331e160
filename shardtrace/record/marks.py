"""Marks on modules, which tell the recorder about them: attributes of their ``__dict__``."""

from __future__ import annotations

from torch import nn

PART_ATTRIBUTE = "_shardtrace_part_of"  # of a submodule of a sharded model: the ShardedState around it
REPEATED = "_shardtrace_block"  # of a block that is compiled once with others of its kind: its name
EAGER = "_shardtrace_eager"  # of a module that PyTorch runs
# Of a module whose activations are recomputed in backward: all of them, or the cheap ones.
CHECKPOINTED = {"full": "_shardtrace_checkpointed", "cheap": "_shardtrace_checkpointed_cheap"}


def recomputed(module: nn.Module) -> str | None:
    """A module's own mark: "full", "cheap", or None."""
    return next((what for what, mark in CHECKPOINTED.items() if mark in module.__dict__), None)
