"""A repeated block is traced once. The trace is the same as if every block had been traced, apart from names."""

import copy
import itertools
import random

import shardtrace
from passes.analysis import collectives
from passes.analysis.calls import CallOf, block_of
from passes.analysis.origins import Origin
from passes.checkpoint_activations import Call
from passes.pipeline import ShardParameters
from shardtrace.blocks.share import TracedBlocks

import pytest
import thunder
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbolTag
from thunder.core.transform_common import Transform, dce
from torch import nn

D = 3


def weight():
    return nn.Parameter(torch.randn(D, D) / 2)


class Net(nn.Module):
    """Calls its blocks one after the other."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.run(x).sum()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = weight()

    def forward(self, x):
        return torch.tanh(x @ self.w) + x


def lines(trace, *, recomputed=True):
    """The lines of a trace, with values numbered in the order in which they appear, and those of a block for its call.

    ``recomputed``: with the marks of what is recomputed, which Thunder sets on lines and parts that it traced before.
    """
    numbers, scopes, calls = itertools.count(), itertools.count(), {}

    def tag(t, scope):
        return calls.setdefault((t, scope), len(calls)) if isinstance(t, Call) else type(t)

    def marked(t):
        return recomputed or (not isinstance(t, BoundSymbolTag) and t is not ProxyTag.RECOMPUTE_IN_BACKWARD)

    def read(bsyms, known, scope=None):
        def value(v):
            if not isinstance(v, Proxy):
                return v if isinstance(v, (str, int, float, bool, type(None))) else type(v)
            if v.name not in known:
                known[v.name] = next(numbers)
            kind = (getattr(v, "shape", None), getattr(v, "dtype", None), getattr(v, "requires_grad", None))
            return known[v.name], *map(str, kind), *sorted(str(t) for t in v.tags if marked(t))

        def line(b, is_part=False):
            values = tree_flatten_with_dataclass((b.output, b.args, {k: v for k, v in b.kwargs.items() if k != "name"}))
            ignored = (CallOf, Origin, Call) if is_part and not recomputed else (CallOf, Origin)
            tags = sorted(str(tag(t, scope)) for t in b.tags if not isinstance(t, ignored) and marked(t))
            return b.sym.id, [value(v) for v in values[0]], [line(s, is_part=True) for s in b.subsymbols], tags

        for b in bsyms:
            block = block_of(b)
            if block is None:
                yield line(b)
            else:
                inside = {p.name: known[a.name] for p, a in zip(block.inputs, b.args, strict=True)}
                yield from read(block.trace.bound_symbols[len(block.inputs) : -1], inside, next(scopes))
                known.update({o.name: inside[p.name] for p, o in zip(block.outputs, b.output, strict=True)})

    return list(read(trace.bound_symbols, {}))


class Onlooker(Transform):
    """A transform of a user, which is to see the lines of blocks."""


def compiled(net, *inputs, transforms=(), **options):
    """A jitted copy of a net, its result and its gradients."""
    cmodel = thunder.jit(shardtrace.fsdp(copy.deepcopy(net), **options), transforms=list(transforms))
    TABLE.clear()
    torch.manual_seed(0)
    loss = cmodel(*inputs)
    loss.backward()
    return cmodel, [loss.detach(), *(p.grad for p in cmodel.parameters() if p.requires_grad), *cmodel.buffers()]


def blocks_of(cmodel):
    """Which calls were written again, and why others were not."""
    (first,) = (t for t in thunder.compile_data(cmodel).transforms if isinstance(t, ShardParameters))
    blocks = first.compilation.blocks
    return (dict(blocks.shared), blocks.alone) if blocks else ({}, {})


def compare(net, *inputs, real=True, exact=True, **options):
    """Compiles a net with every block traced, with each kind as calls, and with its lines written for each call.
    Returns :func:`blocks_of`.

    If a block's input is read elsewhere too, its gradients are added up in another order: not ``exact``."""
    inputs = inputs or (torch.randn(2, D, generator=torch.Generator().manual_seed(1)),)
    inline, wanted = compiled(net, *inputs, **options | {"repeated_blocks": "inline"})
    assert blocks_of(inline) == ({}, {})
    written, found = compiled(net, *inputs, transforms=[Onlooker()], **options)
    for kind in ("last_traces", "last_backward_traces", "last_epilogue_traces"):
        mine, others = (getattr(thunder.compile_stats(c), kind)[-1] for c in (written, inline))
        assert lines(mine) == lines(others)
    assert not real or same(found, wanted)
    once, found = compiled(net, *inputs, **options)
    traced = [dce(thunder.last_traces(c)[0]) for c in (once, inline)]
    assert lines(traced[0], recomputed=False) == lines(traced[1], recomputed=False)
    assert sent(once) == sent(inline)
    assert not real or (same(found, wanted) if exact else near(found, wanted))
    assert blocks_of(once) == blocks_of(written)
    return blocks_of(once)


