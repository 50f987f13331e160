import gc
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SHARDTRACE_CHECK_STEPS"] = "1"
os.environ["SHARDTRACE_CACHE"] = tempfile.mkdtemp(prefix="shardtrace-cache")  # not what this machine was calibrated to

import shardtrace  # noqa: F401  makes thunder importable on torch 2.13

import pytest
import torch.distributed as dist
from ranks import GARBAGE, Ranks

gc.set_threshold(*GARBAGE)


@pytest.fixture(scope="session")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three_ranks():
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture
def fake_ranks():
    """Makes this process rank 0 (or another) of a group of any size whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(world_size, rank=0):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def single_rank(tmp_path):
    """A real gloo group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
