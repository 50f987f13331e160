"""Outputs that a loss does not use: their parameters have no gradient, as in eager mode."""

import copy

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from golden import compile_fake, stage
from ranks import on_ranks
from torch import nn


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x):
        x = self.body(x).tanh()
        return {"first": self.heads[0](x), "second": self.heads[1](x), "number": 3}


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


@on_ranks(2)
def test_sums_of_no_sync_are_kept():
    """The step that reduces does not use an output that a step before it has used."""
    eager = Heads()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    cmodel, x = thunder.jit(model), torch.randn(3, 4)
    eager(x)["first"].sum().backward()
    eager(x)["second"].sum().backward()
    with model.no_sync():
        cmodel(x)["first"].sum().backward()
    cmodel(x)["second"].sum().backward()
    torch.testing.assert_close(shardtrace.full_gradients(model), {name: p.grad for name, p in eager.named_parameters()})


def test_lines(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(Heads()))
    cmodel(torch.ones(3, 4))["first"].sum().backward()
    trace = stage(cmodel, "drop_unused", thunder.last_backward_traces)
    added = [b for b in trace.bound_symbols if b.sym.name == "unless_unused"]
    assert [sorted(b.args[1].obj.outputs) for b in added] == [[0], [0], [1], [1]]
    one = compile_fake(lambda: nn.Linear(4, 4), torch.ones(3, 4))
    assert "unless_unused" not in str(thunder.last_backward_traces(one)[-1])
