"""What no gradient reaches has no gradient, as in eager mode: optimizers leave it alone."""

import copy
import re
from contextlib import nullcontext

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from golden import compile_fake, stage
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x):
        x = self.body(x).tanh()
        return {"first": self.heads[0](x), "second": self.heads[1](x), "number": 3}


def without_gradient(model):
    """Names of parameters, of which a rank may hold no row."""
    return {name for name, p in model.named_parameters() if p.grad is None and p.numel()}


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp", "owner"])
def test_momentum_and_decay_as_in_eager_mode(strategy):
    eager = Heads()
    model = shardtrace.fsdp(copy.deepcopy(eager), sharding_strategy=strategy)
    cmodel, x = thunder.jit(model), torch.randn(3, 4)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-2) for m in (eager, model)]
    for keys in (("first", "second"), ("first",), ("second",), ("second", "first")):
        for run, optimizer in zip((eager, cmodel), optimizers, strict=True):
            optimizer.zero_grad()
            out = run(x)
            sum(out[key].square().sum() for key in keys).backward()
            optimizer.step()
        none = [[n for n, p in m.named_parameters() if p.grad is None] for m in (eager, model)]
        assert none[0] == none[1]
    found = shardtrace.full_state_dict(model)
    torch.testing.assert_close(dict(found), dict(eager.state_dict()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_ranks_that_use_different_outputs():
    """The mean over ranks, of which one has no gradient."""
    eager = Heads()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    for key in ("first", "second"):
        eager(x)[key].sum().backward()
    thunder.jit(model)(x)["first" if dist.get_rank() else "second"].sum().backward()
    expected = {name: p.grad / 2 for name, p in eager.named_parameters()}
    torch.testing.assert_close(shardtrace.full_gradients(model), expected)


class Experts(nn.Module):
    """Run by PyTorch: the values of ``chosen`` say which experts compute."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, chosen):
        for i in chosen.unique().tolist():
            x = x + self.experts[i](x) * (chosen == i)[:, None]
        return x


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.side = nn.ModuleList(Experts() for _ in range(2)), nn.Linear(4, 2)

    def forward(self, x, chosen):
        for layer in self.layers:
            x = layer(x.tanh(), chosen)
        return x, self.side(x)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_experts_without_tokens_on_some_ranks_are_as_under_ddp(strategy):
    """Each rank chooses other experts. No_sync sums two of the steps."""
    eager = Mixture()
    model = shardtrace.fsdp(copy.deepcopy(eager), sharding_strategy=strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.3) for m in (eager, model)]
    replicated = DDP(eager, find_unused_parameters=True)
    x = torch.randn(4, 4)
    for choices, reduced in (([0, 1], True), ([2, 2], False), ([2, 0], True), ([3, 0], True)):
        chosen = torch.full((4,), choices[dist.get_rank()])
        for run in (replicated, model):
            with nullcontext() if reduced else run.no_sync():
                run(x, chosen)[0].square().mean().backward()
        if reduced:
            assert without_gradient(model) == without_gradient(eager) > {"side.bias"}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(eager.state_dict()), rtol=1e-5, atol=1e-5)


class Stop(torch.autograd.Function):
    """No gradient for its second argument, and none for both if ``everything``."""

    @staticmethod
    def forward(ctx, x, w, everything=False):
        ctx.everything = everything
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        return None if ctx.everything else gradient, None, None


class Pair(nn.Module):
    """A block with two results, run by PyTorch if it ``reads`` values."""

    def __init__(self, reads):
        super().__init__()
        self.f, self.g, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), reads

    def forward(self, x, y):
        a = x + self.f(x + y)
        if self.reads and not torch.isfinite(a).all():
            a = a.clamp(-1, 1)
        return a, y + self.g(x)


class Ends(nn.Module):
    """Ends by one of ``ENDS``, after blocks of which the last one's second result may be unused."""

    def __init__(self, end, reads=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.w, self.end = nn.ModuleList(Pair(reads) for _ in range(3)), nn.Linear(4, 4), end

    def forward(self, x):
        y = x
        for block in self.blocks:
            x, y = block(x, y)
        return self.end(x, y, self.w.weight)


ENDS = {
    "the second result is unused": lambda x, y, w: x @ w,
    "both are results": lambda x, y, w: (x @ w, y),
    "a function without a gradient for one": lambda x, y, w: x + Stop.apply(y, w),
    "of what was computed": lambda x, y, w: x + Stop.apply(y, (2 * w).tanh()),
    "for none": lambda x, y, w: x + Stop.apply(y, w, True),
    "one of two broadcast tensors": lambda x, y, w: x + torch.broadcast_tensors(y, w[0])[1],
    "dropout of everything": lambda x, y, w: x + F.dropout(y @ w, 1.0),
    "attention that drops everything": lambda x, y, w: (
        x + F.scaled_dot_product_attention(x[None, None], y[None, None], (y @ w)[None, None], dropout_p=1.0)[0, 0]
    ),
    "zeros": lambda x, y, w: x + (y @ w).sign(),
    "written over": lambda x, y, w: x + (y @ w).zero_(),
}


@pytest.mark.parametrize(("end", "reads"), [*((end, False) for end in ENDS), *((end, True) for end in list(ENDS)[:2])])
def test_none_where_eager_has_none(single_rank, end, reads):
    eager = Ends(ENDS[end], reads)
    model = shardtrace.fsdp(copy.deepcopy(eager))
    given = [torch.ones(4, 4, requires_grad=True) for _ in range(2)]
    for run, x in zip((eager, model), given, strict=True):
        out = run(x)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
    assert without_gradient(model) == without_gradient(eager)
    torch.testing.assert_close(given[1].grad, given[0].grad)
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


@on_ranks(2)
def test_sums_of_no_sync_are_kept():
    """The step that reduces does not use an output that a step before it has used; or no step has used it."""
    eager = Heads()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    cmodel, x = thunder.jit(model), torch.randn(3, 4)
    for last in ("second", "first"):
        eager.zero_grad()
        model.zero_grad()
        eager(x)["first"].sum().backward()
        eager(x)[last].sum().backward()
        with model.no_sync():
            cmodel(x)["first"].sum().backward()
        cmodel(x)[last].sum().backward()
        assert without_gradient(model) == without_gradient(eager)
        expected = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
        torch.testing.assert_close(dict(shardtrace.full_gradients(model)), expected)


def test_lines(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(Heads()))
    cmodel(torch.ones(3, 4))["first"].sum().backward()
    trace = stage(cmodel, "drop_unused", thunder.last_backward_traces)
    for name in ("mark_unused", "unless_unused"):
        added = [b for b in trace.bound_symbols if b.sym.name == name]
        assert sorted(sorted(b.args[1].obj.sources) for b in added) == [[0], [0], [1], [1]]
    printed = str(trace)
    assert re.search(r"# unless_unused in 4 lines, None if no gradient has come on any rank: t\d+ = t\d+,", printed)
    assert re.search(
        r"  # mark_unused in 2 lines, minus zero if no gradient has come: t\d+ = t\d+, t\d+ = t\d+\n", printed
    )
    assert "unused(" not in printed
    one = compile_fake(lambda: nn.Linear(4, 4), torch.ones(3, 4))
    assert "unused" not in str(thunder.last_backward_traces(one)[-1])
