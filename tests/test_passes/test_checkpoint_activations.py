"""Checkpointed blocks save only inputs and random numbers. Gradients are bit for bit those without checkpoints."""

import shutil

import shardtrace
from passes.analysis.calls import block_function
from passes.analysis.recognise import is_random, names
from passes.analysis.verify import VerificationError, verify

import models
import pytest
import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from ranks import on_ranks
from thunder.core.symbol import BoundSymbolTag
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Block(nn.Module):
    """Two layers with ``how(block, x)`` between, and a composite symbol at the end."""

    def __init__(self, how):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.how = how

    def forward(self, x):
        y = self.how(self, torch.tanh(self.up(x)))
        return y if isinstance(y, dict) else F.gelu(self.down(y))


class Net(nn.Module):
    def __init__(self, how=lambda block, x: x, calls=(0,)):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(how) for _ in set(calls)])
        self.calls = calls

    def forward(self, x):
        x = self.first(x)
        for call in self.calls:
            x = self.blocks[call](x)
            x = x["y"] * x["z"].sum() if isinstance(x, dict) else x
        return x


class Checkpoints(Net):
    """Calls torch's own function."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def attention(block, x):
    heads = x.reshape(2, 2, 2, WIDTH)
    return F.scaled_dot_product_attention(heads, torch.sin(heads), heads, dropout_p=0.4).reshape(x.shape)


def in_place(block, x):
    y = torch.sin(x)
    y.mul_(2.0)
    return y * y


def without_grad(block, x):
    with torch.no_grad():
        return F.dropout(x, 0.5)


def sampled(block, x):
    with torch.no_grad():
        rows = torch.multinomial(torch.softmax(x[:, 0], 0), 8, True)
    return x[rows]


# how a block computes, and the dtypes of the values that are saved besides its inputs
HOW = {
    "dropout": (lambda b, x: F.dropout(torch.sin(F.dropout(x, 0.3)), 0.3), ["bool8", "bool8"]),
    "attention": (attention, ["bool8"]),
    "bernoulli": (lambda b, x: x * torch.bernoulli(torch.sigmoid(x)), ["float32"]),
    "rand_like": (lambda b, x: torch.where(torch.rand_like(x) > 0.5, x, torch.sin(x)), ["bool8"]),
    "small noise": (lambda b, x: x * torch.randn(1, WIDTH).expand(8, WIDTH), ["float32"]),
    "multinomial": (sampled, ["int64"]),
    "no grad": (lambda b, x: b.up(x) * without_grad(b, x), ["bool8"]),
    "batch norm": (lambda b, x: b.norm(x), []),
    "in place": (in_place, []),  # a value is made anew: nothing is written into
    "checkpoint inside": (
        lambda b, x: checkpoint(lambda t: F.dropout(b.up(t), 0.5), x, use_reentrant=False),
        ["bool8"],
    ),
    "several results": (lambda b, x: {"y": torch.exp(x), "z": F.softmax(x, -1)}, ["float32"] * 3),
}


def step(model, *, executors=None, **options):
    """The result of a step with all gradients and buffers, and the jitted model."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    cmodel = thunder.jit(shardtrace.fsdp(model, **options), executors=executors)
    x = torch.randn(8, WIDTH, requires_grad=True)
    y = cmodel(x)
    (y * y).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *gradients, *model.buffers()], cmodel


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def close(found, expected):
    return all(torch.allclose(f, e, atol=1e-4, rtol=1e-4) for f, e in zip(found, expected, strict=True))


def saved(cmodel):
    """The dtypes of the saved activations, those of calls of blocks among them."""
    forward = thunder.last_traces(cmodel)[-1]
    _, (tensors, others) = forward.bound_symbols[-1].args
    for bsym in forward.bound_symbols:
        if block_function(bsym) is not None and names(bsym.output) & names(others):
            tensors += tuple(block_function(bsym).trace.bound_symbols[-1].args[0][-1])
    return sorted(f"{p.dtype}".removeprefix("thunder.dtypes.") for p in tensors if not p.name.startswith("t_"))


def backward(cmodel):
    return thunder.last_backward_traces(cmodel)[-1]


