"""Unrolled traces are those that Thunder would have made of all iterations."""

import re
from contextlib import nullcontext

import shardtrace
from passes import pipeline
from passes.analysis import is_return, is_unpack, names
from passes.analysis.calls import called_module, part_of
from shardtrace.fake import fake_ranks as ranks

import pytest
import thunder
import torch
from golden import compile_fake
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

WIDTH = 4


class Block(nn.Module):
    def __init__(self, bias=True, inner=8):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=bias), nn.Linear(inner, WIDTH, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask=None):
        y = self.down(torch.tanh(self.up(self.drop(x))))
        return x + (y if mask is None else y * mask)


class Other(Block):
    def forward(self, x, mask=None):
        return x * torch.sigmoid(self.up(x)).mean(-1, keepdim=True)


class Frozen(Block):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)


class Net(nn.Module):
    """Blocks between a line before and a line after them."""

    def __init__(self, *blocks):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(blocks or (Block() for _ in range(6)))

    def forward(self, x):
        return self.run(x * self.scale).tanh()

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def lines(trace):
    """A trace's lines with values numbered in the order in which lines read and make them; saved values in any
    order."""
    numbers = {}

    def numbered(text):
        return re.sub(r"\b((?:bw_)?f?t|saved)\d+\b", lambda m: numbers.setdefault(m[0], f"{m[1]}_{len(numbers)}"), text)

    found, lists = [], []
    for bsym in trace.bound_symbols:
        if is_return(bsym):
            found.append([numbered(name) for name in names_in_order(bsym.args[0])])
            lists += ([*names(part)] for part in bsym.args[1]) if len(bsym.args) > 1 else ()
        elif is_unpack(bsym):
            lists.append([o.name for o in bsym.flat_proxy_outs])
        else:
            tags = sorted(str(tag) for tag in bsym.tags if "result=" not in str(tag))
            found.append((numbered(str(bsym)), tags))
    return found, [sorted(map(numbered, values)) for values in lists]


def names_in_order(result):
    return [getattr(value, "name", str(value)) for value in torch.utils._pytree.tree_leaves(result)]


def traces(cmodel):
    return [t[-1] for t in (thunder.last_traces(cmodel), thunder.last_backward_traces(cmodel)) if t]


def compiled(build, *inputs, backward=True, rolled=True, **options):
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, nullcontext() if backward else torch.no_grad():
        if not rolled:
            patch.setattr(pipeline, "roll", lambda computation, **_: computation)
        return compile_fake(build, *(inputs or [torch.ones(2, WIDTH)]), backward=backward, **options)


def left_out(cmodel):
    """How many iterations Thunder has not seen."""
    stages = (str(t.get_provenance()) for t in thunder.last_traces(cmodel))
    return sum(int(found[1]) for stage in stages if (found := re.search(r"unroll writes the other (\d+)", stage)))


def check(build, *inputs, **options):
    """Asserts that traces do not depend on rolling, and returns how many iterations were left out."""
    cmodel = compiled(build, *inputs, **options)
    want = compiled(build, *inputs, rolled=False, **options)
    assert left_out(want) == 0
    assert list(map(lines, traces(cmodel))) == list(map(lines, traces(want)))
    return left_out(cmodel)


def two_dimensions():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": "zero1"},
        {"sharding_strategy": "zero2"},
        {"sharding_strategy": "zero3"},
        {"sharding_strategy": "ddp"},
        {"sharding_strategy": "hybrid_zero3"},
        {"sharding_strategy": "zero3_secondary"},
        {"backward": False},
        {"activation_checkpointing": "full"},
        {"mp_policy": "fp16", "offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"gather_dtype": "int8", "reduce_wire": "int4", "error_feedback": True},
    ],
    ids=lambda options: "-".join(map(str, options.values()))[:30],
)
def test_traces_are_those_of_all_iterations(fake_ranks, options):
    fake_ranks(4)
    if options.get("sharding_strategy") in ("hybrid_zero3", "zero3_secondary"):
        options = {**options, "mesh": two_dimensions()}
    assert check(lambda: Net(*(Block(inner=2048) for _ in range(6))), **options) == 3


class Masked(Net):
    def run(self, x):
        mask = torch.arange(WIDTH)
        for block in self.blocks:
            x = block(x, mask)
        return x


class Twice(Net):
    def run(self, x):
        with torch.no_grad():
            x = super().run(x)
        return super().run(x.tanh())


@pytest.mark.parametrize(
    ("build", "iterations"),
    [
        (Masked, 3),
        (Twice, 0),  # each parameter is read in two loops
        (lambda: Net(*(kind() for _ in range(5) for kind in (Block, Other))), 2),
        (lambda: Net(*(Block() for _ in range(5)), *(Other() for _ in range(6))), 2 + 3),
        (lambda: Net(*(Frozen() for _ in range(5))), 1 + 1),  # the first one's input needs no gradient
        (lambda: nn.Sequential(*(Block() for _ in range(6))), 2),
        (lambda: Net(*(Block(bias=i != 3) for i in range(9))), 2),
        (lambda: Net(*(Block() for _ in range(4))), 0),  # not worth it
    ],
)
def test_loops_of_models(fake_ranks, build, iterations):
    fake_ranks(2)
    assert check(build) == iterations


