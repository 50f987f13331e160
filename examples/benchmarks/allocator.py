"""glibc's malloc as each contender has it in a process of its own, without settings in the environment."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from shardtrace.ranks.mesh import keep_freed_memory

# Parameters of mallopt(3). By default glibc raises both as a program frees larger blocks, up to these bytes.
DEFAULTS = {-3: 32 * 2**20, -1: 64 * 2**20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


@contextmanager
def default_allocator() -> Iterator[None]:
    """Undoes inside what ``shardtrace.fsdp`` has set for the process, which would speed up other contenders too."""
    changed = keep_freed_memory()
    if changed:
        for which, size in DEFAULTS.items():
            ctypes.CDLL(None).mallopt(which, size)
    try:
        yield
    finally:
        keep_freed_memory()
