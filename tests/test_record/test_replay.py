"""Whole models: what the lines of a record compute is what eager PyTorch computes, step by step."""

import functools

import shardtrace

import pytest
import thunder
import torch
import torch.utils.checkpoint
from against_eager import Model, check, rows
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("single_rank")

TABLE = torch.arange(12.0).view(3, 4)  # a constant


# ---- writes ----


def writes_a_row(m, x):
    y = m.fc(x)
    y[0] = x[1] * 2
    return y


def writes_into_a_view(m, x):
    y = m.fc(x)
    y.t()[1].mul_(3)
    return y.exp()


def reads_a_view_after_a_write(m, x):
    y = m.fc(x)
    first, rest = y[:1], y[1:]
    y.add_(1)
    return first * 2, rest.sum(), y


def writes_through_several_views(m, x):
    y = m.fc(x).clone()
    a, b, c = y[:, :2], y[:, 1:3], y.view(-1)
    a += 1
    b *= 2
    c[::2] = x.view(-1)[::2]
    return a, b, c, y


def writes_after_it_was_read(m, x):
    y = m.fc(x)
    z = y + 1
    y.mul_(2)
    return y * z


def writes_a_slice_of_a_new_tensor(m, x):
    out = x.new_zeros(3, 8)
    out[:, ::2] = m.fc(x)
    out[:, 1::2] = out[:, ::2] * 3
    return out


def fills_by_a_mask(m, x):
    y = m.fc(x)
    y[y > 0] = 0.5
    return y.masked_fill_(x < 0, 2.0)


def copies_with_another_dtype(m, x):
    y = torch.empty(3, 4, dtype=torch.float64)
    y.copy_(m.fc(x))
    return y * y


def writes_to_out(m, x):
    y = torch.empty(3, 4)
    with torch.no_grad():
        torch.mul(x, 2, out=y)
    return m.fc(x) + y


def writes_into_a_buffer(m, x):
    m.count += x.detach().sum(0)
    y = m.fc(x) + m.count
    m.count.mul_(0.5)
    return y


def writes_into_a_view_of_a_buffer(m, x):
    m.count[1:3] += 1
    return m.fc(x) + m.count


def replaces_a_buffer(m, x):
    m.count = m.count * 0.9 + x.detach().mean(0)
    return m.fc(x) * m.count


def writes_where_gradients_are_off(m, x):
    y = m.fc(x)
    view = y[1:]
    with torch.no_grad():
        y.clamp_(-0.1, 0.1)
        view[0] = 3
    return y * x, view * 2


def writes_past_autograd(m, x):
    y = m.fc(x)
    y.data.mul_(3)
    z = y.detach()
    z[0].add_(1)
    return y * x, z


def reads_a_view_where_gradients_are_off(m, x):
    y = m.fc(x)
    view = y[0]
    y.add_(1)
    with torch.no_grad():
        z = view * 2
    return view * 3 * z


def extends_a_list(m, x):
    parts = []
    for k in range(3):
        parts.append(m.fc(x) * k)
    whole = torch.stack(parts)
    parts.clear()
    return whole


# ---- gradients and modes ----


def a_part_without_gradients(m, x):
    with torch.no_grad():
        scale = m.fc(x).abs().amax(-1, keepdim=True)
    return m.fc(x) / scale


def gradients_within_no_grad(m, x):
    with torch.no_grad():
        y = m.fc(x)
        with torch.enable_grad():
            z = m.fc(x)
    return y, z


def detached(m, x):
    y = m.fc(x)
    return y + y.detach() ** 2


def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = m.fc(x)
        with torch.autocast("cpu", enabled=False):
            z = m.fc(y.float())
        w = F.softmax(y @ y.t(), -1)
    return y, z, w


def checkpointed(m, x, *, reentrant):
    y = torch.utils.checkpoint.checkpoint(lambda a: m.fc(a).tanh(), x * 2, use_reentrant=reentrant)
    return m.fc(y)


