"""Lines that keep gradients, or add the kept ones. (Their sums are tested in tests/test_shardtrace/test_accumulation.py.)"""

import shardtrace
from passes.analysis.verify import VerificationError, verify, verify_lines

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import stage, text
from torch import nn


def compiled(fake_ranks, *, steps, **options):
    """The model after its steps. True is a step inside no_sync."""
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Linear(6, 4), **options)
    cmodel = thunder.jit(model)
    for inside in steps:
        if inside:
            with model.no_sync():
                cmodel(torch.ones(3, 6)).sum().backward()
        else:
            cmodel(torch.ones(3, 6)).sum().backward()
    return cmodel


def backward(cmodel):
    return text(stage(cmodel, "accumulate", thunder.last_backward_traces), dels=False)


def test_kept(fake_ranks):
    cmodel = compiled(fake_ranks, steps=[True])
    assert_expected_inline(
        backward(cmodel),
        """\
C0, C1, = saved_for_backward
clear_mutable_collection(saved_for_backward)
clear_mutable_collection(C1)
t0, = cotangents
clear_mutable_collection(cotangents)
input, = C0
clear_mutable_collection(C0)
t1 = aten_t(t0)
t2 = aten_mm(t1, input)
t3 = aten_sum_dim_IntList(t0, [0], True)
t4 = aten_view(t3, [4])
accumulate((t2, t4), b_root)
return (None, None, None)""",
    )


def test_added(fake_ranks):
    cmodel = compiled(fake_ranks, steps=[True, False])
    assert_expected_inline(
        backward(cmodel),
        """\
C0, C1, = saved_for_backward
clear_mutable_collection(saved_for_backward)
clear_mutable_collection(C1)
t0, = cotangents
clear_mutable_collection(cotangents)
input, = C0
clear_mutable_collection(C0)
t1 = aten_t(t0)
t2 = aten_mm(t1, input)
t3 = aten_sum_dim_IntList(t0, [0], True)
t4 = aten_view(t3, [4])
(t5, t6) = accumulated((t2, t4), b_root)
ft7 = reduce_scatter((t5, t6), b_root)
(t8, t9) = wait_reduce_scatter(ft7, b_root)
return (None, t9, t8)""",
    )


def test_a_step_without_no_sync_before_it_is_as_ever(fake_ranks):
    cmodel = compiled(fake_ranks, steps=[False])
    lines = [b.sym.name for b in thunder.last_backward_traces(cmodel)[-1].bound_symbols]
    assert "reduce_scatter" in lines
    assert not any("accumulate" in name for name in lines)


def test_each_kind_of_step_is_compiled_once(fake_ranks):
    cmodel = compiled(fake_ranks, steps=[False, True, True, False, True, False, False])
    assert thunder.cache_misses(cmodel) == 3
    with torch.no_grad():
        cmodel(torch.ones(3, 6))
        with cmodel._model.no_sync():
            cmodel(torch.ones(3, 6))
    assert thunder.cache_misses(cmodel) == 4


def test_memory_of_what_is_kept(fake_ranks):
    """Whole gradients are held throughout, in fp32 although they are computed in bf16."""
    sums = 4 * (6 * 4 + 4)
    for steps in ([True], [True, False]):
        plain = shardtrace.memory(compiled(fake_ranks, steps=[False], mp_policy="bf16"))
        torch.distributed.destroy_process_group()
        kept = shardtrace.memory(compiled(fake_ranks, steps=steps, mp_policy="bf16"))
        torch.distributed.destroy_process_group()
        assert kept.forward.peak.during == plain.forward.peak.during + sums
        assert kept.backward.lines[0].gradients == plain.backward.lines[0].gradients + sums
    assert kept.backward.lines[-1].gradients == plain.backward.lines[-1].gradients  # freed when reduced


@pytest.mark.parametrize("strategy", ["zero3", "owner"])
def test_limits_of_memory_are_proven_once_the_trace_is_scheduled(fake_ranks, strategy):
    """Autodiff gathers more buckets at once than ``prefetch`` allows when activations are recomputed."""
    fake_ranks(2)
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)]
    options = {"sharding_strategy": strategy, "activation_checkpointing": True, "bucketing_strategy": 0.0005}
    model = shardtrace.fsdp(nn.Sequential(*layers), **options)
    cmodel = thunder.jit(model)
    with model.no_sync():
        cmodel(torch.ones(3, 8)).sum().backward()
    backward = stage(cmodel, "accumulate", thunder.last_backward_traces)
    verify_lines(backward)
    with pytest.raises(VerificationError, match="buckets are unsharded at once"):
        verify(backward)
    verify(stage(cmodel, "schedule", thunder.last_backward_traces))
