import shardtrace

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from thunder.core.transform_common import Transform
from torch import nn


def two_linear():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5))


@pytest.fixture
def cmodel(fake_ranks):
    fake_ranks(2)
    return compile_fake(two_linear, torch.ones(3, 6))


def test_inputs_are_shards(cmodel):
    trace = stage(cmodel, "shard_parameters")
    shapes = {p.name: tuple(p.shape) for p in trace.args}
    assert shapes == {
        "input": (3, 6),
        "t_0_weight": (32, 6),
        "t_0_bias": (32,),
        "t_2_weight": (3, 64),  # 5 rows, padded to 6
        "t_2_bias": (3,),
    }


def test_the_prologue_checks_shards(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(two_linear, torch.ones(3, 6), transforms=[Transform()])  # checks are not merged for this one
    trace = stage(cmodel, "shard_parameters", thunder.last_prologue_traces)
    checks = [line for line in text(trace).splitlines() if "check_tensor" in line]
    assert_expected_inline(
        "\n".join(checks),
        """\
prims.check_tensor_shape_and_metadata(input, (3, 6), 'cpu', torch.float32, False)
prims.check_tensor_shape_and_metadata(t_0_weight_dtensor, (64, 6), 'cpu', torch.float32, True)
prims.check_tensor_shape_and_metadata(t_0_bias_dtensor, (64,), 'cpu', torch.float32, True)
prims.check_tensor_shape_and_metadata(t_2_weight_dtensor, (5, 64), 'cpu', torch.float32, True)
prims.check_tensor_shape_and_metadata(t_2_bias_dtensor, (5,), 'cpu', torch.float32, True)""",
    )


def test_the_body_is_that_of_the_traced_model(cmodel):
    body = [b.sym.name for b in stage(cmodel, "shard_parameters").bound_symbols if b.sym.name != "unpack_trivial"]
    assert body == ["torch_linear_0", "torch_tanh_0", "torch_linear_1", "python_return"]


def test_a_function_without_sharded_parameters_is_left_alone(fake_ranks):
    fake_ranks(2)
    sharded, plain = shardtrace.fsdp(nn.Linear(2, 2)), nn.Linear(2, 2)
    step = thunder.jit(lambda x, shard: sharded(x) if shard else plain(x))
    step(torch.ones(1, 2), True)
    step(torch.ones(1, 2), False)  # the function has the passes, but this trace has nothing for them
    assert not any("shardtrace" in str(t.get_provenance()) for t in thunder.last_traces(step))