class Outputs(Net):
    def run(self, x):
        found = [x := block(x) for block in self.blocks]
        return found[2] + x


class Skips(Net):
    def run(self, x):
        before = x
        for block in self.blocks:
            x, before = block(x, before), x
        return x


class SharesWithGradient(Net):
    def run(self, x):
        mask = x.tanh()
        for block in self.blocks:
            x = block(x, mask)
        return x


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[4].up.weight


class ReadElsewhere(Net):
    def run(self, x):
        return super().run(x) + self.blocks[3].down.weight[:, 0]


class ManyCalls(Net):
    def run(self, x):
        for _ in range(6):
            x = self.blocks[0](x)
        return x


class ReadsTwice(Net):
    def __init__(self):
        super().__init__(*(Block() for _ in range(10)))

    def run(self, x):
        blocks = list(self.blocks)
        for first, second in zip(blocks[::2], blocks[1::2], strict=True):
            x = second(first(x), x)
        return x


class Pair(Block):
    def forward(self, x, y):
        return super().forward(x), torch.sigmoid(y)


class OneIsOtherwise(Net):
    def __init__(self):
        super().__init__(*(Pair() for _ in range(7)))

    def run(self, x):
        y = x.tanh()
        for i, block in enumerate(self.blocks):
            x, y = block(y, x) if i == 4 else block(x, y)
        return x + y


class Between(Net):
    def run(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


@pytest.mark.parametrize(
    "build", [Outputs, Skips, SharesWithGradient, ReadElsewhere, ManyCalls, ReadsTwice, OneIsOtherwise, Between]
)
def test_what_is_no_loop_is_lowered_whole(fake_ranks, build):
    fake_ranks(2)
    assert check(build) == 0


class TakesTurns(Net):
    def forward(self, x, *masks):
        x = x * self.scale
        for i, block in enumerate(self.blocks):
            x = block(x, masks[i % 2])
        return x


def test_inputs_of_several_iterations(fake_ranks):
    fake_ranks(2)
    assert check(TakesTurns, torch.ones(2, WIDTH), torch.ones(WIDTH), torch.zeros(WIDTH)) == 0


class WithTarget(Net):
    def forward(self, x, target):
        result = super().forward(x).clone()
        result -= target  # Thunder gives inputs that share memory new names where values change in place
        return result


def test_one_tensor_as_two_inputs(fake_ranks):
    fake_ranks(2)
    x = torch.ones(2, WIDTH)
    assert check(WithTarget, x, x) == 3


def test_tied_weights_are_gathered_once(fake_ranks):
    fake_ranks(2)
    assert check(Tied) == 0


PATTERNS = [(Block,), (Other,), (Frozen,), (Block, Other), (Block, Frozen, Block)]
SEGMENTS = st.lists(st.tuples(st.sampled_from(PATTERNS), st.integers(1, 6), st.booleans()), min_size=1, max_size=3)


class Segments(nn.Module):
    def __init__(self, segments):
        super().__init__()
        self.joined = [joined for _, _, joined in segments]
        self.parts = nn.ModuleList(nn.ModuleList(k() for _ in range(n) for k in kinds) for kinds, n, _ in segments)

    def forward(self, x):
        for part, joined in zip(self.parts, self.joined, strict=True):
            for block in part:
                x = block(x)
            if joined:
                x = x.tanh()
        return x


@settings(max_examples=4, deadline=None)
@given(SEGMENTS)
def test_any_row_of_blocks(segments):
    with ranks(2):
        check(lambda: Segments(segments))


def test_gradients_are_those_of_eager(fake_ranks):
    fake_ranks(1)
    eager, model = Net(), Net()
    for part in (*eager.modules(), *model.modules()):
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    model.load_state_dict(eager.state_dict())
    cmodel = thunder.jit(shardtrace.fsdp(model))
    x = torch.randn(3, WIDTH)
    for f in (eager, cmodel):
        f(x).square().sum().backward()
    assert left_out(cmodel) == 3
    for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_each_line_names_its_own_module_and_runs_the_same_function(fake_ranks):
    fake_ranks(2)
    forward, backward = traces(compiled(Net))
    modules = [[called_module(b) for b in t.bound_symbols if part_of(b)] for t in (forward, backward)]
    assert modules == [[f"blocks.{i}" for i in order] for order in (range(6), range(5, -1, -1))]
    assert len({part_of(b) for b in forward.bound_symbols} - {None}) == 1
