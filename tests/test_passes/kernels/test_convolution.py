from passes.analysis.flops import flops
from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare

CONVOLUTION = ["convolution", "convolution_backward"]
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", FUNCTIONS)
def test_convolution(rank, dtype):
    spatial = (6,) * rank
    compare(
        FUNCTIONS[rank],
        leaf(2, 4, *spatial, dtype=dtype),
        leaf(3, 4, *(3,) * rank, dtype=dtype),
        leaf(3, dtype=dtype),
        kernels=CONVOLUTION,
    )


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"stride": (2, 1), "padding": (0, 2)}],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_options(options, bias):
    weight = leaf(4, 4 // options.get("groups", 1), 3, 3)
    compare(
        lambda a, w, b: F.conv2d(a, w, b, **options),
        leaf(2, 4, 7, 7),
        weight,
        leaf(4) if bias else None,
        kernels=CONVOLUTION,
    )


@pytest.mark.parametrize(("a", "w", "b"), [(False, True, True), (True, False, False), (True, False, True)])
def test_only_the_gradients_that_are_used_are_computed(a, w, b):
    shapes = {(2, 3, 6, 6): a, (4, 3, 3, 3): w, (4,): b}
    inputs = [torch.randn(shape, requires_grad=wanted) for shape, wanted in shapes.items()]
    jitted = compare(F.conv2d, *inputs, kernels=CONVOLUTION)
    (line,) = (x for x in thunder.last_backward_traces(jitted)[-1].bound_symbols if x.sym.name == CONVOLUTION[1])
    assert line.args[-1] == (a, w, b)
    assert flops(line) == (a + w) * 2 * 2 * 4 * 4 * 4 * 3 * 3 * 3


def test_gradcheck():
    jitted = thunder.jit(lambda a, w: F.conv2d(a, w, padding=1, stride=2), executors=[executor])
    assert torch.autograd.gradcheck(
        jitted, (leaf(1, 2, 4, 4, dtype=torch.float64), leaf(2, 2, 3, 3, dtype=torch.float64))
    )
