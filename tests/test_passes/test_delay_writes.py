"""Writes into buffers and arguments outlast fusions, and no line reads what was written for what was there before."""

import copy

import shardtrace

import pytest
import thunder
import torch
from eager import uncompiled
from expecttest import assert_expected_inline
from golden import stage, text
from torch import nn
from torch.nn import functional as F

FUSING = [["sdpa", "torch_kernels", "torchcompile"], ["sdpa", "torchcompile"]]


class Counters(nn.Module):
    """Two buffers are written. The loss, which torch's kernel computes, parts the writes from other fusions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, y):
        self.steps += 1
        self.seen += 2
        return F.cross_entropy(self.linear(x).tanh(), y)


class Scaled(Counters):
    """The result depends on what is written, and on what was there before."""

    def forward(self, x, y):
        h = self.linear(x) * self.steps.cos()
        self.steps += 1
        self.seen += 2
        return F.cross_entropy((h * self.seen.clone()).tanh(), y)


class Block(Counters):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        self.steps += 1
        self.seen += 2
        return self.norm(self.linear(x) * self.seen.clone()).tanh()


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, y)


class Arguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y, p, q):
        p += 1
        q += 2
        return F.cross_entropy(self.linear(x).tanh() * p, y)


@pytest.fixture(autouse=True)
def _uncompiled():
    with uncompiled():
        yield


def data():
    return torch.linspace(-1, 1, 8).view(2, 4), torch.tensor([1, 2])


def check(model, *extra, executors, step=None, grad=True, **options):
    """Compares two steps of a model with eager PyTorch: results, gradients, buffers and written arguments."""
    reference = copy.deepcopy(model)
    sharded = shardtrace.fsdp(model, checks=shardtrace.Checks(prove=True), **options)
    step = step or (lambda model, *args: model(*args))
    jitted = thunder.jit(step, executors=executors)
    found, wanted = ([*data(), *(t.clone() for t in extra)] for _ in range(2))
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            losses = jitted(sharded, *found), step(reference, *wanted)
            torch.testing.assert_close(*losses)
            for loss in losses if grad else ():
                loss.backward()
    if grad:
        grads = [[p.grad for p in m.parameters()] for m in (sharded, reference)]
        torch.testing.assert_close(*grads)
    torch.testing.assert_close(dict(sharded.named_buffers()), dict(reference.named_buffers()))
    torch.testing.assert_close(found, wanted)


def compiled(model, *inputs):
    jitted = thunder.jit(shardtrace.fsdp(model), executors=FUSING[0])
    jitted(*inputs)
    return jitted


def test_golden(fake_ranks):
    fake_ranks(2)
    cmodel = compiled(Scaled(), *data())
    assert_expected_inline(
        text(stage(cmodel, "delay_writes")),
        """\
t0 = snapshot(t_seen)
t1 = snapshot(t_steps)
(t2,) = torch_linear_0(x, t_linear_weight, t_linear_bias)
(t3,) = torch_cos_0(t1)
(h,) = torch_mul_0(t2, t3)
(t4,) = torch_add_0(t1)
(t5,) = torch_add_1(t0)
t6 = ltorch.clone(t5, memory_format=(object of type torch_memory_format))
(t7,) = torch_mul_0(h, t6)
(t8,) = torch_tanh_0(t7)
(t9,) = torch_cross_entropy_0(t8, y)
t10 = prims.copy_(t4, t_steps, grad_enabled=True)
t11 = prims.copy_(t5, t_seen, grad_enabled=True)
return {'output': (t9,), 'flat_args': [x, y, t_linear_bias, t_linear_weight, t11, t10]}""",
    )


def test_a_counter_needs_no_snapshot(fake_ranks):
    fake_ranks(2)
    cmodel = compiled(Counters(), *data())
    assert "snapshot" not in text(stage(cmodel, "delay_writes"))


def test_nothing_to_write(fake_ranks):
    fake_ranks(2)
    cmodel = compiled(nn.Linear(4, 4), data()[0])
    assert not any("delay_writes" in str(t.get_provenance()) for t in thunder.last_traces(cmodel))


def test_an_argument_that_is_read_through_a_view(fake_ranks):
    """Without fusions, writes stay where they are."""
    fake_ranks(1)

    def step(model, x, y, p, q):
        view = p.view(2, 2)
        return model(x, y, p, q) + (3 * view).sum()

    reference = Arguments()
    model = shardtrace.fsdp(copy.deepcopy(reference), checks=shardtrace.Checks(prove=False))  # it is not proven
    found = thunder.jit(step)(model, *data(), torch.zeros(4), torch.zeros(4))
    torch.testing.assert_close(found, step(reference, *data(), torch.zeros(4), torch.zeros(4)))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("model", "strategy"), [(Counters, "zero3"), (Scaled, "zero3"), (Scaled, "ddp")])
def test_buffers(fake_ranks, model, strategy, grad):
    fake_ranks(1)
    check(model(), executors=FUSING[0], sharding_strategy=strategy, grad=grad)


@pytest.mark.parametrize("model", [Counters, Scaled])
def test_buffers_where_the_loss_is_fused(fake_ranks, model):
    fake_ranks(1)
    check(model(), executors=FUSING[1])


@pytest.mark.parametrize("blocks", ["once", "inline"])
def test_buffers_of_blocks(fake_ranks, blocks):
    fake_ranks(1)
    policy = shardtrace.CompilePolicy(repeated_blocks=blocks)
    check(Blocks(), executors=FUSING[0], compile_policy=policy)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("model", [Counters, Scaled])
def test_two_calls_in_a_step(fake_ranks, model, grad):
    fake_ranks(1)
    check(model(), executors=FUSING[0], step=lambda m, x, y: m(x, y) + m(2 * x, y), grad=grad)


def test_a_buffer_that_is_read_after_the_call(fake_ranks):
    fake_ranks(1)
    check(Scaled(), executors=FUSING[0], step=lambda m, x, y: m(x, y) + m.steps.clone())


@pytest.mark.parametrize("grad", [True, False])
def test_arguments(fake_ranks, grad):
    fake_ranks(1)

    def step(model, x, y, p, q):
        return model(x, y, p, q) + p.sum() + q.sum()

    check(Arguments(), torch.zeros(4), torch.ones(4), executors=FUSING[0], step=step, grad=grad)
