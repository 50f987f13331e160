import math

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from ranks import on_ranks
from sharded_training import ROWS, my_rows, sharded_zoo
from torch import nn


@on_ranks(3)
def test_as_torch_on_one_process():
    clip({"embed*": "ddp", "blocks.0.*": "owner", "*": "zero3"})


@on_ranks(4)
def test_hybrid():
    clip({"embed*": "ddp", "*": "hybrid_zero3"}, mesh=(2, 2))


def clip(strategy, mesh=None):
    """Norms and clipped gradients equal torch's for one process on the whole batch."""
    torch.manual_seed(0)
    single, model = Zoo(), sharded_zoo(strategy, mesh=mesh)
    cmodel = thunder.jit(model)
    for norm_type in (2, 1.0, 3.5, float("inf")):
        single.zero_grad()
        model.zero_grad()
        single(*tokens(ROWS)).backward()
        cmodel(*my_rows(tokens(ROWS))).backward()
        expected = torch.nn.utils.clip_grad_norm_((p for p in single.parameters() if p.numel()), 0.1, norm_type)
        if norm_type == 3.5:
            found = torch.nn.utils.clip_grad_norm_(cmodel.parameters(), 0.1, norm_type)
        else:
            target = cmodel if norm_type == 1 else (p for p in cmodel.parameters())
            found = shardtrace.clip_grad_norm_(target, 0.1, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        gradients = shardtrace.full_gradients(model)
        for name, p in single.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-7)
    before = shardtrace.full_gradients(model)
    shardtrace.clip_grad_norm_(model, 1e6)
    torch.testing.assert_close(shardtrace.full_gradients(model), before, rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank(value):
    """An inf or NaN on one rank is an error on all, in each norm."""
    model = shardtrace.fsdp(nn.Linear(4, 4))
    for norm_type, norm_name in ((2.0, "2"), (float("inf"), "inf")):
        thunder.jit(model)(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == 1:
            model.bias.grad.to_local()[0] = value
        before = model.weight.grad.clone()
        with pytest.raises(RuntimeError, match="is non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        with pytest.raises(RuntimeError) as raised:
            shardtrace.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        assert str(raised.value) == (
            f"the {norm_name}-norm of all gradients is {value}: nothing was clipped; "
            "error_if_nonfinite=False would scale gradients by it"
        )
        torch.testing.assert_close(model.weight.grad, before, rtol=0, atol=0, equal_nan=True)
        norm = shardtrace.clip_grad_norm_(model, 1.0, norm_type)
        assert torch.equal(norm, torch.tensor(value)) or (norm.isnan() and value != value)


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
