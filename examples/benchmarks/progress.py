"""The progress bar of rank 0."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from tqdm import tqdm


def progress(**options: Any) -> Any:
    """A bar on the terminal that ``launch.py`` left open: stderr, where libraries chat, goes to a file."""
    terminal = int(os.environ.get("BENCHMARK_TERMINAL", "2"))
    return tqdm(**options, file=open(terminal, "w", closefd=False), disable=dist.get_rank() != 0)
