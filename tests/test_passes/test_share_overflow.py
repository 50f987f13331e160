"""The line that makes an overflow on one rank one on all: where it stands, and what it does."""

import pytest
import thunder
import torch
from golden import compile_fake, stage
from ranks import on_ranks
from sharded_training import overflow_on_one_rank
from torch import nn


def two_linear():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def last_lines(cmodel):
    return [b.sym.name for b in thunder.last_backward_traces(cmodel)[-1].bound_symbols if b.sym.name != "python_del"][
        -4:
    ]


def test_after_all_gradients_have_come(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy="zero2", mp_policy="fp16")
    trace = stage(cmodel, "share_overflow", thunder.last_backward_traces)
    *_, line, last = trace.bound_symbols
    assert (line.sym.name, last.sym.name) == ("share_overflow", "python_return")
    assert len(line.flat_proxy_args) == 4  # the gradients of two weights and two biases
    assert last_lines(cmodel)[-2:] == ["share_overflow", "python_return"]


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_only_in_fp16(fake_ranks, precision):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy="zero2", mp_policy=precision)
    assert "share_overflow" not in last_lines(cmodel)


def test_after_gradients_that_are_reduced_twice(fake_ranks):
    fake_ranks(4)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy="hybrid_zero3", mp_policy="fp16", mesh=mesh)
    assert last_lines(cmodel)[-3:] == ["wait_all_reduce", "share_overflow", "python_return"]


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "owner"])
def test_an_overflow_on_one_rank_makes_all_skip_the_step(strategy):
    overflow_on_one_rank(strategy)
