"""Optimizers: those that mix elements are right on DTensors, and refused where each tensor is on one rank."""

import copy
import pickle
from types import SimpleNamespace
from unittest import mock

import shardtrace
from shardtrace.ranks import failure

import pytest
import thunder
import torch
from ranks import on_ranks
from torch import nn

MIXING = ["Muon", "Adafactor", "LBFGS"]


def build(name, parameters):
    options = {"LBFGS": {"max_iter": 3}}
    return getattr(torch.optim, name)(list(parameters), lr=0.1, **options.get(name, {}))


def with_gradients(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_refused_on_owned_parameters(fake_ranks, name):
    fake_ranks(2)
    model = net()
    before = build(name, model.parameters())
    shardtrace.fsdp(model, sharding_strategy="owner")
    values = [p.detach().clone() for p in with_gradients(model).parameters()]
    for optimizer in (before, build(name, model.parameters())):
        with pytest.raises(
            RuntimeError,
            match=f"{name} computes with all tensors together and would be wrong on parameter '0.weight' of "
            'Sequential, which only one rank owns: call fsdp.. with another sharding_strategy than "owner"',
        ):
            optimizer.step(lambda: torch.zeros(()))
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))


@pytest.mark.parametrize(
    ("reason", "aborted", "changed", "message"),
    [
        ("rank 1: ValueError: bad batch", [], False, "another rank failed: rank 1: ValueError: bad batch"),
        ("", ["TIMEOUT"], False, "a collective was aborted .TIMEOUT."),
        ("", ["", "TIMEOUT"], True, "a collective was aborted .TIMEOUT."),  # while the step ran
    ],
)
def test_a_step_with_gradients_of_an_aborted_reduction(fake_ranks, monkeypatch, reason, aborted, changed, message):
    fake_ranks(2)
    model, other = with_gradients(shardtrace.fsdp(net())), with_gradients(net())
    monkeypatch.setattr(failure, "_watch", lambda: SimpleNamespace(reason=reason, ends=False))
    monkeypatch.setattr(failure, "asynchronous_error", mock.Mock(side_effect=aborted))
    values = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(shardtrace.RankFailedError, match=message + ".* .noticed in a step of an optimizer"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(torch.equal(p, v) is not changed for p, v in zip(model.parameters(), values, strict=True))
    monkeypatch.setattr(failure, "asynchronous_error", lambda: "TIMEOUT")
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # has nothing to do with other ranks


def test_a_subclass_and_one_of_another_library(fake_ranks):
    fake_ranks(2)
    model = with_gradients(shardtrace.fsdp(net(), sharding_strategy="owner"))

    class Mine(torch.optim.Adafactor):
        pass

    with pytest.raises(RuntimeError, match="Mine computes with all tensors together"):
        Mine(model.parameters()).step()
    transformers = pytest.importorskip("transformers")
    with pytest.raises(RuntimeError, match="Adafactor computes with all tensors together"):
        transformers.Adafactor(model.parameters()).step()


def test_a_rule_may_leave_a_parameter_whole(fake_ranks):
    fake_ranks(2)
    model = with_gradients(shardtrace.fsdp(net(), sharding_strategy={"0.*": "ddp", "*": "owner"}))
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


def train(model, optimizer, x, steps=3):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def on_each_rank(name, strategy):
    """Training equals that of the single process, but for the rounding of Muon, which computes in bf16."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    single, model = net(), shardtrace.fsdp(net(), sharding_strategy=strategy)
    rounds = name == "Muon" and strategy == "zero3"
    for one, called in ((single, single), (model, thunder.jit(model))):
        train(called, build(name, one.parameters()), x, steps=1 if rounds else 3)
    rounding = {"atol": 1e-2, "rtol": 0} if rounds else {}
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(single.state_dict()), **rounding)


class Small(nn.Module):
    """An embedding, matrices and a norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        return self.down(self.norm(self.up(self.embed(x)))).square().mean()


def is_matrix(name, p):
    return p.ndim == 2 and "embed" not in name


def muon_and_adamw(model):
    matrices, others = shardtrace.split_parameters(model, is_matrix)
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1, eps=1e-2)]


