"""A plain number that changes is an input of the step: as in eager, bit for bit, and compiled once more. What reads it is
compiled for each value, which a line says, and old steps are dropped."""

import copy
import gc
import math
import warnings
import weakref
from types import SimpleNamespace

import shardtrace
from shardtrace.model import tracing
from shardtrace.model.state import own_state
from shardtrace.record.recording import VARIANTS, Number, Place, _stand_ins

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn

SCALE = 1.0


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.t = nn.Linear(4, 4), 1.0

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) / (1 + self.t)


class Net(nn.Module):
    """``forward`` is given to it: a function of the module, the input and other arguments."""

    def __init__(self, forward):
        super().__init__()
        self._forward = forward
        self.linear, self.blocks = nn.Linear(4, 4), nn.ModuleList(Block() for _ in range(3))
        self.t, self.n, self.last, self.log = 1.0, 0, None, []
        self.config, self.table = SimpleNamespace(alpha=1.0), {"scale": [1.0, 2.0]}

    def forward(self, x, *args, **kwargs):
        return self._forward(self, x, *args, **kwargs)


def anneal(net, i):
    net.t = 1 - 0.1 * i


def many_operators(net, x):
    y = net.linear(x) * net.t
    y = torch.lerp(y - net.t, x, net.t**2).clamp(max=1 + net.t)
    y = torch.where(x > net.t, y, -net.t).add(y, alpha=net.t)
    y *= 3 % net.t
    return y.masked_fill(x > 1, 0.99**net.n)


def under_no_grad(net, x):
    with torch.no_grad():
        mixed = x * net.t
    return net.linear(x) + mixed


def in_checkpoint(net, x):
    return torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(net.linear(y) * net.t), x, use_reentrant=False)


def through_blocks(net, x):
    for block in net.blocks:
        x = block(x)
    return x


def counting(net, x):
    net.n += 1
    return net.linear(x) / net.n


def decaying(net, x):
    net.last, net.t = net.t, net.t * 0.9 + 0.01
    return net.linear(x) / net.t


def set_blocks(net, i):
    for k, block in enumerate(net.blocks):
        block.t = k + 0.1 * i


def set_global(net, i):
    global SCALE
    SCALE = 1.0 + i


