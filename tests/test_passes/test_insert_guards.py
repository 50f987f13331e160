"""A guard that raises makes Thunder compile another step."""

import shardtrace
from passes.borders import insert_guards
from passes.plan import TracedParameters

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from thunder.core.trace import TraceCtx
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), 2.0

    def forward(self, x):
        return self.linear(x) * self.factor


def test_golden(fake_ranks):
    """One guard for the parameters' homes, and one for the state that the model's forward has read."""
    fake_ranks(2)
    cmodel = compile_fake(Scaled, torch.ones(2, 4))
    lines = text(stage(cmodel, "shard_parameters", thunder.last_prologue_traces)).splitlines()
    assert_expected_inline(
        "\n".join(lines[:5]),
        """\
check_value(guard_0, args)
check_value(guard_1, args)
check_value(guard_2, args)
prims.check_len(args, 1)
prims.check_len(kwargs, 0)""",
    )


def test_without_guards_the_prologue_is_the_same():
    prologue = TraceCtx()
    assert insert_guards(prologue, parameters=TracedParameters()) is prologue


def test_a_guard_that_raises_compiles_another_step(single_rank):
    model = shardtrace.fsdp(Scaled())
    cmodel, x = thunder.jit(model), torch.ones(2, 4)
    first = cmodel(x)
    for factor, misses in ((2.0, 1), (3.0, 2), (2.0, 2), (3.0, 2)):
        model.factor = factor
        torch.testing.assert_close(cmodel(x), first * factor / 2)
        assert thunder.cache_misses(cmodel) == misses


@pytest.mark.parametrize("guards", [1, 3])
def test_each_guard_is_a_line_behind_the_arguments_and_the_last_one_stands_behind_all_checks(fake_ranks, guards):
    fake_ranks(2)
    cmodel = compile_fake(Scaled, torch.ones(2, 4))
    called = []
    prologue = thunder.last_prologue_traces(cmodel)[0]
    before = [b.sym.name for b in prologue.bound_symbols]
    every = [lambda i=i: called.append(i) for i in range(guards + 1)]
    new = insert_guards(prologue, parameters=TracedParameters(), guards=every[:-1], last_guards=every[-1:])
    names, old = [b.sym.name for b in new.bound_symbols], set(map(id, prologue.bound_symbols))
    assert [b.sym.name for b in new.bound_symbols if id(b) in old] == before
    lines = [b for b in new.bound_symbols if id(b) not in old]
    assert names.index("check_value") == names.index("unpack_trivial") + 1
    for line in lines:
        line._call_ctx[line.sym.name](*line.args)
    assert called == list(range(guards + 1))
    assert names[-2:] == ["check_value", "python_return"]
