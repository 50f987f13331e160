"""Forwards that send messages to other ranks themselves: PyTorch runs the module that does it, and a trial sends none."""

import copy

import shardtrace
from passes.compat.jit import notes_of
from passes.compat.versions import NoMessages

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import on_ranks
from torch import nn


class Gathered(torch.autograd.Function):
    """The rows of all ranks, as losses of contrast want them."""

    @staticmethod
    def forward(ctx, x):
        rows = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x)
        return tuple(rows)

    @staticmethod
    def backward(ctx, *grads):
        total = torch.stack(grads)
        dist.all_reduce(total)
        return total[dist.get_rank()]


def center(module, x):
    mean = x.detach().mean(0)
    dist.all_reduce(mean)
    module.mean.lerp_(mean / dist.get_world_size(), 0.1)
    return x - module.mean


def into_a_buffer(module, x):
    module.mean.copy_(x.detach().mean(0))
    waiting = dist.all_reduce(module.mean, async_op=True)
    x = x.tanh()
    waiting.wait()
    dist.barrier()
    return x * module.mean


def by_function(module, x):
    mean = functional.all_reduce(x.detach().mean(0), "sum", dist.group.WORLD)
    return x - mean + functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD).mean(0)


def nearest(module, x):
    chosen = x.detach().argmax(-1)
    rows = [torch.empty_like(chosen) for _ in range(2)]
    dist.all_gather(rows, chosen)
    names = [None, None]
    dist.all_gather_object(names, "a" * 3)
    return x + torch.eye(4)[rows[1]] * len(names[1])


class Sends(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.how(self, x)


class Net(nn.Module):
    """Sends messages in its submodules, and in an autograd function."""

    def __init__(self):
        super().__init__()
        ways = (center, into_a_buffer, by_function, nearest)
        self.parts = nn.Sequential(*(m for way in ways for m in (nn.Linear(4, 4), Sends(way))))

    def forward(self, x, offset=0):
        x = self.parts(x + offset)
        return x @ torch.cat(Gathered.apply(x)).T + dist.get_rank()


@on_ranks(2)
def test_messages_are_those_of_eager():
    torch.manual_seed(0)
    eager = Net()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    for step in range(3):
        torch.manual_seed(2 * step + dist.get_rank())
        x, offset = torch.randn(2, 4), step * dist.get_rank()  # one rank records again, and the other one does not
        expected, found = eager(x, offset), model(x, offset)
        torch.testing.assert_close(found, expected)
        for y in (expected, found):
            y.square().mean().backward()
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    for name, gradient in shardtrace.full_gradients(model).items():
        total = eager.get_parameter(name).grad
        dist.all_reduce(total)
        torch.testing.assert_close(gradient, total / 2)


@pytest.mark.parametrize(("how", "name"), [(center, "allreduce"), (by_function, "all_reduce"), (nearest, "allgather")])
def test_a_model_that_sends_messages_itself(single_rank, how, name):
    model = Sends(how)
    model.weight = nn.Parameter(torch.ones(4))
    shardtrace.fsdp(model)
    with pytest.raises(RuntimeError, match=rf"collective of torch.distributed \({name}\): move that part") as error:
        model(torch.ones(2, 4))
    assert f"in {how.__name__}:" in notes_of(error.value)


def test_a_trial_sends_nothing(fake_ranks):
    fake_ranks(3)
    x, rows = torch.arange(4.0), [torch.ones(4) for _ in range(3)]
    with NoMessages():
        dist.all_reduce(x)
        dist.all_gather(rows, x)
        assert functional.all_gather_tensor(x, 0, dist.group.WORLD).shape == (12,)
        dist.send(x, 1)
        version = x._version
        dist.recv(x, 1)
    assert all(torch.equal(row, torch.arange(4.0)) for row in rows)
    assert (version, x._version) == (1, 2)  # what is received and reduced is written, what is sent is not
    assert not x.any()
