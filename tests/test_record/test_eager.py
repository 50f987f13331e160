"""Modules that depend on the values of tensors are run by PyTorch. What cannot be, is refused with its place."""

import copy
import logging

import shardtrace
from passes.compat.jit import notes_of
from passes.pipeline import FirstStage
from shardtrace.record import recorder

import numpy
import pytest
import thunder
import torch
from against_eager import Model, check, rows
from ranks import on_ranks
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)


class Branch(Part):
    def forward(self, x):
        x = self.fc(x)
        if x.sum() > 0:
            return x
        return -2 * x


class Item(Part):
    def forward(self, x):
        return self.fc(x) / max(x.abs().max().item(), 1.0)


class Nonzero(Part):
    """Rows are chosen by their values."""

    def forward(self, x):
        out = x.new_zeros(x.shape)
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        return out.index_add(0, chosen, self.fc(x[chosen]))


class Experts(nn.Module):
    """As in Mixtral: each expert gets the rows that choose it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, which = torch.where(chosen == number)
            out.index_add_(0, row, expert(x[row]) * weights[row, which, None])
        return out


class Counting(Part):
    """Writes into a buffer, returns a dict and its input, draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        if self.count.item() < 0:
            x = -x
        return {"y": nn.functional.dropout(self.fc(x), 0.5), "x": x}


class Skips(Part):
    """Returns its input or a new tensor, by its values."""

    def forward(self, x):
        return x if x.sum() > 0 else self.fc(x)


class CountingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), Counting()

    def forward(self, x):
        found = self.part(self.first(x))
        return found["y"] + found["x"], self.part.count * 2


def around(cls):
    return lambda: nn.Sequential(nn.Linear(4, 4), cls(), nn.Tanh(), nn.Linear(4, 4))


def remarks(cmodel):
    (first,) = (t for t in thunder.compile_data(cmodel).transforms if isinstance(t, FirstStage))
    return first.compilation.facts.remark


