"""Blocks whose records are equal are compiled once; all others by themselves. The step is that of eager PyTorch."""

import contextvars
import threading
import types

import shardtrace
from passes.analysis.calls import CallOf, block_of
from passes.analysis.liveness import collectives
from passes.pipeline import FirstStage

import pytest
import thunder
import torch
import torch.utils.checkpoint
from against_eager import check, rows
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models import Net
from thunder.core.transform_common import Transform
from torch import nn
from torch.nn import functional as F

D = 4


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D) / 2)

    def forward(self, x):
        return torch.tanh(x @ self.w) + x


def called(cmodel):
    """The modules that are called, for each function of blocks, in the trace as it was recorded."""
    found = {}
    for bsym in thunder.last_traces(cmodel)[0].bound_symbols:
        if (block := block_of(bsym)) is not None:
            found.setdefault(block, []).extend(tag.module for tag in bsym.tags if isinstance(tag, CallOf))
    return [" ".join(name.removeprefix("blocks.") for name in names) for names in found.values()]


def remarks(cmodel):
    (first,) = (t for t in thunder.compile_data(cmodel).transforms if isinstance(t, FirstStage))
    return first.compilation.facts.remark


# ---- blocks of one kind ----


class Dropped(Plain):
    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, x):
        return F.dropout(super().forward(x), self.p, self.training)


class Tied(Plain):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return super().forward(x) @ self.shared


