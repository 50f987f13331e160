"""The proof that a step is the unsharded program: of right steps, and of steps that a pass makes wrong."""

import gc

import shardtrace  # isort: split

from passes.pipeline import PassAfterLowering
from passes.proof.program import Numbers, arguments_of

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core.devices import cpu
from thunder.core.dtypes import float32
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


UNCHECKED = shardtrace.Checks(prove=False)


def step(pass_=None, **options):
    model = shardtrace.fsdp(Net(), checks=UNCHECKED, **options)
    cmodel = thunder.jit(model, transforms=[PassAfterLowering(pass_)] if pass_ else [])
    cmodel(torch.randn(4, 4))
    return cmodel


@pytest.mark.parametrize("blocks", ["once", "inline"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "owner"])
def test_right_steps(fake_ranks, strategy, blocks):
    fake_ranks(2)
    policy = shardtrace.CompilePolicy(repeated_blocks=blocks)
    proof = shardtrace.prove(step(sharding_strategy=strategy, compile_policy=policy))
    assert (proof.verdict, proof.values) == ("proven", 15)  # 1 output, 14 parameters


def test_gradients_that_are_averaged_in_bf16_are_proven_up_to_rounding(fake_ranks):
    fake_ranks(2)
    proof = shardtrace.prove(step(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)))
    assert proof.verdict == "rounding"
    assert all("bf16" in reason for reason in proof.rounding)
    assert str(proof).startswith("proven up to rounding: 15 results")


def exchange_gradients(trace):
    """A wrong pass: two gradients of one shape change places."""
    *lines, last = trace.bound_symbols
    grads = list(last.args[0]) if isinstance(last.args[0], tuple) else []
    same = [
        (i, j)
        for i, a in enumerate(grads)
        for j, b in enumerate(grads[:i])
        if a is not None and b is not None and a.shape == b.shape
    ]
    if not same:
        return trace
    i, j = same[0]
    grads[i], grads[j] = grads[j], grads[i]
    new = from_trace(trace)
    new.bound_symbols = [*lines, last.from_bsym(args=(tuple(grads),))]
    return new


def test_a_wrong_step(fake_ranks):
    fake_ranks(2)
    proof = shardtrace.prove(step(exchange_gradients))
    assert proof.verdict == "unproven"
    assert len(proof.differences) >= 2
    assert "the gradient of blocks." in str(proof)


def test_a_wrong_step_raises_if_it_is_to_be_proven(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(Net()), transforms=[PassAfterLowering(exchange_gradients)])
    with pytest.raises(AssertionError, match="the compiled step of Net could not be proven"):
        cmodel(torch.randn(4, 4))


class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()


def keep_input(trace):
    """A wrong pass: forward returns what it was given."""
    *lines, last = trace.bound_symbols
    x = next((p for p in trace.args if p.name == "x"), None)
    if x is None or "flat_args" not in last.args[0]:  # of a block
        return trace
    new = from_trace(trace)
    new.bound_symbols = [*lines, last.from_bsym(args=({**last.args[0], "output": (x,)}, *last.args[1:]))]
    return new


@pytest.mark.parametrize(("net", "grad"), [(Net, False), (Detached, True)], ids=["no_grad", "detached"])
def test_a_step_without_gradients_is_proven(fake_ranks, net, grad):
    """Thunder marks its forward as one that a backward follows."""
    fake_ranks(2)
    before = gc.get_threshold()
    with torch.set_grad_enabled(grad):
        thunder.jit(shardtrace.fsdp(net()))(torch.randn(4, 4))
        assert gc.get_threshold() == before
        cmodel = thunder.jit(shardtrace.fsdp(net()), transforms=[PassAfterLowering(keep_input)])
        with pytest.raises(AssertionError, match=r"the compiled step of .* could not be proven"):
            cmodel(torch.randn(4, 4))


def test_calls_that_cannot_be_proven(fake_ranks):
    fake_ranks(2)
    jitted = thunder.jit(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="needs a call"):
        shardtrace.prove(jitted)
    jitted(torch.ones(2, 2))
    with pytest.raises(ValueError, match="no sharded model"):
        shardtrace.prove(jitted)


def test_equal_expressions_have_one_number():
    numbers = Numbers()
    x, y = numbers.of("input", 0), numbers.of("input", 1)
    one, other = (numbers.of("sin", (), (numbers.of("add", (), (a, y)),)) for a in (x, y))
    assert one == numbers.of("sin", (), (numbers.of("add", (), (x, y)),)) != other
    assert numbers.difference(one, other) == (x, y)
    assert numbers.text(one) == "sin(add(input(0), input(1)))"


def test_a_difference_names_the_constant_the_results_and_the_source(fake_ranks):
    def wrong(trace):
        def halved(line):
            return line.from_bsym(args=tuple(0.25 if type(a) is float and a == 0.5 else a for a in line.args))

        new = from_trace(trace)
        new.bound_symbols = [halved(line) for line in trace.bound_symbols]
        return new

    class Scaled(Net):
        def forward(self, x):
            y = super().forward(x)
            y = torch.sin(F.layer_norm(y, y.shape[-1:], eps=0.5))
            return y, y + 1

    fake_ranks(2)
    model = shardtrace.fsdp(Scaled(), checks=UNCHECKED)
    cmodel = thunder.jit(model, transforms=[PassAfterLowering(wrong)])
    cmodel(torch.randn(4, 4))
    proof = shardtrace.prove(cmodel)
    first = proof.differences[0]
    assert first.what[:2] == ("output 0", "output 1")
    assert (first.found.count("0.25"), first.expected.count("0.5")) == (1, 1)
    assert first.found.replace("0.25", "0.5") == first.expected
    assert "test_prove.py:" in first.place
    assert "output 0 and " in str(proof)
    assert "\n    the step computes " in str(proof)


def test_expressions_as_a_reader_sees_them():
    numbers = Numbers()
    x = numbers.of("input", 0)
    operands = []
    with tracectx(TraceCtx()):
        a = TensorProxy("a", shape=(2,), device=cpu, dtype=float32)
    shape = arguments_of((a, (6,)), {"eps": 1e-5}, operands)
    assert operands == ["a"]
    norm = numbers.of("kernels.norm", shape, (x,))
    assert numbers.text(norm) == "norm(input(0), (6,), eps=1e-05)"
    assert numbers.text(numbers.of("result", 1, (norm,))) == "norm(input(0), (6,), eps=1e-05)[1]"
    assert numbers.text(numbers.of("draw", (2, "torch.dropout", shape), (norm,)), 1).endswith("(draw 2)")
