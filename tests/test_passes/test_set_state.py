"""What forward leaves on modules is set when the step has run."""

import shardtrace
from passes.borders import set_state

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, text
from thunder.core.trace import TraceCtx
from torch import nn


class Keeps(nn.Module):
    """Leaves a loss, a tensor without a gradient and a number on itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.loss, self.last, self.kind = nn.Linear(4, 4), None, None, ""

    def forward(self, x):
        y = self.linear(x)
        self.loss, self.last, self.kind = y.pow(2).sum(), x + 1, "seen"
        return torch.tanh(y)


def test_golden(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(Keeps, torch.ones(2, 4))
    assert_expected_inline(
        text(thunder.compile_stats(cmodel).last_epilogue_traces[-1]),
        """\
set_state(shardtrace_state_0, (t0, t1))
watch_backward((t0, t1, t2), backward)
return t2""",
    )


def test_without_setters_the_epilogue_is_the_same():
    trace = TraceCtx()
    assert set_state(trace, setters={}) is trace


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_flow_through_what_was_set(single_rank, steps):
    torch.manual_seed(0)
    net = Keeps()
    cmodel = thunder.jit(shardtrace.fsdp(net))
    for _ in range(steps):
        x = torch.randn(2, 4)
        net.kind = ""
        y = cmodel(x)
        torch.testing.assert_close(net.loss, net.linear(x).pow(2).sum())
        assert torch.equal(net.last, x + 1)
        assert net.kind == "seen"
        net.zero_grad()
        (net.loss + y.sum()).backward()
        found = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        z = net.linear(x)
        (z.pow(2).sum() + torch.tanh(z).sum()).backward()
        torch.testing.assert_close(found, [p.grad for p in net.parameters()])
    assert thunder.cache_misses(cmodel) == min(steps, 2)  # a forward may ask whether there is a loss: once more
