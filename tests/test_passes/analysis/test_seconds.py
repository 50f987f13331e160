from dataclasses import replace

from passes.analysis.flops import bytes_moved, flops
from passes.analysis.seconds import compute_seconds
from passes.plan import CostModel, Device, Link

import thunder
import torch

MODEL = CostModel(Link(bandwidth=1000.0, latency=0.5), Device(flops=2e3, half_flops=8e3, bandwidth=1e3, overhead=0.25))


def product(dtype):
    """The lowered line of a matrix product."""
    jitted = thunder.jit(torch.matmul)
    jitted(torch.ones(3, 4, dtype=dtype), torch.ones(4, 5, dtype=dtype))
    (line,) = [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "matmul"]
    return line


def test_the_slower_of_arithmetic_and_memory():
    line = product(torch.float32)
    work, moved = flops(line), bytes_moved(line)
    assert (work, moved) == (120, 4 * (12 + 20 + 15))

    def seconds(line, **rates):
        return compute_seconds(replace(MODEL, device=replace(MODEL.device, **rates)), line)

    assert seconds(line, flops=1.0, half_flops=1e9) == 0.25 + work
    assert seconds(line, flops=1e9, bandwidth=2.0) == 0.25 + moved / 2
    half = product(torch.bfloat16)
    assert seconds(half, flops=1e9, half_flops=2.0, bandwidth=1e9, overhead=0.0) == work / 2
