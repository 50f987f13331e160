"""What several GPUs must show: a rank on each, over nccl. With the device "cpu" over a backend that behaves like nccl.

``tests/gpu/test_several_gpus.py`` runs these functions on GPUs; ``SHARDTRACE_GPU_TESTS_ON=cpu`` rehearses them there, and
``tests/test_proof.py`` does so for some.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import shardtrace  # isort: split

import thunder
import torch
import torch.distributed as dist
from hosts import slow_host
from late import late_groups
from models import Zoo, tokens
from sharded_training import ROWS, make_optimizer, mean_over_ranks, my_rows, reference
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.profiler import ProfilerActivity, profile

Mesh = tuple[int, int]  # (replicate, shard)
Kernel = tuple[str, int, int]  # name, start and end in ns

WIDTH, LAYERS = 4096, 6  # of the products that a gather is to run beside
STEPS = 3


@contextmanager
def groups(device: str, mesh: Mesh | None = None, *, late: bool = True) -> Iterator[Any]:
    """What ``fsdp(mesh=...)`` takes: all ranks, or a mesh of this shape. On the CPU it behaves like nccl if ``late``."""
    if device == "cpu" and late:
        with late_groups(mesh) as found:
            yield found
    elif mesh is None:
        yield dist.group.WORLD
    else:
        yield dist.init_device_mesh(device, mesh, mesh_dim_names=("replicate", "shard"))


def trains_as_one_process(device: str, strategy: str, mesh: Mesh | None = None, offload: bool = False) -> None:
    """The Zoo trains on each rank's rows as one process trains it on the CPU with all of them."""
    expected_losses, expected = reference(STEPS, "adamw")
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    # gloo does not gather uneven rows
    host = slow_host(direct=strategy == "owner") if offload and device == "cpu" else nullcontext()
    # groups that behave like nccl's insist that each of them is used, and know no host memory
    idle = mesh is not None and (1 in mesh or strategy == "zero3_secondary")
    with groups(device, mesh, late=not (idle or offload)) as group, host:
        torch.manual_seed(0)
        init = shardtrace.InitPolicy(device=device)
        model = shardtrace.fsdp(Zoo(), sharding_strategy=strategy, mesh=group, init_policy=init, **options)
        cmodel = thunder.jit(model)
        optimizer = make_optimizer("adamw", cmodel.parameters())
        losses = []
        for step in range(STEPS):
            loss = cmodel(*(t.to(device) for t in my_rows(tokens(ROWS, step))))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=2e-6)
        for name, value in shardtrace.full_state_dict(cmodel).items():
            torch.testing.assert_close(
                value.cpu(), expected[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert shardtrace.collectives(cmodel)


def trains_with_rounding(device: str, gathers: str, reductions: str) -> None:
    """Rounded gathers and reductions move a model as exact ones do, and all ranks to the same values."""
    results = []
    for policy in (None, shardtrace.CommPolicy(gather_dtype=gathers, reduce_wire=reductions)):
        with groups(device) as group:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
            options = {} if policy is None else {"comm_policy": policy}
            init = shardtrace.InitPolicy(device=device)
            shardtrace.fsdp(model, mesh=group, init_policy=init, **options)
            cmodel = thunder.jit(model)
            optimizer = torch.optim.SGD(cmodel.parameters(), lr=0.5)
            torch.manual_seed(1 + dist.get_rank())
            x, y = torch.randn(32, 64).to(device), torch.randn(32, 64).to(device)
            for _ in range(STEPS):
                torch.nn.functional.mse_loss(cmodel(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append({n: p.to(device) for n, p in shardtrace.full_state_dict(cmodel).items()})
    exact, rounded = results
    for name, value in rounded.items():
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value)
        assert all(torch.equal(other, value) for other in others), name
        torch.testing.assert_close(value, exact[name], rtol=0.05, atol=0.01)
    assert any(not torch.equal(value, exact[name]) for name, value in rounded.items())


def rounds_buckets(device: str) -> None:
    """The tests of rounded buckets, with their tensors on a device."""
    from test_quantized import exchange

    with groups(device) as group, torch.device(device):
        exchange(group, direct=False)


def gathers_beside_products(device: str) -> float:
    """The milliseconds of a step of ZeRO-3 in which a gather and a product run at once. 0 on the CPU, whose profile has
    no kernels."""
    width, rows, dtype = (32, 4, torch.float32) if device == "cpu" else (WIDTH, 2 * WIDTH, torch.bfloat16)
    with groups(device) as group:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(LAYERS)))
        shardtrace.fsdp(model, mesh=group, init_policy=shardtrace.InitPolicy(device=device))
        cmodel = thunder.jit(model)
        x = torch.randn(rows, width, dtype=dtype, device=device)

        def step() -> None:
            cmodel(x).square().mean().backward()
            model.zero_grad()

        for _ in range(STEPS):
            step()
        on_gpu = [] if device == "cpu" else [ProfilerActivity.CUDA]
        with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as record:
            for _ in range(STEPS):
                step()
            if on_gpu:
                torch.cuda.synchronize()
        assert {c.kind for c in shardtrace.collectives(cmodel)} == {"all_gather", "reduce_scatter"}
        return together(kernels(record)) / STEPS / 1e6


def kernels(record: Any) -> list[Kernel]:
    """The kernels of a profile that ran on a GPU."""
    events = record.profiler.kineto_results.events()
    on_gpu = (e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA)
    return [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_gpu]


def together(found: Iterable[Kernel]) -> int:
    """The ns in which a gather of nccl and a kernel that computes run at once. A copy is no kernel that computes."""
    found = list(found)
    gathers = [k for k in found if re.search(r"nccl.*AllGather", k[0], re.IGNORECASE)]
    computes = _merged(k for k in found if not re.search(r"nccl|memcpy|memset|^shardtrace::", k[0], re.IGNORECASE))
    return sum(max(0, min(end, e) - max(start, s)) for _, start, end in gathers for s, e in computes)


def _merged(found: Iterable[Kernel]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for _, start, end in sorted(found, key=lambda k: k[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
