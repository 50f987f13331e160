"""Ranks that torchrun restarted share a store with the ranks that died."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import shardtrace  # noqa: F401  isort: split
from shardtrace.ranks import mesh
from shardtrace.ranks.mesh import attempt_name

import pytest
import torch.distributed as dist


def attempt(store, ranks, first):
    """The names that ranks in threads agree on. Rank ``first`` starts before the others."""

    def join(rank):
        time.sleep(0 if rank == first else 0.05)
        return attempt_name(store, rank, ranks, timeout=20)

    with ThreadPoolExecutor(ranks) as threads:
        return set(threads.map(join, range(ranks)))


def test_each_attempt_has_a_name_of_its_own_on_all_ranks():
    store, seen = dist.HashStore(), set()
    for ranks, first in ((2, 0), (2, 1), (3, 2), (3, 0), (1, 0), (2, 1)):  # earlier attempts leave keys
        names = attempt(store, ranks, first)
        assert len(names) == 1
        assert not names & seen
        seen |= names


@pytest.mark.parametrize(("rank", "message"), [(0, r"rank\(s\) 1, 2 did not start"), (1, "rank 0 did not start")])
def test_ranks_that_do_not_come_are_named(rank, message):
    store = dist.HashStore()
    attempt(store, 3, 0)
    with pytest.raises(RuntimeError, match=f"{message} within 0.1 s"):
        attempt_name(store, rank, 3, timeout=0.1)


LEAVE = """
import atexit, gc, os, runpy, sys, time
import torch, torch.distributed as dist
leave_in_peace = runpy.run_path(sys.argv[1])["leave_in_peace"]  # without Thunder, a second for each rank

class SlowEnd:
    def __del__(self):  # as the end of many modules: a thread that waits for the GIL ends in the middle of a destructor
        time.sleep(0.2)

slow_end = SlowEnd()

def run(rank, store):
    atexit.register(gc.freeze)  # or Python would look through all objects, a second for each rank
    sys.setswitchinterval(100)  # a thread keeps the GIL, as on a busy machine
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    leave_in_peace()
    works = [dist.all_reduce(torch.ones(64), async_op=True) for _ in range(20)]
    for work in works:
        work.wait()

ranks = []
for attempt in range(6):  # all at once
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run(rank, os.path.abspath(f"store{attempt}"))
            sys.exit()
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks])
"""


def test_ranks_end_without_an_abort(tmp_path):
    """Without ``leave_in_peace``, some of these ranks are killed by a signal: one in ten on a busy machine."""
    command = [sys.executable, "-c", LEAVE, mesh.__file__]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith(f"{12 * [0]}\n"), done.stderr  # gloo of torch 2.10 prints its connections first
