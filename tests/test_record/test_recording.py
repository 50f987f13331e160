"""Later steps record the forward again: state that no guard sees is an error, and nothing else is."""

import copy
import gc
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import shardtrace

import pytest
import thunder
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm


@pytest.fixture
def elsewhere(monkeypatch):
    """An object that no guard reaches: the code looks its module up by a name."""
    module = types.ModuleType("elsewhere")
    module.options = types.SimpleNamespace(scale=0.5, function="sin", fails=False)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    return module.options


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        options = __import__("sys").modules["elsewhere"].options
        if options.fails:
            raise KeyError("gone")
        y = getattr(torch, options.function)(self.linear(x)) * options.scale
        return {"y": y, "scale": options.scale} if options.scale > 5 else y


def take_steps(cmodel, count, context=torch.enable_grad):
    for _ in range(count):
        with context():
            cmodel(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.25}, r"mul: 0.5 is now 0.25, at .*test_recording.py:\d+ in forward"),
        ({"function": "cos"}, "sin is now cos, at"),
        ({"scale": 6.0}, "mul: 0.5 is now 6.0"),
        ({"fails": True}, "it raises KeyError: 'gone'"),
    ],
)
def test_a_change_that_no_guard_sees_is_an_error(single_rank, elsewhere, change, message):
    cmodel = thunder.jit(shardtrace.fsdp(Net()))
    take_steps(cmodel, 4)  # compared before steps 2 and 4
    vars(elsewhere).update(change)
    take_steps(cmodel, 3)
    with pytest.raises(RuntimeError, match=f"the forward of Net is not what was compiled .*{message}"):
        take_steps(cmodel, 1)
    vars(elsewhere).update(fails=False)
    take_steps(cmodel, 1)  # compiled again
    assert thunder.cache_misses(cmodel) == 3


def test_how_often(single_rank, elsewhere):
    never, third = (thunder.jit(shardtrace.fsdp(Net(), checks=shardtrace.Checks(recording=n))) for n in (False, 3))
    take_steps(never, 1)
    take_steps(third, 3)
    elsewhere.scale = 1.0
    take_steps(never, 8)
    take_steps(third, 2)
    with pytest.raises(RuntimeError, match=r"0\.5 is now 1\.0"):
        take_steps(third, 1)
    with pytest.raises(ValueError, match="recording must be True, False or a number of steps, not -1"):
        shardtrace.fsdp(Net(), checks=shardtrace.Checks(recording=-1))


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_recorded_in_the_modes_of_the_first_step(single_rank, elsewhere, context):
    cmodel = thunder.jit(shardtrace.fsdp(Net()))
    take_steps(cmodel, 4, context)
    take_steps(cmodel, 4)
    assert thunder.cache_misses(cmodel) == 2


class Varied(nn.Module):
    """Makes new objects in each call: functions, literals, generators, a random mask, a count, a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        y = torch.vmap(lambda row: self.linear(row) * row.sum())(x)
        self.seen += y.detach().mean(0)
        self.last = y.detach().mean(0)
        y = F.dropout(y, 0.5) + torch.tensor([1.0, 2.0, 3.0, float("nan")]).nan_to_num()
        return {"y": y.relu_(), "last": [y[:, 1:] * self.seen[1:]]}


def test_new_objects_are_no_difference(single_rank, monkeypatch):
    def collect(generation=2):
        assert generation < 2, "a search for fakes, which takes a second"

    monkeypatch.setattr(gc, "collect", collect)
    cmodel = thunder.jit(shardtrace.fsdp(Varied(), checks=shardtrace.Checks(recording=1)))
    take_steps(cmodel, 5)
    assert thunder.cache_misses(cmodel) == 1


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad


class InAnotherThread(nn.Linear):
    def forward(self, x):
        threads = ThreadPoolExecutor(1)
        done = threads.submit(
            lambda: (Cube.apply(torch.ones(2)), nn.Linear(2, 2)(torch.ones(2)).shape, torch.Generator)
        )
        assert [type(t) for t in done.result()[:1]] == [torch.Tensor]  # no fake, and no error
        return super().forward(x)


def test_other_threads_see_nothing_of_a_recording(single_rank):
    """Such as one that writes a checkpoint while a later step records again."""
    take_steps(thunder.jit(shardtrace.fsdp(InAnotherThread(4, 4))), 3)


FUNCTIONS = {
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]).square().sum(),
    "hessian": lambda f, x: torch.func.jacrev(torch.func.grad(lambda v: f(v).sum()))(x[0]).square().sum(),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda v: f(v).sum()))(x).square().sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_transforms_are_recorded_alike(single_rank, name):
    """Torch caches what fake kernels give: the second recording meets other functions in them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5, bias=False)

        def forward(self, x):
            return FUNCTIONS[name](lambda v: torch.tanh(self.second.weight @ v), self.first(x))

    FakeTensorMode.cache_clear()
    eager, x = Net(), torch.ones(3, 6)
    model = shardtrace.fsdp(copy.deepcopy(eager))
    for _ in range(2):
        torch.testing.assert_close(model(x), eager(x))


def test_cached_parametrizations(single_rank):
    class Net(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.fc, self.inside = weight_norm(nn.Linear(4, 4)), inside

        def forward(self, x):
            with parametrize.cached() if self.inside else nullcontext():
                return self.fc(self.fc(x))

    eager, x = Net(True), torch.ones(2, 4)
    for model in (shardtrace.fsdp(copy.deepcopy(eager)), shardtrace.fsdp(Net(False))):
        if model.inside:
            torch.testing.assert_close(model(x), eager(x))
        model(x)
        with parametrize.cached(), pytest.raises(RuntimeError, match=r"Net is called within parametrize.cached\(\)"):
            model(x)
        model(x)