class Masked(Plain):
    """A buffer, keywords, None, a tuple as argument and as result."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(3, D)))

    def forward(self, x, pair=None, *, scale=2.0, more=True):
        x = super().forward(x) * self.mask * scale
        if pair is not None:
            x = x + pair[0] * pair[1]
        return x, (x, x.sum()) if more else None


class MaskedNet(Net):
    def forward(self, x):
        pair = None
        for block in self.blocks:
            x, pair = block(x, pair, scale=3.0)
        return x * pair[1]


class Detached(Plain):
    def forward(self, x):
        with torch.no_grad():
            gate = torch.sigmoid(super().forward(x))
        return super().forward(x) * gate


class InPlace(Plain):
    def forward(self, x):
        y = super().forward(x)
        y += x
        return F.relu(y.mul_(2), inplace=True)


class Thrice(Net):
    def forward(self, x):
        return self.blocks[1](self.blocks[0](self.blocks[0](self.blocks[0](x))))


class Kept(Net):
    """Also reads what blocks return elsewhere."""

    def forward(self, x):
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return x.sum() + kept[0].sum() * kept[1].detach().sum()


class Checkpointing(Net):
    """Checkpoints some calls and not others."""

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        return torch.utils.checkpoint.checkpoint(self.blocks[2], x, use_reentrant=False)


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Drawn(Plain):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x) * torch.randn(D)


class Norm(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        return self.norm(super().forward(x))


class Appending(Plain):
    def forward(self, x, losses):
        losses.append(super().forward(x).sum())
        return super().forward(x)


class AppendingNet(Net):
    def forward(self, x):
        losses = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


class OfState(Plain):
    def forward(self, state):
        h = super().forward(state["x"])
        state["x"] = state["x"] + h
        state["aux"] = state["aux"] + h.mean()


class StateNet(Net):
    """Blocks that return nothing and change the dict that they are given."""

    def forward(self, x):
        state = {"x": x, "aux": x.new_zeros(())}
        for block in self.blocks:
            block(state)
        return state["x"], state["aux"]


class Listening(Plain):
    def forward(self, x, size):
        return super().forward(x) * size  # a tensor that the model makes before each block


class ListeningNet(Net):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, x.mean())
        return x


class Reading(Plain):
    """Reads a number in the way of ``read``."""

    def __init__(self, number, read=lambda block: block.number):
        super().__init__()
        self.number, self.items, self.read = number, [number], read

    def forward(self, x):
        return super().forward(x) * self.read(self)


TABLES = [torch.ones(D), torch.arange(D) + 2.0]  # constants are arguments of the function


def tied():
    shared = nn.Parameter(torch.randn(D, D))
    return Net(*(Tied(shared) for _ in range(3)))


def hooked():
    net = Net(Plain(), Plain(), Plain())
    net.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    return net


def frozen():
    net = Net(*(Plain() for _ in range(4)))
    net.blocks[:2].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: Net(Plain(), Plain(), Plain()), ["0 1 2"]),
        (lambda: Net(Dropped(), Dropped()), ["0 1"]),
        (lambda: MaskedNet(*(Masked() for _ in range(4))), ["1 2 3"]),
        (lambda: Net(Detached(), Detached()), ["0 1"]),
        (lambda: Net(InPlace(), InPlace()), ["0 1"]),
        (lambda: Kept(Plain(), Plain()), ["0 1"]),
        (lambda: Thrice(Plain(), Plain()), ["0 0 0 1"]),
        (lambda: Checkpointing(*(Plain() for _ in range(3))), ["0 2", "0 1 2"]),
        (lambda: Autocast(Plain(), Plain()), ["0 1"]),
        (lambda: Net(Drawn(), Drawn()), ["0 1"]),
        (lambda: Net(Norm(), Norm()), ["0 1"]),
        (lambda: AppendingNet(Appending(), Appending()), ["0 1"]),
        (lambda: StateNet(*(OfState() for _ in range(3))), ["1 2"]),
        (lambda: ListeningNet(Listening(), Listening()), ["0 1"]),
        (lambda: Net(Plain(), Dropped(), Plain(), Dropped()), ["0 2", "1 3"]),
        (tied, ["0 1 2"]),
        (lambda: Net(*(Reading(n, lambda block: 2.0) for n in range(3))), ["0 1 2"]),  # a number that is not read
        (lambda: Net(*(Reading(n, lambda block: TABLES[block.number]) for n in (0, 1, 0))), ["0 1 2"]),
        (lambda: Net(*(Reading(n, lambda block: [2, 2][block.number]) for n in (0, 1))), ["0 1"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_blocks_of_one_kind(make, kinds, single_rank):
    assert called(check(make, rows)) == kinds


def test_the_remark(single_rank):
    cmodel = check(lambda: Net(Plain(), Dropped(), Plain(), Dropped(0.1)), rows)
    assert remarks(cmodel) == (
        "blocks.0 is compiled once for 2 calls; blocks.1, blocks.3, each by itself: no other block makes the same calls"
    )


def test_blocks_that_are_called_by_class(fake_ranks):
    fake_ranks(2)
    model = lambda: Net(nn.Sequential(Plain(), Dropped()), nn.Sequential(Plain(), Dropped()))  # noqa: E731
    x = torch.ones(3, D, requires_grad=True)
    for options, kinds in (
        ({}, ["0 1"]),
        ({"compile_policy": shardtrace.CompilePolicy(repeated_blocks=Plain)}, ["0.0 1.0", "0.1 1.1"]),
        ({"compile_policy": shardtrace.CompilePolicy(repeated_blocks="inline")}, []),
    ):
        cmodel = thunder.jit(shardtrace.fsdp(model(), **options))
        cmodel(x)
        assert called(cmodel) == kinds


class Onlooker(Transform):
    """A transform of a user, which is to see the lines of blocks."""


def test_transforms_see_the_lines_of_blocks(single_rank):
    cmodel = thunder.jit(shardtrace.fsdp(Net(Plain(), Plain())), transforms=[Onlooker()])
    cmodel(*rows(0))
    assert called(cmodel) == []
    assert remarks(cmodel) == "blocks.0, blocks.1, each by itself: Onlooker is to see them"


def test_blocks_in_several_buckets(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(Net(Norm(), Norm()), bucketing_strategy="none"))
    cmodel(*rows(0))
    assert called(cmodel) == []
    assert remarks(cmodel) == "blocks.0, blocks.1, each by itself: its parameters are in several buckets"


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": "zero2"},
        {"sharding_strategy": "zero3", "mp_policy": "bf16"},
        {"sharding_strategy": "ddp"},
        {"activation_checkpointing": Dropped},
        {"activation_checkpointing": nn.Tanh},
    ],
    ids=str,
)
def test_collectives_are_those_of_blocks_by_themselves(options, fake_ranks):
    class Deep(Dropped):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            return self.act(super().forward(x))

    fake_ranks(2)
    sent = []
    for how in ({}, {"compile_policy": shardtrace.CompilePolicy(repeated_blocks="inline")}):
        cmodel = thunder.jit(shardtrace.fsdp(Net(Deep(), Deep(), Deep()), **options, **how))
        cmodel(*rows(0)).sum().backward()
        assert called(cmodel) == ([] if how else ["0 1 2"])
        traces = (thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1])
        sent.append([sorted(map(str, collectives(trace))) for trace in traces])
    assert sent[0] == sent[1]


def test_what_is_recomputed_makes_another_kind(single_rank):
    marks = {f"blocks.{i}": ("none", "cheap", "full")[i % 3] for i in range(6)}
    cmodel = check(lambda: Net(*(Norm() for _ in range(6))), rows, activation_checkpointing=marks)
    assert called(cmodel) == ["0 3", "1 4", "2 5"]


# ---- blocks of several kinds ----


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: Net(*(Dropped(p) for p in (0.1, 0.2, 0.1))), ["0 2"]),
        (lambda: Net(*(Reading(n) for n in (1, 2))), []),
        (lambda: Net(*(Reading(n) for n in (1, 1.0))), []),
        (lambda: Net(*(Reading(n) for n in (0.0, -0.0))), []),
        (lambda: Net(*(Reading(n, lambda block: getattr(block, "num" + "ber")) for n in (1, 2, 1))), ["0 2"]),
        (lambda: Net(*(Reading(n, lambda block: vars(block).get("number")) for n in (1, 2, 1))), ["0 2"]),
        (lambda: Net(*(Reading(n, lambda block: 3 if block.number > 1 else 5) for n in (1, 2, 0))), ["0 2"]),
        (lambda: Net(*(Reading(n, lambda block: sum(v for v in block.items)) for n in (1, 2, 1))), ["0 2"]),
        (lambda: Net(*(Reading(n, lambda block: torch.tensor(block.number)) for n in (1.0, 2.0))), []),
        (hooked, ["0 2"]),
        (frozen, ["0 1", "2 3"]),
        (lambda: Net(Plain(), Dropped(0.0), Plain()), ["0 2"]),  # the same lines but one
        (lambda: Net(Plain(), *(type("Plain", (Plain,), {})() for _ in range(2))), []),  # other classes
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_blocks_of_several_kinds(make, kinds, single_rank):
    assert called(check(make, rows)) == kinds


VARIABLE, LOCAL = contextvars.ContextVar("number", default=0.0), threading.local()


class Changing(Net):
    """Changes state elsewhere before each block."""

    def __init__(self, change, read):
        self.context = types.SimpleNamespace(number=0.0)
        context = self.context
        super().__init__(*(Reading(0.0, lambda block: read(context)) for _ in range(3)))
        self.change = change

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            self.change(self.context, number)
            x = block(x)
        return x


def cell():
    number = 0.0

    def change(context, new):
        nonlocal number
        number = float(new)

    return change, lambda context: number


@pytest.mark.parametrize(
    ("change", "read", "kinds"),
    [
        (lambda c, i: setattr(c, "number", i + 1.0), lambda c: c.number, []),
        (lambda c, i: setattr(c, "number", None if i % 2 else 3.0), lambda c: c.number or 1.0, ["0 2"]),
        (lambda c, i: setattr(c, "other", 2.0) if i == 1 else None, lambda c: getattr(c, "other", 1.0), ["1 2"]),
        (lambda c, i: setattr(c, "kept", [i + 1.0]), lambda c: c.kept[0], []),
        (lambda c, i: setattr(c, "read", (lambda: 1.0) if i else (lambda: 2.0)), lambda c: c.read(), ["1 2"]),
        (lambda c, i: VARIABLE.set(float(i)), lambda c: VARIABLE.get(), []),
        (lambda c, i: setattr(LOCAL, "number", float(i)), lambda c: LOCAL.number, []),
        (lambda c, i: setattr(Plain, "level", float(i)), lambda c: Plain.level, []),
        (*cell(), []),
    ],
    ids=["number", "None", "hasattr", "list", "function", "context variable", "thread", "class", "cell"],
)
def test_state_that_the_model_changes_between_blocks(change, read, kinds, single_rank):
    assert called(check(lambda: Changing(change, read), rows, steps=1)) == kinds


class Same(Plain):
    def forward(self, x, skip):
        return (x, super().forward(x)) if skip else (super().forward(x), x)


class SameNet(Net):
    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x, y = block(x, i < 2)
            x = x * y
        return x


class Unused(Plain):
    """Computes something of a parameter that nothing reads."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(D, D)

    def forward(self, x):
        self.unused(x)
        return super().forward(x)


