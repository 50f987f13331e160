"""A line that calls torch's function has its values and gradients, and saves no input.

Most tests hide torch's functions from :mod:`passes.kernels.aten`, which differentiates them as operators.
"""

from unittest import mock

import shardtrace
from passes.analysis import liveness
from passes.analysis.flops import flops, is_library_call, work
from passes.analysis.recognise import is_foreign, is_random
from passes.kernels import torch_call
from passes.kernels.aten import Meta
from passes.kernels.torch_call import Autocast, Line, TorchCall, call_of

import pytest
import thunder
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from golden import compile_fake, text
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

torch.library.define("torch_call_tests::square", "(Tensor x) -> Tensor")
torch.library.impl("torch_call_tests::square", "cpu", lambda x: x * x)


def square(x):
    """An operator without a fake kernel, and without a gradient."""
    return torch.ops.torch_call_tests.square(x)


def hidden(function):
    """A function that may keep objects of Python for backward, as far as anyone can see."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def call(function, *args, written=(), **options):
    """The call of ``function`` with these arguments, and the tensors among them."""
    flat, spec = pytree.tree_flatten((args, {}))
    places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    tensors = [flat[i] for i in places]
    empty = [t.detach().clone() if n in written else t for n, t in enumerate(tensors)]
    inside = list(flat)
    for i, t in zip(places, empty, strict=True):
        inside[i] = t
    found, _ = pytree.tree_unflatten(inside, spec)
    given = set(map(id, inside))  # what is passed on is no result
    results = [t for t in pytree.tree_leaves(function(*found)) if isinstance(t, torch.Tensor) and id(t) not in given]
    results += [empty[n] for n in sorted(written)]
    return TorchCall(
        "torch_call_0",
        hidden(function),
        [None if i in places else x for i, x in enumerate(flat)],
        spec,
        places,
        inputs=[Meta.of(t) for t in tensors],
        results=[Meta.of(t)._replace(grad=t.is_floating_point()) for t in results],
        written=written,
        **options,
    ), [t.detach() for t in tensors]


def forward_and_backward(made, tensors, gradients=None):
    """The results of the lines, the gradients, and what the list held."""
    with torch.no_grad(), mock.patch.object(torch_call, "keeps_graph", return_value=False):  # as autograd calls it
        *outs, saved = made.forward(*tensors)
        held = list(saved)
        gradients = gradients or [torch.ones_like(outs[i]) for i in made.returned]
        found = made.backward(saved, *(tensors[i] for i in made.reads.inputs), *gradients)
    assert len(saved) == 0
    return outs, found, held


def eager(function, *args):
    found = [t for t in pytree.tree_leaves(function(*args)) if isinstance(t, torch.Tensor)]
    wanted = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.requires_grad]
    outs = [t for t in found if t.is_floating_point()]
    return found, torch.autograd.grad(outs, wanted, [torch.ones_like(o) for o in outs], allow_unused=True)


def tensor(*shape, grad=True):
    return torch.randn(shape, requires_grad=grad)


# functions, their arguments, and the inputs that backward reads
CASES = {
    "product": (torch.einsum, ("ij,jk->ik", tensor(2, 3), tensor(3, 4)), (0, 1)),
    "of one parameter": (torch.einsum, ("ij,jk->ik", tensor(2, 3, grad=False), tensor(3, 4)), (0,)),
    "a view of an input": (lambda x, w: x @ w.t().reshape(4, 6)[:, 2:5], (tensor(2, 4), tensor(6, 4)), None),
    "a transposed input": (lambda x: (x.t() * x.t()).sum(0), (tensor(2, 4),), (0,)),
    "a result that is saved": (torch.exp, (tensor(3),), ()),
    "several results": (torch.linalg.qr, (tensor(4, 3),), None),
    "integers": (lambda x, i: x[i] * 2, (tensor(5, 3), torch.tensor([0, 2, 2])), (1,)),
    "integers as results": (lambda x: torch.sort(x, -1), (tensor(2, 5),), ()),
    "list": (lambda xs: torch.block_diag(*xs), ([tensor(2, 2), tensor(3, 1)],), ()),
    "unused": (lambda x, y: (x * x, y.shape[0]), (tensor(2), tensor(3)), (0,)),
    "no dimensions": (torch.addcmul, (tensor(), tensor(3), tensor(3)), (1, 2)),
    "complex": (lambda x: torch.fft.rfft(x).abs(), (tensor(8),), None),
    "twice the same": (torch.dot, (*[tensor(3)] * 2,), None),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name):
    function, args, reads = CASES[name]
    made, tensors = call(function, *args)
    expected, gradients = eager(function, *args)
    outs, found, held = forward_and_backward(made, tensors)
    torch.testing.assert_close(outs, expected)
    if name == "twice the same":
        found, gradients = [sum(found)], [gradients[0]]
    gradients = [torch.zeros_like(f) if g is None else g for f, g in zip(found, gradients, strict=True)]
    torch.testing.assert_close(list(found), gradients)
    assert reads is None or made.reads.inputs == reads
    storages = {t.untyped_storage()._cdata for t in tensors}
    assert storages.isdisjoint(t.untyped_storage()._cdata for t in held)
    torch.testing.assert_close(list(made.run(*tensors)), outs)


def test_inputs_die_if_backward_does_not_read_them():
    made, (x, w) = call(torch.add, tensor(4, 4), tensor(4, 4))
    alive = StorageWeakRef(x.untyped_storage()), StorageWeakRef(w.untyped_storage())
    *_, saved = made.forward(x, w)
    del x, w
    assert [a.expired() for a in alive] == [True, True]
    assert made.reads.inputs == ()
    assert list(saved) == []


def test_inputs_that_are_read_are_no_part_of_the_graph():
    """Backward may get them computed again, with other strides."""
    function = lambda x, w: x @ w[1:].t()  # noqa: E731
    args = tensor(2, 4), tensor(4, 5).t().detach().requires_grad_()
    made, (x, w) = call(function, *args)
    *outs, saved = made.forward(x, w)
    again = [x.clone(), w.contiguous()]
    assert again[1].stride() != w.stride()
    alive = StorageWeakRef(w.untyped_storage())
    del w
    args[1].data = torch.empty(0)
    assert alive.expired()
    found = made.backward(saved, *again, torch.ones_like(outs[0]))
    torch.testing.assert_close(found[0], torch.ones(2, 4) @ again[1][1:])
    torch.testing.assert_close(found[1][1:], torch.ones(4, 2) @ again[0])


def test_inputs_that_share_memory():
    """Each is an input of backward by itself. A part of both belongs to none, and is saved."""
    whole = torch.randn(6)
    x, y = whole[:4].requires_grad_(), whole.clone()[2:].requires_grad_()
    made, _ = call(lambda x, y: x * y, x, y)
    a, b = whole[:4], whole[2:]
    outs, (gx, gy), held = forward_and_backward(made, [a, b])
    torch.testing.assert_close(outs, [a * b])
    torch.testing.assert_close([gx, gy], [b, a])
    assert held == []
    made, _ = call(lambda x, y: x[1:3] * y[1:3], x, y)
    _, (gx, gy), held = forward_and_backward(made, [a, b])
    torch.testing.assert_close([gx[1:3], gy[1:3]], [b[1:3], a[1:3]])
    assert len(held) == 2


def test_nothing_is_left_if_backward_does_not_run():
    made, (x,) = call(torch.exp, tensor(3))
    out, saved = made.forward(x)
    alive = StorageWeakRef(out.untyped_storage())
    assert len(saved) == 1
    del out, saved
    assert alive.expired()


def test_written_inputs_are_results():
    """A function that writes gets clones."""
    made, (x, y) = call(lambda x, y: x.mul_(y), tensor(3), tensor(3), written=[0])
    before = x.clone()
    (out,), (gx, gy), _ = forward_and_backward(made, [x, y])
    assert torch.equal(x, before)
    assert torch.equal(out, x * y)
    torch.testing.assert_close([gx, gy], [y, x])


def test_autocast():
    made, (x, w) = call(F.linear, tensor(2, 3), tensor(4, 3), autocast=[Autocast("cpu", torch.bfloat16)])
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, w)
    outs = made.run(x, w)
    assert outs[0].dtype == torch.bfloat16
    assert torch.equal(outs[0], expected)
    *_, saved = made.forward(x, w)
    found = made.backward(saved, *(t for i, t in enumerate((x, w)) if i in made.reads.inputs), expected)
    assert [g.dtype for g in found] == [torch.float32] * 2


def test_a_function_without_a_fake_kernel():
    """Backward gets all inputs. Its cost is unknown, so that it is not repeated."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return square(x)

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    made, (x,) = call(Squared.apply, tensor(3))
    outs, (gx,), held = forward_and_backward(made, [x])
    torch.testing.assert_close([outs[0], gx], [x * x, 2 * x])
    assert made.reads == ((0,), 0, (), False)
    assert held == []
    assert is_library_call(made.symbol)


