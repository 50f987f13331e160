from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare

KERNELS = ["linear", "linear_backward_input", "linear_backward_weight"]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_eager(shape, dtype, bias):
    b = leaf(5, dtype=dtype) if bias else None
    kernels = [*KERNELS, "linear_backward_bias"] if bias and len(shape) > 1 else KERNELS
    compare(F.linear, leaf(*shape, dtype=dtype), leaf(5, 4, dtype=dtype), b, kernels=kernels, exact=False)


def test_only_the_gradients_that_are_used_are_computed():
    compare(F.linear, torch.randn(3, 4), leaf(5, 4), kernels=[KERNELS[0], KERNELS[2]])
    compare(F.linear, leaf(3, 4), torch.randn(5, 4), kernels=KERNELS[:2])


def test_autocast():
    def function(a, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(a, w)

    compare(function, leaf(3, 4), leaf(5, 4), kernels=KERNELS)


def test_gradcheck():
    jitted = thunder.jit(F.linear, executors=[executor])
    arguments = [leaf(*shape, dtype=torch.float64) for shape in ((2, 3), (4, 3), (4,))]
    assert torch.autograd.gradcheck(jitted, arguments)