@pytest.mark.parametrize(
    ("build", "remark"),
    [
        (around(Branch), "1 (Branch) is run by PyTorch"),
        (around(Item), "1 (Item) is run by PyTorch"),
        (around(Skips), "1 (Skips) is run by PyTorch"),
        (around(Nonzero), "1 (Nonzero) is run by PyTorch"),
        (around(Experts), "1 (Experts) is run by PyTorch"),
        (CountingNet, "part (Counting) is run by PyTorch"),
        (lambda: nn.Sequential(nn.Sequential(Item(), nn.Linear(4, 4)), Item()), "0.0 (Item) is run by PyTorch"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_depends_on_values(build, remark, single_rank):
    cmodel = check(build, rows)
    assert remark in remarks(cmodel)


def test_its_lines_of_the_trace(fake_ranks):
    """One line forward, one backward; in ZeRO-3 its parameters are gathered for both, and none is saved."""
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(around(Experts)(), sharding_strategy="zero3"))
    cmodel(torch.randn(3, 4)).sum().backward()
    names = [
        [b.sym.name for b in trace[-1].bound_symbols if "eager" in b.sym.name]
        for trace in (thunder.last_traces(cmodel), thunder.last_backward_traces(cmodel))
    ]
    assert names == [["torch_eager_Experts_0_forward"], ["torch_eager_Experts_0_backward"]]
    assert (
        len(shardtrace.inspect(cmodel).collectives) == 8
    )  # of three layers, of which backward does not read the first


@on_ranks(2)
def test_on_two_ranks():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    eager = around(Experts)()
    torch.manual_seed(0)
    model = shardtrace.fsdp(around(Experts)(), sharding_strategy="zero3")
    cmodel = thunder.jit(model)
    mine = x.chunk(2)[torch.distributed.get_rank()]
    for _ in range(3):
        for call, parameters, batch in ((eager, eager.parameters(), x), (cmodel, cmodel.parameters(), mine)):
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            optimizer.zero_grad()
            call(batch).square().mean().backward()
            optimizer.step()
    found = shardtrace.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        torch.testing.assert_close(found, dict(eager.state_dict()))


def test_chosen_modules(single_rank):
    """By name, pattern and class, although they can be recorded."""
    cmodel = check(lambda: nn.Sequential(nn.Linear(4, 4), Part(), nn.Tanh()), lambda step: (), steps=0)
    model = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh())  # noqa: E731
    for chosen, names in (
        (["1"], ["torch_eager_Linear_0"]),
        (["[01]"], ["torch_eager_Linear_0", "torch_eager_Linear_1"]),
        ([nn.Linear], ["torch_eager_Linear_0", "torch_eager_Linear_1"]),
        (["0", nn.Tanh], ["torch_eager_Linear_0", "torch_eager_Tanh_0"]),
    ):
        cmodel = check(model, rows, compile_policy=shardtrace.CompilePolicy(eager=chosen))
        assert [b.sym.name for b in thunder.last_traces(cmodel)[0].bound_symbols if "eager" in b.sym.name] == names
    with pytest.raises(ValueError, match=r"Sequential has no module that eager='2\.fc' chooses"):
        shardtrace.fsdp(model(), compile_policy=shardtrace.CompilePolicy(eager=["2.fc"]))


# ---- what is refused ----


def text_of(error):
    """The message with its notes, which Python 3.10 has in the message."""
    return f"{error}{notes_of(error)}"


def refused(model, *args, **options):
    cmodel = thunder.jit(shardtrace.fsdp(model, **options))
    try:
        cmodel(*args)
    except Exception as error:
        return error
    raise AssertionError("it was recorded")


X = torch.randn(2, 4)


@pytest.mark.parametrize(
    ("cls", "line"),
    [
        (Branch, "if x.sum() > 0:"),
        (Item, "return self.fc(x) / max(x.abs().max().item(), 1.0)"),
        (Nonzero, "chosen = (x[:, 0] > 0).nonzero()[:, 0]"),
    ],
)
def test_without_pytorch(fake_ranks, cls, line):
    fake_ranks(2)
    found = refused(nn.Sequential(nn.Linear(4, 4), cls()), X, compile_policy=shardtrace.CompilePolicy(eager=None))
    assert type(found) is RuntimeError
    assert str(found).startswith("the forward of Sequential cannot be recorded: it depends on the values of tensors")
    assert 'call fsdp(compile_policy=CompilePolicy(eager="auto")), or name the module that PyTorch is to run' in str(
        found
    )
    place, source, hint = text_of(found).split("\n")[-3:]
    assert place.startswith(f"shardtrace was recording Sequential, at {__file__}:")
    assert place.endswith(" in forward:")
    assert source == f"    {line}"
    assert "docs/guide/troubleshooting.md#models-that-cannot-be-recorded" in hint


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda m, x: torch.rand(4, generator=torch.Generator()) * m.fc(x), "makes a torch.Generator"),
        (lambda m, x: (lambda y: (y.register_hook(torch.neg), y)[1])(m.fc(x)), "would run the hook"),
        (lambda m, x: torch.autograd.grad(m.fc(x).sum(), m.fc.weight, create_graph=True)[0], "it computes gradients"),
        (lambda m, x: m.fc(x.to_sparse().to_dense()), "makes a sparse tensor"),
        (lambda m, x: m.fc(x).unsqueeze_(0), "use what unsqueeze returns"),
    ],
)
def test_what_no_step_would_do(fake_ranks, function, text):
    fake_ranks(2)
    assert text in str(refused(Model(function), X))


def test_arguments_that_no_step_takes(single_rank):
    writes = Model(lambda m, x: m.fc(x) * x.detach().mul_(2))
    assert "writes into its argument 't_0', which requires" in str(refused(writes, X.clone().requires_grad_()))
    assert "argument 't_0' is a sparse tensor" in str(refused(Model(lambda m, x: m.fc(x.to_dense())), X.to_sparse()))


class Misfit(nn.Linear):
    def forward(self, x):
        return x @ torch.ones(3, 3)


def test_an_error_of_shapes_names_the_line_and_logs_nothing(fake_ranks, monkeypatch):
    fake_ranks(2)
    logged = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "callHandlers", logged.append)
    found = refused(nn.Sequential(nn.Linear(4, 4), Misfit(4, 4)), X)
    assert "    return x @ torch.ones(3, 3)\n" in text_of(found)
    assert logged == []


