"""The operators of a call and of its backward give eager's values and gradients to the last bit."""

import shardtrace
from passes.analysis.flops import bytes_moved, flops, work
from passes.analysis.recognise import is_foreign, is_random, is_repeatable, properties
from passes.comm.symbols import Property
from passes.kernels.aten import Meta, binding_of, find_program, operator_of, symbol_of
from passes.kernels.torch_call import Line

import pytest
import thunder
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from golden import compile_fake, text
from programs import run
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def tensor(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def program_of(function, *tensors):
    """The program of a function, and which of its results have a gradient."""
    outs = [t for t in pytree.tree_leaves(function(*tensors)) if isinstance(t, torch.Tensor)]
    returned = [i for i, t in enumerate(outs) if t.requires_grad]

    def run(leaves):
        return [t for t in pytree.tree_leaves(function(*leaves)) if isinstance(t, torch.Tensor)], None

    return find_program(run, [Meta.of(t) for t in tensors], returned), returned


def check(function, *tensors, seed=0, transposed=False):
    """Compares with eager. ``transposed``: gradients arrive with other strides than the results have."""
    program, returned = program_of(function, *tensors)
    assert program is not None
    torch.manual_seed(seed)
    expected = [t for t in pytree.tree_leaves(function(*tensors)) if isinstance(t, torch.Tensor)]
    grads = [torch.randn(expected[i].shape).to(expected[i].dtype) for i in returned]
    if transposed:
        grads = [g.mT.contiguous().mT if g.ndim > 1 else g for g in grads]
    wanted = [t for t in tensors if t.requires_grad]
    gradients = torch.autograd.grad([expected[i] for i in returned], wanted, grads, allow_unused=True)
    torch.manual_seed(seed)
    with torch.no_grad():
        outs, found = run(program, [t.detach() for t in tensors], grads)
    for a, b in zip((*outs, *found), (*expected, *gradients), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))
    return program


FUNCTIONS = {
    "addmm": (torch.addmm, [(4,), (3, 5), (5, 4)]),
    "linear": (F.linear, [(2, 3, 5), (4, 5), (4,)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(2, 3, 5), (2, 4, 5)]),
    "product with a vector": (torch.matmul, [(2, 3, 5), (5,)]),
    "broadcast": (torch.mul, [(2, 3, 5), (3, 1)]),
    "root mean square": (lambda x, w: F.rms_norm(x, (5,), w), [(2, 3, 5), (5,)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), [(2, 3, 5), (5,), (5,)]),
    "rms norm of two dims": (lambda x: F.rms_norm(x, (3, 5), eps=1e-3), [(2, 3, 5)]),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), [(2, 4, 5), (4,)]),
    "group norm, transposed": (lambda x, w, b: F.group_norm(x.mT, 3, w, b), [(2, 5, 6), (6,), (6,)]),
    "softmax": (lambda x: torch.softmax(x, -1), [(2, 3, 5)]),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), [(2, 3, 5)]),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q * 2, q, is_causal=True), [(1, 2, 4, 8)]),
    "attention of floats": (lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), [(1, 2, 4, 8), (4, 4)]),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 3, 5, 5), (4, 3, 3, 3), (4,)]),
    "convolution in one dim": (lambda x, w: F.conv1d(x, w, stride=2), [(2, 4, 7), (3, 4, 3)]),
    "convolution of groups": (lambda x, w: F.conv3d(x, w, groups=2, dilation=2), [(1, 4, 5, 5, 5), (2, 2, 2, 2, 2)]),
    "convolution, transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 3, 4, 4), (3, 2, 3, 3)]),
    "pooling": (lambda x: F.max_pool2d(x, 2), [(2, 3, 6, 6)]),
    "interpolation": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(1, 2, 4, 4)]),
    "several results": (lambda x: x.split([2, 3], -1), [(2, 5)]),
    "sorted": (lambda x: torch.sort(x, -1), [(2, 5)]),
    "unused": (lambda x, y: x * x, [(2, 3), (3,)]),
    "an input": (lambda x: (x, x * 2), [(2, 3)]),
    "a view": (lambda x: x.transpose(0, 1), [(2, 3)]),
    "no dimensions": (lambda x, y: x * y, [(), (3, 4)]),
    "powers": (lambda x: x.abs() ** 1.7, [(2, 3)]),
    "scan": (lambda x: torch.logcumsumexp(x, -1), [(2, 3)]),
    "inverse": (lambda x: torch.linalg.inv(x + 3 * torch.eye(3)), [(3, 3)]),
    "pad": (lambda x: F.pad(x, (1, 2), mode="reflect"), [(2, 3, 5)]),
    "index": (lambda x: x[:, :, torch.arange(3) // 2], [(2, 3, 4)]),
    "written": (lambda x: torch.zeros(2, 3).copy_(x).mul_(2).add_(1), [(2, 3)]),
    "dropout": (lambda x: F.dropout(x, 0.3), [(4, 5)]),
    "dropout by half": (lambda x: F.dropout(x), [(4, 5)]),
    "feature dropout": (lambda x: F.dropout1d(x, 0.4), [(2, 4, 5)]),
    "alpha dropout": (lambda x: F.alpha_dropout(x, 0.4, training=True), [(4, 5)]),
    "attention with dropout": (lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.3), [(1, 2, 4, 8)]),
}


