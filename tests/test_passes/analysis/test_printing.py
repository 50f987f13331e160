"""Traces of sharded models as they print: types, buckets, modules and places, in comments."""

import re

import shardtrace
from passes.analysis.printing import describe_bucket, type_text
from passes.plan import Bucket, BucketPlan, ShardedParameter
from passes.plan.plan import Member
from tests.golden import compile_fake

import thunder
import torch
from eager import uncompiled
from expecttest import assert_expected_inline
from thunder.core import dtypes
from thunder.core.devices import cpu
from thunder.core.proxies import FutureTensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import nn


def two_layers():
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))


def body(trace):
    """The text of a trace from its signature on. Places are in this file."""
    return re.sub(r"(test_printing\.py):\d+(?:  .*)?", r"\1", str(trace).partition("def ")[2])


def test_golden_of_a_forward(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_layers, torch.ones(8, 64), sharding_strategy="zero2")
    assert_expected_inline(
        body(thunder.last_traces(cmodel)[-1]),
        """\
computation(input, t_0_weight, t_2_weight):
  # input: "cpu f32[8, 64]"
  # t_0_weight: "cpu f32[32, 64]"
  # t_2_weight: "cpu f32[32, 64]"
  # b_0: ZeRO-2 over 2 ranks, 4,096 f32, 16,384 bytes: 0.weight
  # issued here: in order of first use, as early as the limits allow
  ft7 = all_gather((t_0_weight,), b_0)  # ft7: "future, 4096 f32"
  # b_2: ZeRO-2 over 2 ranks, 4,096 f32, 16,384 bytes: 2.weight
  # issued here: in order of first use, as early as the limits allow
  ft19 = all_gather((t_2_weight,), b_2)  # ft19: "future, 4096 f32"
  # waited for here: the next line uses it; compute is idle for 0.266 ms
  (t8,) = wait_all_gather(ft7, b_0)  # t8: "cpu f32[64, 64]"
  del ft7

  # 0  test_printing.py
  t12 = torch_linear_0(input, t8)  # t12: "cpu f32[8, 64]"
  del t8

  # 1  test_printing.py
  t16 = torch_tanh_0(t12)  # t16: "cpu f32[8, 64]"
  del t12
  # waited for here: the next line uses it; compute is idle for 0.259 ms
  (t20,) = wait_all_gather(ft19, b_2)  # t20: "cpu f32[64, 64]"
  del ft19

  # 2  test_printing.py
  t24 = torch_linear_1(t16, t20)  # t24: "cpu f32[8, 64]"
  return {'output': (t24,), 'flat_args': [input, t_0_weight, t_2_weight], 'flat_output': (t24,)}, ((t16, t20, input), ())""",
    )


def test_golden_of_the_joint_trace(fake_ranks):
    """Thunder's own stages print likewise: here its forward and backward in one."""
    fake_ranks(2)
    cmodel = compile_fake(two_layers, torch.ones(8, 64), sharding_strategy="zero2")
    (joint,) = (t for t in thunder.last_traces(cmodel) if "Grad transform" in str(t.get_provenance()))
    assert_expected_inline(
        body(joint).partition("t_2_weight: ")[2],
        """\
"cpu f32[32, 64]"
  # b_0: ZeRO-2 over 2 ranks, 4,096 f32, 16,384 bytes: 0.weight
  ft7 = all_gather((t_0_weight,), b_0)  # ft7: "future, 4096 f32"
  (t8,) = wait_all_gather(ft7, b_0)  # t8: "cpu f32[64, 64]"

  # 0  test_printing.py
  t12 = torch_linear_0(input, t8)  # t12: "cpu f32[8, 64]"

  # 1  test_printing.py
  t16 = torch_tanh_0(t12)  # t16: "cpu f32[8, 64]"
  # b_2: ZeRO-2 over 2 ranks, 4,096 f32, 16,384 bytes: 2.weight
  ft19 = all_gather((t_2_weight,), b_2)  # ft19: "future, 4096 f32"
  (t20,) = wait_all_gather(ft19, b_2)  # t20: "cpu f32[64, 64]"

  # 2  test_printing.py
  t24 = torch_linear_1(t16, t20)  # t24: "cpu f32[8, 64]"
  t25 = prims.get_grad(t24)  # t25: "cpu f32[8, 64]"
  t26 = aten_t(t25)  # t26: "cpu f32[64, 8]"
  t27 = aten_mm(t26, t16)  # t27: "cpu f32[64, 64]"
  t28 = aten_mm(t25, t20)  # t28: "cpu f32[8, 64]"
  ft22 = reduce_scatter((t27,), b_2)  # ft22: "future, 2048 f32"
  (t23,) = wait_reduce_scatter(ft22, b_2)  # t23: "cpu f32[32, 64]"

  # 1
  t18 = aten_tanh_backward(t28, t16)  # t18: "cpu f32[8, 64]"

  # 0
  t14 = aten_t(t18)  # t14: "cpu f32[64, 8]"
  t15 = aten_mm(t14, input)  # t15: "cpu f32[64, 64]"
  ft10 = reduce_scatter((t15,), b_0)  # ft10: "future, 2048 f32"
  (t11,) = wait_reduce_scatter(ft10, b_0)  # t11: "cpu f32[32, 64]"
  return {'output': (None, t11, t23), 'flat_args': [input, t_0_weight, t_2_weight], 'fw_flat_out': (t24,)}""",
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x).tanh()


