"""glibc's malloc keeps the memory that a step frees, so that the next step does not fault it in again.

By default glibc returns freed memory to the system if a block is large or if much is free at the end of the heap. A
step on a CPU frees all of its activations and gathered parameters, and the next one faults each page in again.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEEP = 2**30  # bytes: larger blocks are still returned at once, and free memory beyond this at the end of the heap
# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Sets glibc's thresholds for this process. Returns whether it did.

    Does nothing if the environment chooses them (``MALLOC_...``, ``GLIBC_TUNABLES``) or may have chosen another
    allocator (``LD_PRELOAD``), or with another C library. A later call of mallopt takes precedence.
    """
    chosen = "LD_PRELOAD" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or chosen or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(which, KEEP) == 1 for which in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