def checkpointed_without_gradients(m, x):
    """None of the inputs needs a gradient, so that torch warns and computes none within."""
    return m.fc(torch.utils.checkpoint.checkpoint(lambda a: m.fc(a).tanh(), x.detach(), use_reentrant=True))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 30 * x**2 * grad  # not the gradient of a cube: it must be this one


def own_function(m, x):
    return Cube.apply(m.fc(x)) + x


def mapped(m, x):
    return torch.vmap(lambda row: m.fc(row) * row.sum())(x)


@torch.jit.script
def scripted(x, scale: float):
    if x.size(0) > 2:
        return x * scale
    return x


def calls_a_scripted_function(m, x):
    return scripted(m.fc(x), 2.0)


def derivative(m, x):
    return torch.func.jvp(lambda a: (a * a).sum(-1), (x.detach(),), (torch.ones_like(x),))[1] + m.fc(x).sum(-1)


# ---- numbers and structures ----


def dropped(m, x):
    return F.dropout(m.fc(x), 0.5, m.training) + torch.randn(3, 4)


def constants(m, x):
    return m.fc(x) * TABLE + torch.tensor([1.0, 2.0, 3.0, 4.0])


def complex_numbers(m, x):
    z = torch.view_as_complex(m.fc(x).view(3, 2, 2))
    return torch.view_as_real(z * z.conj() * torch.polar(torch.ones(2), torch.ones(2))).flatten(1)


def fourier(m, x):
    return torch.fft.irfft(torch.fft.rfft(m.fc(x)) * 2, n=4)


def a_dict(m, x):
    y = m.fc(x)
    return {"y": y, "more": (y.sum(), [y.mean(), None]), "number": 3, "text": "a"}


def topk(m, x):
    values, indices = m.fc(x).topk(2)
    return values, indices


def the_same_twice(m, x):
    y = m.fc(x)
    return y, y, y.view(-1)


def its_input(m, x):
    return x, m.fc(x)


def einsum(m, x):
    return torch.einsum("bi,bj->ij", m.fc(x), x)


def indexed(m, x):
    return m.fc(x)[torch.tensor([2, 0]), 1:][..., None]


def padded(m, x):
    return F.pad(m.fc(x), (1, 2), mode="replicate")


def split_by_unequal_sizes(m, x):
    a, b = m.fc(x).split([1, 3], dim=1)
    return a * b


def writes_into_parts_of_complex_numbers(m, x):
    z = torch.view_as_complex(m.fc(x).view(3, 2, 2)).clone()
    z.real.mul_(2)
    y = m.fc(x).clone()
    torch.view_as_complex(y.view(3, 2, 2)).mul_(1j)
    return torch.view_as_real(z * z), z.imag + 1, y * 2


