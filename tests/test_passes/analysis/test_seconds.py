from dataclasses import replace

from passes.analysis.flops import bytes_made, bytes_moved, flops
from passes.analysis.recognise import bucket_of, is_issue
from passes.analysis.seconds import compute_seconds
from passes.plan import CostModel, Device, Link

import pytest
import thunder
import torch
from golden import compile_fake
from torch import nn

MODEL = CostModel(Link(bandwidth=1000.0, latency=0.5), Device(flops=2e3, half_flops=8e3, bandwidth=1e3, overhead=0.25))


def product(dtype):
    """The lowered line of a matrix product."""
    jitted = thunder.jit(torch.matmul)
    jitted(torch.ones(3, 4, dtype=dtype), torch.ones(4, 5, dtype=dtype))
    (line,) = [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "matmul"]
    return line


def test_arithmetic_then_memory():
    line = product(torch.float32)
    work, moved, made = flops(line), bytes_moved(line), bytes_made(line)
    assert (work, moved, made) == (120, 4 * (12 + 20 + 15), 4 * 15)

    def seconds(line, **rates):
        return compute_seconds(replace(MODEL, device=replace(MODEL.device, **rates)), line)

    assert seconds(line, flops=1.0, half_flops=1e9) == pytest.approx(0.25 + work + moved / 1e3)
    assert seconds(line, flops=1e9, bandwidth=2.0) == pytest.approx(0.25 + moved / 2)
    assert seconds(line, flops=1e9, bandwidth=1e9, allocation=2.0) == pytest.approx(0.25 + made / 2)
    half = product(torch.bfloat16)
    assert seconds(half, flops=1e9, half_flops=2.0, bandwidth=1e9, overhead=0.0) == pytest.approx(work / 2, rel=1e-6)


def test_a_collective_takes_its_part_of_the_device_where_it_is_issued(fake_ranks):
    fake_ranks(2)
    forward = thunder.last_traces(compile_fake(lambda: nn.Linear(4, 4), torch.ones(2, 4)))[-1]
    (gather,) = [b for b in forward.bound_symbols if is_issue(b)]
    cost = replace(MODEL, link=replace(MODEL.link, busy=0.5, busy_per_byte=0.1))
    assert compute_seconds(MODEL, gather) == 0
    assert compute_seconds(cost, gather) == 0.5 + 0.1 * bucket_of(gather).bytes / 2


def test_links_inside_a_machine_take_their_own_part():
    inside, between = Link(2e3, 0.5, busy=0.25), Link(1e3, 0.5, busy=1.0)
    cost = CostModel(between, MODEL.device, inside, 4)
    assert cost.busy_seconds(1000, 4) == 0.25
    assert cost.busy_seconds(1000, 2, apart=True) == 1.0
    assert cost.busy_seconds(1000, 1) == 0