@pytest.mark.parametrize("how", HOW)
def test_only_inputs_and_random_numbers_are_saved(single_rank, how):
    name, (how, others) = how, HOW[how]
    expected, _ = step(Net(how))
    found, cmodel = step(Net(how), activation_checkpointing=Block)
    # the kernel of a batch norm updates its buffers, so that its parts are recomputed instead
    assert close(found, expected) if name == "batch norm" else same(found, expected)
    inputs = ["float32"] * 2  # of the block and of the first layer
    assert saved(cmodel) == sorted([*inputs, *others])
    drawn = [b.sym.name for b in backward(cmodel).bound_symbols if is_random(b) and "vjp" not in b.sym.name]
    assert not drawn


@pytest.mark.parametrize("executors", [["sdpa", "torchcompile"], ["torch"]])
def test_executors(single_rank, monkeypatch, executors):
    """Fuses regions, but runs them uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def how(block, x):
        return attention(block, F.dropout(x, 0.3)) * torch.randn(1, WIDTH).expand(8, WIDTH)

    expected, _ = step(Net(how), executors=executors)
    found, cmodel = step(Net(how), activation_checkpointing=Block, executors=executors)
    assert same(found, expected)
    assert saved(cmodel) == ["bool8", "bool8", "float32", "float32", "float32"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_regions(single_rank):
    """Random numbers are drawn once, whatever draws them: a dropped input gets no gradient."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Dropout(0.5)])
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.blocks[0](x * self.scale)

    model = shardtrace.fsdp(Dropped(), activation_checkpointing=True)
    cmodel = thunder.jit(model, executors=["sdpa", "torchcompile"])
    x = torch.ones(64, requires_grad=True)
    y = cmodel(x)
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_a_model_that_checkpoints_itself(single_rank):
    how, others = HOW["dropout"]
    expected, _ = step(Net(how))
    found, cmodel = step(Checkpoints(how))
    assert same(found, expected)
    assert saved(cmodel).count("bool8") == len(others)


@pytest.mark.parametrize("chosen", [(Block, nn.Linear), lambda m: isinstance(m, (Net, Block))])
def test_blocks_in_blocks_and_blocks_called_twice(single_rank, chosen):
    """The outer block counts. The whole model may be a block."""
    expected, _ = step(Net(HOW["dropout"][0], calls=(0, 1, 0)))
    found, cmodel = step(Net(HOW["dropout"][0], calls=(0, 1, 0)), activation_checkpointing=chosen)
    assert same(found, expected)
    inputs = ["float32"] * (4 if isinstance(chosen, tuple) else 1)
    assert saved(cmodel) == sorted([*inputs, *["bool8"] * 6])


def test_backward(fake_ranks):
    """The bucket is gathered once, before its block is computed again; the mask comes from forward."""
    fake_ranks(2)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
    cmodel = compile_fake(
        lambda: nn.Sequential(block), torch.randn(2, 4), activation_checkpointing=lambda name, module: name == "0"
    )
    assert_expected_inline(
        text(backward(cmodel), dels=False),
        """\
C0, C1, = saved_for_backward
clear_mutable_collection(saved_for_backward)
clear_mutable_collection(C1)
t0, = cotangents
clear_mutable_collection(cotangents)
t_0_3_weight, t_0_3_bias, t_0_0_weight, t_0_0_bias, input, t1, = C0
clear_mutable_collection(C0)
bw_ft2 = all_gather((t_0_3_weight, t_0_3_bias), b_0_3)
bw_ft3 = all_gather((t_0_0_weight, t_0_0_bias), b_0_0)
(bw_t4, bw_t5) = wait_all_gather(bw_ft2, b_0_3)
t6 = aten_mm(t0, bw_t4)
t7 = aten_t(t0)
(bw_t8, bw_t9) = wait_all_gather(bw_ft3, b_0_0)
bw_t10 = torch_linear_0(input, bw_t8, bw_t9)
bw_t11 = torch_tanh_0(bw_t10)
t12 = dropout(bw_t11, t1, 2.0)
t13 = aten_mm(t7, t12)
t14 = aten_sum_dim_IntList(t0, [0], True)
t15 = aten_view(t14, [4])
ft16 = reduce_scatter((t13, t15), b_0_3)
t17 = dropout(t6, t1, 2.0)
t18 = aten_tanh_backward(t17, bw_t11)
t19 = aten_t(t18)
t20 = aten_mm(t19, input)
t21 = aten_sum_dim_IntList(t18, [0], True)
t22 = aten_view(t21, [4])
ft23 = reduce_scatter((t20, t22), b_0_0)
(t24, t25) = wait_reduce_scatter(ft16, b_0_3)
(t26, t27) = wait_reduce_scatter(ft23, b_0_0)
return (None, t27, t26, t25, t24)""",
    )