DISTANCES = {
    "distances": (lambda x, y: torch.cdist(x, y, p=1.0), [(2, 3, 5), (2, 4, 5)]),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), [(4, 3, 5), (4, 1, 1)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_eagers(name, dtype):
    if dtype is torch.bfloat16 and name in ("inverse", "scan", "no dimensions"):
        pytest.skip("torch computes it in float32 only")
    function, shapes = FUNCTIONS[name]
    check(function, *(tensor(*shape, dtype=dtype) for shape in shapes))


@pytest.mark.parametrize("name", [*FUNCTIONS, *DISTANCES])
def test_gradients_with_other_strides(name):
    function, shapes = (FUNCTIONS | DISTANCES)[name]
    check(function, *(tensor(*shape) for shape in shapes), transposed=True)


@pytest.mark.parametrize("name", ["linear", "layer norm", "group norm", "attention", "convolution", *DISTANCES])
def test_inputs_with_other_strides(name):
    """In a later step. The program is that of contiguous ones."""
    function, shapes = (FUNCTIONS | DISTANCES)[name]
    tensors = [tensor(*shape) for shape in shapes]
    program, _ = program_of(function, *tensors)
    others = [t.detach().mT.contiguous().mT.requires_grad_() if t.ndim > 1 else t for t in tensors]
    expected = function(*others)
    grad = torch.randn(expected.shape)
    gradients = torch.autograd.grad(expected, others, grad)
    with torch.no_grad():
        (out,), found = run(program, [t.detach() for t in others], [grad])
    torch.testing.assert_close((out, *found), (expected.detach(), *gradients))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x * 1).add_(y),
        lambda x, y: (x * 1).mul_(2).div_(y),
        lambda x, y: (x * 1).addcmul_(x, y.to(x.dtype)).sub_(y.double()),
        lambda x, y: F.cosine_similarity(x[0, 0], y[0].to(x.dtype), dim=0),
    ],
    ids=["add_", "div_", "sub_", "cosine similarity"],
)
def test_writes_keep_their_dtype(function):
    """The function of the same name promotes it."""
    check(function, tensor(2, 3, dtype=torch.bfloat16), tensor(3))


def test_the_means_of_losses():
    """torch's own parser of arguments takes the default of ``reduction`` for 0, which is "none"."""
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy_with_logits"):
        operator = getattr(aten, name).default
        assert binding_of(operator)(x, y).shape == operator(x, y).shape == ()


def test_gradients_of_channels_last():
    x = torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last).requires_grad_()
    check(lambda x, w: F.group_norm(x, 2, w), x, tensor(4))
    check(lambda x, w: F.group_norm(x, 2, w), x, tensor(4), transposed=True)


def test_integers_and_frozen_inputs():
    check(lambda i, w: F.embedding(i, w), torch.tensor([[0, 2], [2, 1]]), tensor(3, 4))
    check(torch.addmm, tensor(4, grad=False), tensor(3, 5), tensor(5, 4))
    program = check(F.conv2d, tensor(2, 3, 5, 5, grad=False), tensor(4, 3, 3, 3), tensor(4))
    [backward] = program.backward
    assert backward.args[-1] == [False, True, True]  # what is computed


@pytest.mark.parametrize("name", ["addmm", "softmax", "root mean square", "attention"])
def test_whole(name):
    """Forward may be one line of torch's function: of attention backward needs a value that is no result."""
    function, shapes = FUNCTIONS[name]
    program, _ = program_of(function, *(tensor(*shape) for shape in shapes))
    assert program.whole == (name in ("addmm", "softmax"))


CONSTANT = torch.ones(3)
WITHOUT = {
    "strides": lambda x: x.as_strided((2, 2), (2, 1)),
    "factors that depend on strides": torch.linalg.det,
    "complex numbers": lambda x: torch.fft.rfft(x).conj().abs(),
    "numbers of a tensor": lambda x: x * x.sum().item(),
    "a tensor from nowhere": lambda x: x * CONSTANT,
    "a part that is written": lambda x: (lambda y: (y[0].zero_(), y)[1])(x * 2),
    "a list": lambda x: x[:, [0, 2, 2]],
    "a generator": lambda x: x * torch.rand(3, generator=torch.Generator()),
    "zeros, whatever is given": torch.angle,
}


