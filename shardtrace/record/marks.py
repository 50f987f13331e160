"""What the recorder is told: marks on modules, which are attributes of their ``__dict__``, and whose code is whose."""

from __future__ import annotations

import functools

from torch import nn

ATTRIBUTE = "_shardtrace"  # of a sharded module: its ShardedState
PART_ATTRIBUTE = "_shardtrace_part_of"  # of a submodule of a sharded model: the ShardedState around it
REPEATED = "_shardtrace_block"  # of a block that is compiled once with others of its kind: its name
EAGER = "_shardtrace_eager"  # of a module that PyTorch runs
LIBRARIES = frozenset({"torch", "torchgen", "thunder", "shardtrace", "passes", "contextlib"})
# Of a module whose activations are recomputed in backward: all of them, or the cheap ones.
CHECKPOINTED = {"full": "_shardtrace_checkpointed", "cheap": "_shardtrace_checkpointed_cheap"}


def recomputed(module: nn.Module) -> str | None:
    """A module's own mark: "full", "cheap", or None."""
    return next((what for what, mark in CHECKPOINTED.items() if mark in module.__dict__), None)


@functools.cache
def is_library(module: str) -> bool:
    """Whether a module of Python, by its name, is part of torch, Thunder or shardtrace: none of the user's lines or
    objects is in it."""
    return module.partition(".")[0] in LIBRARIES