def test_in_a_jitted_function(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(Branch(), compile_policy=shardtrace.CompilePolicy(eager=None))
    with pytest.raises(RuntimeError) as info:
        thunder.jit(lambda x: model(x).sum())(X)
    assert "shardtrace was recording Branch, at" in text_of(info.value)


class Sizes(Part):
    """The number of rows that it returns depends on their values."""

    def forward(self, x):
        return self.fc(x)[x[:, 0] > 0]


def test_shapes_that_depend_on_values(fake_ranks):
    fake_ranks(2)
    torch.manual_seed(0)  # the values that it is tried on
    found = refused(nn.Sequential(nn.Linear(4, 4), Sizes()), torch.randn(100, 4))
    assert "the forward of Sequential cannot be recorded: it depends on the values of tensors" in str(found)
    assert "return self.fc(x)[x[:, 0] > 0]" in text_of(found)


class Scaled(nn.Linear):
    def reset_parameters(self):
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)


class Rare(Part):
    """Returns a row less only where a value is far from those that it is tried on."""

    def forward(self, x):
        return self.fc(x)[1:] if x.max() > 100 else self.fc(x)


def test_a_shape_that_has_never_been_seen(single_rank):
    cmodel = check(lambda: nn.Sequential(Scaled(4, 4), Rare(), nn.Tanh()), rows)
    with pytest.raises(RuntimeError, match="Rare, which PyTorch runs, has returned other shapes or values than when"):
        cmodel(torch.full((3, 4), 1000.0))


class Hides(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = [nn.Parameter(torch.randn(4))]
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) * self.hidden[0]


def test_parameters_in_a_plain_list(fake_ranks):
    fake_ranks(2)
    found = refused(Hides(), X)
    assert "a tensor of shape (4,) requires a gradient and is neither a parameter of the module nor" in text_of(found)
    assert "make it an nn.Parameter of the module" in text_of(found)
    assert "return self.fc(x) * self.hidden[0]" in text_of(found) or f"{__file__}:" in text_of(found)


class Refuses(Part):
    def forward(self, x):
        if x.shape[0] != 3:
            raise ValueError("not three rows")
        return self.fc(x)


class Replaces(Part):
    def forward(self, x):
        try:
            return self.fc(x).no_such_method()
        except AttributeError as error:
            raise KeyError("no such method") from error


class Generator(Part):
    def forward(self, x):
        return sum(row for row in self.rows(self.fc(x)))

    def rows(self, x):
        yield x.no_such_method()


@pytest.mark.parametrize(
    ("cls", "error", "line"),
    [
        (Refuses, ValueError, 'raise ValueError("not three rows")'),
        (Replaces, KeyError, 'raise KeyError("no such method") from error'),
        (Generator, AttributeError, "yield x.no_such_method()"),
    ],
)
@pytest.mark.parametrize("eager", ["auto", None])
def test_errors_of_the_model_stay_as_they_are(fake_ranks, cls, error, line, eager):
    fake_ranks(2)
    found = refused(nn.Sequential(nn.Linear(4, 4), cls()), X, compile_policy=shardtrace.CompilePolicy(eager=eager))
    assert type(found) is error
    assert "cannot be recorded" not in str(found)
    assert f"shardtrace was recording Sequential, at {__file__}:" in text_of(found)
    assert f"    {line}\n" in text_of(found)


def test_recovering_from_an_error(single_rank):
    class Recovers(Part):
        def forward(self, x):
            try:
                x.no_such_method()
            except AttributeError:
                x = self.fc(x)
            return x

    check(Recovers, rows)


def test_weights_in_a_list(single_rank):
    """The list of an nn.LSTM holds the parameters that the module holds."""
    check(lambda: nn.LSTM(4, 4), lambda step: (torch.randn(5, 3, 4),))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 5 * grad * x * x  # on purpose: not that of its forward


cube = Cube.apply  # before any recording
cube_in_cpp = torch._C._FunctionBase.__dict__["apply"].__get__(None, Cube)  # of torch 2.14, before shardtrace


class Cubes(nn.Module):
    def forward(self, x):
        return cube(x)


class CubesInCpp(nn.Module):
    def forward(self, x):
        return cube_in_cpp(x)


