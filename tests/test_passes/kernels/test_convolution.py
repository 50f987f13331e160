import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare
from passes.kernels import executor

CONVOLUTION = ["convolution", "convolution_backward_input", "convolution_backward_weight"]
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
    "options", [dict(stride=2), dict(padding=1), dict(dilation=2), dict(groups=2), dict(stride=(2, 1), padding=(0, 2))], ids=str
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


def test_the_first_layer_has_no_gradient_of_its_input():
    compare(F.conv2d, torch.randn(2, 3, 6, 6), leaf(4, 3, 3, 3), leaf(4), kernels=[CONVOLUTION[0], CONVOLUTION[2]])


def test_frozen_weights():
    compare(F.conv2d, leaf(2, 3, 6, 6), torch.randn(4, 3, 3, 3), kernels=CONVOLUTION[:2])
    jitted = compare(F.conv2d, leaf(2, 3, 6, 6), torch.randn(4, 3, 3, 3), leaf(4), kernels=CONVOLUTION)
    (line,) = (b for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if b.sym.name == CONVOLUTION[2])
    assert line.args[-1] == (False, True)


def test_gradcheck():
    jitted = thunder.jit(lambda a, w: F.conv2d(a, w, padding=1, stride=2), executors=[executor])
    assert torch.autograd.gradcheck(jitted, (leaf(1, 2, 4, 4, dtype=torch.float64), leaf(2, 2, 3, 3, dtype=torch.float64)))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("options", [dict(), dict(stride=1), dict(padding=1)], ids=str)
def test_avg_pool(rank, options):
    name = f"avg_pool{rank}d"
    compare(
        lambda a: getattr(F, name)(a, 2, **options), leaf(2, 3, *(6,) * rank), kernels=[name, f"{name}_backward"]
    )


@pytest.mark.parametrize("options", [dict(), dict(stride=1), dict(padding=1), dict(dilation=2)], ids=str)
def test_max_pool1d(options):
    compare(lambda a: F.max_pool1d(a, 2, **options), leaf(2, 3, 7), kernels=["max_pool1d", "max_pool1d_backward"])
