"""Optimizers that compute with whole tensors: right where a rank has them, refused where it has a shard."""

import copy
import pickle

import shardtrace

import pytest
import thunder
import torch
from torch import nn

MIXING = ["Muon", "Adafactor", "LBFGS"]


def build(name, parameters):
    options = {"Muon": {"lr": 0.1}, "Adafactor": {"lr": 0.1}, "LBFGS": {"lr": 0.1, "max_iter": 3}}
    return getattr(torch.optim, name)(list(parameters), **options[name])


def with_gradients(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("Muon", "zero3"), ("Muon", "zero2"), ("Adafactor", "zero3"), ("Adafactor", "owner"), ("LBFGS", "owner")],
)
def test_refused_on_shards(fake_ranks, name, strategy):
    fake_ranks(2)
    model = net()
    before = build(name, model.parameters())
    shardtrace.fsdp(model, sharding_strategy=strategy)
    values = [p.detach().clone() for p in with_gradients(model).parameters()]
    alternatives = '"owner" or "ddp"' if name == "Muon" else '"ddp"'
    for optimizer in (before, build(name, model.parameters())):
        with pytest.raises(
            RuntimeError,
            match=f"{name} computes with whole tensors and would be wrong on parameter '0.weight' of Sequential"
            f".*call fsdp.. with sharding_strategy={alternatives}.*AdamW",
        ):
            optimizer.step(lambda: torch.zeros(()))
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))


def test_a_subclass_and_one_of_another_library(fake_ranks):
    fake_ranks(2)
    model = with_gradients(shardtrace.fsdp(net()))

    class Mine(torch.optim.Adafactor):
        pass

    with pytest.raises(RuntimeError, match="Mine computes with whole tensors"):
        Mine(model.parameters()).step()
    transformers = pytest.importorskip("transformers")
    with pytest.raises(RuntimeError, match="Adafactor computes with whole tensors"):
        transformers.Adafactor(model.parameters()).step()


def test_a_rule_may_leave_a_parameter_whole(fake_ranks):
    fake_ranks(2)
    model = with_gradients(shardtrace.fsdp(net(), sharding_strategy={"0.*": "ddp", "*": "zero3"}))
    build("Adafactor", model[0].parameters()).step()
    with pytest.raises(RuntimeError, match=r"parameter '2.weight'"):
        build("Adafactor", model.parameters()).step()


@pytest.mark.parametrize("name", MIXING)
def test_a_world_of_one_and_whole_parameters(single_rank, name):
    """Also an unsharded model, and what is whole for a while."""
    for model in (net(), shardtrace.fsdp(net())):
        build(name, with_gradients(model).parameters()).step(lambda: torch.zeros(()))
    with shardtrace.full_params(model):
        build(name, with_gradients(model).parameters()).step(lambda: torch.zeros(()))


def test_optimizers_copy_and_pickle(fake_ranks):
    fake_ranks(2)
    optimizer = build("Muon", with_gradients(shardtrace.fsdp(net(), sharding_strategy="owner")).parameters())
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copied.step()


def train(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def on_each_rank(name, strategy):
    """Training equals that of the single process."""
    x = torch.ones(2, 4)
    single, model = net(), shardtrace.fsdp(net(), sharding_strategy=strategy)
    train(single, build(name, single.parameters()), x)
    train(thunder.jit(model), build(name, model.parameters()), x)
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(single.state_dict()))


@pytest.mark.parametrize(
    ("name", "strategy"), [("Muon", "owner"), ("Muon", "ddp"), ("Adafactor", "ddp"), ("LBFGS", "ddp")]
)
def test_right_with(two_ranks, name, strategy):
    two_ranks.run(on_each_rank, name=name, strategy=strategy)