def test_blocks_that_use_a_parameter_for_nothing(fake_ranks):
    fake_ranks(2)
    model = nn.Sequential(nn.Linear(D, D), nn.Sequential(Unused(), Unused()))
    cmodel = shardtrace.fsdp(model)
    cmodel(torch.randn(3, D)).sum().backward()
    assert called(cmodel)
    assert model[1][0].unused.weight.grad is None


def test_blocks_that_return_what_they_are_given(single_rank):
    assert called(check(lambda: SameNet(*(Same() for _ in range(4))), rows)) == ["0 1 2 3"]


class GivenTwice(Net):
    def forward(self, x):
        y = x * 2
        return self.blocks[0](x, y) + self.blocks[1](y, x) + self.blocks[2](x, x)


class OfTwo(Plain):
    def forward(self, x, y):
        return super().forward(x) * y.sin()


def test_blocks_that_are_given_one_tensor_twice(single_rank):
    cmodel = check(lambda: GivenTwice(*(OfTwo() for _ in range(3))), rows)
    assert called(cmodel) == ["0 1"]


class Stretch(Plain):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class StretchNet(Net):
    def forward(self, x):
        return super().forward(x * 1)


def test_blocks_that_write_into_what_they_are_given(single_rank):
    cmodel = check(lambda: StretchNet(Stretch(), Stretch()), rows)
    assert called(cmodel) == []
    assert remarks(cmodel) == "blocks.0, blocks.1, each by itself: it writes into tensors of others"


