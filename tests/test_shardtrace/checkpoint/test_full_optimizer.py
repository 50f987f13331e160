"""The whole state of an optimizer is that of a single process, and is loaded back."""

import copy

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from ranks import on_ranks
from sharded_training import ROWS, make_optimizer, my_rows, sharded_zoo
from torch import nn

# whole tensors on owners, tensors on all ranks, shards
MIXED = {lambda name, p: name == "blocks.0.up.weight": "owner", "blocks.1.*": "ddp", "*": "zero3"}


def step(model, optimizer, batch):
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_states_equal(found, expected):
    assert found["state"].keys() == expected["state"].keys()
    assert found["param_groups"] == expected["param_groups"]
    for number, values in expected["state"].items():
        torch.testing.assert_close(dict(found["state"][number]), dict(values), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_whole_state():
    torch.manual_seed(0)
    one = Zoo()
    single = make_optimizer("adamw", one.parameters())
    step(one, single, tokens(ROWS))
    model = sharded_zoo(MIXED)
    optimizer = make_optimizer("adamw", model.parameters())
    step(thunder.jit(model), optimizer, my_rows(tokens(ROWS)))
    full = shardtrace.full_optimizer_state_dict(model, optimizer)
    assert_states_equal(full, single.state_dict())
    first = shardtrace.full_optimizer_state_dict(model, optimizer, rank0_only=True, cpu=True)
    assert bool(first) == (dist.get_rank() == 0)

    names = [name for name, _ in model.named_parameters()]
    by_name = {  # as PyTorch's FSDP has it
        "state": {names[number]: values for number, values in full["state"].items()},
        "param_groups": [{**group, "params": [names[n] for n in group["params"]]} for group in full["param_groups"]],
    }
    for state_dict in (full, by_name):
        new = make_optimizer("adamw", model.parameters())
        shardtrace.load_full_optimizer_state_dict(model, new, copy.deepcopy(state_dict))
        for p in model.parameters():
            if p.numel():
                torch.testing.assert_close(new.state[p], optimizer.state[p], rtol=0, atol=0)
        assert_states_equal(shardtrace.full_optimizer_state_dict(model, new), full)

    kept = copy.deepcopy(
        full
    )  # a snapshot: steps of the optimizer change nothing in it, nor do those of one that loads it
    shardtrace.load_full_optimizer_state_dict(model, new, full)
    for one in (optimizer, new):
        step(thunder.jit(model), one, my_rows(tokens(ROWS)))
        assert_states_equal(full, kept)


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks():
    model = shardtrace.fsdp(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    if dist.get_rank() == 0:  # whatever is wrong on one rank
        optimizer.state[model.weight]["momentum_buffer"] = torch.ones(3)
    with pytest.raises(shardtrace.CheckpointError, match=r"momentum_buffer of parameter 0 has shape \(3,\)"):
        shardtrace.full_optimizer_state_dict(model, optimizer)
    optimizer.state.clear()
    if dist.get_rank() == 0:
        optimizer.state[model.weight]["momentum_buffer"] = torch.ones_like(model.weight)
    with pytest.raises(shardtrace.CheckpointError, match="the ranks differ in the state of the SGD to gather"):
        shardtrace.full_optimizer_state_dict(model, optimizer)
    group = {**optimizer.state_dict()["param_groups"][0]}
    for state_dict, message in (
        ({}, "no state dict of an optimizer"),
        ({"state": {}, "param_groups": []}, r"has groups of \[2\] parameters, the state dict has groups of \[\]"),
        ({"state": {}, "param_groups": [{**group, "params": ["weight", "bia"]}]}, "bia of the state dict is not in"),
        ({"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [group]}, r"of weight has shape \(3,\)"),
    ):
        with pytest.raises(shardtrace.CheckpointError, match=message):
            shardtrace.load_full_optimizer_state_dict(model, optimizer, state_dict)
