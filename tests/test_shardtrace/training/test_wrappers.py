"""Wrappers and functions of torch that would take a shard for a whole parameter."""

import shardtrace

import pytest
import thunder
import torch
from thunder.distributed import ddp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


def test_each_is_refused(fake_ranks):
    fake_ranks(2)
    device = torch.device("cpu")

    def sharded():
        return shardtrace.fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))

    model = sharded()
    cmodel, before = thunder.jit(model), [p.detach().clone() for p in model.parameters()]
    for wrap in (
        lambda: DistributedDataParallel(model),
        lambda: DistributedDataParallel(module=cmodel),
        lambda: DistributedDataParallel(nn.Sequential(model)),
        lambda: FullyShardedDataParallel(model, device_id=device),
        lambda: fully_shard(model),
        lambda: fully_shard(sharded()[0]),
        lambda: fully_shard(thunder.jit(sharded())),
        lambda: ddp(cmodel),
    ):
        with pytest.raises(RuntimeError, match=r"Sequential is sharded.*call the model itself, without a wrapper"):
            wrap()
    with pytest.raises(
        RuntimeError, match=r"the ModuleList around it has parameters that are not.*after get_peft_model"
    ):
        DistributedDataParallel(nn.ModuleList([model, nn.Linear(2, 2)]))
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
    owned = shardtrace.fsdp(nn.Sequential(nn.Linear(4, 4)), sharding_strategy="owner")
    optimizer = torch.optim.SGD(owned.parameters())
    for call in (
        lambda: get_optimizer_state_dict(thunder.jit(owned), optimizer),
        lambda: get_state_dict(owned, optimizer),
        lambda: get_model_state_dict(owned),
    ):
        with pytest.raises(RuntimeError, match=r"Sequential is sharded.*call shardtrace.full_state_dict"):
            call()


def test_others_are_as_before(fake_ranks):
    fake_ranks(2)
    shardtrace.fsdp(nn.Linear(4, 4))
    fully_shard(nn.Linear(4, 4))
    model = DistributedDataParallel(nn.Linear(4, 4))
    assert get_model_state_dict(model).keys() == {"weight", "bias"}