class Net(nn.Module):
    def __init__(self, how=lambda x, w: torch.einsum("ij,kj->ik", x, w)):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(4, 4)), how

    def forward(self, x):
        return self.how(x, self.weight)


def traces(cmodel):
    return thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]


def test_golden(fake_ranks):
    """In ZeRO-3 backward gathers the parameter again."""
    fake_ranks(2)
    forward, backward = traces(compile_fake(Net, torch.ones(3, 4)))
    assert_expected_inline(
        text(forward),
        """\
ft0 = all_gather((t_weight,), b_root)
(t1,) = wait_all_gather(ft0, b_root)
del ft0
t2 = torch_einsum_0(x, t1)
del t1
return {'output': (t2,), 'flat_args': [x, t_weight], 'flat_output': (t2,)}, ((x,), ())""",
    )
    assert_expected_inline(
        text(backward, dels=False),
        """\
C0, C1, = saved_for_backward
clear_mutable_collection(saved_for_backward)
clear_mutable_collection(C1)
t0, = cotangents
clear_mutable_collection(cotangents)
x, = C0
clear_mutable_collection(C0)
t1 = aten_unsqueeze(x, 2)
t2 = aten_view(t1, [1, 3, 4])
t3 = aten_view(t0, [3, 4, 1])
t4 = aten_permute(t3, [0, 2, 1])
t5 = aten_view(t4, [1, 3, 4])
t6 = aten_transpose_int(t2, 1, 2)
t7 = aten_bmm(t6, t5)
t8 = aten_view(t7, [4, 4, 1])
t9 = aten_permute(t8, [2, 1, 0])
t10 = aten_permute(t9, [1, 2, 0])
t11 = aten_squeeze_dim(t10, 2)
ft12 = reduce_scatter((t11,), b_root)
(t13,) = wait_reduce_scatter(ft12, b_root)
return (None, t13)""",
    )


