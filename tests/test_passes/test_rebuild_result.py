"""A jitted model returns structures that Thunder itself cannot return."""

import collections

import shardtrace
from passes.borders import rebuild_result, run_rebuild

import thunder
import torch
from torch import nn

Pair = collections.namedtuple("Pair", "sum more")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return Pair(y.sum(), {"y": y, "n": 3})


def test_one_line_makes_the_result(single_rank):
    jitted = thunder.jit(shardtrace.fsdp(Net()))
    result = jitted(torch.ones(2, 4))
    assert type(result) is Pair
    assert result.more["n"] == 3
    traces = thunder.compile_stats(jitted).last_epilogue_traces
    lines = [b for b in traces[-1].bound_symbols if b.sym.id == run_rebuild.id]
    assert len(lines) == 1
    assert len(lines[0].args[1]) == 2
    result.sum.backward()
    assert jitted.get_parameter("linear.weight").grad is not None


def test_plain_results_are_left_alone(single_rank):
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4)))
    jitted(torch.ones(2, 4))
    trace = thunder.compile_stats(jitted).last_epilogue_traces[-1]
    assert rebuild_result(trace, rebuild=None) is trace
    assert not [b for b in trace.bound_symbols if b.sym.id == run_rebuild.id]
