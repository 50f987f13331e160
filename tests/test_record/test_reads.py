"""Values of inputs are read and guarded. Checks that only raise are lines. What each step computes is left to PyTorch."""

import copy

import shardtrace
from passes.compat.jit import notes_of
from passes.pipeline import FirstStage
from shardtrace.record.reads import VARIANTS

import pytest
import thunder
import torch
from against_eager import Model, check
from ranks import on_ranks
from torch import nn


def remarks(cmodel):
    (first,) = (t for t in thunder.compile_data(cmodel).transforms if isinstance(t, FirstStage))
    return first.compilation.facts.remark


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function
        self.register_buffer("sizes", torch.tensor([2, 3]))

    def forward(self, *args):
        return self.function(self, *args)


def masked(step):
    """Two steps with three rows each, a third with two."""
    mask = torch.zeros(5, dtype=torch.bool)
    mask[: (3, 3, 2)[step]] = True
    return torch.randn(5, 4), mask


def in_place(m, x, mask):
    mask = mask.clone()
    mask[0] |= ~mask.any()
    return m.fc(x)[mask]


def in_loops(m, x, mask):
    y = m.fc(x)
    for start, stop in zip([0, 1], mask.nonzero()[:2, 0], strict=True):
        y = y + torch.arange(start, stop).sum() * y[: stop + 1].mean()
    return y


def by_mask(m, x, mask):
    y = m.fc(x)
    y = torch.where(mask[:, None], y, 0.5 * y)
    return y[mask].sum() + y[~mask, :2].mean() + y.masked_select(mask[:, None]).mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, mask: m.fc(x) * 2 if mask.sum() > 2 else m.fc(x),
        lambda m, x, mask: m.fc(x) * int(mask.sum()),
        lambda m, x, mask: m.fc(x) / mask.float().mean().item(),  # a float that follows from booleans
        lambda m, x, mask: m.fc(x) * sum(mask.tolist()),
        lambda m, x, mask: m.fc(x) * float(mask.numpy().sum()),
        lambda m, x, mask: m.fc(x)[mask.nonzero()[:, 0]] @ m.fc.weight,
        lambda m, x, mask: m.fc(x).split([int(mask.sum()), int((~mask).sum())])[0],
        lambda m, x, mask: m.fc(x)[: mask.sum()],
        lambda m, x, mask: m.fc(x).repeat_interleave(1 + mask.long(), 0),
        in_place,
        in_loops,
        by_mask,
    ],
)
def test_values_of_inputs(single_rank, function):
    """Steps that read the same share a compiled one."""
    cmodel = check(lambda: Net(function), masked, steps=3)
    assert thunder.cache_misses(cmodel) == 2
    assert "PyTorch" not in remarks(cmodel)


def test_a_branch_on_numbers_that_are_no_integers(single_rank):
    cmodel = check(
        lambda: Net(lambda m, x: m.fc(x) * 2 if (x == 0).any() else m.fc(x)), lambda step: (torch.randn(3, 4),)
    )
    assert thunder.cache_misses(cmodel) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(x)[:, : m.sizes[0].item()],
        lambda m, x: m.fc(x).view(-1, *m.sizes.tolist()[:1]),
        lambda m, x: m.fc(x) + (3 in m.sizes),
        lambda m, x: m.fc(x) * torch.tensor([1.5, 2.5]).max().item(),
    ],
)
def test_values_of_buffers(single_rank, function):
    cmodel = check(lambda: Net(function), lambda step: (torch.randn(3, 4),))
    assert thunder.cache_misses(cmodel) == 1
    assert "PyTorch" not in remarks(cmodel)


def test_a_buffer_that_the_script_writes(single_rank):
    model = shardtrace.fsdp(Net(lambda m, x: m.fc(x) * m.sizes[0].item()))
    x = torch.randn(3, 4)
    first = model(x)
    model.sizes.fill_(4)
    torch.testing.assert_close(model(x), 2 * first)


