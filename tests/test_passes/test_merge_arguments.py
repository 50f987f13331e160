"""One line for all inputs, while Thunder's passes run."""

from passes.analysis.recognise import is_unpack
from passes.merge_arguments import merge_arguments, split_arguments

import thunder
import torch
from golden import compile_fake
from thunder.core import prims
from torch import nn


def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


def comments(trace):
    return [line for line in str(trace).splitlines() if line.startswith("  # ")]


def test_a_trace_names_the_same_inputs(fake_ranks):
    fake_ranks(2)
    traces = thunder.last_traces(compile_fake(model, torch.ones(3, 4)))
    before = next(t for t in traces if "insert_synchronize" in str(t.get_provenance()))
    merged = merge_arguments(before)
    (line,) = filter(is_unpack, merged.bound_symbols)
    assert line.sym == prims.unpack_trivial
    assert [p.name for p in line.flat_proxy_outs] == [p.name for p in before.args]
    assert comments(merged) == comments(before)
    again = split_arguments(merged)
    assert list(map(str, again.bound_symbols)) == list(map(str, before.bound_symbols))
    assert split_arguments(again) is again
    assert merge_arguments(merged) is merged


def test_thunder_sees_one_line_and_we_see_all(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(model, torch.ones(3, 4))
    lines = {}
    for trace in thunder.last_traces(cmodel):
        lines[str(trace.get_provenance())] = sum(map(is_unpack, trace.bound_symbols))
    names, counts = list(lines), list(lines.values())
    first, last = (next(i for i, n in enumerate(names) if w in n) for w in (": roll", ": unroll"))
    assert last - first > 2  # Thunder's own passes
    assert set(counts[:first]) == set(counts[last:]) == {7}
    assert set(counts[first:last]) == {1}


def test_without_calls_of_blocks_each_input_keeps_its_line(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(3, 4))
    assert {sum(map(is_unpack, t.bound_symbols)) for t in thunder.last_traces(cmodel)} == {3}
