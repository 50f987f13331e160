import gc
import inspect
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SHARDTRACE_CHECK_STEPS"] = "1"
os.environ["SHARDTRACE_PROVE"] = "1"  # whatever a test compiles
os.environ["SHARDTRACE_PROGRESS"] = "inf"  # a busy machine would say what takes long
os.environ["SHARDTRACE_CACHE"] = tempfile.mkdtemp(prefix="shardtrace-cache")  # not the calibration of this machine

import shardtrace  # noqa: F401  makes thunder importable on torch 2.13 to 2.15

import pytest
import torch.distributed as dist
from ranks import REWRITTEN, Ranks

pytest.register_assert_rewrite(*REWRITTEN)


def pytest_configure(config):
    config.addinivalue_line("markers", "on_ranks(world_size): run the body of the test on so many ranks")


# The files that lanes begin with: those that take more than 20 s, the longest ones first.
LONG = ["notebooks", "examples", "context_parallel", "failure", "tensor_parallel", "mutants", "contract", "operators"]
LONG += ["docs", "trainers", "planning", "benchmarks", "sweep"]


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run the body of a test that ``on_ranks`` marks on the ranks."""
    mark = pyfuncitem.get_closest_marker("on_ranks")
    if mark is None:
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    pyfuncitem.funcargs["ranks_of"](*mark.args).run(pyfuncitem.function, **arguments)
    return True


@pytest.fixture(scope="session")
def ranks_of():
    """The pool of ranks of a world size, shared by all tests: ``ranks_of(2).run(function, ...)``. With the device
    "cuda", each has a GPU."""
    pools = {}
    yield lambda world_size, device="cpu": pools.setdefault((world_size, device), Ranks(world_size, device))
    for ranks in pools.values():
        ranks.stop()


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Python looks through all objects to collect garbage, and a recording to find closures. It does not see what is
    there before the tests of a file: that of a long lane would take three times as long as the tests themselves."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def two_ranks(ranks_of):
    return ranks_of(2)


@pytest.fixture
def fake_ranks():
    """Make this process rank 0 (or another) of a group of any size. The other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(world_size, rank=0):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def single_rank(tmp_path):
    """A real gloo group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
