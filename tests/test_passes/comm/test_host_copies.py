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
bw_ft8 = all_gather((t_blocks_1_weight, t_blocks_1_bias), b_blocks_1)
(bw_t9, bw_t10) = wait_all_gather(bw_ft4, b_blocks_2)
ft14 = reduce_scatter((t12, t13), b_blocks_2)
(bw_t16, bw_t17) = wait_all_gather(bw_ft8, b_blocks_1)
ft21 = reduce_scatter((t19, t20), b_blocks_1)
(t25, t26) = wait_reduce_scatter(ft14, b_blocks_2)
ft27 = offload((t25, t26), b_blocks_2)
ft28 = reduce_scatter((t23, t24), b_blocks_0)
(t29, t30) = wait_reduce_scatter(ft21, b_blocks_1)
ft31 = offload((t29, t30), b_blocks_1)
(t32, t33) = wait_reduce_scatter(ft28, b_blocks_0)
ft34 = offload((t32, t33), b_blocks_0)
(t35, t36) = wait_offload(ft27, b_blocks_2)
(t37, t38) = wait_offload(ft31, b_blocks_1)
(t39, t40) = wait_offload(ft34, b_blocks_0)
return (None, t40, t39, t38, t37, t36, t35)""",
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
(bw_t8, bw_t9, bw_t10, bw_t11, bw_t12, bw_t13) = wait_all_gather(bw_ft4, b_model)
ft24 = reduce_scatter((t22, t23, t19, t20, t15, t16), b_model)
(t25, t26, t27, t28, t29, t30) = wait_reduce_scatter(ft24, b_model)
ft31 = all_reduce((t25, t26, t27, t28, t29, t30), b_model_replicas)
(t32, t33, t34, t35, t36, t37) = wait_all_reduce(ft31, b_model_replicas)
ft38 = offload((t32, t33, t34, t35, t36, t37), b_model)
(t39, t40, t41, t42, t43, t44) = wait_offload(ft38, b_model)
return (None, t40, t39, t42, t41, t44, t43)""",
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
