"""Optimizers that were built before fsdp(), and parameters that are changed after it."""

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn


@on_ranks(2)
def test_an_optimizer_that_was_built_before():
    """The optimizer holds the shards afterwards."""
    torch.manual_seed(0)
    single, model = nn.Linear(4, 6), nn.Linear(4, 6)
    model.load_state_dict(single.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, model)]
    cmodel = thunder.jit(shardtrace.fsdp(model))
    for run in (single, cmodel):
        run(torch.ones(2, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(shardtrace.full_state_dict(model), dict(single.state_dict()))


@on_ranks(2)
def test_conversion_after_a_step():
    model = shardtrace.fsdp(nn.Linear(4, 4))
    cmodel = thunder.jit(model)
    cmodel(torch.ones(2, 4)).sum().backward()
    model.to(torch.bfloat16)
    message = r"the dtype of parameter 'weight' was torch.float32 when fsdp\(\) sharded it and is torch.bfloat16 now"
    with pytest.raises(RuntimeError, match=message):
        cmodel(torch.ones(2, 4, dtype=torch.bfloat16))


@on_ranks(2)
@pytest.mark.parametrize("on", [0, 1])
def test_a_parameter_changed_on_one_rank_is_an_error_on_all(on):
    model = nn.Linear(4, 4)
    cmodel = thunder.jit(shardtrace.fsdp(model, timeout=20))
    if dist.get_rank() == on:
        model.half()
    with pytest.raises(
        RuntimeError, match=r"the dtype of parameter 'weight' was torch.float32 when fsdp\(\) sharded it"
    ):
        cmodel(torch.ones(2, 4))
