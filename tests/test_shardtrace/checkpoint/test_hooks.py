"""``state_dict`` of a sharded model, which other libraries save."""

import copy

import shardtrace
from shardtrace.model.distribute import whole_copy

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Zoo
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


@on_ranks(2)
def test_shards_are_dtensors_for_torchs_functions(tmp_path):
    expected, model = net().state_dict(), shardtrace.fsdp(net())
    cmodel, other = thunder.jit(model), {key: value + 1 for key, value in expected.items()}

    def holds(values):
        torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(values), rtol=0, atol=0)

    for one in (model, cmodel, copy.deepcopy(model), nn.ModuleDict({"inner": model})):
        found = one.state_dict()
        assert all(isinstance(value, DTensor) for value in found.values())
        assert [tuple(v.shape) for v in found.values()] == [tuple(v.shape) for v in expected.values()]
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save(cmodel.state_dict(), path)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    plain = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(plain, checkpoint_id=tmp_path / "dcp")
    torch.testing.assert_close(plain, dict(expected), rtol=0, atol=0)
    whole = StateDictOptions(full_state_dict=True)
    for state in (get_model_state_dict(model, options=whole), cmodel.original_state_dict()):
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)
    set_model_state_dict(model, dict(other), options=whole)  # which makes its values DTensors
    holds(other)
    cmodel.load_state_dict(torch.load(path, weights_only=False))
    holds(expected)
    model.load_state_dict(other)
    holds(other)
    model.state_dict()["0.bias"].to_local().zero_()  # the memory is the model's
    assert not model[0].bias.any()
    twin = copy.deepcopy(model)
    twin.load_state_dict(expected)
    torch.testing.assert_close(dict(shardtrace.full_state_dict(twin)), dict(expected), rtol=0, atol=0)
    assert not model[0].bias.any()
    assert [tuple(v.shape) for v in whole_copy(model).state_dict().values()] == [
        tuple(v.shape) for v in expected.values()
    ]
    with shardtrace.full_params(model):
        assert model.state_dict()["1.bias"].tolist() == other["1.bias"].tolist()


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp", {"embed*": "ddp", "blocks.0.*": "owner", "*": "zero2"}])
def test_a_round_trip(strategy, tmp_path):
    torch.manual_seed(0)
    model = shardtrace.fsdp(Zoo(), sharding_strategy=strategy)
    before = {key: value.clone() for key, value in shardtrace.full_state_dict(model).items()}
    assert isinstance(model.state_dict(keep_vars=True)["position"], nn.Parameter)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    plain = {key: torch.zeros_like(value) for key, value in before.items()}
    dcp.load(plain, checkpoint_id=tmp_path)
    torch.testing.assert_close(plain, before, rtol=0, atol=0)
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), before, rtol=0, atol=0)
    torch.manual_seed(1)
    other = Zoo().state_dict()
    model.load_state_dict(other)
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(other), rtol=0, atol=0)
