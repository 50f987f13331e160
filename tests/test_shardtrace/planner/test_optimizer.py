import functools
import runpy
from pathlib import Path

from passes.analysis.liveness import LineMemory
from passes.plan.cost import cluster, hardware
from shardtrace.planner.estimate import DISPATCH, Setting, estimate, optimizer_cost, while_updating
from shardtrace.planner.search import Candidate

import pytest
import torch

LLAMA = Path(__file__).parents[3] / "notebooks/llama/model.py"


def test_state_and_work_of_an_element():
    sgd, momentum = optimizer_cost(torch.optim.SGD), optimizer_cost(functools.partial(torch.optim.SGD, momentum=0.9))
    assert (sgd.name, sgd.state, sgd.moved) == ("SGD", 0.0, 12.0)  # reads p and its gradient, writes p
    assert (momentum.state, momentum.moved) == (4.0, 4 * (2 + 3 + 3))  # scales the momentum, adds to it, adds it to p
    assert optimizer_cost("SGD(momentum=0.9)") == momentum


def test_adamw_as_torch_runs_it():
    """Bytes by hand, of torch/optim/adam.py. Decay reads and writes p; lerp reads m and g and writes m; v is scaled, and
    addcmul reads v and g and writes v; the square root of v is a new tensor, which is divided and added to; addcdiv
    reads p, m and the root and writes p. The loop divides into another new tensor."""
    moved = 4 * (2 + 3 + 2 + 3 + 2 + 2 + 2 + 4)
    on_cpu, on_gpu = optimizer_cost("AdamW"), optimizer_cost("AdamW", "h100-sxm")
    assert (on_cpu.way, on_cpu.state, on_cpu.moved, on_cpu.temporary) == ("for-loop", 8.0, moved, 8.0)
    assert 10 <= on_cpu.calls <= 20
    assert (on_gpu.way, on_gpu.state, on_gpu.moved, on_gpu.temporary) == ("foreach", 8.0, moved, 4.0)
    assert on_gpu.on_host == on_cpu
    fused = optimizer_cost("AdamW(fused=True)", "h100-sxm")
    assert (fused.way, fused.state, fused.moved, fused.temporary) == ("fused", 8.0, 4 * (4 + 3), 0.0)  # g is only read
    assert on_gpu.fused == on_cpu.fused == fused == fused.on_host
    assert optimizer_cost("AdamW(foreach=False)", "h100-sxm").way == "for-loop"
    assert optimizer_cost("Adafactor", "h100-sxm").way == "for-loop"
    assert optimizer_cost(functools.partial(torch.optim.AdamW, foreach=True)).way == "foreach"


def test_llama_70b_on_16_gpus_while_the_optimizer_works():
    """GiB of a rank, by hand: 70.55 billion parameters / 16 of 4 bytes, four times for p, g, m and v, and temporary
    values; 15 % for the allocator, 1.4 GB for driver and communicators."""
    module = runpy.run_path(str(LLAMA))
    with torch.device("meta"):
        count = sum(p.numel() for p in module["Llama"](module["CONFIGS"]["70B"]).parameters())
    assert count == pytest.approx(70.55e9, rel=1e-3)
    found, words = hardware("h100-sxm"), count // 16
    last = LineMemory(**dict.fromkeys(LineMemory._fields, 0) | {"inputs": 4 * words})

    def gib(optimizer):
        setting = Setting(cluster(found, inside=None, between=None, node_ranks=None), found, optimizer)
        tensors = while_updating(last, words, words // 80, setting)
        return (tensors * 1.15 + 1.0e9 + 0.4e9) / 2**30

    foreach = optimizer_cost("AdamW", found.name)
    assert gib(foreach) == pytest.approx(16 * 4.409 * 1.15 / 1.0737 * 20 / 16 + 1.3, abs=0.2)  # 95.7
    assert gib(foreach.fused) == pytest.approx(
        16 * 4.409 * 1.15 / 1.0737 + 1.3, abs=0.2
    )  # 76.9: then backward needs more


def test_the_loop_dispatches_each_operator_on_dtensors(task, family):
    """On a CPU; a parameter that DDP leaves whole is no DTensor."""
    step = family.step(Candidate(family.name))
    loop = estimate(step, task.setting)
    foreach = estimate(step, task.setting._replace(optimizer=optimizer_cost("AdamW(foreach=True)")))
    count = len(list(task.model.parameters()))
    assert loop.optimizer - foreach.optimizer == pytest.approx(DISPATCH * optimizer_cost("AdamW").calls * count)


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"torch\.optim has no optimizer 'Adamw'"):
        optimizer_cost("Adamw")
    with pytest.raises(ValueError, match=r"torch\.optim has no optimizer 'AdamW\(0\.1\).zip'"):
        optimizer_cost("AdamW(0.1).zip")
