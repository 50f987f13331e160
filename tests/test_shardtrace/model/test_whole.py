"""``whole_copy``: a sharded model as it was before."""

import shardtrace
from shardtrace.model.distribute import whole_copy
from shardtrace.model.state import states_in
from shardtrace.planner.training_plan import fingerprint
from shardtrace.testing import fake_ranks

import pytest
import torch
from toy_gpt import RANKS, gpt


@pytest.mark.parametrize("world_size", [1, RANKS])
def test_it_is_as_before(world_size):
    model = gpt()
    model.lm_head.weight = model.wte.weight
    before, classes = fingerprint(model), {name: type(m) for name, m in model.named_modules()}
    with fake_ranks(world_size):
        shardtrace.fsdp(model, activation_checkpointing={"h.0": "full", "h.1": "cheap"})
        shards = {name: tuple(p.shape) for name, p in model.named_parameters()}
        whole = whole_copy(model)
        assert fingerprint(whole) == before
        assert {name: type(m) for name, m in whole.named_modules()} == classes
        assert states_in(whole) == []
        assert whole.lm_head.weight is whole.wte.weight
        assert all(p.is_meta for p in whole.parameters())
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shards
        shardtrace.fsdp(
            whole, init_policy=shardtrace.InitPolicy(param_init_fn=torch.nn.Module.modules)
        )  # it can be sharded again
        assert [p.shape for p in whole.parameters()] == [p.shape for p in model.parameters()]
