import weakref

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from ranks import on_ranks
from torch import nn


@on_ranks(2)
def test_round_trips():
    round_trips()


@on_ranks(3)
def test_round_trips_on_three_ranks():
    round_trips()


def round_trips():
    torch.manual_seed(0)
    model = Zoo()
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    cmodel = thunder.jit(shardtrace.fsdp(model))
    full = shardtrace.full_state_dict(cmodel, cpu=True)
    assert list(full) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=0)
    assert full["head.weight"] is full["embedding.weight"]
    on_first = shardtrace.full_state_dict(model, rank0_only=True)
    assert list(on_first) == (list(expected) if dist.get_rank() == 0 else [])

    other = {k: v + 1 for k, v in expected.items()}
    assert shardtrace.load_full_state_dict(cmodel, other) == ([], [])
    with shardtrace.full_params(model):
        for name, value in other.items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
        model.scale.data.fill_(7.0)
    assert shardtrace.full_state_dict(model)["scale"] == 7
    with shardtrace.full_params(model, writeback=False):
        model.scale.data.fill_(8.0)
    assert shardtrace.full_state_dict(model)["scale"] == 7

    loaded = shardtrace.load_full_state_dict(model, expected if dist.get_rank() == 0 else {}, broadcast_from=0)
    assert loaded == ([], [])
    torch.testing.assert_close(shardtrace.full_state_dict(model), dict(full), rtol=0, atol=0)
    partial = {"scale": torch.tensor(3.0)}
    missing, unexpected = shardtrace.load_full_state_dict(model, partial, strict=False)
    assert len(missing) == len(expected) - 1
    assert not unexpected
    assert shardtrace.full_state_dict(model)["scale"] == 3
    # plain state dicts of shards round-trip too
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "owner"])
def test_whole_parameters_come_one_at_a_time(strategy):
    torch.manual_seed(0)
    model = Zoo()
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    model = shardtrace.fsdp(model, sharding_strategy=strategy)
    parameters, given, seen = dict(model.named_parameters(remove_duplicate=False)), [], set()
    for name, value in shardtrace.iter_full_params(model):
        given += [weakref.ref(value)] if name in parameters and value.numel() > 8 else []
        assert len({id(t) for r in given if (t := r()) is not None}) <= 2
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
        seen.add(name)
    assert seen == expected.keys()

    tied = {"head.weight"}
    half = dict(shardtrace.iter_full_params(model, dtype=torch.bfloat16, names="hf"))
    assert half.keys() == expected.keys() - tied
    for name, value in half.items():
        wanted = expected[name].bfloat16() if expected[name].is_floating_point() else expected[name]
        torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    with pytest.raises(ValueError, match='names must be "model" or "hf"'):
        shardtrace.iter_full_params(model, names="vllm")


@on_ranks(2)
@pytest.mark.parametrize("broken_on", [None, 1])
def test_a_state_dict_that_does_not_fit(broken_on):
    """A state dict that does not fit, on one rank or on all, is an error on all and changes nothing."""
    model = shardtrace.fsdp(Zoo())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    good = {k: v + 1 for k, v in shardtrace.full_state_dict(model).items()}
    if broken_on in (None, dist.get_rank()):
        del good["scale"]
        good["position"] = torch.zeros(2, 2)
    with pytest.raises(
        RuntimeError, match=r"position has shape \(2, 2\), the model's is \(5, 6\); missing key scale"
    ) as raised:
        shardtrace.load_full_state_dict(model, good)
    assert raised.type is RuntimeError
    for k, v in model.state_dict().items():
        assert torch.equal(v, before[k]), f"{k} was changed"


@on_ranks(2)
def test_full_params_runs_without_thunder():
    model = shardtrace.fsdp(Zoo())
    cmodel = thunder.jit(model)
    inputs, targets = tokens(4)
    with torch.no_grad():
        expected = cmodel(inputs, targets)
        with shardtrace.full_params(model):
            torch.testing.assert_close(model(inputs, targets), expected)
            with pytest.raises(RuntimeError, match="was called inside full_params"):
                cmodel(inputs, targets)
        torch.testing.assert_close(cmodel(inputs, targets), expected)


def test_not_sharded(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match=r"Linear is not sharded: call shardtrace.fsdp"):
        shardtrace.full_state_dict(nn.Linear(2, 2))


class Counts(nn.Linear):
    """A layer with extra state, a buffer of a dtype that gloo does not know, and a parameter of one row."""

    def __init__(self):
        super().__init__(4, 4)
        self.calls = 3
        self.row = nn.Parameter(torch.randn(1, 1000))
        self.register_buffer("table", torch.arange(5, dtype=torch.int16))

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


@on_ranks(2)
def test_extra_state_and_odd_buffers():
    model = Counts()
    if dist.get_rank() == 1:
        model.table += 7
    shardtrace.fsdp(model, init_policy=shardtrace.InitPolicy(broadcast_from=1))
    assert model.table.tolist() == [7, 8, 9, 10, 11]
    full = shardtrace.full_state_dict(model)
    assert full["row"].untyped_storage().nbytes() == 4000
    full["_extra_state"] = 5
    assert shardtrace.load_full_state_dict(model, full) == ([], [])
    assert model.calls == 5
    full["_extra_state"] = 6
    shardtrace.load_full_state_dict(model, full if dist.get_rank() == 1 else {}, broadcast_from=1)
    assert model.calls == 6


@on_ranks(2)
def test_errors_inside_full_params():
    """The shards come back after any error inside."""
    model = shardtrace.fsdp(nn.Linear(4, 6))
    before = [p.detach().clone() for p in model.parameters()]

    def resize():
        model.weight.data = torch.zeros(2, 2)

    for error, change in ((KeyError, lambda: {}["x"]), (RuntimeError, resize)):
        with pytest.raises(error), shardtrace.full_params(model):
            change()
        for p, values in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.detach(), values, rtol=0, atol=0)
    with shardtrace.full_params(model):
        assert model.weight.shape == (6, 4)


@on_ranks(2)
def test_values_are_copies():
    model = shardtrace.fsdp(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before = shardtrace.full_state_dict(model)
    kept = {name: value.clone() for name, value in before.items()}
    model(torch.randn(3, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.testing.assert_close(dict(before), kept, rtol=0, atol=0)
    assert not torch.equal(shardtrace.full_state_dict(model)["1.running_mean"], kept["1.running_mean"])