def lines_of_torch(*traces):
    return [b for trace in traces for b in trace.bound_symbols if isinstance(b.sym.id, Line)]


def test_flops_and_what_is_known_of_a_line(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(Net, torch.ones(3, 4, requires_grad=True))
    traced = [b for b in thunder.last_traces(cmodel)[0].bound_symbols if call_of(b.sym) is not None]
    [forward] = lines_of_torch(*traces(cmodel))
    products = [b for b in traces(cmodel)[1].bound_symbols if flops(b)]
    assert [flops(b) for b in (*traced, forward, *products)] == [2 * 3 * 4 * 4] * 4
    assert work(forward).full == flops(forward)
    assert all(is_library_call(b.sym) and not is_foreign(b.sym) for b in (*traced, forward, *products))
    cmodel = compile_fake(lambda: Net(lambda x, w: torch.sort(x * w)[0]), torch.ones(4, 4))
    assert not any(is_library_call(b.sym) or flops(b) for b in traces(cmodel)[0].bound_symbols)


GROUPED = {  # the shapes of the factors of a grouped product, the ends of the groups, and its FLOPs
    "rows": ((8, 16), (2, 16, 24), [3, 8], 2 * 8 * 16 * 24),
    "columns": ((2, 8, 16), (16, 24), [8, 24], 2 * 8 * 16 * 24),
    "sums": ((8, 16), (16, 24), [8, 16], 2 * 8 * 16 * 24),
    "matrices": ((2, 8, 16), (2, 16, 24), None, 2 * 2 * 8 * 16 * 24),
}


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products(name, dtype):
    """torch does not know their FLOPs, and lets only those of bfloat16 through on fake tensors."""
    *shapes, ends, count = GROUPED[name]
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    factors = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    made, tensors = call(lambda a, b, offs: F.grouped_mm(a, b, offs=offs), *factors, offs)
    assert made.reads == (tuple(range(len(tensors))), count, (), True)


def test_the_memory_of_the_list(fake_ranks):
    fake_ranks(1)
    how = lambda x, w: torch.sort(x * w, -1)[0]  # noqa: E731  saves its indices
    forward, backward = traces(compile_fake(lambda: Net(how), torch.ones(4, 4)))
    memory = liveness.step_liveness(forward, backward)
    assert [b for b in memory.forward.buffers if b.kind == "saved" and b.bytes == 4 * 4 * 8]
    assert memory.backward.lines[0].saved >= 4 * 4 * 8
    assert memory.backward.lines[-1].saved == 0


@pytest.mark.parametrize("how", [F.rrelu, lambda x: F.gumbel_softmax(x, hard=True)], ids=["rrelu", "gumbel"])
def test_random_numbers_are_drawn_once(single_rank, how):
    def step(compiled):
        torch.manual_seed(0)
        net, x = Net(lambda x, w: how(x @ w) if how is not F.rrelu else how(x @ w, training=True)), torch.randn(3, 4)
        model = thunder.jit(shardtrace.fsdp(net, activation_checkpointing=Net)) if compiled else net
        torch.manual_seed(1)
        y = model(x)
        (y * torch.arange(12.0).view(3, 4)).sum().backward()
        return [y.detach(), net.weight.grad], model

    (found, cmodel), (expected, _) = step(True), step(False)
    torch.testing.assert_close(found, expected)
    forward, backward = traces(cmodel)
    assert any(is_random(b) for b in forward.bound_symbols)
    assert not any(is_random(b) for b in backward.bound_symbols)


def test_retain_graph(single_rank):
    torch.manual_seed(0)
    model = shardtrace.fsdp(Net())
    cmodel = thunder.jit(model)
    y = cmodel(torch.randn(3, 4)).pow(2).sum()
    y.backward(retain_graph=True)
    once = model.weight.grad.clone()
    y.backward()
    torch.testing.assert_close(model.weight.grad, 2 * once)
    with pytest.raises(RuntimeError):
        y.backward()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, 8, 8)) for _ in range(2))

    def forward(self, x):
        ends = torch.tensor([4, 8], dtype=torch.int32)
        return F.grouped_mm(F.silu(F.grouped_mm(x, self.up, offs=ends)), self.down, offs=ends).tanh()