class Viewing(Net):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x[0] = 1.0
        return x


def test_results_that_are_written_into(single_rank):
    cmodel = check(lambda: Viewing(Plain(), Plain()), rows)
    assert called(cmodel) == []
    assert remarks(cmodel) == "blocks.0, blocks.1, each by itself: what it returns is written into"


class HalfDetached(Net):
    def forward(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            y = self.blocks[1](x)
        return self.blocks[2](x) * y


def test_without_gradients_it_is_another_kind(single_rank):
    assert called(check(lambda: HalfDetached(Plain(), Plain(), Plain()), rows)) == ["0 2"]


# ---- changes after a step was compiled ----


def test_a_changed_attribute_compiles_another_step(single_rank):
    for place in range(3):
        net = Net(*(Reading(1.0) for _ in range(3)))
        (x,) = rows(0)
        cmodel = thunder.jit(shardtrace.fsdp(net))
        before = cmodel(x)
        net.blocks[place].number = 3.0
        after = cmodel(x)
        assert not torch.equal(before, after)
        assert called(cmodel) == [" ".join(str(i) for i in range(3) if i != place)]


def test_a_block_in_another_mode(single_rank):
    cmodel = thunder.jit(shardtrace.fsdp(Net(*(Dropped(1.0) for _ in range(3))).eval()))
    (x,) = rows(0)
    assert cmodel(x).any()
    cmodel.get_submodule("blocks.2").train()
    assert not cmodel(x).any()


def test_a_frozen_block(single_rank):
    cmodel = thunder.jit(shardtrace.fsdp(Net(Plain(), Plain(), Plain())))
    cmodel(*rows(0)).sum().backward()
    cmodel.zero_grad()
    cmodel.get_submodule("blocks.1").requires_grad_(False)
    cmodel(*rows(0)).sum().backward()
    assert [p.grad is None for p in cmodel.parameters()] == [False, True, False]


# ---- any mix ----


class Anything(nn.Module):
    """A block whose record depends on everything that it is made with."""

    def __init__(self, *made_with):
        super().__init__()
        width, self.number, self.activation, bias, trainable, depth = self.made_with = made_with
        self.inner = nn.ModuleList(nn.Linear(D if i == 0 else width, width, bias=bias) for i in range(depth))
        self.out = nn.Parameter(torch.randn(width, D), requires_grad=trainable)

    def forward(self, x):
        for layer in self.inner:
            x = self.activation(layer(x) * self.number)
        return x @ self.out


MADE_WITH = st.tuples(
    st.sampled_from([2, 4]),
    st.sampled_from([1, 2.0, 2, True]),
    st.sampled_from([torch.tanh, torch.relu]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
)


@given(st.lists(MADE_WITH, min_size=2, max_size=4))
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])  # to shrink would take minutes
def test_any_mix_of_blocks(many):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        cmodel = check(lambda: Net(*(Anything(*one) for one in many)), rows)
        kinds = {}
        for i, one in enumerate(many):
            kinds.setdefault(tuple((type(v), v) for v in one), []).append(str(i))
        assert called(cmodel) == [" ".join(names) for names in kinds.values() if len(names) > 1]
    finally:
        dist.destroy_process_group()


class Measures(nn.Module):
    """Returns and keeps what it has measured without gradients."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(D, D), None

    def forward(self, x):
        y = self.linear(x).tanh()
        with torch.no_grad():
            scale = y.square().mean(-1, keepdim=True)
            self.last = scale * 2
        return y, scale


class UsesMeasures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(D, D), nn.ModuleList([Measures(), Measures(), Measures()])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            y, scale = block(x)
            x = x + y * scale
        return x


def test_results_without_gradients_leave_those_of_others(single_rank):
    ours = UsesMeasures()
    eager = UsesMeasures()
    eager.load_state_dict(ours.state_dict())
    jitted = thunder.jit(shardtrace.fsdp(ours))
    for _ in range(2):
        x = torch.randn(3, D)
        for call in (jitted, eager):
            call(x).square().sum().backward()
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(ours.blocks[1].last, eager.blocks[1].last)
    assert any(block_of(b) for b in thunder.last_traces(jitted)[0].bound_symbols)
