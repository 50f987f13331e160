"""What two and four GPUs prove: a rank on each, over nccl. The functions are those of ``tests/on_gpus.py``.

``SHARDTRACE_GPU_TESTS_ON=cpu pytest tests/gpu/test_ranks.py`` rehearses them on the CPU, over a backend like nccl.
"""

import os

import on_gpus
import pytest
import torch
from proof import MESHES, missing_gpus

ON = os.environ.get("SHARDTRACE_GPU_TESTS_ON", "cuda")


@pytest.fixture
def on_ranks_of(ranks_of):
    """Runs a function on so many ranks, each with a GPU of its own. Skips if there are fewer GPUs."""

    def run(world_size, function, **arguments):
        if ON == "cuda" and (reason := missing_gpus(world_size, torch.cuda.device_count())):
            pytest.skip(reason)
        return ranks_of(world_size, ON).run(function, device=ON, **arguments)

    return run


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp", "owner"])
def test_ranks_train_as_one_process(on_ranks_of, proves, strategy, world_size):
    on_ranks_of(world_size, on_gpus.trains_as_one_process, strategy=strategy)
    proves("ranks over nccl", f"{strategy}, {world_size} ranks", "losses and parameters of one process on the CPU")


@pytest.mark.parametrize(("strategy", "mesh"), MESHES)
def test_meshes_train_as_one_process(on_ranks_of, proves, strategy, mesh):
    on_ranks_of(mesh[0] * mesh[1], on_gpus.trains_as_one_process, strategy=strategy, mesh=mesh)
    proves("ranks over nccl", f"{strategy}, {mesh[0]} x {mesh[1]}", "losses and parameters of one process on the CPU")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", ["zero3", "owner"])
def test_ranks_train_from_host_memory(on_ranks_of, proves, strategy, world_size):
    on_ranks_of(world_size, on_gpus.trains_as_one_process, strategy=strategy, offload=True)
    proves("ranks, offloaded", f"{strategy}, {world_size} ranks", "losses and parameters of one process on the CPU")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wires", [("int8", "int8"), ("fp8", "int4")])
def test_rounding(on_ranks_of, proves, wires, world_size):
    gathers, reductions = wires
    on_ranks_of(world_size, on_gpus.trains_with_rounding, gathers=gathers, reductions=reductions)
    proves("rounded messages", f"{gathers}, {reductions}, {world_size} ranks", "equal on all ranks, near exact ones")


def test_rounded_buckets(on_ranks_of, proves):
    on_ranks_of(2, on_gpus.rounds_buckets)
    proves("rounded buckets", "2 ranks", "values, sums, overflows and errors are right")


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_gather_and_a_product_at_the_same_time(on_ranks_of, proves, world_size):
    found = on_ranks_of(world_size, on_gpus.gathers_beside_products)
    assert ON == "cpu" or min(found) > 0, f"no rank computes while it gathers: {found} ms"
    proves("overlap", f"zero3, {world_size} ranks", f"{min(found):.2f} ms of a step on the rank with the least")
