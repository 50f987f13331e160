from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare
from torch import nn

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def test_only_the_gradients_that_are_used_are_computed():
    jitted = compare(
        lambda a, w: F.rms_norm(a, (6,), w), leaf(3, 6), torch.randn(6),
        kernels=["rms_norm", "rms_norm_backward"],
        exact=False,
    )  # fmt: skip
    (line,) = (b for b in thunder.last_backward_traces(jitted)[-1].bound_symbols if b.sym.name == "rms_norm_backward")
    assert line.args[-1] == (True, False)
    assert line.output[1] is None


@DTYPES
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm(dtype, eps):
    compare(
        lambda a, w: F.rms_norm(a, (6,), w, eps),
        leaf(3, 4, 6, dtype=dtype),
        leaf(6, dtype=dtype),
        kernels=["rms_norm", "rms_norm_backward"],
        exact=False,
    )


@pytest.mark.parametrize(("shape", "normalized"), [((3, 6), (6,)), ((6,), (6,)), ((2, 3, 4), (3, 4))])
def test_rms_norm_gradcheck(shape, normalized):
    jitted = thunder.jit(lambda a, w: F.rms_norm(a, normalized, w), executors=[executor])
    assert torch.autograd.gradcheck(jitted, (leaf(*shape, dtype=torch.float64), leaf(*normalized, dtype=torch.float64)))
    jitted = thunder.jit(lambda a: F.rms_norm(a, normalized), executors=[executor])
    assert torch.autograd.gradcheck(jitted, (leaf(*shape, dtype=torch.float64),))


@DTYPES
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(dtype, training):
    def function(a, w, b):
        mean, var = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
        return F.batch_norm(a, mean, var, w, b, training)

    compare(
        function,
        *(leaf(*s, dtype=dtype) for s in ((4, 3, 5, 5), (3,), (3,))),
        kernels=["batch_norm", "batch_norm_backward"],
    )


@pytest.mark.parametrize(("affine", "tracked"), [(True, True), (False, True), (True, False)])
def test_batch_norm_updates_its_buffers(affine, tracked):
    torch.manual_seed(0)
    expected = nn.BatchNorm2d(3, affine=affine, track_running_stats=tracked)
    found = nn.BatchNorm2d(3, affine=affine, track_running_stats=tracked)
    jitted = thunder.jit(found, executors=[executor])
    for training in (True, True, False):
        a = torch.randn(4, 3, 5, 5)
        for module in (expected, found):
            module.train(training)
        assert torch.equal(jitted(a), expected(a))
        for name, buffer in expected.named_buffers():
            assert torch.equal(found.get_buffer(name), buffer), name


def test_instance_norm():
    compare(lambda a: F.instance_norm(a), leaf(2, 3, 4, 4), kernels=["batch_norm", "batch_norm_backward"], exact=False)
