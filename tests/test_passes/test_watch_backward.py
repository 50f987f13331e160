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


def penalties_on_ranks():
    """Every rank raises before anything is sent. Then all train on."""
    cmodel = thunder.jit(shardtrace.fsdp(net(), checks=shardtrace.Checks(timeout=20)))
    with REFUSED:
        penalty(cmodel)
    cmodel(torch.ones(2, 4)).sum().backward()


def test_on_two_ranks(two_ranks):
    two_ranks.run(penalties_on_ranks)