def test_tags(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(lambda: Net(HOW["dropout"][0]), torch.randn(2, WIDTH), activation_checkpointing=1)
    lines = [b for b in stage(cmodel, "checkpoint_activations").bound_symbols if b.flat_proxy_args]
    again = ["again" if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in b.tags else "once" for b in lines]
    shown = "\n".join(f"{when:5} {b.sym.name}" for when, b in zip(again, lines, strict=True))
    assert_expected_inline(
        shown,
        """\
once  synchronize
once  torch_linear_0
once  synchronize
again torch_linear_1
again torch_tanh_0
again dropout
again torch_sin_0
again dropout
again torch_linear_1
once  torch_gelu_0
once  python_return""",
    )


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "owner"])
def test_each_bucket_is_gathered_as_often_as_without(fake_ranks, strategy):
    fake_ranks(2)
    options = {"sharding_strategy": strategy, "activation_checkpointing": Block}
    cmodel = compile_fake(lambda: Net(calls=(0, 1)), torch.randn(2, WIDTH), **options)
    rows = [(row.phase, row.kind, row.bucket) for row in shardtrace.collectives(cmodel)]
    blocks, gather = ["blocks.0", "blocks.1"], "broadcast" if strategy == "owner" else "all_gather"
    assert [b for phase, kind, b in rows if (phase, kind) == ("forward", gather)] == ["first", *blocks]
    again = [b for phase, kind, b in rows if (phase, kind) == ("backward", gather)]
    assert again == ([] if strategy == "zero2" else blocks[::-1])


def test_a_block_that_is_sharded_by_itself(fake_ranks):
    fake_ranks(2)
    net = Net()
    shardtrace.fsdp(net.blocks[0])
    cmodel = compile_fake(lambda: net, torch.randn(2, WIDTH), activation_checkpointing=Block)
    assert saved(cmodel) == ["float32"] * 2


def test_predicted_memory(fake_ranks):
    fake_ranks(2)
    peaks = []
    for checkpointing in (None, True):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)))
        cmodel = compile_fake(lambda m=model: m, torch.randn(256, 8), activation_checkpointing=checkpointing)
        peaks.append(shardtrace.memory(cmodel).peak)
    assert peaks[1] < 0.7 * peaks[0]


def test_what_is_computed_again_is_not_saved(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(Net, torch.randn(2, WIDTH), activation_checkpointing=Block)
    trace = stage(cmodel, "schedule")
    again = next(b for b in trace.bound_symbols if b.sym.name == "torch_tanh_0")
    *_, last = trace.bound_symbols
    result, (tensors, other) = last.args
    trace.bound_symbols = [b for b in trace.bound_symbols[:-1] if b.sym.name != "python_del"]
    trace.bound_symbols.append(last.from_bsym(args=(result, ((*tensors, again.output), other))))
    with pytest.raises(VerificationError, match="is to be computed again"):
        verify(trace)


class Dropped(nn.Module):
    """Zoo's block with dropout."""

    def __init__(self):
        super().__init__()
        self.block = models.Block()

    def forward(self, x):
        return F.dropout(self.block(x), 0.2)


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "precision", "bucketing"),
    [("zero3", None, "block"), ("zero3", "bf16", "none"), ("owner", None, "block")],
)
def test_two_ranks(strategy, precision, bucketing):
    """Gradients of a step are those without checkpointing, bit for bit."""
    found = []
    for checkpointing in (None, Dropped):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Dropped(), Dropped())
        options = {"sharding_strategy": strategy, "mp_policy": precision, "bucketing_strategy": bucketing}
        shardtrace.fsdp(model, activation_checkpointing=checkpointing, **options)
        cmodel = thunder.jit(model)
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            cmodel(torch.randn(3, 6)).float().pow(2).mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
