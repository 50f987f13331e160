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