class Experts(nn.Sequential):
    def __init__(self):
        super().__init__(Expert(), Expert())


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize(("how", "again"), [(None, 0), ("cheap", 0), ("full", 4)])
def test_grouped_products_are_recomputed_as_products_are(fake_ranks, how, again):
    """They are not cheap."""
    fake_ranks(2)
    cmodel = compile_fake(
        Experts,
        torch.ones(8, 8),
        activation_checkpointing=how,
        compile_policy=shardtrace.CompilePolicy(repeated_blocks="inline"),
    )
    forward, backward = ([b for b in lines_of_torch(t) if "grouped_mm" in b.sym.name] for t in traces(cmodel))
    assert [b.sym.id.kind for b in forward] == ["_forward"] * 4
    assert sorted(b.sym.id.kind for b in backward) == ["_backward"] * 4 + ["_forward"] * again
    assert sum(map(flops, [*forward, *backward])) == (4 + 8 + again) * 2 * 8 * 8 * 8


class ByAutograd(torch.autograd.Function):
    """Computes its gradients in forward, as fused losses do."""

    @staticmethod
    def gradients(x, w):
        with torch.enable_grad():
            a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
            loss = (a @ b).tanh().square().sum()
            return torch.autograd.grad(loss, (a, b)), loss.detach()

    @classmethod
    def forward(cls, ctx, x, w):
        gradients, loss = cls.gradients(x, w)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        return tuple(gradient * saved for saved in ctx.saved_tensors)


class ByFunc(ByAutograd):
    @staticmethod
    def gradients(x, w):
        return torch.func.grad_and_value(lambda a, b: (a @ b).tanh().square().sum(), argnums=(0, 1))(x, w)


class ByVjp(ByAutograd):
    @staticmethod
    def gradients(x, w):
        loss, backward = torch.func.vjp(lambda a, b: (a @ b).tanh().square().sum(), x, w)
        return backward(torch.ones(())), loss


def implicit(x, w):
    """A fixed point, from which its function is left by one more step; run as one function."""
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((y @ w.detach()).sin().sum(), y)
    return (x @ w).tanh() * slope


@pytest.mark.parametrize("function", [ByAutograd.apply, ByFunc.apply, ByVjp.apply, implicit])
def test_gradients_computed_in_forward(function):
    made, tensors = call(function, tensor(3, 3), tensor(3, 3))
    outs, found, held = forward_and_backward(made, tensors)
    expected, gradients = eager(function, *(t.requires_grad_() for t in tensors))
    torch.testing.assert_close((*outs, *found), (*expected, *gradients))
    assert all(t is None or t.shape == (3, 3) for t in held)
    assert sum(t is not None for t in held) <= 2  # nothing of the graph inside
