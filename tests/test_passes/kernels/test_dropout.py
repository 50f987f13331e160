from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_equals_eager_with_the_same_seed(dtype, p):
    a = torch.randn(40, 50).to(dtype).requires_grad_()
    compare(lambda a: F.dropout(a, p), a, kernels=["dropout_mask", "dropout", "dropout"], exact=False)


def test_saves_one_byte_for_each_element():
    jitted = thunder.jit(lambda a: F.dropout(a, 0.3), executors=[executor])
    jitted(torch.randn(4, 5, requires_grad=True)).sum().backward()
    saved, _ = thunder.last_traces(jitted)[-1].bound_symbols[-1].args[1]
    assert [str(s.dtype) for s in saved] == ["thunder.dtypes.bool8"]


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_without_randomness_is_left_to_thunder(p, training):
    compare(lambda a: F.dropout(a, p, training) * 2, torch.randn(5, requires_grad=True), kernels=[])
