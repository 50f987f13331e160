"""The collective that tells all ranks of an overflow on one."""

import shardtrace
from passes.analysis.recognise import bucket_of, is_issue, is_overflow
from passes.analysis.seconds import link_seconds
from shardtrace.fake import compile_only
from shardtrace.ranks.failure import RankFailedError

import pytest
import thunder
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from hosts import on_absent_cuda
from ranks import on_ranks
from sharded_training import overflow_on_one_rank
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy


def two_linear():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def last_lines(cmodel):
    return [b.sym.name for b in thunder.last_backward_traces(cmodel)[-1].bound_symbols if b.sym.name != "python_del"][
        -5:
    ]


def overflows(cmodel):
    lines = thunder.last_backward_traces(cmodel)[-1].bound_symbols
    return [b for b in lines if is_issue(b) and is_overflow(b)]


def test_after_all_gradients_have_come(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy="zero2", mp_policy="fp16")
    trace = stage(cmodel, "share_overflow", thunder.last_backward_traces)
    *_, line, wait, last = trace.bound_symbols
    assert (line.sym.name, wait.sym.name, last.sym.name) == ("share_overflow", "wait_share_overflow", "python_return")
    assert len(line.flat_proxy_args) == 4  # the gradients of two weights and two biases
    assert last_lines(cmodel)[-3:] == ["share_overflow", "wait_share_overflow", "python_return"]


def test_golden_end_of_backward(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), mp_policy="fp16")
    assert_expected_inline(
        "\n".join(text(stage(cmodel, "schedule", thunder.last_backward_traces)).splitlines()[-8:]),
        """\
(t14, t15) = wait_reduce_scatter(ft9, b_2)
del ft9
(t16, t17) = wait_reduce_scatter(ft13, b_0)
del ft13
ft18 = share_overflow((t14, t15, t16, t17), overflow_0)
wait_share_overflow(ft18, overflow_0)
del ft18
return (None, t17, t16, t15, t14)""",
    )


def test_it_is_a_collective_like_the_others(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy="zero2", mp_policy="fp16")
    row = shardtrace.collectives(cmodel)[-1]
    assert row == ("share_overflow", "backward", "Sequential", "f32", 4, ())
    assert str(row) == "share_overflow of Sequential (f32, 4 bytes)"
    (line,) = overflows(cmodel)
    link = bucket_of(line).plan.cost.link
    assert link_seconds(line) == pytest.approx(link.latency + 4 / link.bandwidth)  # a half each way


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_only_in_fp16(fake_ranks, precision):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy="zero2", mp_policy=precision)
    assert "share_overflow" not in last_lines(cmodel)


@pytest.mark.parametrize("policy", ["fp16", MixedPrecisionPolicy(torch.float16, torch.float32)])
def test_after_gradients_that_are_reduced_twice(fake_ranks, policy):
    fake_ranks(4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy="hybrid_zero3", mp_policy=policy, mesh=mesh)
    assert last_lines(cmodel)[-4:] == ["wait_all_reduce", "share_overflow", "wait_share_overflow", "python_return"]
    (line,) = overflows(cmodel)
    plan = bucket_of(line).plan
    assert (plan.group, plan.world_size, plan.rank) == (dist.group.WORLD, 4, 0)


def test_after_gradients_have_reached_the_host(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(two_linear(), device="cuda:0", mp_policy="fp16", offload_policy=CPUOffloadPolicy())
    cmodel = thunder.jit(model)
    compile_only(cmodel, ((on_absent_cuda(3, 6),), {}))
    (line,) = overflows(cmodel)
    assert {g.device.type for g in line.args[0]} == {"cpu"}
    assert line.output.device.type == "cuda"  # where the flag travels
    end = ["wait_offload", "share_overflow", "wait_share_overflow", "wait_copies", "python_return"]
    assert last_lines(cmodel)[-5:] == end


def test_each_model_has_its_own_group(fake_ranks):
    fake_ranks(4)
    pair = dist.new_group([0, 1])
    first = shardtrace.fsdp(nn.Linear(6, 4), mp_policy="fp16")
    second = shardtrace.fsdp(nn.Linear(4, 2), mp_policy="fp16", mesh=pair)
    third = shardtrace.fsdp(nn.Linear(2, 2), mesh=pair)  # without fp16
    cmodel = thunder.jit(lambda x: third(second(first(x)).float()).sum())
    compile_only(cmodel, ((torch.ones(3, 6),), {}))
    lines = overflows(cmodel)
    assert {bucket_of(b).plan.group: len(b.flat_proxy_args) for b in lines} == {dist.group.WORLD: 2, pair: 2}
    assert sorted(bucket_of(b).plan.world_size for b in lines) == [2, 4]


def test_one_rank_has_nobody_to_tell(fake_ranks):
    fake_ranks(1)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), mp_policy="fp16")
    assert "share_overflow" not in last_lines(cmodel)


def test_a_rank_that_dies_is_blamed(fake_ranks, monkeypatch):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), mp_policy="fp16")
    result = cmodel(torch.ones(3, 6)).sum()

    def fail(*args, **kwargs):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(RankFailedError, match="noticed in a collective of Sequential"):
        result.backward()


@on_ranks(2)
@pytest.mark.parametrize("which", [0, 1])
def test_an_overflow_concerns_the_model_that_has_it(which):
    """Two models on two groups in one function. One overflows on one rank: no rank takes its step, and all ranks take
    the step of the other."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)]
    for model, group in zip(models, (dist.group.WORLD, dist.new_group([0, 1])), strict=True):
        shardtrace.fsdp(model, mp_policy="fp16", mesh=group)
    factors = [torch.ones(2), torch.ones(2)]
    factors[which][0] = 60000.0
    step = thunder.jit(lambda x, a, b: (models[0](x) * a).sum() + (models[1](x) * b).sum())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    before = [model.weight.detach().clone() for model in models]
    scaler.scale(step(torch.ones(2, 4), *factors)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [torch.equal(m.weight, w) for m, w in zip(models, before, strict=True)] == [which == 0, which == 1]
    assert scaler.get_scale() == 8


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "owner"])
def test_an_overflow_on_one_rank_makes_all_skip_the_step(strategy):
    overflow_on_one_rank(strategy)
