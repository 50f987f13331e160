"""ZeRO-3: nothing unsharded is saved for backward, however the model uses its parameters."""

import shardtrace
from passes.analysis.recognise import names, unsharded_values

import pytest
import thunder
import torch
import torch.nn.functional as F
from golden import compile_fake, stage
from models import Block, Zoo, tokens
from thunder.core.symbol import BoundSymbolTag
from torch import nn


class Uses(nn.Module):
    """One weight (4, 4), used by ``how``."""

    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.gain = nn.Parameter(torch.ones(4, 1))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.how = how

    def forward(self, x):
        return self.how(self, torch.tanh(x))


USES = {
    "linear": lambda m, x: F.linear(x, m.weight),
    "matmul": lambda m, x: x @ m.weight,
    "transpose": lambda m, x: x @ m.weight.t(),
    "view": lambda m, x: x @ m.weight.view(2, 8).reshape(4, 4),
    "slice": lambda m, x: x[:, :2] @ m.weight[1:3],
    "chunk": lambda m, x: x[:, :2] @ m.weight.chunk(2)[0] + x[:, :2] @ m.weight.chunk(2)[1],
    "cast": lambda m, x: (x.to(torch.bfloat16) @ m.weight.to(torch.bfloat16)).float(),
    "cast and transpose": lambda m, x: (x.double() @ m.weight.t().double()).float(),
    "broadcast product": lambda m, x: x.reshape(1, 4, 4) * m.weight * torch.sigmoid(x),
    "layer norm": lambda m, x: F.layer_norm(x, (4,), m.weight[0], m.weight[1]),
    "rms norm": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * m.weight[0],
    "weight norm": lambda m, x: F.linear(x, m.gain * m.weight / m.weight.norm(dim=1, keepdim=True)),
    "embedding": lambda m, x: F.embedding(torch.arange(4), m.weight) * x,
    "einsum": lambda m, x: torch.einsum("ij,jk->ik", x, m.weight),
    "conv": lambda m, x: F.conv1d(x[None], m.weight[:, :, None]),
    "mask": lambda m, x: x @ (m.weight * m.mask),
    "dequantize": lambda m, x: x @ (m.weight.to(torch.int8).float() * m.mask),
    "cast mask": lambda m, x: x @ (m.weight * m.mask[:4].to(m.weight.dtype)),
    "causal mask": lambda m, x: x @ (m.weight * torch.ones(4, 4).tril()),
    "index": lambda m, x: x @ m.weight[torch.arange(4)],
    "two parameters": lambda m, x: x @ (m.weight @ m.weight.t() * m.gain),
}


def saved_unsharded(cmodel):
    """The saved values that forward computes only from parameters, except for the model's outputs."""
    trace = stage(cmodel, "schedule")
    (result, (saved, _)) = trace.bound_symbols[-1].args
    return names(saved) & unsharded_values(trace).keys() - names(result["output"])


def gathers(cmodel, phase):
    return [c.bucket for c in shardtrace.collectives(cmodel) if c.kind == "all_gather" and c.phase == phase]


@pytest.mark.parametrize("how", USES)
def test_nothing_unsharded_is_saved(fake_ranks, how):
    fake_ranks(2)
    cmodel = compile_fake(lambda: Uses(USES[how]), torch.randn(4, 4, requires_grad=True))
    assert not saved_unsharded(cmodel)
    forward, (backward,) = stage(cmodel, "schedule"), thunder.last_backward_traces(cmodel)[-1:]
    (_, (saved, _)) = forward.bound_symbols[-1].args
    shards = {"t_weight": (2, 4), "t_gain": (2, 1)}
    assert {p.name: tuple(p.shape) for p in saved if p.name in shards}.items() <= shards.items()
    assert any(b.sym.name == "all_gather" for b in backward.bound_symbols)