NOTHING = lambda net, i: None  # noqa: E731
# the forward, what the script changes before step i, and the arguments of step i
INPUTS = {
    "attribute": (lambda net, x: net.linear(x) / net.t, anneal, {}),
    "operators": (many_operators, lambda net, i: vars(net).update(t=1.5 - 0.1 * i, n=i), {}),
    "of a config": (lambda net, x: net.linear(x) * net.config.alpha, lambda net, i: vars(net.config).update(alpha=0.5 + i), {}),
    "in a list": (lambda net, x: net.linear(x) * net.table["scale"][1], lambda net, i: net.table["scale"].__setitem__(1, float(i)), {}),
    "global": (lambda net, x: net.linear(x) * SCALE, set_global, {}),
    "argument": (lambda net, x, step: net.linear(x) / (1 + step), NOTHING, {"step": int}),
    "float argument": (lambda net, x, rate=1.0: net.linear(x) * rate, NOTHING, {"rate": float}),
    "lambda": (lambda net, x: (lambda y: y * net.t)(net.linear(x)), anneal, {}),
    "no_grad": (under_no_grad, anneal, {}),
    "checkpoint": (in_checkpoint, anneal, {}),
    "gradient reversal": (lambda net, x: net.linear(Reversed.apply(net.linear(x), net.t * 2)), anneal, {}),
    "blocks": (through_blocks, set_blocks, {}),
    "special values": (lambda net, x: net.linear(x) * net.t, lambda net, i: vars(net).update(t=[1.0, 0.0, math.inf, math.nan][i]), {}),
    "integers": (lambda net, x: net.linear(x + (x > 0).long() * net.n), lambda net, i: vars(net).update(n=i), {}),
    "counter": (counting, NOTHING, {}),
    "a part of a large one": (lambda net, x: net.linear(x) * (net.n % 7), lambda net, i: vars(net).update(n=2**70 + i), {}),
    "decay": (decaying, NOTHING, {}),
}  # fmt: skip
READ = {
    "branch": (lambda net, x: net.linear(x) / (1 if net.t > 0.85 else net.t), anneal, {}),
    "returned": (lambda net, x: (net.linear(x) / net.t, net.t), anneal, {}),
    "in an object": (lambda net, x: (vars(net).update(last=SimpleNamespace(t=net.t)), net.linear(x) / net.t)[1], anneal, {}),
    "kept in a list": (lambda net, x: (net.log.append({"t": net.t}), net.linear(x) / net.t)[1], anneal, {}),
    "of math": (lambda net, x: net.linear(x) * math.cos(net.t), anneal, {}),
    "of dropout": (lambda net, x: net.linear(x) + 0 * F.dropout(x, net.t), anneal, {}),
    "of a new tensor": (lambda net, x: net.linear(x) * torch.tensor(net.t), anneal, {}),
    "under vmap": (lambda net, x: torch.vmap(lambda row: row * net.t)(net.linear(x)), anneal, {}),
    "an index": (lambda net, x: net.linear(x)[net.n // 2 :] * net.t, lambda net, i: vars(net).update(n=i), {}),
    "too large": (lambda net, x: net.linear(x) * net.n, lambda net, i: vars(net).update(n=2**62 + 2**60 * i), {}),
}  # fmt: skip


def results(net, i, change, arguments):
    change(net, i)
    net.zero_grad()
    out = net(torch.linspace(-2, 2, 8).view(2, 4), **{name: kind(i) for name, kind in arguments.items()})
    y, *rest = out if isinstance(out, tuple) else (out,)
    y.sum().backward()
    return [y, *(p.grad for p in net.parameters())], (rest, net.t, net.n, net.last, net.log)


def steps_compiled(model):
    (jitted,) = own_state(model).compiled.values()
    return thunder.compile_stats(jitted).cache_misses


def compare(case, steps=4):
    """Steps of a sharded model, each of which is proven and equal to eager's. Returns the model."""
    forward, change, arguments = case
    torch.manual_seed(0)
    whole = Net(forward)
    model = shardtrace.fsdp(copy.deepcopy(whole), checks=shardtrace.Checks(prove=True))
    for i in range(steps):
        (expected, state), (found, new) = (results(net, i, change, arguments) for net in (whole, model))
        assert repr(state) == repr(new)
        for a, b in zip(expected, found, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.nan_to_num(), b.reshape(a.shape).nan_to_num())
    return model


@pytest.mark.parametrize("name", INPUTS)
def test_a_number_that_changes_is_an_input(single_rank, name):
    assert steps_compiled(compare(INPUTS[name])) <= 2


@pytest.mark.parametrize("name", READ)
def test_a_number_that_is_read_is_compiled_for_each_value(single_rank, name):
    compare(READ[name])


def test_blocks_with_numbers_of_their_own_are_one_function(single_rank):
    (jitted,) = own_state(compare(INPUTS["blocks"])).compiled.values()
    assert {"Block_forward", "Block_backward"} <= shardtrace.block_traces(jitted).keys()


def test_a_number_of_another_type_is_compiled_again(single_rank):
    values = [1.0, 2.0, 3, torch.ones(()), 0.5, None]
    forward = lambda net, x: net.linear(x) * (2 if net.t is None else net.t)  # noqa: E731
    compare((forward, lambda net, i: vars(net).update(t=values[i]), {}), len(values))


def test_backward_of_an_earlier_step_has_its_own_numbers(single_rank):
    whole = Net(lambda net, x: torch.tanh(net.linear(x) * net.t))  # a checkpoint of eager would read the last number
    model = copy.deepcopy(whole)
    model._forward = in_checkpoint
    shardtrace.fsdp(model)
    x, gradients = torch.ones(2, 4), []
    for net in (whole, model):
        sums = []
        for i in range(4):
            anneal(net, i)
            sums.append(net(x).sum())
        sum(sums).backward()
        gradients.append(net.linear.weight.grad.view(4, 4))
    torch.testing.assert_close(*gradients)


class Sample:
    @property
    def __dict__(self):
        pytest.fail("is looked at")


def test_what_stands_beside_a_number_is_not_searched():
    """The globals of a script with a counter of steps may hold all its data."""
    beside = {"STEPS": 1, "DATA": [Sample()]}
    assert list(_stand_ins(Number(Place(beside, "STEPS", "STEPS")), set())) == []


def test_a_line_says_what_is_compiled_again_and_old_steps_are_dropped(single_rank, monkeypatch):
    monkeypatch.setattr(tracing, "KEPT", VARIANTS)
    model, x, steps = shardtrace.fsdp(Net(READ["branch"][0])), torch.ones(2, 4), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(VARIANTS + 2):
            model.train(i % 2 == 0)  # two values: nobody is told
            anneal(model, i)
            model(x)
            (jitted,) = own_state(model).compiled.values()
            steps.append(weakref.ref(thunder.last_traces(jitted)[-1]))
    gc.collect()
    lines = [str(line.message) for line in said if str(line.message).startswith("Net: ")]
    assert lines[0].startswith(f"Net: Net.t has had {VARIANTS} values (0.7 -> 0.6), and a step was compiled for each")
    assert lines[1:] == [f"Net: {VARIANTS} steps were compiled. Each further one takes the place of the oldest"] * 2
    assert [step() is None for step in steps] == [True] * 2 + [False] * VARIANTS
    shardtrace.prove(jitted)


@pytest.mark.parametrize("remedy", ["tensor", "buffer"])
def test_the_remedies_of_that_line_compile_one_step(single_rank, remedy):
    model = Net(lambda net, x, t=None: net.linear(x) / (net.temperature if t is None else t))
    model.register_buffer("temperature", torch.ones(()))
    shardtrace.fsdp(model)
    for i in range(3):
        model.temperature.fill_(1 - 0.1 * i)
        model(torch.ones(2, 4), **({"t": torch.tensor(1 - 0.1 * i)} if remedy == "tensor" else {}))
    assert steps_compiled(model) == 1
