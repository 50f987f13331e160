"""What a module that PyTorch runs does to the user's objects is done once in each step, and a trial leaves nothing."""

import copy
import itertools
import random
import warnings
from collections import deque
from types import SimpleNamespace

import shardtrace
from shardtrace.record.calls import tensors_in

import pytest
import torch
from against_eager import Model
from torch import nn
from torch.utils._pytree import tree_map_only

STEPS = 3
SEEN = []


class Part(nn.Module):
    """Depends on the values of tensors, and calls ``function`` with itself, its input and its output."""

    calls = 0

    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function
        self.n, self.last, self.maximum, self.text, self.owner = 0, None, 0.0, "", []
        self.seen, self.losses, self.window = [], {}, deque(maxlen=2)
        self.config, self.table = SimpleNamespace(n=0, aux=None), torch.zeros(4)
        self.random, self.count = random.Random(1), itertools.count()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if x.sum().item() > 1e9:
            return x
        return self.function(self, x, self.fc(x))


class Net(nn.Module):
    """Has a part, with which the part's function is called, and ``around`` with itself and what that returned."""

    def __init__(self, function, around=lambda net, y: y):
        super().__init__()
        self.fc, self.part, self.around = nn.Linear(4, 4), Part(function), around
        self.n, self.aux = 0, None
        self.part.owner.append(self)

    def forward(self, x):
        return self.around(self, self.part(self.fc(x)))


def sets(**values):
    """A function that sets attributes of the part, and returns its output."""

    def function(part, x, y):
        for name, value in values.items():
            setattr(part, name, value(part, y))
        return y

    return function


def does(action):
    def function(part, x, y):
        action(part, y)
        return y

    return function


def loss(part, y):
    return y.square().mean()


def counts(part, y):
    part.n += 1
    part.config.n += part.n
    Part.calls += 1
    SEEN.append(len(SEEN))


def sets_owners(part, y):
    part.owner[0].n += 1
    part.owner[0].aux = loss(part, y)


def sets_items(part, y):
    part.losses["aux"] = {"loss": loss(part, y), "max": y.max().item()}
    part.config.aux = y.mean()


def warns(part, y):
    warnings.warn("from forward", stacklevel=1)
    part.n += 1


def draws(part, x, y):
    return y * random.random() * part.random.random() + next(part.count)


def reads_itself(part, x, y):
    part.n += 1
    part.table += y.detach().mean(0)
    return y * part.n + part.table


def makes_a_buffer(part, x, y):
    if not hasattr(part, "own"):
        part.register_buffer("own", torch.zeros(4))
    part.own += 1
    part.mean = part.mean * 0.5 + y.detach().mean(0)
    return y + part.own


def appends_while_short(part, y):
    if len(part.seen) < 2:
        part.seen.append(y.detach())


def accumulates(part, y):
    part.last = loss(part, y) if part.last is None else part.last + loss(part, y)


def resets(net, y):
    net.part.seen = []
    return net.part(y)


def resets_last(net, y):
    net.part.last = None
    return net.part(net.part(y))


def nothing(part, x, y):
    part.n += 1
    part.last = y.detach().mean()


CASES = {
    "counts": (does(counts), None),
    "its owner": (does(sets_owners), None),
    "items": (does(sets_items), None),
    "a list that grows": (does(lambda part, y: part.seen.append(loss(part, y))), None),
    "a short list": (does(appends_while_short), None),
    "a deque": (does(lambda part, y: part.window.append(y.detach().mean())), None),
    "numbers and texts": (sets(maximum=lambda p, y: y.max().item(), text=lambda p, y: p.text + "a"), None),
    "its input and output": (lambda part, x, y: (setattr(part, "last", [x, y]), y)[1], None),
    "reads itself": (reads_itself, None),
    "buffers": (makes_a_buffer, None),
    "random numbers": (draws, None),
    "warnings": (does(warns), None),
    "without a result": (nothing, lambda net, y: net.fc(torch.ones(2, 4)) + net.part.fc.bias),
    "read without a gradient": (sets(last=lambda p, y: y.detach().mean()), lambda net, y: y * net.part.last),
    "returned with a gradient": (sets(last=loss), lambda net, y: (y, net.part.last)),
    "twice": (does(lambda part, y: part.seen.append(loss(part, y))), lambda net, y: net.part(y)),
    "an average": (
        sets(last=lambda p, y: y.detach().mean() + (0 if p.last is None else p.last)),
        lambda net, y: net.part(y) * net.part.last,
    ),
    "a count that is read": (does(counts), lambda net, y: y * net.part.config.n),
    "a list from around": (does(lambda part, y: part.seen.append(1)), resets),
    "a gradient across calls": (does(accumulates), resets_last),
}


