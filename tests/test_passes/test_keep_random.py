"""Backward reads the random numbers that forward draws, whatever executes the trace."""

import shardtrace

import pytest
import thunder
import torch
import torch.nn.functional as F
from golden import compile_fake, stage
from thunder.core.prims import OpTags
from thunder.core.symbol import has_tags
from torch import nn

# each is linear in z: the gradient of its sum shows the numbers that backward read
LINEAR = {
    "randn_like": lambda z: z * torch.sin(torch.randn_like(z)),
    "randint": lambda z: z * torch.randint(0, 5, z.shape),
    "rand_like": lambda z: torch.where(torch.rand_like(z) > 0.5, z, 2 * z),
    "bernoulli": lambda z: z * torch.bernoulli(torch.full_like(z, 0.5)),
    "poisson": lambda z: z * torch.poisson(torch.exp(z.detach())),
    "dropout": lambda z: F.dropout(z, 0.5),
    "attention": lambda z: F.scaled_dot_product_attention(*[torch.ones(2, 1, 4, 4)] * 2, z, dropout_p=0.5),
}


def attention(z, dropout):
    q, bias = z[:, 0], torch.zeros(4)
    into, out = torch.ones(12, 4), torch.ones(4, 4)
    return F.multi_head_attention_forward(q, q, q, 4, 1, into, None, None, None, False, dropout, out, bias)[0]


# functions whose gradient Thunder would take from numbers drawn anew
DRAWN_AGAIN = {
    "dropout2d": lambda z: F.dropout2d(z, 0.5),
    "alpha_dropout": lambda z: F.alpha_dropout(z, 0.5, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "multi_head_attention_forward": lambda z: attention(z, 0.5),
}


class Net(nn.Module):
    """Applies each function of ``how`` to a product. The fusions of forward and of backward then have values to share."""

    def __init__(self, *how):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4) for _ in how])
        self.how = how

    def forward(self, x):
        return torch.stack([how(x * weight) for how, weight in zip(self.how, self.weights, strict=True)])


@pytest.mark.parametrize(
    ("executors", "strategy"),
    [(None, "zero3"), (["sdpa", "torchcompile"], "zero3"), (["sdpa", "torchcompile"], "zero2")],
)
def test_backward_reads_what_forward_drew(single_rank, monkeypatch, executors, strategy):
    """If a function is linear in z = x * w, the gradient for w, times w, sums up to the result."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # fusions run uncompiled
    monkeypatch.setenv("SHARDTRACE_PROVE", "0")  # fusions reorder equal draws: docs/proof.md, "Unproven"
    torch.manual_seed(0)
    model = shardtrace.fsdp(Net(*LINEAR.values()), sharding_strategy=strategy)
    cmodel = thunder.jit(model, executors=executors)
    y = cmodel(torch.randn(2, 1, 4, 4))
    y.sum().backward()
    sums = [(w.grad * w).sum().item() for w in model.parameters()]
    found, expected = dict(zip(LINEAR, sums, strict=True)), dict(zip(LINEAR, y.sum((1, 2, 3, 4)).tolist(), strict=True))
    assert found == pytest.approx(expected, rel=1e-4)


def test_only_random_parts_are_tagged(fake_ranks):
    """The product of a dropout may be repeated; its mask may not."""
    fake_ranks(2)
    cmodel = compile_fake(lambda: Net(LINEAR["dropout"]), torch.ones(2, 4))
    (line,) = [b for b in stage(cmodel, "keep_random").bound_symbols if b.sym.name == "dropout"]
    assert OpTags.RANDOM_OP not in line.tags
    assert {part.sym.name: has_tags(part, {OpTags.RANDOM_OP}) for part in line.subsymbols} == {
        "uniform_like": True,
        "lt": False,
        "mul": False,
    }


def test_nothing_random(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(lambda: Net(torch.sin), torch.ones(2, 4))
    assert not any("keep_random" in str(t.get_provenance()) for t in thunder.last_traces(cmodel))


@pytest.mark.parametrize("name", DRAWN_AGAIN)
def test_in_a_model_their_gradients_are_those_of_torch(single_rank, name):
    """Equal to eager with the same seed."""

    def step(compiled):
        torch.manual_seed(0)
        net, x = Net(DRAWN_AGAIN[name]), torch.randn(2, 1, 4, 4)
        model = thunder.jit(shardtrace.fsdp(net)) if compiled else net
        torch.manual_seed(1)
        y = model(x)
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        return [y.detach(), *(p.grad for p in net.parameters())]

    torch.testing.assert_close(step(True), step(False), rtol=1e-5, atol=1e-5)  # sums of numbers in the thousands


@pytest.mark.parametrize("name", DRAWN_AGAIN)
def test_around_a_model_they_are_refused(fake_ranks, name):
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Linear(4, 4))
    step = thunder.jit(lambda x: DRAWN_AGAIN[name](model(x)))
    with pytest.raises(NotImplementedError, match=rf"^torch\.nn\.functional\.{name} is random"):
        step(torch.ones(2, 1, 4, 4))


def without_grad(z):
    with torch.no_grad():
        mask = F.dropout2d(torch.ones_like(z))
    return z * mask


@pytest.mark.parametrize(
    "how",
    [without_grad, lambda z: F.dropout2d(z, 0.5, training=False), lambda z: attention(z, 0.0)],
    ids=["no grad", "evaluated", "probability of 0"],
)
def test_around_a_model_where_no_harm_is_done(fake_ranks, how):
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Linear(4, 4))
    thunder.jit(lambda x: how(model(x)))(torch.ones(2, 1, 4, 4)).sum().backward()


def test_around_a_model_that_is_not_differentiated(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Linear(4, 4))
    with torch.no_grad():
        thunder.jit(lambda x: DRAWN_AGAIN["dropout2d"](model(x)))(torch.ones(2, 1, 4, 4))
