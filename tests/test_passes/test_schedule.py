import re

from passes.analysis.recognise import is_collective
from shardtrace import CompilePolicy

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from torch import nn


def two_linear():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5))


def collective_lines(trace):
    """Collectives by bucket, with the compute between them as dots."""
    words = []
    for b in trace.bound_symbols:
        if is_collective(b):
            words.append(
                f"{b.sym.name.replace('all_gather', 'gather').replace('reduce_scatter', 'reduce')} {b.args[1].label}"
            )
        elif (name := re.sub(r"torch_|_\d+", "", b.sym.name)) in ("linear", "python_return"):
            words.append(name)
    return "\n".join(words)


def test_golden_forward(fake_ranks):
    fake_ranks(2)
    assert_expected_inline(
        text(stage(compile_fake(two_linear, torch.ones(3, 6)), "schedule")),
        """\
ft0 = all_gather((t_0_weight, t_0_bias), b_0)
ft1 = all_gather((t_2_weight, t_2_bias), b_2)
(t2, t3) = wait_all_gather(ft0, b_0)
del ft0
t4 = torch_linear_0(input, t2, t3)
del t2, t3
t5 = torch_tanh_0(t4)
del t4
(t6, t7) = wait_all_gather(ft1, b_2)
del ft1
t8 = torch_linear_1(t5, t6, t7)
del t6, t7
return {'output': (t8,), 'flat_args': [input, t_0_bias, t_0_weight, t_2_bias, t_2_weight], 'flat_output': (t8,)}, ((t_2_weight, t_2_bias, t5, input), ())""",
    )


def test_golden_backward_of_zero3(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6))
    assert_expected_inline(
        text(stage(cmodel, "schedule", thunder.last_backward_traces)),
        """\
C0, C1, = saved_for_backward
clear_mutable_collection(saved_for_backward)
clear_mutable_collection(C1)
del C1, saved_for_backward
t0, = cotangents
clear_mutable_collection(cotangents)
del cotangents
t_2_weight, t_2_bias, t1, input, = C0
clear_mutable_collection(C0)
del C0
bw_ft2 = all_gather((t_2_weight, t_2_bias), b_2)
del t_2_weight, t_2_bias
(bw_t3, bw_t4) = wait_all_gather(bw_ft2, b_2)
del bw_t4, bw_ft2
t5 = aten_mm(t0, bw_t3)
del bw_t3
t6 = aten_t(t0)
t7 = aten_mm(t6, t1)
del t6
t8 = aten_sum_dim_IntList(t0, [0], True)
del t0
t9 = aten_view(t8, [5])
del t8
ft10 = reduce_scatter((t7, t9), b_2)
del t7, t9
t11 = aten_tanh_backward(t5, t1)
del t5, t1
t12 = aten_t(t11)
t13 = aten_mm(t12, input)
del t12, input
t14 = aten_sum_dim_IntList(t11, [0], True)
del t11
t15 = aten_view(t14, [64])
del t14
ft16 = reduce_scatter((t13, t15), b_0)
del t13, t15
(t17, t18) = wait_reduce_scatter(ft10, b_2)
del ft10
(t19, t20) = wait_reduce_scatter(ft16, b_0)
del ft16
return (None, t20, t19, t18, t17)""",
    )


def test_reasons_stand_above_the_lines(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(four_linear, torch.ones(3, 4))
    reasons = [
        f"{b.sym.name} {b.args[1].label}: {b.header}"
        for traces in (thunder.last_traces, thunder.last_backward_traces)
        for b in stage(cmodel, "schedule", traces).bound_symbols
        if is_collective(b)
    ]
    assert_expected_inline(
        "\n".join(reasons),
        """\
all_gather 0: issued here: in order of first use, as early as the limits allow
all_gather 1: issued here: in order of first use, as early as the limits allow
wait_all_gather 0: waited for here: the next line uses it; compute is idle for 0.2 ms
all_gather 2: issued here: not earlier, as more than prefetch=1 would be gathered ahead of use
wait_all_gather 1: waited for here: the next line uses it; compute is idle for 0.197 ms
all_gather 3: issued here: not earlier, as more than prefetch=1 would be gathered ahead of use
wait_all_gather 2: waited for here: the next line uses it; compute is idle for 0.197 ms
wait_all_gather 3: waited for here: the next line uses it; compute is idle for 0.197 ms
all_gather 3: issued here: in order of first use, as early as the limits allow
reduce_scatter 3: issued here: its gradients are complete
wait_all_gather 3: waited for here: the next line uses it; compute is idle for 0.197 ms
all_gather 2: issued here: not earlier, as more than 128 bytes would be in flight
wait_reduce_scatter 3: waited for here: it makes room for b_2; compute is idle for 0.194 ms
reduce_scatter 2: issued here: its gradients are complete
wait_all_gather 2: waited for here: the next line uses it; compute is idle for 0.2 ms
all_gather 1: issued here: not earlier, as more than 128 bytes would be in flight
wait_reduce_scatter 2: waited for here: it makes room for b_1; compute is idle for 0.194 ms
reduce_scatter 1: issued here: its gradients are complete
wait_all_gather 1: waited for here: the next line uses it; compute is idle for 0.2 ms
reduce_scatter 0: issued here: its gradients are complete
wait_reduce_scatter 1: waited for here: the trace ends; compute is idle for 0.194 ms
wait_reduce_scatter 0: waited for here: the trace ends; compute is idle for 0.2 ms""",
    )
    printed = str(thunder.last_traces(cmodel)[-1])
    assert "# issued here: not earlier, as more than prefetch=1 would be gathered ahead of use\n" in printed


def test_golden_backward_of_zero2(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy="zero2")
    assert_expected_inline(
        collective_lines(stage(cmodel, "schedule", thunder.last_backward_traces)),
        """\
reduce 2
reduce 0
wait_reduce 2
wait_reduce 0
python_return""",
    )


def four_linear():
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))


@pytest.mark.parametrize(
    ("prefetch", "lines"),
    [
        (0, "gather 0, wait 0, linear, gather 1, wait 1, linear, gather 2, wait 2, linear, gather 3, wait 3, linear"),
        (
            None,
            "gather 0, gather 1, wait 0, linear, gather 2, wait 1, linear, gather 3, wait 2, linear, wait 3, linear",
        ),
        (2, "gather 0, gather 1, gather 2, wait 0, linear, gather 3, wait 1, linear, wait 2, linear, wait 3, linear"),
    ],
)
def test_prefetch(fake_ranks, prefetch, lines):
    """None: one bucket, the default."""
    fake_ranks(2)
    cmodel = compile_fake(four_linear, torch.ones(3, 4), compile_policy=CompilePolicy(prefetch=prefetch))
    found = collective_lines(stage(cmodel, "schedule")).replace("wait_gather", "wait").splitlines()
    assert found == [*lines.split(", "), "python_return"]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_compute_keeps_its_order(fake_ranks, strategy):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), sharding_strategy=strategy)
    for traces in (thunder.last_traces(cmodel), thunder.last_backward_traces(cmodel)):
        before, after = (
            [
                [o.name for o in b.flat_proxy_outs]
                for b in trace.bound_symbols
                if not is_collective(b) and b.flat_proxy_outs and not b.sym.name.startswith("unpack")
            ]
            for trace in (next(t for t in traces if "Delete Last Used" in str(t.get_provenance())), traces[-1])
        )
        assert before == after
