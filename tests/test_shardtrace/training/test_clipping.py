import math

import shardtrace

import pytest
import step_workers as workers
import torch
from torch import nn


@pytest.mark.parametrize("strategy", ["zero3", "ddp", {"embed*": "ddp", "blocks.0.*": "owner", "*": "zero2"}])
def test_as_torch_on_one_process(three_ranks, strategy):
    three_ranks.run(workers.clip, strategy=strategy)


def test_hybrid(four_ranks):
    four_ranks.run(workers.clip, strategy={"embed*": "ddp", "*": "hybrid_zero3"}, mesh=(2, 2))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank(two_ranks, value):
    for messages in two_ranks.run(workers.clip_nonfinite, value=value):
        assert messages == [
            f"the {norm}-norm of all gradients is {value}: nothing was clipped; "
            "error_if_nonfinite=False would scale gradients by it"
            for norm in ("2", "inf")
        ]


def test_without_sharded_parameters():
    ours, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model(torch.ones(2, 3)).sum().backward()
    norm = shardtrace.clip_grad_norm_(ours.parameters(), 0.5)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_without_gradients():
    assert shardtrace.clip_grad_norm_(nn.Linear(3, 3).parameters(), 0.5) == 0
    assert shardtrace.clip_grad_norm_([], 0.5) == 0


def test_norm_type():
    with pytest.raises(ValueError, match="norm_type must be more than 0, not 0"):
        shardtrace.clip_grad_norm_([], 1.0, 0)