def same(some, others):
    assert [a is None for a in some] == [b is None for b in others]
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True) if a is not None)


def near(some, others):
    torch.testing.assert_close(some, others, rtol=1e-6, atol=1e-8)
    return True


def sent(cmodel):
    """The collectives of a step."""
    traces = (thunder.last_traces(cmodel)[-1], *thunder.last_backward_traces(cmodel)[-1:])
    return [sorted(map(str, collectives(trace))) for trace in traces]


# ---- blocks that are traced once ----


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
        self.register_buffer("mask", torch.tril(torch.ones(2, D)))

    def forward(self, x, pair=None, *, scale=2.0, more=True):
        x = super().forward(x) * self.mask * scale
        if pair is not None:
            x = x + pair[0] * pair[1]
        return x, (x, x.sum()) if more else None


class MaskedNet(Net):
    def run(self, x):
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


class Same(Plain):
    def forward(self, x, skip):
        return (x, super().forward(x)) if skip else (super().forward(x), x)


class SameNet(Net):
    def run(self, x):
        for i, block in enumerate(self.blocks):
            x, y = block(x, i < 2)
            x = x * y
        return x


def returns_its_input():
    return SameNet(*(Same() for _ in range(4)))


class Hidden(Net):
    def forward(self, x):
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return x.sum() + kept[0].sum() * kept[1].detach().sum()


class Thrice(Net):
    def run(self, x):
        return self.blocks[1](self.blocks[0](self.blocks[0](self.blocks[0](x))))


class Checkpointing(Net):
    """Checkpoints some calls and not others."""

    def run(self, x):
        x = torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        return torch.utils.checkpoint.checkpoint(self.blocks[2], x, use_reentrant=False)


class Autocast(Net):
    def run(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().run(x).float()


class Drawn(Plain):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x) * torch.randn(D)


class Numbered(Plain):
    """Hugging Face's blocks have a number that they only use for a cache."""

    def __init__(self, number):
        super().__init__()
        self.number = number


class Norm(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x):
        return self.norm(super().forward(x))


def tied():
    shared = weight()
    return Net(*(Tied(shared) for _ in range(3)))


def of_two_kinds():
    return Net(Plain(), Dropped(), Plain(), Dropped())


