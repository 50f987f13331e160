import collections
import copy
import dataclasses
from functools import partial
from typing import ClassVar

import shardtrace

import pytest
import thunder
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def penalty(cmodel, **options):
    """The gradient penalty of a critic (WGAN-GP), whose cotangents need no gradient."""
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(cmodel(x).sum(), x, create_graph=True, **options)
    return (gradient.norm(dim=1) - 1).square().mean()


REFUSED = pytest.raises(RuntimeError, match="backward of Sequential was called with create_graph=True")


@pytest.mark.parametrize("options", [{}, {"checks": shardtrace.Checks(steps=False)}, {"sharding_strategy": "ddp"}])
def test_a_gradient_penalty_is_refused(fake_ranks, options):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(net(), **options))
    for _ in range(2):  # the second call runs the compiled step
        with REFUSED:
            penalty(cmodel)
    with REFUSED:
        torch.autograd.grad(cmodel(torch.ones(2, 4)).sum(), [*cmodel.parameters()], create_graph=True)
    cmodel(torch.ones(2, 4)).sum().backward()  # works again
    line = thunder.compile_stats(cmodel).last_epilogue_traces[-1].bound_symbols[-2]
    assert line.sym.name == "watch_backward"


def test_in_a_world_of_one(single_rank):
    with REFUSED:
        penalty(thunder.jit(shardtrace.fsdp(net())))


def test_a_function_of_which_the_model_is_a_part(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(net())
    cmodel = thunder.jit(lambda x: (model(x).sum(), x))
    x = torch.randn(3, 4, requires_grad=True)
    loss, same = cmodel(x)
    torch.autograd.grad(same.square().sum(), x, create_graph=True)  # not through the model
    with REFUSED:
        torch.autograd.grad(loss, x, create_graph=True)


def test_what_keeps_working(single_rank):
    """retain_graph, no_grad, and a double backward through other parts of the graph."""
    cmodel, x = thunder.jit(shardtrace.fsdp(net())), torch.randn(3, 4, requires_grad=True)
    loss = cmodel(x).sum()
    torch.autograd.grad(x.square().sum(), x, create_graph=True)[0].sum().backward()
    x.grad = None
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with torch.no_grad():
        assert not cmodel(x).requires_grad


@dataclasses.dataclass
class Output:
    main: torch.Tensor
    side: torch.Tensor


class Fields(dict):
    __getattr__ = dict.__getitem__


RESULTS = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": lambda **found: collections.defaultdict(list, found),
    "class of dict": Fields,
    "dataclass": Output,
    "tuple": lambda **found: tuple(found.values()),
}


class Net(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.main, self.side, self.result = nn.Linear(4, 3), nn.Linear(4, 2), result

    def forward(self, x):
        self.left = self.side(x)  # is set after the step
        return self.result(main=self.main(x), side=self.left * 2)


def main_of(out):
    return out[0] if isinstance(out, tuple) else out.main if isinstance(out, Output) else out["main"]


@pytest.mark.parametrize(
    ("by", "result"), [*(("module", r) for r in RESULTS), ("function", "dict"), ("function", "dataclass")]
)
def test_whatever_a_model_returns(single_rank, by, result):
    """The passes over the epilogue see the tensors in it."""
    model = shardtrace.fsdp(Net(RESULTS[result]))
    call = thunder.jit(lambda x: model(x)) if by == "function" else model
    x = torch.ones(2, 4, requires_grad=True)
    out = call(x)
    assert type(out) is type(RESULTS[result](main=1, side=2))
    main_of(out).sum().backward()
    assert model.side.weight.grad is None
    assert model.main.weight.grad is not None
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(main_of(call(x)).sum(), x, create_graph=True)


class Layers(nn.Module):
    """Returns what each layer computes. The second one is computed from the first, inside of one call of a block."""

    def __init__(self, seen=None):
        super().__init__()
        self.layers, self.seen = nn.ModuleList(Layer(seen) for _ in range(2)), seen

    def forward(self, x):
        found = []
        for layer in self.layers:
            y, x = layer(x)
            found += [y, x]
        return found


class Layer(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), seen

    def forward(self, x):
        y = self.linear(x)
        if self.seen is not None:
            y = self.seen.apply(y)
        return y, y.tanh()


WATCHES = {"a hook": lambda t: t.register_hook(lambda g: g * 0), "retain_grad": lambda t: t.retain_grad()}


@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
@pytest.mark.parametrize(("watched", "used"), [(0, 1), (0, 3), (2, 3)])
def test_hooks_on_what_another_result_is_computed_from(single_rank, watch, watched, used):
    found = shardtrace.fsdp(Layers())(torch.ones(3, 4))
    watch(found[watched])
    with pytest.raises(RuntimeError, match="a result of Layers has a hook or retain_grad"):
        found[used].square().sum().backward()


@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
@pytest.mark.parametrize(("watched", "used"), [(0, 0), (2, 2), (3, 3), (3, 1)])
def test_other_hooks_are_right(single_rank, watch, watched, used):
    """The loss uses no result that is computed from the one with the hook."""
    eager = Layers()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    gradients = []
    for run in (eager, model):
        found = run(torch.ones(3, 4))
        watch(found[watched])
        (found[used].square().sum() + found[watched].sum()).backward()
        gradients.append([found[watched].grad, *(p.grad for p in run.parameters())])
    torch.testing.assert_close(*gradients)


class See(torch.autograd.Function):
    gradients: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        See.gradients.append(gradient.clone())
        return gradient


def test_the_remedy_for_hooks(single_rank):
    eager = Layers(See)
    model = shardtrace.fsdp(copy.deepcopy(eager))
    See.gradients.clear()
    for run in (eager, model):
        sum(t.square().sum() for t in run(torch.ones(3, 4))).backward()
    assert len(See.gradients) == 4
    torch.testing.assert_close(See.gradients[2:], See.gradients[:2])


@pytest.mark.filterwarnings("ignore:Error detected")
@pytest.mark.parametrize("of", ["backward only", "the whole step"])
def test_anomaly_mode(single_rank, of):
    model = shardtrace.fsdp(net())
    anomalies = partial(torch.autograd.set_detect_anomaly, True)
    loss = None if of == "the whole step" else model(torch.ones(2, 4)).sum()
    with anomalies():
        (model(torch.ones(2, 4)).sum() if loss is None else loss).backward()
        loss = (model(torch.ones(2, 4)) * 0).sqrt().sum()
        with pytest.raises(RuntimeError, match="nan values"):
            loss.backward()


def penalties_on_ranks():
    """Every rank raises before anything is sent. Then all train on."""
    cmodel = thunder.jit(shardtrace.fsdp(net(), checks=shardtrace.Checks(timeout=20)))
    with REFUSED:
        penalty(cmodel)
    cmodel(torch.ones(2, 4)).sum().backward()


def test_on_two_ranks(two_ranks):
    two_ranks.run(penalties_on_ranks)
