from passes.kernels import executor

import pytest
import thunder
import torch
from eager import compare


def leaf(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shapes", [((4, 6), (4, 6)), ((4, 6), (6,)), ((4, 1), (4, 6)), ((3, 1, 6), (4, 1)), ((4,), ())]
)
def test_equals_eager(dtype, shapes):
    compare(torch.mul, *(leaf(*shape, dtype=dtype) for shape in shapes), kernels=["mul"] * 3)


def test_a_factor_without_gradient():
    compare(lambda a, b: a * b, leaf(4, 6), torch.randn(6).bfloat16(), kernels=["mul"] * 2)


def test_factors_are_saved_as_they_are():
    """Thunder by itself saves them in fp32."""
    jitted = thunder.jit(torch.mul, executors=[executor])
    a, b = leaf(4, 6), leaf(4, 1)
    out = jitted(a, b)
    saved = {t.data_ptr(): t.dtype for t in out.grad_fn.saved_tensors}
    assert saved == {t.data_ptr(): torch.bfloat16 for t in (a, b)}


@pytest.mark.parametrize("b", [2.0, torch.randn(6)], ids=["number", "fp32"])
def test_others_are_left_to_thunder(b):
    compare(lambda a: a * b, leaf(4, 6), kernels=[])
    compare(lambda a: a * a, leaf(4, 6, dtype=torch.float32), kernels=[])