def steps(model, optimizers, count):
    x = torch.arange(4)
    for _ in range(count):
        model(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_muon_on_owned_matrices_and_adamw_on_the_rest(tmp_path):
    """Equal to a single process, also after a checkpoint that holds both optimizers."""
    single = Small()
    steps(single, muon_and_adamw(single), 4)

    def sharded(matrices):
        model = shardtrace.fsdp(Small(), sharding_strategy={is_matrix: matrices, "*": "zero3"})
        return model, muon_and_adamw(model)

    model, optimizers = sharded("owner")
    cmodel = thunder.jit(model)
    steps(cmodel, optimizers, 2)
    shardtrace.save_checkpoint(tmp_path, model, optimizers, step=2)
    steps(cmodel, optimizers, 2)
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(single.state_dict()))

    model, optimizers = sharded("ddp")
    for wrong, message in ((optimizers[1], "2 optimizer.s., 1 are"), (optimizers[::-1], "AdamW, the checkpoint's was")):
        with pytest.raises(shardtrace.CheckpointError, match=message):
            shardtrace.load_checkpoint(tmp_path, model, wrong)
    assert shardtrace.load_checkpoint(tmp_path, model, optimizers).step == 2
    steps(thunder.jit(model), optimizers, 2)
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(single.state_dict()))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("Muon", "ddp"), ("Adafactor", "ddp"), ("LBFGS", "ddp"), ("Muon", "zero3"), ("LBFGS", "zero3"), ("Muon", "owner"),
        ("Adafactor", "zero3"), ("Rprop", "zero3"),
    ],
)  # fmt: skip
def test_right_with(two_ranks, name, strategy):
    two_ranks.run(on_each_rank, name=name, strategy=strategy)


class Scaled(nn.Module):
    """A scale comes first, as ``logit_scale`` of CLIP does, in an optimizer's group."""

    def __init__(self, shape=()):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(shape)), nn.Linear(4, 4)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "owner", "ddp"])
def test_a_step_count_is_no_whole_state(fake_ranks, strategy, shape):
    fake_ranks(2)
    model = with_gradients(shardtrace.fsdp(Scaled(shape), sharding_strategy=strategy))
    for name in ("Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "ASGD"):
        for parameters in (model.parameters(), [model.scale]):
            optimizer = getattr(torch.optim, name)(parameters)
            for _ in range(3):
                optimizer.step()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        optimizer.step()


@on_ranks(2)
def test_an_optimizer_that_has_run_before():
    """It goes on with the new parameters, and its part of the state."""
    for strategy in ("zero3", "owner", {"layer.*": "ddp", "*": "zero3"}):
        torch.manual_seed(0)
        models = [Scaled(), Scaled()]
        models[1].load_state_dict(models[0].state_dict())
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True) for m in models]
        for step in range(3):
            if step == 1:
                shardtrace.fsdp(models[1], sharding_strategy=strategy)
            for model, optimizer in zip(models, optimizers, strict=True):
                with_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
        expected = models[0].state_dict()
        torch.testing.assert_close(dict(shardtrace.full_state_dict(models[1])), dict(expected))
        now = set(map(id, models[1].parameters()))
        assert set(map(id, optimizers[1].param_groups[0]["params"])) == set(map(id, optimizers[1].state)) == now


ELEMENTWISE = [
    ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "fused": True}), ("Adam", {"amsgrad": True}),
    ("AdamW", {"foreach": True}), ("AdamW", {"fused": True, "lr": torch.tensor(0.1)}), ("Adagrad", {"fused": True}),
    ("Adadelta", {"foreach": True}), ("Adamax", {"foreach": True}), ("ASGD", {}), ("NAdam", {"foreach": True}),
    ("RAdam", {}), ("RMSprop", {"foreach": True}),
]  # fmt: skip


@on_ranks(2)
def test_elementwise_optimizers():
    x = torch.ones(2, 4)
    for name, options in ELEMENTWISE:
        single, model = net(), shardtrace.fsdp(net())
        for one in (single, model):
            train(one, getattr(torch.optim, name)(one.parameters(), **{"lr": 0.1, **options}), x)
        torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(single.state_dict()), msg=name)


@on_ranks(2)
def test_dtensors_beside_plain_tensors():
    """Those that are ignored, and those without elements."""

    class Odd(Scaled):
        def __init__(self):
            super().__init__()
            self.nothing, self.own = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(4))

    torch.manual_seed(0)
    single, model = Odd(), Odd()
    model.load_state_dict(single.state_dict())
    shardtrace.fsdp(model, ignored_params=[model.own])
    for one in (single, model):
        optimizers = [
            torch.optim.AdamW(one.parameters(), lr=0.1),
            torch.optim.SGD([one.layer.weight, one.nothing], fused=True),
        ]
        for optimizer in optimizers:
            with_gradients(one)
            torch.nn.utils.clip_grad_norm_([p for p in one.parameters() if p.numel()], 0.1)
            optimizer.step()
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(single.state_dict()))
