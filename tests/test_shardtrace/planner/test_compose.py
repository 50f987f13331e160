"""Composed steps are those that would be compiled: the same lines, seconds and bytes."""

import re

from passes.analysis.verify import verify
from shardtrace.fake import fake_ranks
from shardtrace.planner.planning import compiled_estimate
from shardtrace.planner.search import Candidate

import pytest
import thunder

LAST = frozenset({"h.4", "h.5"})
HALF = tuple((f"h.{i}", "full") for i in range(3))
MIXED = (("h.0", "full"), ("h.1", "full"), ("h.2", "cheap"), ("h.3", "cheap"))


def lines(trace):
    return sorted(re.sub(r"_\d+_", "_", b.sym.name) for b in trace.bound_symbols)


@pytest.mark.parametrize(
    ("candidate", "options"),
    [
        (Candidate("zero", prefetch=2), {"sharding_strategy": "zero3", "prefetch": 2}),
        (
            Candidate("zero", MIXED, LAST, 1),
            {
                "sharding_strategy": {"h.4.*": "zero2", "h.5.*": "zero2", "*": "zero3"},
                "activation_checkpointing": dict(MIXED),
                "prefetch": 1,
            },
        ),
        (
            Candidate("zero", HALF, frozenset({"h.0", "h.1", "h.2", "h.3", "h.4", "h.5", "wte..wpe", "ln_f"}), 3),
            {"sharding_strategy": "zero2", "activation_checkpointing": dict(HALF), "prefetch": 3},
        ),
    ],
)
def test_a_composed_step_is_the_compiled_one(family, task, candidate, options):
    assert candidate.kept <= family.buckets.keys()
    composed = family.step(candidate)
    found = family.point(candidate).estimate
    with fake_ranks(task.world_size):
        function = task._replace(fixed={}).compile_function(options)
        expected = compiled_estimate(function, task.setting)
        real = thunder.last_traces(function)[-1], thunder.last_backward_traces(function)[-1]
    assert [*map(lines, composed)] == [*map(lines, real)]
    assert found == expected
    for trace in composed:
        verify(trace)


def test_the_base_is_not_changed(family):
    before = [str(t) for t in family.base.step]
    family.step(Candidate("zero", MIXED, LAST, 1))
    assert [str(t) for t in family.base.step] == before
