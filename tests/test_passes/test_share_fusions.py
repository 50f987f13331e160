"""Equal fusions are compiled once."""

from passes.blocks import share_fusions
from passes.compat.jit import function_of
from passes.pipeline import PassAfterLowering

import pytest
import thunder
import torch
from eager import uncompiled

EXECUTORS = ["sdpa", "torch_kernels", "torchcompile"]


def fusions(trace):
    return [b for b in trace.bound_symbols if b.sym.is_fusion]


def apart(x):
    """A function that no executor fuses keeps two fusions apart."""
    return torch.nn.functional.batch_norm(x, None, None, training=True)


def step(x, *weights):
    for w in weights:
        x = torch.tanh(apart(x) @ w) * 2 + x
    return x


@pytest.fixture(scope="module")
def compiled():
    """The step with and without the pass: the jitted function, its result and its gradients."""

    def run(*transforms):
        torch.manual_seed(0)
        values = [torch.randn(4, 4, requires_grad=True) for _ in range(5)]
        jitted = thunder.jit(step, executors=EXECUTORS, transforms=list(transforms))
        out = jitted(*values)
        out.sum().backward()
        return jitted, [out.detach(), *(v.grad for v in values)]

    with uncompiled():
        return run(), run(PassAfterLowering(share_fusions))


def test_results_are_the_same(compiled):
    (_, wanted), (_, found) = compiled
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("traces", [thunder.last_traces, thunder.last_backward_traces])
def test_equal_fusions_call_one_function(compiled, traces):
    (plain, _), (shared, _) = compiled
    before, after = (fusions(traces(jitted)[-1]) for jitted in (plain, shared))
    assert len(before) == len(after)
    assert len({id(function_of(b)) for b in before}) == len(before)
    assert len({id(function_of(b)) for b in after}) < len(after)


def test_inputs_in_another_order():
    """The regions of x * a + b and of b * a + x have the same lines."""

    def two(x, a, b):
        y = x * a + b
        z = apart(y)
        return b * a + z

    values = [torch.randn(3, 3) for _ in range(3)]
    jitted = thunder.jit(two, executors=EXECUTORS, transforms=[PassAfterLowering(share_fusions)])
    assert torch.allclose(jitted(*values), two(*values))


def test_unequal_fusions_stay_apart():
    def unequal(x):
        y = torch.tanh(x) * 2
        y = torch.tanh(apart(y)) * 3  # another number
        y = torch.tanh(apart(y)[:2]) * 2  # another shape
        return torch.sigmoid(apart(y)) * 2  # another line

    x = torch.randn(3, 3)
    jitted = thunder.jit(unequal, executors=EXECUTORS, transforms=[PassAfterLowering(share_fusions)])
    with uncompiled():
        assert torch.allclose(jitted(x), unequal(x), atol=1e-6)
    found = fusions(thunder.last_traces(jitted)[-1])
    assert len({id(function_of(b)) for b in found}) == len(found)
