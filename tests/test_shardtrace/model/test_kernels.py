import shardtrace
from shardtrace.model.kernels import enlist_kernels

import pytest
import thunder
import torch
from thunder.executors.torch_compile import torch_compile_ex
from torch import nn


def executors_of(jitted):
    jitted(torch.ones(3, 4)).sum().backward()
    return [executor.name for executor in thunder.compile_data(jitted).executors_list]


DEFAULT = ["sdpa", "torch_kernels", "torchcompile_xentropy", "torch", "python"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_by_default(fake_ranks, world_size):
    fake_ranks(world_size)
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4)))
    assert executors_of(jitted)[1:] == DEFAULT  # the first is Thunder's own, for each jitted function
    assert executors_of(jitted)[1:] == DEFAULT


def test_on_if_the_model_was_jitted_before(fake_ranks):
    fake_ranks(2)
    assert executors_of(shardtrace.fsdp(thunder.jit(nn.Linear(4, 4))))[2:] == DEFAULT


def test_off(fake_ranks):
    fake_ranks(2)
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4), kernels=False))
    assert "torch_kernels" not in executors_of(jitted)


@pytest.mark.parametrize("chosen", [["torch"], ["sdpa"], []])
def test_chosen_executors_stay(fake_ranks, chosen):
    fake_ranks(2)
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4)), executors=chosen)
    assert "torch_kernels" not in executors_of(jitted)


def test_added_by_hand(fake_ranks):
    fake_ranks(2)
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4)), executors=[shardtrace.kernels])
    assert executors_of(jitted)[1:] == ["torch_kernels", "torch", "python"]


def test_off_if_a_default_executor_fuses(monkeypatch):
    """As nvFuser does where it is installed."""
    defaults = (torch_compile_ex, *thunder.get_default_executors())
    monkeypatch.setattr("shardtrace.model.kernels.get_default_executors", lambda: defaults)

    class Data:
        executors_list = (*defaults, *thunder.get_always_executors())

    enlist_kernels(Data)
    assert shardtrace.kernels not in Data.executors_list
