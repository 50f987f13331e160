"""The C library's allocator: its thresholds cannot be read back, but the page faults of a fresh process can be counted."""

import os
import platform
import subprocess
import sys

from shardtrace.ranks import mesh

import pytest

# A "step" allocates 40 blocks of 4 MB and frees them.
SCRIPT = """
import ctypes, resource, runpy, sys
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def step():
    blocks = [libc.malloc(4 << 20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 4 << 20)
    for block in blocks:
        libc.free(block)

assert runpy.run_path(sys.argv[1])["keep_freed_memory"]()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 40 * 1024  # of a step, at 4 KB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_step_reuses_the_memory_of_the_last():
    command = [sys.executable, "-c", SCRIPT, mesh.__file__]
    result = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert int(result.stdout) < PAGES / 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
        ("LD_PRELOAD", "libjemalloc.so"),
    ],
)
def test_settings_of_the_environment_are_left_alone(monkeypatch, name, value):
    for known in [n for n in os.environ if n.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))]:
        monkeypatch.delenv(known)
    monkeypatch.setenv(name, value)
    assert not mesh.keep_freed_memory()
