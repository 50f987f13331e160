"""Ranks that differ raise the same error without delay."""

import re

import shardtrace
from shardtrace import RankMismatchError

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Switch
from ranks import on_ranks
from torch import nn


@on_ranks(2)
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", "the first difference, at position 0: rank 0 has parameter a0.weight of shape ("),
        ("dtype", "position 0: rank 0 has parameter a0.weight of shape (6, 6), torch."),
        ("depth", "the ranks differ in the parameters of Sequential: rank 0 has "),
        ("name", "position 0: rank 0 has parameter "),
        ("frozen", "position 0: rank 0 has parameter a0.weight"),
    ],
)
def test_another_model_on_one_rank(how, message, on):
    width, dtype, depth, name, frozen = 6, torch.float32, 2, "a", False
    if dist.get_rank() == on:
        width, dtype, depth, name, frozen = {
            "shape": (5, dtype, depth, name, frozen),
            "dtype": (width, torch.bfloat16, depth, name, frozen),
            "depth": (width, dtype, 3, name, frozen),
            "name": (width, dtype, depth, "b", frozen),
            "frozen": (width, dtype, depth, name, True),
        }[how]
    model = nn.Sequential()
    for i in range(depth):
        model.add_module(f"{name}{i}", nn.Linear(width, width, dtype=dtype).requires_grad_(not frozen))
    with pytest.raises(RankMismatchError, match=re.escape(message)):
        shardtrace.fsdp(model, checks=shardtrace.Checks(timeout=20))
    assert all(p.shape[0] == width for p in model.parameters()), "half sharded"


@on_ranks(2)
def test_a_refusal_on_one_rank_is_raised_on_all():
    model = nn.Linear(4, 4)
    if dist.get_rank() == 1:
        model.weight.grad = torch.zeros(4, 4)
        error, message = ValueError, "^parameter 'weight' has a gradient"
    else:
        error, message = RankMismatchError, "rank 1: parameter 'weight' has a gradient"
    with pytest.raises(error, match=message):
        shardtrace.fsdp(model, checks=shardtrace.Checks(timeout=20))


@on_ranks(2)
def test_an_argument_that_only_one_rank_refuses():
    """The ranks are still in step: they shard a model afterwards."""
    refused = {
        "prefetch is a field of CompilePolicy": {"prefetch": 2},
        "no parameter matches 'embed": {"sharding_strategy": {"embed.*": "ddp", "*": "zero3"}},
        "got an unexpected keyword argument 'shards'": {"shards": 2},
        "there is no plan in": {"plan": "nowhere.json"},
    }
    for message, options in refused.items():
        with pytest.raises(Exception, match=("" if dist.get_rank() == 1 else "rank 1: .*") + message) as raised:
            shardtrace.fsdp(
                nn.Linear(4, 4), checks=shardtrace.Checks(timeout=20), **options if dist.get_rank() == 1 else {}
            )
        assert isinstance(raised.value, RankMismatchError) == (dist.get_rank() == 0)
    shardtrace.fsdp(nn.Linear(4, 4), checks=shardtrace.Checks(timeout=20))


def all_but_one_shard(absent):
    if dist.get_rank() == absent:
        return
    message = re.escape(f"rank(s) {absent} did not come to compare the parameters of Linear within 0.5 s")
    with pytest.raises(RankMismatchError, match=message):
        shardtrace.fsdp(nn.Linear(4, 4), checks=shardtrace.Checks(timeout=0.5))


def test_a_rank_that_does_not_come(ranks_of):
    ranks = ranks_of(3)
    try:
        ranks.run(all_but_one_shard, absent=1)
    finally:
        ranks.stop()  # these ranks no longer count comparisons alike


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, order):
        return self.left(self.right(x)) if order == "left" else self.right(self.left(x))


@on_ranks(2)
def test_layers_in_another_order():
    cmodel = thunder.jit(shardtrace.fsdp(Branches(), bucketing_strategy="layer", checks=shardtrace.Checks(timeout=20)))
    message = (
        "the ranks differ in the collectives of Branches; the first difference, at position 0: "
        "rank 0 has forward: all_gather of left (f32, 80 bytes: left.weight, left.bias); "
        "rank 1 has forward: all_gather of right"
    )
    with pytest.raises(RankMismatchError, match=re.escape(message)):
        cmodel(torch.ones(2, 4), "right" if dist.get_rank() == 0 else "left")


@on_ranks(2)
def test_a_parameter_unused_on_one_rank():
    cmodel = thunder.jit(shardtrace.fsdp(Switch(), bucketing_strategy="layer", checks=shardtrace.Checks(timeout=20)))
    message = (
        "the ranks differ in the collectives of Switch: rank 0 has 2, rank 1 has 1; the first "
        "difference, at position 1: rank 0 has forward: all_gather of second "
    )
    with pytest.raises(RankMismatchError, match=f"^{re.escape(message)}"):
        cmodel(torch.ones(2, 4), dist.get_rank() == 0)


@on_ranks(2)
def test_a_new_shape_on_one_rank():
    """Only one rank compiles. Its collectives are the same, so nothing needs to be compared again."""
    cmodel = thunder.jit(shardtrace.fsdp(Branches(), checks=shardtrace.Checks(timeout=2)))
    for rows in (3, 3 + dist.get_rank(), 3):
        cmodel(torch.ones(rows, 4), "left").sum().backward()
