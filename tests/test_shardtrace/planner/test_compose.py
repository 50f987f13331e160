"""Composed steps are those that would be compiled: the same lines, seconds and bytes."""

import re
from dataclasses import replace

from passes.analysis.verify import verify
from shardtrace.planner.planning import compiled_estimate
from shardtrace.planner.search import Candidate, Rounding, make_family, on_host
from shardtrace.testing import fake_ranks

import pytest
import thunder

LAST = frozenset({"h.4", "h.5"})
HALF = tuple((f"h.{i}", "full") for i in range(3))
AWAY = (("h.0", "full+host"), ("h.1", "full+host"), ("h.2", "host"), ("h.3", "host"))
MIXED = (("h.0", "full"), ("h.1", "full"), ("h.2", "cheap"), ("h.3", "cheap"))


def lines(trace):
    return sorted(re.sub(r"(_\d+)+_", "_", b.sym.name) for b in trace.bound_symbols)


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
        (
            Candidate("zero", AWAY, LAST, 1),
            {
                "sharding_strategy": {"h.4.*": "zero2", "h.5.*": "zero2", "*": "zero3"},
                "activation_checkpointing": dict(AWAY),
                "prefetch": 1,
            },
        ),
        (
            Candidate("zero", HALF, LAST, 1, Rounding("int8", "int4")),
            {
                "sharding_strategy": {"h.4.*": "zero2", "h.5.*": "zero2", "*": "zero3"},
                "activation_checkpointing": dict(HALF),
                "prefetch": 1,
                "gather_dtype": "int8",
                "reduce_wire": "int4",
            },
        ),
    ],
)
def test_a_composed_step_is_the_compiled_one(family, task, candidate, options):
    assert candidate.kept <= family.buckets.keys()
    family = replace(family, variants=family.variants | on_host(family.variants), _points={})
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


def test_second_shards(task, family):
    """The functions of blocks are those of ZeRO-3. Only gathers of forward are rounded."""
    mesh = task._replace(fixed={}, mesh_shape=(2, 2), allowed=family.task.allowed)
    with fake_ranks(task.world_size):
        second = make_family(mesh, "secondary", family)
        function = mesh.compile_function(
            {"sharding_strategy": "zero3_secondary", "activation_checkpointing": dict(MIXED), "gather_dtype": "int8"}
        )
        expected = compiled_estimate(function, task.setting)
    candidate = Candidate("secondary", MIXED, rounding=Rounding("int8"))
    assert second.point(candidate).estimate == expected
    for trace in second.step(candidate):
        verify(trace)


def test_the_base_is_not_changed(family):
    before = [str(t) for t in family.base.step]
    family.step(Candidate("zero", MIXED, LAST, 1))
    assert [str(t) for t in family.base.step] == before
