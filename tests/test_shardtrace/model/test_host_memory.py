"""Parameters at rest in host memory. (The lines of the trace: tests/test_passes/test_offload.py; a GPU's: tests/gpu.)"""

import copy

import shardtrace

import offload_workers as workers
import pytest
import thunder
import torch
from golden import text
from hosts import slow_host
from models import Zoo, tokens
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from workers import reference


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_a_world_of_one_trains_from_host_memory(single_rank, strategy):
    expected_losses, expected = reference(3, "adamw")
    with slow_host():
        found_losses, model = workers.train(strategy)
    torch.testing.assert_close(found_losses, expected_losses, rtol=1e-5, atol=1e-6)
    for name, value in shardtrace.full_state_dict(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6)
    host = model._shardtrace.entries[0].home.host
    assert host.loads > host.sends > 0


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_nothing_reads_a_copy_before_it_is_there(single_rank, strategy):
    torch.manual_seed(0)
    expected = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    model = copy.deepcopy(expected)
    with slow_host(loads_late=True):
        shardtrace.fsdp(model, sharding_strategy=strategy, device="cpu", offload_policy=CPUOffloadPolicy())
    x = torch.randn(2, 6)
    for m in (expected, thunder.jit(model)):
        m(x).sum().backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("strategy", ["owner", {"blocks.0.*": "ddp", "*": "zero3"}])
def test_ranks_train_from_host_memory(two_ranks, strategy):
    two_ranks.run(workers.train_and_compare, strategy=strategy)


def test_replicas_of_one_rank_each(two_ranks):
    two_ranks.run(workers.train_and_compare, strategy="hybrid_zero3", mesh=(2, 1))


def test_the_step_around_it(two_ranks, tmp_path):
    two_ranks.run(workers.accumulate_clip_and_checkpoint, folder=str(tmp_path))


def test_half_precision_with_an_overflow(two_ranks):
    two_ranks.run(workers.overflow)


def test_on_the_cpu_nothing_changes(fake_ranks):
    fake_ranks(2)
    traces = []
    for policy in (None, OffloadPolicy(), CPUOffloadPolicy()):
        torch.manual_seed(0)
        cmodel = thunder.jit(shardtrace.fsdp(Zoo(), device="cpu", offload_policy=policy))
        cmodel(*tokens(2)).backward()
        traces.append(text(thunder.last_backward_traces(cmodel)[-1]))
    assert traces[0] == traces[1] == traces[2]


def test_replicas_are_not_kept_on_the_host(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match='keeps nothing in host memory with sharding_strategy="ddp"'):
        shardtrace.ddp(Zoo(), device="cpu", offload_policy=CPUOffloadPolicy())


def test_no_cuda_graphs(fake_ranks):
    fake_ranks(2)
    with slow_host():
        model = shardtrace.fsdp(Zoo(), device="cpu", offload_policy=CPUOffloadPolicy())
    with pytest.raises(Exception, match="a CUDA graph cannot hold Zoo, whose parameters are in host memory"):
        thunder.jit(model, transforms=[CUDAGraphTransform()])(*tokens(2))


@pytest.mark.parametrize("policy", [True, "cpu", CPUOffloadPolicy])
def test_what_is_no_policy(fake_ranks, policy):
    fake_ranks(2)
    with pytest.raises(TypeError, match=r"offload_policy must be torch\.distributed\.fsdp\.CPUOffloadPolicy\(\)"):
        shardtrace.fsdp(Zoo(), device="cpu", offload_policy=policy)
