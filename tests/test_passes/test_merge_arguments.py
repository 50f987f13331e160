"""One line for all inputs, unless passes of users are to see them."""

from functools import partial

from passes import PassAfterLowering, PassBeforeAutodiff
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


def unpacking(traces):
    """The number of lines that name inputs, by the pass that made the trace."""
    return {str(t.get_provenance()): sum(map(is_unpack, t.bound_symbols)) for t in traces}


def place(counts, name):
    return next(i for i, provenance in enumerate(counts) if name in provenance)


def test_a_trace_names_the_same_inputs(fake_ranks):
    fake_ranks(2)
    traces = thunder.last_traces(compile_fake(model, torch.ones(3, 4)))
    before = next(t for t in traces if "shard_parameters" in str(t.get_provenance()))
    merged = merge_arguments(before)
    (line,) = filter(is_unpack, merged.bound_symbols)
    assert line.sym == prims.unpack_trivial
    assert [p.name for p in line.flat_proxy_outs] == [p.name for p in before.args]
    assert comments(merged) == comments(before)
    again = split_arguments(merged)
    assert list(map(str, again.bound_symbols)) == list(map(str, before.bound_symbols))
    assert split_arguments(again) is again
    assert merge_arguments(merged) is merged
    # from the second pass on there is one line
    counts = unpacking(traces)
    synchronized = place(counts, "insert_synchronize")
    assert set(list(counts.values())[:synchronized]) == {7}
    assert set(list(counts.values())[synchronized:]) == {1}
    assert comments(traces[-1])[:7] == comments(before)[:7]


def test_passes_of_users_see_a_line_for_each_input(fake_ranks):
    fake_ranks(2)
    before, after = [], []

    def look(trace, seen):
        seen.append(sum(map(is_unpack, trace.bound_symbols)))
        return trace

    passes = [
        PassBeforeAutodiff(partial(look, seen=before), "look"),
        PassAfterLowering(partial(look, seen=after), "look"),
    ]
    traces = thunder.last_traces(compile_fake(model, torch.ones(3, 4), transforms=passes))
    assert max(before) == max(after) == 7  # a block's own trace has fewer
    counts = unpacking(traces)
    first, last = place(counts, "outline") + 1, place(counts, "unroll")
    assert last - first > 2  # Thunder's own passes
    numbers = list(counts.values())
    assert set(numbers[:first]) == set(numbers[last:]) == {7}
    assert set(numbers[first:last]) == {1}


def test_without_calls_of_blocks_each_input_keeps_its_line(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(3, 4))
    assert set(unpacking(thunder.last_traces(cmodel)).values()) == {3}
