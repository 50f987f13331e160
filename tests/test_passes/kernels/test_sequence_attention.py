"""Causal attention of a rank's queries is that of the whole sequence, and so are the sums of its gradients."""

from passes.comm.sequence import Part, _widen, local_part
from passes.kernels import parts
from passes.kernels.parts import CausalAttention
from passes.plan.plan import ContextPlan, Split

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

RANKS = 2


@pytest.mark.parametrize("kernel", [True, False], ids=["in pieces", "with a mask"])
@pytest.mark.parametrize("heads", [4, 2], ids=["", "grouped"])
@pytest.mark.parametrize("length", [16, 13, 3])
def test_equals_attention_of_the_whole_sequence(monkeypatch, length, heads, kernel):
    if not kernel:
        monkeypatch.setattr(parts, "_has_kernel", lambda *tensors: False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, length, 8, requires_grad=True) for n in (4, heads, heads))
    cotangent = torch.randn(2, 4, length, 8)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads < 4)
    gradients = torch.autograd.grad(expected, (q, k, v), cotangent)
    found = [torch.zeros_like(t) for t in (q, k, v)]
    for rank in range(RANKS):
        plan = ContextPlan(RANKS, rank)
        part = Part(plan, Split.along(2, length))
        of_rank = local_part(q, part)
        out = CausalAttention(plan, length)(of_rank, k, v, enable_gqa=heads < 4)
        assert out.shape == of_rank.shape
        torch.testing.assert_close(_widen(out, part), _widen(local_part(expected, part), part))
        # zero where a part is padded, as the gradient of a gather is
        given = local_part(_widen(local_part(cotangent, part), part), Part(plan, part.split, fill=0))
        for total, g in zip(found, torch.autograd.grad(out, (q, k, v), given), strict=True):
            total += g
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
