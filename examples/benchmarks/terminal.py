"""The terminal of the benchmark: only rank 0 writes to it."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from tqdm import tqdm


def progress_bar(**options: Any) -> Any:
    """A progress bar on the terminal that ``launch.py`` keeps open. Stderr, where libraries chat, goes to a file."""
    terminal = int(os.environ.get("BENCHMARK_TERMINAL", "2"))
    return tqdm(**options, file=open(terminal, "w", closefd=False), disable=dist.get_rank() != 0)