def test_blocks_print_below_with_names_inside_of_them(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(lambda: nn.Sequential(nn.Linear(6, 6), Block(), Block()), torch.ones(2, 6))
    whole = str(thunder.last_traces(cmodel)[-1])
    assert "# The code of 1 ... 2, 2 modules\n" in whole
    assert_expected_inline(
        body(whole.split("\n\n\n")[1]),
        """\
Block_forward(cmodel, t_1_inner_weight, t_1_inner_bias):
  # cmodel: "cpu f32[2, 6]"
  # t_1_inner_weight: "cpu f32[6, 6]"
  # t_1_inner_bias: "cpu f32[6]"

  # inner  test_printing.py
  t3 = torch_linear_1(cmodel, t_1_inner_weight, t_1_inner_bias)  # t3: "cpu f32[2, 6]"
  del cmodel, t_1_inner_weight, t_1_inner_bias

  # the block  test_printing.py
  t10 = torch_tanh_0(t3)  # t10: "cpu f32[2, 6]"
  del t3
  return (t10,)""",
    )
    backward = str(thunder.last_backward_traces(cmodel)[-1])
    assert "\n  # inner\n" in backward.split("\n\n\n")[1]


def test_what_runs_has_thunders_own_text(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_layers, torch.ones(8, 64))
    trace = thunder.last_traces(cmodel)[-1]
    assert "# b_0: ZeRO-3 over 2 ranks" in str(trace)
    assert "# b_0:" not in trace.python()
    assert str(trace) == str(trace)  # nothing is left by the first print


def test_models_that_are_not_sharded_print_as_thunder_prints_them():
    jitted = thunder.jit(nn.Linear(3, 3))
    jitted(torch.ones(2, 3))
    for trace in (*thunder.last_traces(jitted), *thunder.last_prologue_traces(jitted)):
        assert str(trace) == trace.python(print_depth=-1)


def test_steps_without_gradients(fake_ranks):
    """Their last trace is made by Thunder."""
    fake_ranks(2)
    with torch.no_grad():
        cmodel = compile_fake(two_layers, torch.ones(8, 64), backward=False)
    printed = str(thunder.last_traces(cmodel)[-1])
    assert "Unwrap" in printed
    assert re.search(r'wait_all_gather\(ft\d+, b_0\)  # t\d+: "cpu f32\[64, 64\]"\n', printed)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * x.reshape(2, 1, 4)  # it needs no gradient: Thunder's operator runs it


def test_definitions_of_lines_that_run_are_left_out(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(Shifted, torch.ones(2, 4))
    printed = {str(t.get_provenance()): str(t) for t in thunder.last_traces(cmodel)}
    *_, last = printed.values()
    assert "    # t" in next(text for made_by, text in printed.items() if "insert_synchronize" in made_by)
    assert re.search(r"reshape\(.*1, 4", last)
    assert "    # " not in last


def test_fusions_say_what_they_compute_and_where(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(two_layers()), executors=["torchcompile"])
    with uncompiled():
        cmodel(torch.ones(8, 64)).sum().backward()
    printed = str(thunder.last_traces(cmodel)[-1])
    assert re.search(r"\[t\d+\] = TorchCompile\d\(.*\n    # # 0  .*\n    # t\d+ = .*linear", printed)
    assert "      # " not in printed


def test_what_a_wire_carries(fake_ranks):
    fake_ranks(2)
    policy = shardtrace.CommPolicy(gather_dtype="int8")
    cmodel = compile_fake(two_layers, torch.ones(8, 64), comm_policy=policy)
    printed = str(thunder.last_traces(cmodel)[-1])
    assert re.search(r'all_gather\(\(t_0_weight,\), b_0_int8\)  # ft\d+: "future, 4096 int8"', printed)
    assert "# b_0_int8: ZeRO-3 over 2 ranks, 4,096 int8, " in printed


def test_members_of_a_bucket_share_what_their_names_begin_with():
    plan = BucketPlan("Net", world_size=2, strategy="zero2")

    def described(*names):
        members = tuple(Member(ShardedParameter(plan, n, (4, 4), "h.0"), True) for n in names)
        return describe_bucket(Bucket("h.0", "b", plan, members, dtypes.bfloat16))

    facts = "# b: ZeRO-2 over 2 ranks"
    assert described("h.0.w") == [f"{facts}, 16 bf16, 32 bytes: h.0.w"]
    assert described("h.0.w", "h.0.fc.w") == [f"{facts}, 32 bf16, 64 bytes: h.0.{{w, fc.w}}"]
    assert described("w", "h.w") == [f"{facts}, 32 bf16, 64 bytes: w, h.w"]
    long = described(*(f"h.0.layer{i}.weight" for i in range(12)))
    assert len(long) == 3
    assert all(len(line) <= 110 for line in long)


def test_futures():
    with tracectx(TraceCtx()):
        future = FutureTensorProxy(shape=(4, 2), device=cpu, dtype=dtypes.float32)
    assert type_text(future) == "future, 4 x 2 f32"
