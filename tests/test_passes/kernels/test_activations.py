from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare
from hypothesis import given, settings
from hypothesis import strategies as st

ACTIVATIONS = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
}
OPTIONS = {
    "gelu, tanh": ("gelu", lambda a: F.gelu(a, approximate="tanh")),
    "softplus, beta": ("softplus", lambda a: F.softplus(a, 2.0, 1.0)),
    "leaky_relu, slope": ("leaky_relu", lambda a: F.leaky_relu(a, 0.3)),
    "elu, alpha": ("elu", lambda a: F.elu(a, 0.4)),
    "selu": ("elu", F.selu),
    "method": ("relu", lambda a: a.relu()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_eager(name, dtype):
    a = (torch.randn(4, 6) * 3).to(dtype).requires_grad_()
    compare(ACTIVATIONS[name], a, kernels=[name, f"{name}_backward"])


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case):
    name, function = OPTIONS[case]
    compare(function, torch.randn(4, 6).mul(3).requires_grad_(), kernels=[name, f"{name}_backward"])


@settings(max_examples=3, deadline=None)
@given(st.sampled_from(sorted(ACTIVATIONS)), st.lists(st.integers(1, 3).map(lambda n: 2 * n), min_size=1, max_size=4))
def test_gradcheck(name, shape):
    a = torch.randn(shape, dtype=torch.float64).add(0.01).requires_grad_()
    assert torch.autograd.gradcheck(thunder.jit(ACTIVATIONS[name], executors=[executor]), (a,))


def test_an_input_that_is_used_twice():
    a = torch.randn(5, requires_grad=True)
    compare(
        lambda a: F.silu(a) * a + F.gelu(a),
        a,
        kernels=["silu", "silu_backward", "gelu", "gelu_backward"],
        exact=False,
    )


def test_in_place_is_left_to_thunder():
    compare(lambda a: F.relu(a * 2, inplace=True), torch.randn(5, requires_grad=True), kernels=[])


def test_integers_and_empty_tensors_are_left_to_thunder():
    compare(F.silu, torch.randn(0, 3, requires_grad=True), kernels=[])
    jitted = thunder.jit(F.relu, executors=[executor])
    assert torch.equal(jitted(torch.tensor([-1, 2])), torch.tensor([0, 2]))
