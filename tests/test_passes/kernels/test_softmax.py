from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_equals_eager(dtype):
    a = torch.randn(4, 6).to(dtype).requires_grad_()
    compare(lambda a: F.softmax(a, -1), a, kernels=["softmax", "softmax_backward"])


def test_in_another_dtype():
    a = torch.randn(4, 6).to(torch.bfloat16).requires_grad_()
    compare(lambda a: F.softmax(a, dim=0, dtype=torch.float32), a, kernels=["softmax", "softmax_backward"])


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_gradcheck(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    jitted = thunder.jit(lambda a: F.softmax(a, dim), executors=[executor])
    assert torch.autograd.gradcheck(jitted, (torch.randn(shape, dtype=torch.float64, requires_grad=True),))
