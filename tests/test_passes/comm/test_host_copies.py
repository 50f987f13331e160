"""Lines of a step with parameters in host memory, compiled for a GPU that need not exist."""

import re

import shardtrace
from passes.analysis.recognise import bucket_of, is_offload
from passes.analysis.seconds import link_seconds
from passes.analysis.verify import VerificationError, verify
from passes.plan import CostModel, Device, Link
from shardtrace.inspector.checking import memory
from shardtrace.inspector.page import render
from shardtrace.testing import compile_only

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import stage, text
from hosts import on_absent_cuda
from thunder.core.trace import from_trace
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.sum()


def compiled(kind=Net, **options):
    model = shardtrace.fsdp(
        kind(), init_policy=shardtrace.InitPolicy(device="cuda:0"), offload_policy=CPUOffloadPolicy(), **options
    )
    cmodel = thunder.jit(model)
    compile_only(cmodel, ((on_absent_cuda(4, 8),), {}))
    return cmodel


def compiled_where_it_is():
    cmodel = thunder.jit(shardtrace.fsdp(Net()))
    compile_only(cmodel, ((torch.ones(4, 8),), {}))
    return cmodel


def communication(trace):
    kinds = "gather|broadcast|replicated|reduce|offload|accumulate|return"
    return "\n".join(line for line in text(trace).splitlines() if re.search(kinds, line))


def test_gradients_leave_when_they_are_reduced_and_are_awaited_at_the_end(fake_ranks):
    fake_ranks(2)
    cmodel = compiled()
    assert_expected_inline(
        communication(stage(cmodel, "schedule")),
        """\
ft0 = all_gather((t_blocks_0_weight, t_blocks_0_bias), b_blocks_0)
ft1 = all_gather((t_blocks_1_weight, t_blocks_1_bias), b_blocks_1)
(t2, t3) = wait_all_gather(ft0, b_blocks_0)
ft6 = all_gather((t_blocks_2_weight, t_blocks_2_bias), b_blocks_2)
(t7, t8) = wait_all_gather(ft1, b_blocks_1)
(t11, t12) = wait_all_gather(ft6, b_blocks_2)
return {'output': (t15,), 'flat_args': [x, t_blocks_0_bias, t_blocks_0_weight, t_blocks_1_bias, t_blocks_1_weight, t_blocks_2_bias, t_blocks_2_weight], 'flat_output': (t15,)}, ((t14, t_blocks_2_weight, t_blocks_2_bias, t10, t_blocks_1_weight, t_blocks_1_bias, t5, x), ())""",
    )
    backward = stage(cmodel, "schedule", thunder.last_backward_traces)
    assert_expected_inline(
        communication(backward),
        """\
bw_ft4 = all_gather((t_blocks_2_weight, t_blocks_2_bias), b_blocks_2)
bw_ft7 = all_gather((t_blocks_1_weight, t_blocks_1_bias), b_blocks_1)
(bw_t8, bw_t9) = wait_all_gather(bw_ft4, b_blocks_2)
ft15 = reduce_scatter((t12, t14), b_blocks_2)
(bw_t17, bw_t18) = wait_all_gather(bw_ft7, b_blocks_1)
ft24 = reduce_scatter((t21, t23), b_blocks_1)
(t30, t31) = wait_reduce_scatter(ft15, b_blocks_2)
ft32 = offload((t30, t31), b_blocks_2)
ft33 = reduce_scatter((t27, t29), b_blocks_0)
(t34, t35) = wait_reduce_scatter(ft24, b_blocks_1)
ft36 = offload((t34, t35), b_blocks_1)
(t37, t38) = wait_reduce_scatter(ft33, b_blocks_0)
ft39 = offload((t37, t38), b_blocks_0)
(t40, t41) = wait_offload(ft32, b_blocks_2)
(t42, t43) = wait_offload(ft36, b_blocks_1)
(t44, t45) = wait_offload(ft39, b_blocks_0)
return (None, t45, t44, t43, t42, t41, t40)""",
    )
    assert {p.device.device_str() for p in backward.bound_symbols[-1].flat_proxy_args} == {"cpu"}
    assert {a.device.device_str() for b in backward.bound_symbols if b.sym.name == "offload" for a in b.args[0]} == {
        "cuda:0"
    }


def test_each_rank_copies_the_shards_that_it_reduces_over_replicas(fake_ranks):
    fake_ranks(4)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cmodel = compiled(sharding_strategy="hybrid_zero3", mesh=mesh, bucketing_strategy="model")
    assert_expected_inline(
        communication(stage(cmodel, "schedule", thunder.last_backward_traces)),
        """\
bw_ft4 = all_gather((t_blocks_0_weight, t_blocks_0_bias, t_blocks_1_weight, t_blocks_1_bias, t_blocks_2_weight, t_blocks_2_bias), b_model)
(bw_t7, bw_t8, bw_t9, bw_t10, bw_t11, bw_t12) = wait_all_gather(bw_ft4, b_model)
ft29 = reduce_scatter((t26, t28, t21, t23, t15, t17), b_model)
(t30, t31, t32, t33, t34, t35) = wait_reduce_scatter(ft29, b_model)
ft36 = all_reduce((t30, t31, t32, t33, t34, t35), b_model_replicas)
(t37, t38, t39, t40, t41, t42) = wait_all_reduce(ft36, b_model_replicas)
ft43 = offload((t37, t38, t39, t40, t41, t42), b_model)
(t44, t45, t46, t47, t48, t49) = wait_offload(ft43, b_model)
return (None, t45, t44, t47, t46, t49, t48)""",
    )


