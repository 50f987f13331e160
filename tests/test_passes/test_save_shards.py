"""Lines that fusions move into backward start from shards, not from whole parameters that forward saved."""

import cProfile
import pstats

import shardtrace
from passes import collectives
from passes.analysis.recognise import bucket_of, is_issue, names, parameter_aliases
from passes.analysis.verify import verify
from passes.save import Swapped, save_shards

import pytest
import thunder
import torch
from golden import compile_fake, stage
from models import Zoo, tokens
from ranks import on_ranks
from sharded_training import train_zoo
from torch import nn


@pytest.fixture
def fused(fake_ranks, monkeypatch):
    """Fuses regions, but runs them uncompiled."""
    fake_ranks(2)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def compile(**options):
        model = shardtrace.fsdp(
            Zoo(), compile_policy=shardtrace.CompilePolicy(repeated_blocks="inline"), **options
        )  # a call passes parameters and saves none
        cmodel = thunder.jit(model, executors=["sdpa", "torchcompile"])
        cmodel(*tokens(2)).backward()
        return cmodel

    return compile


def test_shards_are_saved(fused):
    cmodel = fused()
    forward = stage(cmodel, "save_shards")
    _, (saved, _) = forward.bound_symbols[-1].args
    assert "t_blocks_1_norm" in names(saved)
    assert names(saved).isdisjoint(parameter_aliases(forward))
    rows = shardtrace.collectives(cmodel)
    again = [row.bucket for row in rows if (row.kind, row.phase) == ("all_gather", "backward")]
    assert len(again) == len(set(again))  # backward reads the results of its own gathers


def test_backward_gathers_what_its_own_gathers_lack(fake_ranks):
    """Pretends that forward saved the last bias, which backward does not need, instead of an activation."""
    fake_ranks(2)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    cmodel = compile_fake(lambda: model, torch.ones(3, 6), bucketing_strategy="none")
    forward, backward = thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]
    gather = next(b for b in forward.bound_symbols if is_issue(b) and bucket_of(b).label == "2.bias")
    (saved,) = [p for p in forward.bound_symbols[-1].args[1][0] if tuple(p.shape) == (3, 4)]
    new = save_shards(backward, swapped={saved.name: Swapped(bucket_of(gather), 0, gather.args[0][0])})
    verify(new)
    before, after = ([row.bucket for row in collectives(t) if row.kind == "all_gather"] for t in (backward, new))
    assert after == ["2.bias", *before]


def test_work_grows_with_the_number_of_lines(fake_ranks):
    """Function calls, to which time is proportional, for 4 and for 16 gathered parameters."""
    fake_ranks(2)

    def calls(layers):
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
        cmodel = compile_fake(lambda: model, torch.ones(3, 2))
        forward = stage(cmodel, "schedule")
        profile = cProfile.Profile()
        profile.runcall(save_shards, forward, swapped={})
        return pstats.Stats(profile).total_calls

    assert calls(16) <= 4 * calls(4)


def test_zero2_is_left_as_it_is(fused):
    cmodel = fused(sharding_strategy="zero2")
    assert not any("save_shards" in str(t.get_provenance()) for t in thunder.last_traces(cmodel))


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "bucketing"), [("zero2", "block"), ("zero3", "block"), ("zero3", "none")])
def test_equals_the_single_process(strategy, bucketing):
    """An executor fuses lines and moves some from forward into backward. The regions run uncompiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        rows = train_zoo(strategy, bucketing, steps=2, executors=["sdpa", "torchcompile"])
    again = [names for kind, phase, _, _, _, names in rows if (kind, phase) == ("all_gather", "backward")]
    assert sum("blocks.1.norm" in names for names in again) == (strategy == "zero3")