def a_loss_of_two_dtypes(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(20 * m.fc(x), x.detach().softmax(-1), label_smoothing=0.1, reduction="none")


def an_lstm_that_autocast_lowers_in_part(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        weights = [
            m.fc.weight.repeat(2, 1)[:, :4],
            m.fc.weight.repeat(2, 1)[:, :1],
            m.fc.bias.repeat(2),
            m.fc.bias.repeat(2),
        ]
        state = x[None, :, :1], x[None, :, :2]
        return torch._VF.lstm(x[None], state, [*weights, m.fc.weight[:1, :2]], True, 1, 0.0, False, False, False)


@torch.library.custom_op("tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, grad: 5 * grad * ctx.saved_tensors[0] ** 2,  # on purpose: not that of its forward
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def an_operator_of_its_own(m, x):
    return cube(m.fc(x)) + torch.ops.tests.cube(m.fc(x) + 1)


def a_loss_that_reads_values(m, x):
    lengths = torch.tensor([1]), torch.tensor([1])
    return F.gaussian_nll_loss(m.fc(x), x, m.fc(x).exp()), F.ctc_loss(
        m.fc(x)[:, None].log_softmax(-1), torch.ones(1, 1, dtype=int), *lengths
    )


FORWARDS = [
    writes_a_row, writes_into_a_view, reads_a_view_after_a_write, writes_through_several_views,
    writes_after_it_was_read, writes_a_slice_of_a_new_tensor, fills_by_a_mask, copies_with_another_dtype,
    writes_to_out, writes_into_a_buffer, writes_into_a_view_of_a_buffer, replaces_a_buffer, writes_where_gradients_are_off,
    writes_past_autograd, reads_a_view_where_gradients_are_off, extends_a_list, a_part_without_gradients, gradients_within_no_grad, detached, autocast,
    functools.partial(checkpointed, reentrant=False), functools.partial(checkpointed, reentrant=True), own_function,
    checkpointed_without_gradients,
    mapped, calls_a_scripted_function, derivative, dropped, constants, complex_numbers, fourier, a_dict,
    writes_into_parts_of_complex_numbers, a_loss_of_two_dtypes, an_lstm_that_autocast_lowers_in_part,
    a_loss_that_reads_values, an_operator_of_its_own,
    topk, the_same_twice, its_input, einsum, indexed, padded, split_by_unequal_sizes,
]  # fmt: skip


def name_of(function):
    if isinstance(function, functools.partial):
        return f"{function.func.__name__}-{function.keywords}"
    return function.__name__


@pytest.mark.parametrize("function", FORWARDS, ids=name_of)
def test_forward(function):
    check(lambda: Model(function), rows)


def test_writes_into_an_argument():
    def writes(m, x):
        z = m.fc(x * 1)
        x[0] = 5
        return z

    check(lambda: Model(writes), lambda step: (torch.randn(3, 4),))


# ---- modules ----


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.embedding(tokens) * self.frozen)


def tokens(step):
    return (torch.randint(0, 7, (3, 4)),)


def sequences(step):
    return (torch.randn(5, 3, 4, requires_grad=True),)


def images(step):
    return (torch.randn(2, 3, 8, 8, requires_grad=True),)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


def hooked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda module, args, result: result + args[0])
    return model


def normalized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (Tied, tokens),
        (lambda: nn.LSTM(4, 4, num_layers=2, bidirectional=True), sequences),
        (lambda: nn.GRU(4, 4), sequences),
        (Attention, sequences),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1), sequences),
        (hooked, rows),
        (normalized, rows),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), rows),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4)), images),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.InstanceNorm2d(4)), images),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5)), rows),
        (lambda: nn.Bilinear(4, 4, 2), lambda step: (*rows(step), *rows(step + 5))),
    ],
    ids=[
        "tied", "LSTM", "GRU", "MultiheadAttention", "TransformerEncoderLayer", "hooks", "weight_norm",
        "spectral_norm", "circular", "InstanceNorm", "in place", "Bilinear",
    ],
)  # fmt: skip
def test_module(build, inputs):
    check(build, inputs)


FUNCTIONAL = {
    "grad": lambda m, x: torch.func.grad(lambda y: m.fc(y).sin().sum())(x),
    "grad of each row": lambda m, x: torch.vmap(torch.func.grad(lambda y: m.fc(y).sin().sum()))(x),
    "jacrev": lambda m, x: torch.func.jacrev(lambda y: m.fc(y).sin())(x[0]),
    "functional_call": lambda m, x: torch.func.functional_call(m.fc, {"weight": m.fc.weight * 2}, (x,)),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_derivatives_in_forward(single_rank, name):
    check(lambda: Model(FUNCTIONAL[name]), rows)


def test_forward_mode_is_refused(single_rank):
    """The gradients of its results would be lost."""
    model = Model(lambda m, x: torch.func.jvp(m.fc, (x,), (torch.ones_like(x),))[1])
    with pytest.raises(NotImplementedError, match="in forward mode"):
        thunder.jit(shardtrace.fsdp(model))(torch.ones(3, 4))