def test_a_limit_of_variants(single_rank):
    """A number that is another one in each step: PyTorch runs the module then."""
    model = lambda: nn.Sequential(Net(lambda m, x: m.fc(x) * (x[0, 0] * 100).int().item()), nn.Tanh())  # noqa: E731
    cmodel = check(model, lambda step: (torch.full((2, 4), 1.0 + step),), steps=VARIANTS + 3)
    assert thunder.cache_misses(cmodel) == VARIANTS + 1
    assert "0 (Net) is run by PyTorch" in remarks(cmodel)


@on_ranks(2)
def test_ranks_that_read_other_values():
    torch.manual_seed(0)
    model = shardtrace.fsdp(Net(lambda m, x, mask: m.fc(x)[mask].mean() * (2 if mask.all() else 1)))
    before, rank = shardtrace.full_state_dict(model), torch.distributed.get_rank()
    found = [model(torch.ones(3, 4), torch.arange(3) < (3 if step == rank else 1)) for step in range(3)]
    once = nn.functional.linear(torch.ones(4), before["fc.weight"], before["fc.bias"]).mean().item()
    assert [y.item() for y in found] == pytest.approx([once * (1 + (step == rank)) for step in range(3)])


# ---- checks ----


def text_of(error):
    return f"{error}{notes_of(error)}"


def raises(m, y):
    if not torch.isfinite(y).all():
        raise ValueError(f"infinite: {y.sum()}")
    return y


def asserts_two(m, y):
    with torch.autocast("cpu", enabled=False):
        assert (y < 1e9).all(), "big"
        assert (y == y).all()
    return y


def both(m, y):
    if (y > 1e9).any() or torch.isnan(y).any().item():
        raise ArithmeticError
    return y


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda m, y: (torch._check_tensor_all(y < 1e9, lambda: "large"), y)[1], RuntimeError, "large"),
        (lambda m, y: (torch._check_tensor_all_with(ValueError, y < 1e9), y)[1], ValueError, "Expected cond to be"),
        (lambda m, y: (torch._assert((y < 1e9).all(), "large"), y)[1], AssertionError, "large"),
        (raises, ValueError, "if not torch.isfinite(y).all():"),
        (asserts_two, AssertionError, 'assert (y < 1e9).all(), "big"'),
        (both, ArithmeticError, "if (y > 1e9).any() or torch.isnan(y).any().item():"),
    ],
)
def test_a_check_that_only_raises(single_rank, function, error, text):
    model = lambda: Net(lambda m, x: {"y": function(m, m.fc(x))})  # noqa: E731
    cmodel = check(model, lambda step: (torch.randn(3, 4),))
    assert any("check" in b.sym.name for b in thunder.last_traces(cmodel)[-1].bound_symbols)
    with pytest.raises(error) as info:
        cmodel(torch.full((3, 4), float("inf")))
    assert text in text_of(info.value)
    assert f"{__file__}:" in text_of(info.value)
    assert thunder.cache_misses(cmodel) == 1


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = x + self.fc(x).tanh()
        assert x.max() < 100
        return x


def test_checks_in_blocks_that_are_compiled_once(single_rank):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Checked() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    cmodel = check(Stack, lambda step: (torch.randn(3, 4),))
    assert "is compiled once for" in remarks(cmodel)
    with pytest.raises(AssertionError, match=r"assert x\.max"):
        cmodel(torch.full((3, 4), 99.5))


def handles(m, x):
    try:
        assert m.fc(x).sum() > 0
    except AssertionError:
        return -m.fc(x)
    return m.fc(x)


def test_a_check_with_another_use_is_none(single_rank):
    cmodel = check(lambda: nn.Sequential(Net(handles), nn.Tanh()), lambda step: (torch.randn(3, 4),), steps=4)
    assert "0 (Net) is run by PyTorch" in remarks(cmodel)


# ---- the model itself ----


def test_the_model_itself_is_run_by_pytorch_at_last(single_rank):
    cmodel = check(
        lambda: Model(lambda m, x: (m.fc(x) if m.fc(x).sum() > 0 else -2 * m.fc(x)) / x.max().item()),
        lambda step: (torch.randn(3, 4),), steps=4,
    )  # fmt: skip
    assert "the model itself (Model) is run by PyTorch, with all its parameters whole" in remarks(cmodel)


