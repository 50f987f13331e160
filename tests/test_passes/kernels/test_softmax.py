from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_equals_eager(name, dtype):
    a = torch.randn(4, 6).to(dtype).requires_grad_()
    compare(lambda a: getattr(F, name)(a, -1), a, kernels=[name, f"{name}_backward"])


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_in_another_dtype(name):
    a = torch.randn(4, 6).to(torch.bfloat16).requires_grad_()
    compare(lambda a: getattr(F, name)(a, dim=0, dtype=torch.float32), a, kernels=[name, f"{name}_backward"])


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(["softmax", "log_softmax"]), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_gradcheck(name, shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    jitted = thunder.jit(lambda a: getattr(F, name)(a, dim), executors=[executor])
    assert torch.autograd.gradcheck(jitted, (torch.randn(shape, dtype=torch.float64, requires_grad=True),))