def test_a_world_of_one_gathers_from_the_host(fake_ranks):
    fake_ranks(1)
    cmodel = compiled()
    assert [c.kind for c in shardtrace.collectives(cmodel)].count("all_gather") == 2 * 3 - 1  # the first needs no grad
    assert memory(cmodel).peak < memory(compiled_where_it_is()).peak


def test_kept_gradients_are_not_copied(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(
        Net(), init_policy=shardtrace.InitPolicy(device="cuda:0"), offload_policy=CPUOffloadPolicy()
    )
    cmodel = thunder.jit(model)
    with model.no_sync():
        compile_only(cmodel, ((on_absent_cuda(4, 8),), {}))
    lines = communication(thunder.last_backward_traces(cmodel)[-1])
    assert "offload" not in lines
    assert lines.count("accumulate(") == 3


def test_memory_of_the_device_alone(fake_ranks):
    fake_ranks(2)
    there, here = memory(compiled()), memory(compiled_where_it_is())
    shards = 3 * 4 * (8 * 8 + 8) // 2
    assert {row.inputs for row in here.forward.lines[1:]} == {row.inputs + shards for row in there.forward.lines[1:]}
    assert there.backward.lines[-1].gradients == 0
    assert here.backward.lines[-1].gradients == shards
    assert there.peak < here.peak


def test_the_inspector_shows_the_copies(fake_ranks):
    fake_ranks(2)
    shown = shardtrace.inspect(compiled())
    assert "432 B of shards in host memory" in str(shown)
    assert [s.kind for s in shown.record.phases[1].timeline.spans].count("offload") == 3
    assert len(shown.collectives) == 8  # a copy is not a collective
    page = render(shown.record)
    assert page.count(">to host<") == 1
    assert "to and from host memory" in page


def test_a_gradient_that_is_not_copied_is_found(fake_ranks):
    fake_ranks(2)
    trace = stage(compiled(), "wait_copies", thunder.last_backward_traces)
    broken = from_trace(trace)
    first = bucket_of(next(b for b in trace.bound_symbols if is_offload(b)))
    broken.bound_symbols = [b for b in trace.bound_symbols if not (is_offload(b) and bucket_of(b) is first)]
    with pytest.raises(VerificationError, match=r"the gradient of blocks\.2\.weight is copied to the host 0 times"):
        verify(broken)


def test_a_copy_that_is_not_awaited_is_found(fake_ranks):
    fake_ranks(2)
    trace = stage(compiled(), "wait_copies", thunder.last_backward_traces)
    broken = from_trace(trace)
    wait = next(b for b in reversed(trace.bound_symbols) if is_offload(b))
    broken.bound_symbols = [b for b in trace.bound_symbols if b is not wait]
    with pytest.raises(VerificationError, match="is never waited for"):
        verify(broken)


def test_a_gather_takes_the_copy_too(fake_ranks):
    fake_ranks(2)
    cost = CostModel(Link(bandwidth=100.0, latency=1.0), Device(1e12, 1e12, 1e12, 0.0, host_bandwidth=50.0))
    cmodel = compiled(compile_policy=shardtrace.CompilePolicy(cost_model=cost), bucketing_strategy="model")
    (gather,) = [b for b in stage(cmodel, "schedule").bound_symbols if b.sym.name == "all_gather"]
    shards = 3 * 4 * (8 * 8 + 8) // 2
    assert link_seconds(gather) == 1 + shards / 100 + shards / 50
    backward = stage(cmodel, "schedule", thunder.last_backward_traces).bound_symbols
    seconds = {b.sym.name: link_seconds(b) for b in backward if b.sym.name in ("reduce_scatter", "offload")}
    assert seconds == {"reduce_scatter": 1 + shards / 100, "offload": shards / 50}


class Two(Net):
    """Two results, of which a script may use one: some gradients are then None."""

    def forward(self, x):
        return {"first": self.blocks[0](x), "second": self.blocks[1](x).tanh() + self.blocks[2](x)}


def test_gradients_that_may_be_none_take_no_memory_on_the_device(fake_ranks):
    fake_ranks(2)
    cmodel = compiled(Two)
    backward = thunder.last_backward_traces(cmodel)[-1]
    assert any(b.sym.name == "unless_unused" for b in backward.bound_symbols)
    assert memory(cmodel).backward.lines[-1].gradients == memory(compiled()).backward.lines[-1].gradients == 0