def test_zero2_saves_the_gathered_parameter_instead(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(
        lambda: Uses(USES["linear"]), torch.randn(4, 4, requires_grad=True), sharding_strategy="zero2"
    )
    assert saved_unsharded(cmodel)
    assert gathers(cmodel, "backward") == []


def test_blocks_are_gathered_again_in_reverse(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(Zoo, *tokens(2))
    assert gathers(cmodel, "forward") == ["embedding..root", "blocks.0", "blocks.1", "root"]
    # the root, which is only added, is not needed again
    assert gathers(cmodel, "backward") == ["embedding..root", "blocks.1", "blocks.0"]
    assert not saved_unsharded(cmodel)


def test_under_autocast(fake_ranks):
    fake_ranks(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Block(8))
    cmodel = thunder.jit(shardtrace.fsdp(model))
    with torch.autocast("cpu", torch.bfloat16):
        cmodel(torch.randn(3, 8)).sum().backward()
    assert not saved_unsharded(cmodel)
    assert any("bf16" in p.type_string() for p in stage(cmodel, "schedule").bound_symbols[-1].args[1][0])


def test_random_functions_of_parameters_are_not_drawn_again(fake_ranks):
    """DropConnect: the dropped weight is saved, because a second mask would differ."""
    fake_ranks(2)
    cmodel = compile_fake(
        lambda: Uses(lambda m, x: F.linear(x, F.dropout(m.weight, 0.5))), torch.randn(4, 4, requires_grad=True)
    )
    backward = thunder.last_backward_traces(cmodel)[-1]
    assert not any("uniform" in b.sym.name or "rand" in b.sym.name for b in backward.bound_symbols)


def test_views_of_parameters_that_are_returned(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(Uses(lambda m, x: (x @ m.weight.t(), m.weight.t()))))
    y, weight = cmodel(torch.randn(4, 4, requires_grad=True))
    assert weight.shape == (4, 4)
    (y.sum() + weight.sum()).backward()
    assert gathers(cmodel, "forward") == ["root"]


def test_tags(fake_ranks):
    fake_ranks(2)
    trace = stage(compile_fake(lambda: Uses(USES["cast"]), torch.randn(4, 4, requires_grad=True)), "regather")
    tagged = [b.sym.name for b in trace.bound_symbols if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in b.tags]
    assert tagged == ["synchronize", "to"]


class Tower(nn.Module):
    """A tower over images, or over what takes their place on a rank that has none."""

    def __init__(self, first, dummy=None):
        super().__init__()
        self.first, self.dummy = first, dummy
        self.tower = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 6))
        self.out = nn.Linear(6, 3)
        self.register_buffer("constant", torch.zeros(3, 5, 4))

    def forward(self, x, image=None):
        image = image if image is not None else self.dummy(self, x)
        return self.out(x + 0 * self.tower(self.first(image)).mean(1))


FIRST = {  # by what it takes: rows of 4, channels, or ids
    "linear": lambda: nn.Linear(4, 8),
    "norm": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8)),
    "conv": lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.Linear(4, 8)),
    "ids": lambda: nn.Embedding(7, 8),
}
DUMMIES = {
    "zeros": ("linear", lambda m, x: torch.zeros(len(x), 5, 4)),
    "ones": ("norm", lambda m, x: torch.ones(3, 5, 4)),
    "new_zeros": ("conv", lambda m, x: x.new_zeros(3, 5, 4)),
    "buffer": ("norm", lambda m, x: m.constant),
    "ids": ("ids", lambda m, x: torch.zeros(3, 5, dtype=torch.long)),
}


@pytest.mark.parametrize("how", DUMMIES)
def test_a_rank_without_an_image_gathers_what_others_gather(fake_ranks, how):
    fake_ranks(2)
    first, dummy = DUMMIES[how]
    sent = []
    for image in (None, torch.zeros(3, 5, dtype=torch.long) if first == "ids" else torch.randn(3, 5, 4)):
        model = shardtrace.fsdp(Tower(FIRST[first](), dummy), bucketing_strategy="layer")
        model(torch.randn(3, 6), image).sum().backward()
        sent.append([(c.kind, c.phase, c.bucket) for c in shardtrace.collectives(model)])
    assert sent[0] == sent[1]
