"""Files that the first rank of a trainer writes, and that each rank looks for by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from passes.compat.jit import unjitted
from shardtrace.model.state import states_in
from shardtrace.ranks.consensus import compare
from shardtrace.ranks.failure import communicating

import torch.distributed as dist
from torch import nn

READ = (".safetensors", ".bin", ".pt", ".ckpt")
OF_A_RANK = "training_args.bin"  # may differ between ranks


def after_first(model: nn.Module, value: Any = None) -> Any:
    """The first rank's ``value``, once the first rank has come here; ``value`` itself if nothing is sharded."""
    said = [value]
    if states := states_in(unjitted(model)):
        with communicating("the first rank to save", states[0].group):
            dist.broadcast_object_list(said, group=states[0].group, group_src=0)
    return said[0]


def check_files(model: nn.Module, path: Any, what: str) -> None:
    """Raises RankMismatchError on every rank unless all see the same files at ``path``, from which each reads its
    rows."""
    for state in states_in(unjitted(model))[:1]:
        root = Path(str(path))
        found = (f for f in [root, *root.rglob("*")] if f.suffix in READ and f.is_file() and f.name != OF_A_RANK)
        lines = [str(path), *sorted(f"{file.name} of {file.stat().st_size} bytes" for file in found)]
        hint = "the ranks must read the same checkpoint: pass its path, on a disk that all nodes share"
        compare(state.group, what, lines, timeout=state.options.checks.timeout, hint=hint)
