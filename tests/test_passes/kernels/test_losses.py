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
SMOOTHED = [*ENTROPY, "smoothing_loss", "smoothing_loss_backward"]
SHAPES = [(5,), (4, 5), (2, 5, 3), (2, 5, 3, 2)]


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
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3)], ids=str)
def test_weights_ignored_labels_and_smoothing(shape, smoothing, reduction, ignore):
    scores, labels = scores_and_labels(shape)
    labels.view(-1)[:2] = ignore
    compare(
        lambda a, y, w: F.cross_entropy(a, y, w, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing),
        scores,
        labels,
        torch.rand(5) + 0.1,
        kernels=SMOOTHED if smoothing else ENTROPY,
        exact=not smoothing,
    )


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from(REDUCTIONS), st.sampled_from([0.0, 0.2]))
def test_gradcheck(shape, reduction, smoothing):
    scores, labels = scores_and_labels(shape, torch.float64)
    jitted = thunder.jit(
        lambda a, y: F.cross_entropy(a, y, reduction=reduction, label_smoothing=smoothing), executors=[executor]
    )
    assert torch.autograd.gradcheck(jitted, (scores, labels))


def test_probabilities_keep_thunders_rule_with_one_kernel():
    target = torch.randn(4, 5).softmax(1)
    compare(
        F.cross_entropy, torch.randn(4, 5, requires_grad=True), target,
        kernels=["log_softmax", "log_softmax_backward"], exact=False,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss(reduction):
    scores, labels = scores_and_labels((4, 5))
    kernels = ["nll_loss", "nll_loss_backward"]
    compare(lambda a, y: F.nll_loss(a, y, ignore_index=1, reduction=reduction), scores, labels, kernels=kernels)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_mse_loss(reduction, dtype):
    a, b = (torch.randn(4, 5).to(dtype).requires_grad_() for _ in "ab")
    kernels = ["mse_loss", "mse_loss_backward", "mse_loss_backward"]
    compare(lambda a, b: F.mse_loss(a, b, reduction=reduction), a, b, kernels=kernels)
    compare(lambda a, b: F.mse_loss(a, b, reduction=reduction), a, b.detach(), kernels=kernels[:2])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("weight", "pos_weight"), [(None, None), (0.5, None), (None, 2.0), (0.5, 2.0)])
def test_binary_cross_entropy_with_logits(reduction, weight, pos_weight):
    weight, pos_weight = (None if w is None else torch.full((5,), w) for w in (weight, pos_weight))
    name = "binary_cross_entropy_with_logits"
    kernels = [name, f"{name}_backward"]
    for learned in (False, True):
        compare(
            lambda a, y, w, p: F.binary_cross_entropy_with_logits(a, y, w, reduction=reduction, pos_weight=p),
            torch.randn(4, 5, requires_grad=True), torch.rand(4, 5, requires_grad=learned), weight, pos_weight,
            kernels=[*kernels, f"{name}_backward_target"] if learned else kernels, exact=False,
        )  # fmt: skip
