import shardtrace

import pytest
import thunder
import torch
from torch import nn


def embed():
    return nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_sparse_gradients_are_refused_by_name(fake_ranks, strategy):
    fake_ranks(2)
    message = r"module 0 \(Embedding\(sparse=True\)\) has sparse gradients, .*: build it with sparse=False"
    with pytest.raises(ValueError, match=message):
        shardtrace.fsdp(embed(), sharding_strategy=strategy)


def test_a_frozen_sparse_embedding_is_sharded(fake_ranks):
    fake_ranks(2)
    model = embed()
    model[0].requires_grad_(False)
    thunder.jit(shardtrace.fsdp(model))(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_in_a_world_of_one(single_rank):
    model = shardtrace.fsdp(embed())
    thunder.jit(model)(torch.tensor([1, 2, 2])).sum().backward()
    assert model[0].weight.grad.is_sparse