@pytest.mark.parametrize(
    ("make", "shared"),
    [
        (lambda: Net(Plain(), Plain(), Plain()), {"blocks.0": 2}),
        (lambda: Net(Dropped(), Dropped()), {"blocks.0": 1}),
        (lambda: MaskedNet(*(Masked() for _ in range(4))), {"blocks.1": 2}),
        (lambda: Net(Detached(), Detached()), {"blocks.0": 1}),
        (lambda: Net(InPlace(), InPlace()), {"blocks.0": 1}),
        (returns_its_input, {"blocks.0": 1, "blocks.2": 1}),
        (lambda: Hidden(Plain(), Plain()), {"blocks.0": 1}),
        (lambda: Thrice(Plain(), Plain()), {"blocks.0": 3}),
        (lambda: Checkpointing(*(Plain() for _ in range(3))), {"blocks.0": 4}),
        (lambda: Autocast(Plain(), Plain()), {"blocks.0": 1}),
        (lambda: Net(Drawn(), Drawn()), {"blocks.0": 1}),
        (lambda: Net(*map(Numbered, range(3))), {"blocks.0": 2}),
        (lambda: Net(Norm(), Norm()), {"blocks.0": 1}),
        (of_two_kinds, {"blocks.0": 1, "blocks.1": 1}),
        (tied, {"blocks.0": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_blocks_that_are_traced_once(make, shared, fake_ranks):
    fake_ranks(1)
    found, alone = compare(make(), exact=make is not returns_its_input)
    assert found == shared
    assert all("inputs differ" in why for why in alone.values())


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": "zero2"},
        {"sharding_strategy": "zero3", "mp_policy": "bf16"},
        {"sharding_strategy": "ddp"},
        {"bucketing_strategy": "none"},
        {"activation_checkpointing": Dropped},
        {"activation_checkpointing": nn.Tanh},
    ],
    ids=str,
)
def test_sharded(options, fake_ranks):
    class Deep(Dropped):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            return self.act(super().forward(x))

    fake_ranks(2)
    assert compare(Net(Deep(), Deep(), Deep()), real=False, **options) == ({"blocks.0": 2}, {})


@pytest.fixture
def traced(monkeypatch):
    """The names of the blocks that were traced."""
    names = []

    def count(self, key, name, *args, trace=TracedBlocks._trace):
        names.append(name)
        return trace(self, key, name, *args)

    monkeypatch.setattr(TracedBlocks, "_trace", count)
    return names


@pytest.mark.parametrize("first", ["none", "cheap", "full"])
def test_what_is_recomputed_makes_another_kind_of_the_same_trace(first, fake_ranks, traced):
    kinds = [first, *sorted({"none", "cheap", "full"} - {first})]
    marks = {f"blocks.{i}": kinds[i % 3] for i in range(6)}
    fake_ranks(1)
    net = Net(*(Dropped() for _ in range(6)))
    found, _ = compare(net, activation_checkpointing=marks)
    assert found == {"blocks.0": 1, "blocks.1": 1, "blocks.2": 1}
    assert traced == ["blocks.0", "blocks.0"]  # once with its lines written, once with calls


def test_blocks_whose_parts_are_recomputed_are_traced(fake_ranks, traced):
    """The mark of a block would hide those of its parts."""
    fake_ranks(1)
    net = Net(*(nn.Sequential(Plain(), Plain()) for _ in range(4)))
    marks = ["blocks.0", "blocks.0.0", "blocks.1.0", "blocks.2", "blocks.2.0"]
    options = {"activation_checkpointing": lambda name, module: name in marks, "repeated_blocks": nn.Sequential}
    found, _ = compare(net, **options)
    assert found == {"blocks.0": 1}
    assert traced == 2 * ["blocks.0", "blocks.1", "blocks.3"]


def test_a_checkpointed_block_is_another_kind(fake_ranks):
    fake_ranks(2)
    net = Net(*(Plain() for _ in range(4)))
    assert compare(net, real=False, activation_checkpointing=2)[0] == {"blocks.0": 1, "blocks.1": 1}


def test_by_class(fake_ranks):
    fake_ranks(2)
    net = Net(nn.Sequential(Plain(), Dropped()), nn.Sequential(Plain(), Dropped()))
    assert compare(net, real=False)[0] == {"blocks.0": 1}
    kinds = {"blocks.0.0": 1, "blocks.0.1": 1}  # of the class and of its subclass
    assert compare(net, real=False, repeated_blocks=Plain)[0] == kinds


def test_modes_and_shapes(fake_ranks):
    """A block that was traced for other shapes, without gradients or in training mode is traced again."""
    fake_ranks(1)
    net = Net(Dropped(), Dropped())
    cmodel = thunder.jit(shardtrace.fsdp(copy.deepcopy(net)))
    for rows in (2, 4):
        assert cmodel(torch.ones(rows, D)).requires_grad
    with torch.no_grad():
        assert not cmodel(torch.ones(2, D)).requires_grad
    cmodel.eval(), net.eval()
    x = torch.randn(2, D)
    assert torch.equal(cmodel(x), net(x))
    assert blocks_of(cmodel) == ({"blocks.0": 1}, {})


class HalfDetached(Net):
    def run(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            y = self.blocks[1](x)
        return self.blocks[2](x) * y


def test_without_gradients_it_is_another_kind(fake_ranks):
    fake_ranks(1)
    found, alone = compare(HalfDetached(Plain(), Plain(), Plain()))
    assert found == {"blocks.0": 1}
    assert list(alone) == ["blocks.1"]


# ---- blocks that are not ----


class Held(Plain):
    """Reads a number that it holds in one of many ways."""

    def __init__(self, number, read):
        super().__init__()
        self.number = self._number = number
        self.named = f"_{number}"
        self.read = read

    @property
    def twice(self):
        return 2 * self._number

    def forward(self, x):
        return super().forward(x) * self.read(self)


READS = {
    "attribute": lambda m: m.number,
    "property": lambda m: m.twice,
    "getattr": lambda m: getattr(m, "num" + "ber"),
    "default": lambda m: getattr(m, "number", None),
    "dict": lambda m: m.__dict__["number"],
    "get": lambda m: m.__dict__.get("number"),
    "vars": lambda m: vars(m)["number"],
    "string": lambda m: float(m.named[1:]),
    "branch": lambda m: 3.0 if m.number > 1 else 5.0,
    "length": lambda m: float(len(m.named)) if m.named == "_1" else 7.0,
}


@pytest.mark.parametrize("how", READS)
def test_other_plain_values_are_not_shared(how, fake_ranks):
    fake_ranks(1)
    shared, _ = compare(Net(*(Held(n, READS[how]) for n in (1, 1, 2))))
    assert shared == {"blocks.0": 1}


class Listing(Plain):
    def __init__(self, number):
        super().__init__()
        self.items, self.table = [number, 2.0], {"number": number}

    def forward(self, x):
        return super().forward(x) * self.items[0] * self.table["number"]


def test_other_values_in_containers_are_not_shared(fake_ranks):
    fake_ranks(1)
    assert compare(Net(*(Listing(n) for n in (1, 1, 2))))[0] == {"blocks.0": 1}


class Shared:
    number = 1.0


class Slotted:
    __slots__ = ("number",)


OUTER, OUTER_LIST, OUTER_OBJECT, OUTER_SLOTS, outer_number = {"number": 1.0}, [1.0], Shared(), Slotted(), 1.0


class Looking(Plain):
    """Reads a number that does not belong to it."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        return super().forward(x) * self.look()


class Changing(Net):
    """Changes the numbers before each block."""

    def run(self, x):
        global outer_number
        for number, block in enumerate(self.blocks):
            OUTER["number"] = OUTER_LIST[0] = OUTER_OBJECT.number = outer_number = number + 2.0
            OUTER_SLOTS.number = number + 2.0
            x = block(x)
        return x


@pytest.mark.parametrize(
    "look",
    [
        lambda: OUTER["number"],
        lambda: OUTER.get("number"),
        lambda: sum(v for v in OUTER.values()),
        lambda: OUTER_LIST[0],
        lambda: sum(OUTER_LIST),
        lambda: OUTER_OBJECT.number,
        lambda: OUTER_SLOTS.number,
        lambda: outer_number,
    ],
)
def test_what_the_model_changes_between_blocks(look, fake_ranks):
    fake_ranks(1)
    found, alone = compare(Changing(Looking(look), Looking(look)))
    assert found == {}
    assert "differs from that of blocks.0" in alone["blocks.1"]


class Config:
    def __init__(self, number):
        self.number = number


class Configured(Plain):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return super().forward(x) * self.config.number


class Appending(Plain):
    def forward(self, x, losses):
        losses.append(super().forward(x).sum())
        return super().forward(x)


class AppendingNet(Net):
    def run(self, x):
        losses = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


SEEN, TABLE = [], {}


class Escaping(Plain):
    def forward(self, x):
        y = super().forward(x)
        SEEN.append(y.sum())
        return y


class EscapingNet(Net):
    def forward(self, x):
        return super().forward(x) + SEEN[-1] * SEEN[-2]


class Storing(Plain):
    def forward(self, x):
        TABLE[len(TABLE)] = x
        return super().forward(x) * len(TABLE)


class Keeping(Plain):
    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, x):
        y = super().forward(x)
        self.kept = y.sum()
        return y


class KeepingNet(Net):
    def forward(self, x):
        return super().forward(x) + sum(block.kept for block in self.blocks)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class OwnFunction(Plain):
    def forward(self, x):
        return Double.apply(super().forward(x))


def hooked():
    net = Net(Plain(), Plain(), Plain())
    net.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    return net


def frozen():
    net = Net(*(Plain() for _ in range(4)))
    net.blocks[:2].requires_grad_(False)
    return net


def another():
    net = Net(Plain(), Plain())
    net.blocks[1].act = nn.Tanh()
    return net


@pytest.mark.parametrize(
    ("make", "shared", "reason"),
    [
        (lambda: Net(*(Dropped(p) for p in (0.1, 0.2, 0.1))), {"blocks.0": 1}, "its p differs"),
        (lambda: Net(*(Configured(Config(n)) for n in (1, 2))), {}, "its submodules or attributes differ"),
        (lambda: AppendingNet(Appending(), Appending()), {}, "a list or dict that it is given"),
        (lambda: EscapingNet(Escaping(), Escaping()), {}, "changes a list that was there before (append)"),
        (lambda: Net(Storing(), Storing()), {}, "changes a dict that was there before (__setitem__)"),
        (lambda: KeepingNet(Keeping(), Keeping()), {}, "changes a Keeping that was there before (__setattr__)"),
        (hooked, {"blocks.0": 1}, "has hooks"),
        (frozen, {"blocks.0": 1, "blocks.2": 1}, "its submodules or attributes differ"),
        (another, {}, "its submodules or attributes differ from those of blocks.0"),
    ],
)
def test_blocks_that_are_traced_by_themselves(make, shared, reason, fake_ranks):
    fake_ranks(1)
    found, alone = compare(make(), exact=make is not returns_its_input)
    assert found == shared
    assert any(reason in why for why in alone.values())


def test_an_autograd_function(fake_ranks):
    fake_ranks(1)
    net, x = Net(OwnFunction(), OwnFunction()), torch.randn(2, D)
    (_, inline), (_, found) = (compiled(net, x, repeated_blocks=how) for how in ("inline", "once"))
    assert all(torch.equal(a, b) for a, b in zip(inline, found, strict=True))


def test_python_numbers_that_are_drawn(fake_ranks):
    """Thunder traces such a number as a constant, each block its own."""

    class Random(Plain):
        def forward(self, x):
            return super().forward(x) * (1.0 if random.random() < 0.5 else 2.0)

    fake_ranks(1)
    _, alone = blocks_of(compiled(Net(Random(), Random()), torch.ones(2, D))[0])
    assert "random" in alone["blocks.1"]


# ---- changes after a step was compiled ----


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_changed_attribute_compiles_another_step(place, fake_ranks):
    fake_ranks(1)
    net, x = Net(*(Held(1.0, READS["attribute"]) for _ in range(3))), torch.randn(2, D)
    cmodel = thunder.jit(shardtrace.fsdp(copy.deepcopy(net)))
    assert torch.equal(cmodel(x), net(x))
    for model in (net, cmodel):
        model.get_submodule(f"blocks.{place}").number = 3.0
    assert torch.equal(cmodel(x), net(x))
    assert blocks_of(cmodel)[0] == {"blocks.0": 1} or place == 0


def test_a_block_in_another_mode(fake_ranks):
    fake_ranks(1)
    net, x = Net(*(Dropped(1.0) for _ in range(3))).eval(), torch.randn(2, D)
    cmodel = thunder.jit(shardtrace.fsdp(copy.deepcopy(net)))
    assert torch.equal(cmodel(x), net(x))
    for model in (net, cmodel):
        model.get_submodule("blocks.2").train()
    assert torch.equal(cmodel(x), net(x))
    assert not net(x).any()


def test_a_frozen_block(fake_ranks):
    fake_ranks(1)
    cmodel = thunder.jit(shardtrace.fsdp(Net(Plain(), Plain(), Plain())))
    cmodel(torch.ones(2, D)).backward()
    cmodel.zero_grad()
    cmodel.get_submodule("blocks.1").requires_grad_(False)
    cmodel(torch.ones(2, D)).backward()
    assert [p.grad is None for p in cmodel.parameters()] == [False, True, False]


# ---- any mix ----


class Anything(nn.Module):
    """A block whose trace depends on everything that it is made with."""

    def __init__(self, width, number, activation, bias, trainable, depth):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(D if i == 0 else width, width, bias=bias) for i in range(depth))
        self.out = nn.Parameter(torch.randn(width, D), requires_grad=trainable)
        self.number, self.activation = number, activation

    def forward(self, x):
        for layer in self.inner:
            x = self.activation(layer(x) * self.number)
        return x @ self.out


KINDS = st.builds(
    Anything,
    st.sampled_from([2, 4]),
    st.sampled_from([1, 2.0, 2, True]),
    st.sampled_from([torch.tanh, torch.relu]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
)


@given(st.lists(KINDS, min_size=2, max_size=4))
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])  # to shrink would take minutes
def test_any_mix_of_blocks(blocks):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        x = torch.randn(2, D, requires_grad=True)
        net = Net(*blocks)
        kinds = {
            (
                m.out.shape,
                m.out.requires_grad,
                type(m.number),
                m.number,
                m.activation,
                len(m.inner),
                m.inner[0].bias is None,
            )
            for m in blocks
        }
        shared, _ = compare(net, x)
        assert sum(shared.values()) <= len(blocks) - len(kinds)
    finally:
        dist.destroy_process_group()
