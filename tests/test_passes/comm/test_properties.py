"""Properties that shardtrace's symbols declare, and the bytes that their lines move."""

import shardtrace
from passes.analysis.flops import bytes_moved, flops, is_free
from passes.analysis.seconds import compute_seconds
from passes.plan import CostModel, Device, Link

import pytest
import thunder
import torch
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor
from torch import nn

ELEMENTS = 6 * 4 + 4
COST = CostModel(Link(bandwidth=1e3, latency=0.5), Device(flops=2e3, half_flops=8e3, bandwidth=1e3, overhead=0.25))


def line(trace, name):
    (found,) = [b for b in trace.bound_symbols if b.sym.name == name]
    return found


@pytest.mark.parametrize(("precision", "width"), [(None, 4), ("bf16", 2)])
def test_kept_gradients(fake_ranks, precision, width):
    """Gradients are read, and their sums in fp32 are read and written."""
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Linear(6, 4), mp_policy=precision)
    cmodel = thunder.jit(model)
    with model.no_sync():
        cmodel(torch.ones(3, 6)).sum().backward()
    kept = line(thunder.last_backward_traces(cmodel)[-1], "accumulate")
    cmodel(torch.ones(3, 6)).sum().backward()
    added = line(thunder.last_backward_traces(cmodel)[-1], "accumulated")
    expected = ELEMENTS * width + 2 * ELEMENTS * 4
    for found in (kept, added):
        assert bytes_moved(found) == expected
        assert compute_seconds(COST, found) == pytest.approx(0.25 + expected / 1e3)


@pytest.mark.parametrize(("precision", "moved"), [(None, 0), ("bf16", ELEMENTS * (4 + 2))])
def test_replicated_parameters(fake_ranks, precision, moved):
    """A cast reads the parameters and writes copies."""
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.ddp(nn.Linear(6, 4), mp_policy=precision))
    cmodel(torch.ones(3, 6)).sum().backward()
    found = line(thunder.last_traces(cmodel)[-1], "replicated")
    assert bytes_moved(found) == moved
    assert compute_seconds(COST, found) == pytest.approx(0.25 + moved / 1e3 if moved else 0)


def test_an_operator_costs_what_the_symbol_costs_that_it_is_like():
    """Its own name tells nothing: a user's ``reshape`` may copy."""
    executor = OperatorExecutor("test_properties")
    product = executor.register_operator("fast", like=thunder.torch.matmul, fn=torch.matmul)
    view = executor.register_operator("rows", like=thunder.torch.reshape, fn=torch.reshape)
    copy = executor.register_operator("reshape", meta=lambda x: TensorProxy(like=x), fn=torch.neg)
    jitted = thunder.jit(lambda x: copy(view(product(x, x), (16,))))
    jitted(torch.ones(4, 4))
    lines = thunder.last_traces(jitted)[-1].bound_symbols
    found = {b.sym.name: (flops(b), bytes_moved(b)) for b in lines if not is_free(b)}
    assert found == {"fast": (2 * 4**3, 2 * 64), "rows": (0, 0), "reshape": (0, 2 * 64)}
