"""``SHARDTRACE_DUMP=folder`` in the environment: each pass writes the trace that it has made into a file there."""

from __future__ import annotations

import os
from pathlib import Path

from passes.runner import Observe

import torch.distributed as dist
from thunder.core.trace import TraceCtx


def dump() -> Observe | None:
    """What writes the result of each pass, as ``08-forward-schedule.py``; numbers follow on those in the folder. None
    if the environment does not ask for it, and on every rank but the first."""
    folder = Path(os.environ.get("SHARDTRACE_DUMP", ""))
    if folder == Path() or dist.get_rank() != 0:
        return None

    def write(what: str, name: str, trace: TraceCtx) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in folder.glob("[0-9]*-*.py"))
        (folder / f"{number:02d}-{what}-{name}.py").write_text(f"{trace}\n")

    return write