def test_layers_that_are_dropped(single_rank):
    """The random numbers of each step choose the path."""
    drops = lambda m, x: m.fc(x) if torch.rand([]) < 0.5 else 2 * m.fc(m.fc(x))  # noqa: E731
    cmodel = check(lambda: Model(drops), lambda step: (torch.randn(3, 4),), steps=4)
    assert "the model itself (Model) is run by PyTorch, with all its parameters whole" in remarks(cmodel)


def test_what_remains_refused_names_the_line_that_ended_the_recording(single_rank):
    def forward(m, x):
        if not torch.compiler.is_compiling():
            return m.fc(x) * m.fc(x).sum().item()
        m.seen = m.fc(x).sum().item()
        return m.fc(x)

    def sets(m, x):
        m.seen = m.fc(x).sum().item()
        return m.fc(x)

    for function in (sets, forward):
        cmodel = thunder.jit(shardtrace.fsdp(Net(function), compile_policy=shardtrace.CompilePolicy(eager=None)))
        with pytest.raises(RuntimeError, match="it depends on the values of tensors") as info:
            cmodel(torch.randn(3, 4))
        assert "    m.seen = m.fc(x).sum().item()" in text_of(info.value)
    returns = Net(lambda m, x: (m.fc(x), m.fc(x).sum().item()))
    with pytest.raises(
        RuntimeError, match=r"PyTorch cannot run Net as one line .CannotStandAlone: the shapes .*values"
    ):
        thunder.jit(shardtrace.fsdp(returns))(torch.randn(3, 4))


def test_in_inference_mode(single_rank):
    model = Net(lambda m, x, mask: m.fc(x)[mask].sum(0) * (1 if m.fc(x).sum() > 0 else -1))
    eager, cmodel = copy.deepcopy(model), shardtrace.fsdp(model)
    with torch.inference_mode():
        for step in range(3):
            torch.testing.assert_close(cmodel(*(given := masked(step))), eager(*given))


def test_what_the_model_keeps_of_values(single_rank):
    def sets(m, x):
        m.seen = m.fc(x).sum().item()
        return m.fc(x)

    model, eager = Net(sets), Net(sets)
    eager.load_state_dict(model.state_dict())
    sharded = shardtrace.fsdp(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(sharded(x), eager(x))
        assert model.seen == eager.seen


def masks_when_traced(m, x, mask):
    """As models of transformers: no mask if none is needed, which a trace for all inputs would not tell."""
    if torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor) or not mask.all():
        return m.fc(x).masked_fill(~mask[:, None], 0.0)
    return m.fc(x).sin()


def test_models_run_as_in_eager_mode(single_rank):
    """They are not told that they are recorded: a step without a mask, and one with."""
    model = Net(masks_when_traced)
    cmodel = thunder.jit(shardtrace.fsdp(copy.deepcopy(model)))
    x = torch.randn(5, 4)
    for mask in (torch.ones(5, dtype=torch.bool), torch.arange(5) > 2):
        assert torch.equal(cmodel(x, mask), model(x, mask))
    assert thunder.cache_misses(cmodel) == 2
    assert "masked_fill" not in str(thunder.compile_stats(cmodel).interpreter_cache[0].computation_traces[-1])


def test_models_that_only_a_compiler_can_run(single_rank):
    """They are told so where a value is missing otherwise."""

    def forward(m, x):
        y = m.fc(x)
        if torch.compiler.is_compiling():
            return torch.where(y.sum() > 0, y, -y)
        return y if y.sum() > 0 else -y

    model = Net(forward)
    cmodel = thunder.jit(shardtrace.fsdp(copy.deepcopy(model)))
    for x in (torch.randn(3, 4), torch.randn(3, 4)):
        assert torch.equal(cmodel(x), model(x))
    assert not remarks(cmodel)
