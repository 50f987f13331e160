"""Ranks that torchrun restarted share a store with those that died."""

import time
from concurrent.futures import ThreadPoolExecutor

import shardtrace  # noqa: F401  isort: split
from shardtrace.rendezvous import attempt_name

import pytest
import torch.distributed as dist


def attempt(store, ranks, first):
    """The names that ranks in threads agree on; rank ``first`` comes earlier than the others."""

    def join(rank):
        time.sleep(0 if rank == first else 0.05)
        return attempt_name(store, rank, ranks, timeout=20)

    with ThreadPoolExecutor(ranks) as threads:
        return set(threads.map(join, range(ranks)))


def test_each_attempt_has_a_name_of_its_own_on_all_ranks():
    store, seen = dist.HashStore(), set()
    for ranks, first in ((2, 0), (2, 1), (3, 2), (3, 0), (1, 0), (2, 1)):  # with keys of those before
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
