"""``mp_policy``: dtypes of a model's inputs and outputs, shards and gradients."""

import shardtrace

import pytest
import thunder
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


@on_ranks(2)
def test_casts_at_the_edge():
    """PyTorch's policy decides the dtypes of inputs and outputs. Shards and buffers keep theirs."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)
            self.register_buffer("shift", torch.ones(6))

        def forward(self, inputs, n):
            out = self.linear(inputs["x"]) * n
            return {"out": out, "shifted": out + self.shift, "ids": inputs["ids"]}

    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float16)
    cmodel = thunder.jit(shardtrace.fsdp(Model(), mp_policy=policy))
    result = cmodel({"x": torch.ones(2, 4), "ids": torch.arange(2)}, 2)
    assert {key: value.dtype for key, value in result.items()} == {
        "out": torch.float16, "shifted": torch.float16, "ids": torch.int64,
    }  # fmt: skip
    result["shifted"].sum().backward()
    assert {p.dtype for p in cmodel.parameters()} == {p.grad.dtype for p in cmodel.parameters()} == {torch.float32}
    assert {b.dtype for b in cmodel.buffers()} == {torch.float32}

    plain = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    cmodel = thunder.jit(shardtrace.fsdp(nn.Linear(4, 6), mp_policy=plain))
    with pytest.raises(Exception, match="dtype"):
        cmodel(torch.ones(2, 4))


def test_mixed_precision_of_one_rank(fake_ranks):
    fake_ranks(1)
    model = nn.Sequential(*(nn.Linear(i, o) for i, o in [(6, 64), (64, 64), (64, 5)]))
    expected = model.to(torch.bfloat16)(torch.ones(3, 6).bfloat16())
    cmodel = thunder.jit(shardtrace.fsdp(model.float(), mp_policy="bf16"))
    result = cmodel(torch.ones(3, 6))
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    result.sum().backward()
    assert {p.grad.dtype for p in cmodel.parameters()} == {torch.float32}
