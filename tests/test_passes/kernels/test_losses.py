from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare
from hypothesis import given, settings
from hypothesis import strategies as st

REDUCTIONS = ["mean", "sum", "none"]
ENTROPY = ["log_softmax", "log_softmax_backward", "nll_loss", "nll_loss_backward"]
SHAPES = [(5,), (4, 5)]


def scores_and_labels(shape, dtype=torch.float32):
    scores = torch.randn(shape).to(dtype).requires_grad_()
    return scores, torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_cross_entropy(dtype):
    compare(F.cross_entropy, *scores_and_labels((4, 5), dtype), kernels=ENTROPY)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy_of_any_shape(shape, reduction):
    compare(lambda a, y: F.cross_entropy(a, y, reduction=reduction), *scores_and_labels(shape), kernels=ENTROPY)


@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_and_ignored_labels(reduction, ignore):
    scores, labels = scores_and_labels((6, 5))
    labels[:2] = ignore
    compare(
        lambda a, y, w: F.cross_entropy(a, y, w, ignore_index=ignore, reduction=reduction),
        scores,
        labels,
        torch.rand(5) + 0.1,
        kernels=ENTROPY,
    )


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from(REDUCTIONS))
def test_gradcheck(shape, reduction):
    scores, labels = scores_and_labels(shape, torch.float64)
    jitted = thunder.jit(lambda a, y: F.cross_entropy(a, y, reduction=reduction), executors=[executor])
    assert torch.autograd.gradcheck(jitted, (scores, labels))


def test_probabilities_keep_thunders_rule_with_one_kernel():
    target = torch.randn(4, 5).softmax(1)
    compare(
        F.cross_entropy, torch.randn(4, 5, requires_grad=True), target,
        kernels=["log_softmax", "log_softmax_backward"], exact=False,
    )  # fmt: skip