def step(net, number, old):
    """All tensors and all else that can be seen after a step. ``old``: tensors that the steps before have left."""
    torch.manual_seed(number)
    random.seed(number)
    Part.calls, SEEN[:] = 0, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = net(torch.randn(2, 4))
    part = net.part
    names = ("n", "last", "maximum", "text", "seen", "losses", "window", "config", "table", "random", "count")
    held = [net.n, net.aux, *(getattr(part, name) for name in names)]
    held[-5:-2] = list(part.window), vars(part.config), part.table
    left = [t for t in tensors_in(held) if t.requires_grad and all(t is not o for o in old)]
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    sum(t.sum() for t in (*results, *left)).backward()
    old += left
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    tensors = [t.detach().clone() for t in (*results, *tensors_in(held), *gradients, *net.buffers())]
    net.zero_grad()
    held[-2] = part.random.getstate()
    messages = [w for w in caught if "from forward" in str(w.message)]
    plain = tree_map_only(torch.Tensor, lambda t: t.requires_grad, held)
    return tensors, repr((plain, Part.calls, SEEN, random.random(), len(messages)))


@pytest.mark.parametrize("case", CASES)
def test_state(case, single_rank):
    function, around = CASES[case]
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Net(function, around or (lambda net, y: y)))
    eager, sharded = nets[0], shardtrace.fsdp(nets[1])
    old = [], []
    for number in range(STEPS):
        (tensors, plain), (found, found_plain) = step(eager, number, old[0]), step(sharded, number, old[1])
        assert found_plain == plain
        torch.testing.assert_close(found, tensors)


# ---- what is refused ----


def switches(part, x, y):
    torch.set_grad_enabled(False)
    return y


REFUSED = {
    "a number of tensors": (
        sets(maximum=lambda p, y: y.max().item()),
        lambda net, y: y * net.part.maximum,
        r"may read Net\.part\.maximum, which a module that PyTorch runs sets by the values",
    ),
    "the mode of gradients": (switches, None, "it switches gradients on or off for what follows"),
    "a parameter": (
        does(lambda part, y: setattr(part, "own", nn.Parameter(torch.ones(4)))),
        None,
        r"forward sets the parameter Net\.part\.own: make it in __init__",
    ),
    "data of a parameter": (
        does(lambda part, y: part.fc.weight.data.clamp_(-0.1, 0.1)),
        None,
        r"parameter 'part\.fc\.weight' is updated in place in forward",
    ),
    "another parameter": (
        does(lambda part, y: setattr(part.fc, "weight", nn.Parameter(part.fc.weight * 2))),
        None,
        r"parameter 'part\.fc\.weight' is updated in place in forward",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, fake_ranks):
    function, around, text = REFUSED[case]
    fake_ranks(2)
    net = shardtrace.fsdp(Net(function, around or (lambda net, y: y)))
    with pytest.raises(RuntimeError, match=text):
        net(torch.randn(2, 4))
    assert torch.is_grad_enabled()


class Views(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.view = view

    def forward(self, x):
        return self.view(x) if x.sum().item() < 1e9 else x


@pytest.mark.parametrize(
    ("view", "around"),
    [
        (lambda x: x[:1], lambda h, y: (y.mul_(0), h)[1]),
        (lambda x: x, lambda h, y: (h.mul_(0), y)[1]),
        (lambda x: x.t(), lambda h, y: (h.add_(1), y[0].relu())[1]),
    ],
)
def test_writes_through_views(view, around, fake_ranks):
    fake_ranks(2)
    model = Model(lambda m, x: (lambda h: around(h, m.views(h)))(m.fc(x) * 1))
    model.views = Views(view)
    with pytest.raises(RuntimeError, match="may share memory with what a module that PyTorch runs returns"):
        shardtrace.fsdp(model)(torch.randn(2, 4))


def test_a_write_that_nothing_else_sees(single_rank):
    model = Model(lambda m, x: m.views(m.fc(x)).mul_(2).relu())
    model.views = Views(lambda x: x)
    x, expected = torch.randn(2, 4), copy.deepcopy(model)
    torch.testing.assert_close(shardtrace.fsdp(model)(x), expected(x))