@pytest.mark.parametrize("name", WITHOUT)
def test_calls_without_a_program(name):
    tensors = [tensor(3, 3)]
    assert find_program(lambda leaves: ([WITHOUT[name](*leaves)], None), list(map(Meta.of, tensors)), [0]) is None


def proxy(*shape):
    return TensorProxy(shape=shape, dtype=thunder.dtypes.float32, device=thunder.devices.cpu)


def line(operator, *args, **kwargs):
    """A line that calls an operator, with results by its fake kernel."""
    trace = TraceCtx()
    with tracectx(trace):
        symbol_of(operator)(*(proxy(*a) if isinstance(a, tuple) else a for a in args), **kwargs)
    [made] = trace.bound_symbols
    assert operator_of(made.sym) is operator
    assert not is_foreign(made.sym)
    return made


def test_what_is_known_of_lines():
    product = line(aten.mm.default, (2, 3), (3, 4))
    assert tuple(product.output.shape) == (2, 4)
    assert (flops(product), work(product).full) == (2 * 2 * 3 * 4,) * 2
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert work(line(attention, (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))).attention == 2 * 2 * 4 * 4 * 16
    assert work(line(aten.gelu_backward.default, (2, 3), (2, 3))).special == 6
    assert Property.VIEW in properties(line(aten.t.default, (2, 3)).sym)
    assert bytes_moved(line(aten.view.default, (2, 3), [6])) == 0
    assert bytes_moved(line(aten._to_copy.default, (2, 3), dtype=torch.bfloat16)) == 24 + 12
    noise = line(aten.bernoulli.p, (2, 3), 0.5)
    assert is_random(noise)
    assert not is_repeatable(noise)
    assert not is_random(product)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.addmm(x, x, self.weight)


def test_no_view_of_a_gathered_parameter_is_saved(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(Net, torch.ones(4, 4, requires_grad=True))
    forward, backward = thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]
    assert_expected_inline(
        text(forward),
        """\
ft0 = all_gather((t_weight,), b_root)
(t1,) = wait_all_gather(ft0, b_root)
del ft0
t2 = torch_addmm_0(x, x, t1)
del t1
return {'output': (t2,), 'flat_args': [x, t_weight], 'flat_output': (t2,)}, ((t_weight, x), ())""",
    )
    assert_expected_inline(
        text(backward, dels=False),
        """\
C0, C1, = saved_for_backward
clear_mutable_collection(saved_for_backward)
clear_mutable_collection(C1)
t0, = cotangents
clear_mutable_collection(cotangents)
t_weight, x, = C0
clear_mutable_collection(C0)
bw_ft1 = all_gather((t_weight,), b_root)
(bw_t2,) = wait_all_gather(bw_ft1, b_root)
t3 = aten_t(bw_t2)
t4 = aten_mm(t0, t3)
t5 = aten_t(x)
t6 = aten_mm(t5, t0)
ft7 = reduce_scatter((t6,), b_root)
t8 = torch.add(t0, t4, alpha=1)
(t9,) = wait_reduce_scatter(ft7, b_root)
return (t8, t9)""",
    )
    assert not any(isinstance(b.sym.id, Line) and b.sym.id.kind for b in forward.bound_symbols)


def test_no_gradient_stays_none(single_rank):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return torch.addcmul(x, self.used, x), torch.where(x > 5, self.unused, x)

    model = shardtrace.fsdp(Unused())
    model(torch.ones(3))[0].sum().backward()
    assert model.used.grad is not None
    assert model.unused.grad is None


@pytest.mark.parametrize(
    "function",
    [
        torch.sgn,
        lambda a: a**0,
        lambda a: torch.copysign(torch.ones(3), a),
        lambda a: torch.nextafter(torch.ones(3), a),
    ],
    ids=["sgn", "pow", "copysign", "nextafter"],
)
def test_zeros_that_torch_gives_stay_zeros(function, single_rank):
    """An optimizer decays a parameter with zeros for its gradient, and none without one."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return function(self.a) * x, self.b * x

    model = shardtrace.fsdp(Scaled())
    model(torch.ones(3))[0].sum().backward()
    assert model.a.grad is not None
    assert not model.a.grad.any()
    assert model.b.grad is None
    model(torch.ones(3))[1].sum().backward()
    assert not model.a.grad.any()
    assert model.b.grad.all()
