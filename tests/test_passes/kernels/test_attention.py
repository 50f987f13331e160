from passes.kernels import executor

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import compare

KERNELS = ["scaled_dot_product_attention", "scaled_dot_product_attention_backward"]


def inputs(*, dtype=torch.float32, queries=5, keys=5, heads=2, width=8):
    q = torch.randn(3, heads, queries, width).to(dtype).requires_grad_()
    k, v = (torch.randn(3, heads, keys, width).to(dtype).requires_grad_() for _ in "kv")
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_equals_eager(dtype, causal):
    compare(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), *inputs(dtype=dtype), kernels=KERNELS
    )


def test_scale_and_another_number_of_keys():
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3)  # noqa: E731
    compare(function, *inputs(keys=7), kernels=KERNELS)


@pytest.mark.parametrize("shape", [(5, 7), (3, 1, 5, 7), (3, 2, 5, 7), (1, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks(shape, boolean):
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True  # each query sees a key
    compare(
        F.scaled_dot_product_attention,
        *inputs(keys=7),
        mask if boolean else torch.randn(shape),
        kernels=KERNELS,
    )


@pytest.mark.parametrize("shape", [(5, 7), (1, 2, 5, 7), (3, 1, 1, 7)], ids=str)
def test_a_mask_with_a_gradient(shape):
    mask = torch.randn(shape, requires_grad=True)
    compare(F.scaled_dot_product_attention, *inputs(keys=7), mask, kernels=KERNELS, exact=False)


def test_a_mask_that_depends_on_a_parameter():
    """Thunder does not mark values that depend on a parameter. The gradient must reach it even so."""
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    compare(
        lambda q, k, v, m, bias: F.scaled_dot_product_attention(q, k, v, m + bias),
        *inputs(), torch.zeros(5, 5), bias, kernels=KERNELS, exact=False,
    )  # fmt: skip


def test_gradcheck():
    jitted = thunder.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), executors=[executor])
    assert torch.autograd.gradcheck(jitted, inputs(dtype=torch.float64, queries=3, keys=3, width=4))


@pytest.mark.parametrize("layout", ["heads last", "sliced"])
def test_other_layouts(layout):
    def function(a):
        if layout == "heads last":
            q, k, v = (t.view(3, 5, 2, 8).transpose(1, 2) for t in a.split(16, 2))
        else:
            q, k, v = (t.transpose(2, 3) for t in a.view(3, 2, 24, 5).split(8, 2))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous().view(3, 5, 16)

    # eager PyTorch does not call the kernel if the last dimension is strided
    compare(function, torch.randn(3, 5, 48, requires_grad=True), kernels=KERNELS, exact=layout == "heads last")


def test_dropout_and_values_of_another_width_are_taken_apart():
    q, k, v = inputs()
    wide = torch.randn(3, 2, 5, 12, requires_grad=True)
    rule = ["softmax", "softmax_backward"]
    compare(F.scaled_dot_product_attention, q, k, wide, kernels=rule, exact=False)
    dropped = thunder.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.5), executors=[executor])
    dropped(q, k, v).sum().backward()
    names = [b.sym.name for b in thunder.last_traces(dropped)[-1].bound_symbols]
    assert {"softmax", "dropout_mask", "dropout"} <= set(names)
