"""Which lines have Thunder's symbol, and which call torch's own function."""

import copy

import shardtrace
from shardtrace.record.symbols import OPERATORS, TRUSTED, is_method, name_of

import pytest
import thunder
import torch
from against_eager import Model, check
from torch.nn import functional as F

X = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("function", "name", "method"),
    [
        (torch.add, "add", False),
        (torch.Tensor.add, "add", True),
        (torch.Tensor.add_, "add_", True),
        (torch.Tensor.T.__get__, "T", True),
        (torch.Tensor.__getitem__, "__getitem__", True),
        (F.gelu, "gelu", False),
        (F.scaled_dot_product_attention, "scaled_dot_product_attention", False),
        (torch.fft.rfft, "rfft", False),
        (torch.linalg.norm, "norm", False),
        (torch.ops.aten.sin.default, "default", False),
        (lambda x: x, "<lambda>", False),
    ],
)
def test_names(function, name, method):
    assert name_of(function) == name
    assert is_method(function) is method


def test_trusted_names_are_torchs():
    for name in TRUSTED:
        assert any(hasattr(owner, name) for owner in (torch, torch.Tensor, F)), name
    assert all(hasattr(torch.Tensor, name) for name in OPERATORS)


def _heads(m, x):
    return m.fc(x).expand(3, 1, 1, 3, 4)


def _masked(m):
    """Numbers that are learned; the last row is masked."""
    return m.fc.weight[:3, :3] + torch.tensor([[0.0], [0.0], [torch.finfo(torch.float32).min]])


def lines_of(function, x=X):
    """The names of the lines of a function of a model and its input, which computes what torch does."""
    cmodel = check(lambda: Model(function), lambda step: (x,), steps=1)
    names = [b.sym.name for b in thunder.last_traces(cmodel)[0].bound_symbols]
    return [name for name in names if name not in ("unpack_trivial", "python_return")]


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (lambda m, x: F.gelu(m.fc(x)), ["torch_linear_0", "torch_gelu_0"]),
        (lambda m, x: -(m.fc(x) * 2), ["torch_linear_0", "torch_mul_0", "torch_neg_0"]),
        (lambda m, x: m.fc(x).t()[1:].T, ["torch_linear_0", "t", "getitem", "transpose"]),
        (lambda m, x: m.fc(x).double().float(), ["torch_linear_0", "to", "to"]),
        (lambda m, x: m.fc(x).matmul(x.t()), ["torch_linear_0", "t", "torch_matmul_0"]),
        (lambda m, x: m.fc(x).add_(1).relu_(), ["torch_linear_0", "torch_add_0", "torch_relu_0"]),
        (lambda m, x: m.fc(x) * x.clone().fill_(2), ["torch_linear_0", "clone", "full_like", "torch_mul_0"]),
    ],
)
def test_symbols(function, lines, single_rank):
    assert lines_of(function) == lines


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda m, x: m.fc(x).logcumsumexp(0), "torch_logcumsumexp_0"),  # Thunder has no symbol
        (lambda m, x: m.fc(x).amax(), "torch_amax_0"),  # and divides a gradient among equal values
        (lambda m, x: x ** m.fc(x).abs(), "torch_pow_0"),  # a tensor as exponent
        (lambda m, x: m.fc(x)[torch.tensor([0, 2])], "torch_getitem_0"),  # tensors as indices
        (lambda m, x: F.embedding(torch.tensor([1, 1]), m.fc.weight, scale_grad_by_freq=True), "torch_embedding_0"),
        (lambda m, x: torch.view_as_complex(m.fc(x).view(3, 2, 2)).abs(), "torch_abs_0"),  # complex numbers
        (lambda m, x: m.fc(x).narrow(0, 1, 2), "torch_narrow_0"),  # Thunder would call torch's function
        (lambda m, x: F.scaled_dot_product_attention(m.fc(x), x, x), "torch_scaled_dot_product_attention_0"),  # 2-dim
        (
            lambda m, x: F.scaled_dot_product_attention(*_heads(m, x), attn_mask=_masked(m)),
            "torch_scaled_dot_product_attention_0",
        ),  # a mask with a gradient
        (lambda m, x: m.fc(x)[:, :0].exp().sum() + m.fc(x), "torch_exp_0"),  # without elements
        (lambda m, x: torch.dropout(m.fc(x), 0.5, True), "torch_dropout_0"),
        (lambda m, x: torch.add(m.fc(x).detach(), 1, out=torch.empty(3, 4)) * m.fc(x), "torch_add_0"),
    ],
)
def test_torchs_own_functions(function, line, single_rank):
    assert line in lines_of(function, X.abs())


class Activations(torch.nn.Module):
    """By functions, methods and modules, in place where torch's backward then computes the same."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.elu = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.ELU()

    def forward(self, x):
        y = torch.relu_(self.norm(self.fc(x)))
        y = F.gelu(y, approximate="tanh") + F.leaky_relu(self.fc(x), 0.2, inplace=True)
        y = F.softplus(self.elu(y * 2), 2.0) + F.selu(F.mish(y))
        z = (y + F.silu(y, inplace=False)).sigmoid_()
        return torch.log_softmax(F.group_norm((z * 2).tanh_(), 2), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_what_thunder_takes_apart_is_as_in_torch(single_rank, dtype):
    eager, results = Activations().to(dtype), []
    cmodel = thunder.jit(shardtrace.fsdp(copy.deepcopy(eager)))
    x = torch.randn(3, 4).to(dtype)
    for model in (eager, cmodel):
        given = x.clone().requires_grad_()
        out = model(given)
        (out.float() ** 2).sum().backward()
        results.append([out.detach(), given.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, torch.as_tensor(b)) for a, b in zip(*results, strict=True))
    forward = [b.sym.name for b in thunder.last_traces(cmodel)[-1].bound_symbols]
    assert "clone" not in forward
    assert {"torch_relu_0", "torch_elu_0", "torch_selu_0", "torch_sigmoid_0", "torch_tanh_0"} <= {*forward}


@pytest.mark.parametrize("name", ["add", "mul", "div", "neg", "abs", "exp", "sum", "mean", "cumsum"])
def test_arithmetic_in_half_has_no_casts(single_rank, name):
    """Thunder's symbols cast to float32 and back, each by a function of its own where nothing fuses."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            others = {"add": (x[:1],), "mul": (x[:1],), "div": (x[:1],), "cumsum": (-1,)}
            return getattr(torch, name)(y, *others.get(name, ()))

    cmodel = thunder.jit(shardtrace.fsdp(Half().bfloat16()))
    cmodel(torch.rand(3, 4, dtype=torch.bfloat16) + 1).float().sum().backward()
    for trace in (thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]):
        assert not [b for b in trace.bound_symbols if b.sym.name in ("to", "convert_element_type")]
