"""Losses and embeddings of parts of a vocabulary are those of torch, with their gradients."""

from passes.kernels.parts import LossOfParts, PartOfEmbedding, PartOfLoss
from passes.plan.plan import ContextPlan

import pytest
import torch
import torch.nn.functional as F


def plans(ranks):
    return [ContextPlan(ranks, rank, pieces=1) for rank in range(ranks)]


def loss_of(logits, labels, ranks, **options):
    """As ranks compute it that have equal parts of the classes."""
    parts = zip(plans(ranks), logits.chunk(ranks, -1), strict=True)
    ignored = options.get("ignore_index", -100)
    numbers = torch.cat([PartOfLoss(plan, ignored)(part, labels) for plan, part in parts], -1)
    return LossOfParts(logits.dtype)(numbers, labels, **options)


def with_gradient(function, logits, *args, **options):
    given = logits.detach().requires_grad_()
    found = function(given, *args, **options)
    return found, torch.autograd.grad(found.sum() * 2, given)[0]


LABELS = torch.tensor([3, 0, -100, 7, 11, 4, -100, 8])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_losses(dtype, ranks, reduction, scale):
    logits = (scale * torch.randn(8, 12, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = with_gradient(loss_of, logits, LABELS, ranks, reduction=reduction)
    expected = with_gradient(F.cross_entropy, logits.float(), LABELS, reduction=reduction)  # torch rounds in between
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(found, tuple(t.to(dtype) for t in expected), **close)


def test_classes_that_are_masked():
    logits = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    logits[:, 4:8] = -torch.inf  # all of one rank
    logits[3, :8] = -torch.inf
    labels = torch.where(LABELS >= 4, 9, LABELS).where(LABELS != 3, 10)
    labels[3] = 8
    found, expected = (with_gradient(f, logits, labels, *more) for f, more in ((loss_of, (3,)), (F.cross_entropy, ())))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_an_ignored_class_and_a_batch_without_labels():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 5, 0, 3])
    found, expected = (
        with_gradient(f, logits, labels, *more, ignore_index=0) for f, more in ((loss_of, (2,)), (F.cross_entropy, ()))
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert loss_of(logits, torch.full((4,), -100), 2).isnan()


@pytest.mark.parametrize("padding", [None, 0, 4])
def test_embeddings(padding):
    table = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 5, 4], [4, 2, 0]])

    def of_parts(table, tokens, padding):
        return sum(PartOfEmbedding(p)(tokens, part, padding) for p, part in zip(plans(2), table.chunk(2), strict=True))

    found = with_gradient(of_parts, table, tokens, padding)
    torch.testing.assert_close(found, with_gradient(lambda w, x, i: F.embedding(x, w, i), table, tokens, padding))


@pytest.mark.parametrize("token", [-1, 6])
def test_tokens_and_labels_that_are_in_no_part(token):
    table = torch.randn(6, 3)
    for plan, part in zip(plans(2), table.chunk(2), strict=True):
        with pytest.raises(IndexError, match="index out of range"):
            PartOfEmbedding(plan)(torch.tensor([0, token]), part)
        with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
            PartOfLoss(plan, -100)(part.T, torch.tensor([0, token, 1]))
        PartOfLoss(plan, token)(part.T, torch.tensor([0, token, 1]))