@pytest.mark.parametrize(("cubes", "by_torch"), [(Cubes, False), (CubesInCpp, True)])
def test_a_reference_to_the_apply_of_an_autograd_function(cubes, by_torch, single_rank, monkeypatch):
    """It is one call with its own backward: its forward alone would have another gradient. A reference of which nothing
    can be seen is left to torch with its module."""
    monkeypatch.setattr(recorder, "APPLIES_IN_CPP", recorder.APPLIES_IN_CPP or by_torch)
    model = nn.Sequential(nn.Linear(4, 4), cubes(), nn.Linear(4, 4))
    expected = copy.deepcopy(model)
    x = torch.randn(3, 4)
    jitted = thunder.jit(shardtrace.fsdp(model))
    jitted(x).sum().backward()
    assert any("eager" in b.sym.name for b in thunder.last_traces(jitted)[0].bound_symbols) == by_torch
    expected(x).sum().backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# ---- what asks for the memory of a tensor, and what has memory of its own ----


class Takes(Part):
    def __init__(self, how):
        super().__init__()
        self.how, self.numbers = how, numpy.ones(4, dtype=numpy.float32)

    def forward(self, x):
        return self.how(self, self.fc(x))


MEMORY = {
    "to_dlpack": lambda m, h: h + from_dlpack(to_dlpack(h.detach())),
    "from_dlpack": lambda m, h: h + torch.from_dlpack(h.detach()),
    "data_ptr": lambda m, h: h * (1 + (h.data_ptr() == 0)),
    "storage": lambda m, h: h + (h.untyped_storage().data_ptr() == 0),
}


@pytest.mark.parametrize("how", MEMORY.values(), ids=MEMORY)
def test_fakes_have_no_memory(how, single_rank):
    for eager in (Takes(how), nn.Sequential(nn.Linear(4, 4), Takes(how))):
        model, x = shardtrace.fsdp(copy.deepcopy(eager)), torch.ones(2, 4)
        torch.testing.assert_close(model(x), eager(x))
    model = shardtrace.fsdp(Takes(how), compile_policy=shardtrace.CompilePolicy(eager=None))
    with pytest.raises(RuntimeError, match="it reads the memory of a tensor"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    "how",
    [
        lambda m, h: h + torch.from_numpy(m.numbers),
        lambda m, h: h * torch.Tensor(m.numbers) + torch.from_numpy(m.numbers[:2])[:, None],
        lambda m, h: h * torch.from_numpy(m.numbers).add_(1),
    ],
)
def test_arrays_of_numpy_are_read_and_written(how, single_rank):
    eager = Takes(how)
    model, x = shardtrace.fsdp(copy.deepcopy(eager)), torch.ones(2, 4)
    for step in range(5):
        torch.testing.assert_close(model(x), eager(x))
        for m in (model, eager):
            m.numbers[step % 4] += 1
            m.numbers = m.numbers * 2 if step == 2 else m.numbers
        assert (model.numbers == eager.numbers).all()


@torch.library.custom_op("shardtrace_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.mark.parametrize("function", [doubled, torch.ops.shardtrace_tests.doubled.default])
def test_an_operator_without_a_fake_kernel(function, single_rank):
    eager = Takes(lambda m, h: function(h))
    model, x = shardtrace.fsdp(copy.deepcopy(eager)), torch.ones(2, 4)
    for m in (eager, model):
        m(x).square().sum().backward()
    torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)


def test_a_module_with_two_names_keeps_its_tensors(single_rank):
    model = nn.Sequential(nn.Linear(4, 4), Branch(), nn.Linear(4, 4))
    model[2] = model[0]  # the first recording fails
    eager, x = copy.deepcopy(model), torch.ones(2, 4)
    torch.testing.assert_close(shardtrace.fsdp(model)(x), eager(x))
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize(
    "write",
    [
        lambda y: (z := y.exp(), z.data.mul_(2), z)[-1],
        lambda y: (z := y.sigmoid(), z.data[0].clamp_(0.4, 0.6), z * 3)[-1],
        lambda y: (z := y * y, y.data.add_(1), z)[-1],
        lambda y: (z := torch.softmax(y, -1), z.data.copy_(y.detach()), z)[-1],
    ],
    ids=["exp", "a row", "an input", "copy"],
)
def test_writes_past_autograd_into_what_backward_has_saved(write, single_rank):
    """PyTorch runs the module: its backward reads what was written."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return write(self.fc(x))

    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 4), Part())
    model = shardtrace.fsdp(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    for run in (eager, model):
        run(x).square().sum().backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
