"""Each kind of state that a forward reads is guarded: a change is named, and what has not changed is no difference."""

import cProfile
import enum
import functools
import math
import sys
import types
from collections import defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace

from shardtrace.record.snapshot import Snapshot
from shardtrace.record.watcher import CodeWatcher

import numpy
import pytest
import torch
from torch import nn

FACTOR = 2.0
TABLE = {"scale": [1.0, 2.0]}
OTHER = SimpleNamespace(scale=1.0)
UNREAD = 1.0


class Mode(enum.Enum):
    TRAIN = 1
    TUNE = 2


@dataclass
class Config:
    scale: float = 1.0


class Plain:
    scale = 1.0

    def __init__(self):
        self.width, self.unread = 4, 0


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


def helper(x, more=[1.0], *, table={"k": 1.0}):  # noqa: B006
    return x * FACTOR * TABLE["scale"][0] * OTHER.scale * helper.k * settings.level * settings.inner.k * more[0]


helper.k = 1.0
settings = types.ModuleType("settings")
settings.level, settings.unread, settings.inner = 1.0, 1.0, types.ModuleType("settings.inner")
settings.inner.k = 1.0


def scaled_by(factor):
    def scaled(x):
        return x * factor

    def rescale(new):
        nonlocal factor
        factor = new

    return scaled, rescale


SCALED, RESCALE = scaled_by(2.0)
(TWIN, _), (SECOND, _), _ = TWINS = [scaled_by(value) for value in [5.0] * 3]


class Block(nn.Module):
    level = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.register_buffer("mean", torch.zeros(2))
        self.scale, self.mode, self.dtype = 1.0, Mode.TRAIN, torch.float32
        self.sizes, self.options, self.names, self.steps = [1, 2, (3, [4])], {"a": {"b": 1}}, {"x"}, deque([1, 2])
        self.config, self.plain, self.slots, self.space = Config(), Plain(), Slots(), SimpleNamespace(k=1)
        self.act = torch.tanh
        self.array, self.large, self.bytes = numpy.ones(1), numpy.ones(20_000), bytearray(1)
        self.partial = functools.partial(print, [1], k=1.0)

    def forward(self, x):
        x = SCALED(helper(self.linear(x))) * self.scale * self.level
        return self.act(x) * self.config.scale * self.plain.width * self.plain.scale * self.slots.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def net():
    return Net()


def taken(net, **options):
    watcher = CodeWatcher()
    with watcher:
        net(torch.ones(1, 2))
    return Snapshot(net, watcher, **options)


def attribute(name, value):
    return lambda block: setattr(block, name, value)


CHANGES = {
    "attribute": (attribute("scale", 2.0), "model.blocks.1.scale (1.0 -> 2.0)"),
    "type of a number": (attribute("scale", 1), "model.blocks.1.scale (1.0 -> 1)"),
    "bool for a number": (lambda b: setattr(b.space, "k", True), "model.blocks.1.space.k (1 -> True)"),
    "new attribute": (attribute("extra", 1), "model.blocks.1.extra (missing -> 1)"),
    "deleted": (lambda b: delattr(b, "scale"), "model.blocks.1.scale (1.0 -> missing)"),
    "training": (lambda b: b.eval(), "model.blocks.1.training (True -> False)"),
    "enum": (attribute("mode", Mode.TUNE), "model.blocks.1.mode"),
    "dtype": (attribute("dtype", torch.float64), "model.blocks.1.dtype (torch.float32 -> torch.float64)"),
    "function": (attribute("act", torch.sin), "model.blocks.1.act"),
    "list": (lambda b: b.sizes.__setitem__(0, 9), "model.blocks.1.sizes[0] (1 -> 9)"),
    "longer list": (lambda b: b.sizes.append(9), "model.blocks.1.sizes[3] (missing -> 9)"),
    "list in a tuple in a list": (lambda b: b.sizes[2][1].append(9), "model.blocks.1.sizes[2][1][1] (missing -> 9)"),
    "dict": (lambda b: b.options["a"].update(b=2), "model.blocks.1.options['a']['b'] (1 -> 2)"),
    "longer dict": (lambda b: b.options.update(c=2), "model.blocks.1.options['c'] (missing -> 2)"),
    "set": (lambda b: b.names.add("y"), "model.blocks.1.names['y'] (missing -> 'y')"),
    "deque": (lambda b: b.steps.rotate(1), "model.blocks.1.steps[0] (1 -> 2)"),
    "dataclass": (lambda b: setattr(b.config, "scale", 2.0), "model.blocks.1.config.scale (1.0 -> 2.0)"),
    "namespace": (lambda b: setattr(b.space, "k", 2), "model.blocks.1.space.k (1 -> 2)"),
    "object": (lambda b: setattr(b.plain, "width", 2), "model.blocks.1.plain.width (4 -> 2)"),
    "object replaced": (attribute("plain", Plain()), "model.blocks.1.plain"),
    "slots": (lambda b: setattr(b.slots, "scale", 2.0), "model.blocks.1.slots.scale (1.0 -> 2.0)"),
    "array": (lambda b: b.array.__setitem__(0, 2.0), "model.blocks.1.array"),
    "element of a large array": (lambda b: b.large.__setitem__(slice(None), 2.0), "model.blocks.1.large"),
    "large array replaced": (lambda b: setattr(b, "large", b.large.copy()), "model.blocks.1.large"),
    "bytes": (lambda b: b.bytes.append(1), "model.blocks.1.bytes"),
    "partial": (lambda b: b.partial.keywords.update(k=2.0), "model.blocks.1.partial['k'] (1.0 -> 2.0)"),
    "list in a partial": (lambda b: b.partial.args[0].append(2), "model.blocks.1.partial[0][1] (missing -> 2)"),
    "buffer removed": (lambda b: delattr(b, "mean"), "number of buffers of model.blocks.1 (1 -> 0)"),
    "bias set": (lambda b: setattr(b.linear, "bias", nn.Parameter(torch.ones(2))), "model.blocks.1.linear"),
    "submodule": (lambda b: b.add_module("more", nn.Linear(1, 1)), "model.blocks.1.more (missing -> a Linear)"),
    "submodule replaced": (lambda b: b.add_module("linear", nn.Linear(2, 2)), "model.blocks.1.linear"),
    "hook": (lambda b: b.register_forward_hook(print), "model.blocks.1._forward_hooks"),
    "pre-hook": (lambda b: b.linear.register_forward_pre_hook(print), "model.blocks.1.linear._forward_pre_hooks"),
    "backward hook": (lambda b: b.register_full_backward_hook(print), "model.blocks.1._backward_hooks"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_state_of_modules(net, kind):
    change, name = CHANGES[kind]
    snapshot = taken(net)
    assert snapshot.difference() == ""
    change(net.blocks[1])
    assert snapshot.difference().startswith(name)


@pytest.mark.parametrize(
    ("owner", "name", "value", "found"),
    [
        (Block, "level", 2.0, "Block.level (1.0 -> 2.0)"),
        (Block, "forward", lambda self, x: x, "Block.forward"),
        (Net, "forward", lambda self, x: x, "Net.forward"),
        (Plain, "scale", 2.0, "Plain.scale (1.0 -> 2.0)"),
        (OTHER, "scale", 2.0, f"global {__name__}.OTHER.scale (1.0 -> 2.0)"),
        (sys.modules[__name__], "FACTOR", 3.0, f"global {__name__}.FACTOR (2.0 -> 3.0)"),
        (sys.modules[__name__], "helper", torch.sin, f"global {__name__}.helper"),
        (helper, "k", 2.0, f"global {__name__}.helper.k (1.0 -> 2.0)"),
        (helper, "__defaults__", ([2.0],), f"global {__name__}.helper.__defaults__[0][0] (1.0 -> 2.0)"),
        (settings, "level", 2.0, f"global {__name__}.settings.level (1.0 -> 2.0)"),
        (settings.inner, "k", 2.0, f"global {__name__}.settings.inner.k (1.0 -> 2.0)"),
    ],
)
def test_classes_and_globals(net, monkeypatch, owner, name, value, found):
    snapshot = taken(net)
    monkeypatch.setattr(owner, name, value)
    assert snapshot.difference().startswith(found)
    monkeypatch.undo()
    assert snapshot.difference() == ""


def test_container_in_a_global(net, monkeypatch):
    snapshot = taken(net)
    monkeypatch.setitem(TABLE, "scale", [3.0, 2.0])
    assert snapshot.difference() == f"global {__name__}.TABLE['scale'][0] (1.0 -> 3.0)"
    monkeypatch.undo()
    helper.__defaults__[0][0] = 3.0
    assert snapshot.difference() == f"global {__name__}.helper.__defaults__[0][0] (1.0 -> 3.0)"
    helper.__defaults__[0][0] = 1.0
    monkeypatch.setitem(helper.__kwdefaults__["table"], "k", 3.0)
    assert snapshot.difference() == f"global {__name__}.helper.__kwdefaults__['table']['k'] (1.0 -> 3.0)"


def test_closure(net):
    snapshot = taken(net)
    RESCALE(3.0)
    try:
        assert snapshot.difference() == "variable factor of scaled_by.<locals>.scaled (2.0 -> 3.0)"
    finally:
        RESCALE(2.0)
    assert snapshot.difference() == ""


def test_closure_that_no_namespace_has(net):
    scaled, rescale = scaled_by(4.0)
    net.blocks[0].act = SimpleNamespace(f=[scaled])  # found among all objects
    net.blocks[0].forward = lambda x: net.blocks[0].act.f[0](x)
    snapshot = taken(net)
    rescale(3.0)
    assert "scaled (4.0 -> 3.0)" in snapshot.difference()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_closures_with_the_same_code_and_value_are_told_apart(net, which):
    net.blocks[0].act = SimpleNamespace(f=[TWINS[2][0]])  # an object holds the third alone
    net.blocks[0].forward = lambda x: net.blocks[0].act.f[0](SECOND(TWIN(x)))
    snapshot = taken(net)
    TWINS[which][1](3.0)
    try:
        assert "scaled (5.0 -> 3.0)" in snapshot.difference()
    finally:
        TWINS[which][1](5.0)


def test_global_hooks_of_torch(net):
    snapshot = taken(net)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert "_global_forward_hooks" in snapshot.difference()
    handle.remove()
    assert snapshot.difference() == ""


def test_what_the_code_does_not_read_may_change(net, monkeypatch):
    snapshot = taken(net)
    net.blocks[0].plain.unread = 1
    monkeypatch.setattr(sys.modules[__name__], "UNREAD", 2.0)
    monkeypatch.setattr(settings, "unread", 2.0)
    net.blocks[0].mean.add_(1)
    assert snapshot.difference() == ""


def test_equal_values_are_no_difference(net):
    block = net.blocks[0]
    block.scale, block.sizes = math.nan, [1, 2]
    snapshot = taken(net)
    block.scale, block.sizes, block.options = float("nan"), [1, 2], {"a": {"b": 1}}
    assert snapshot.difference() == ""
    block.sizes.append(3)  # of the new list
    assert snapshot.difference() == "model.blocks.0.sizes[2] (missing -> 3)"


def test_signs_of_zero_differ(net):
    net.blocks[0].scale = 0.0
    snapshot = taken(net)
    net.blocks[0].scale = -0.0
    assert snapshot.difference() == "model.blocks.0.scale (0.0 -> -0.0)"


def test_comparison_calls_no_code_of_the_user(net):
    class Loud:
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    net.blocks[0].scale = Loud()
    net.blocks[0].act = torch.ones(2)
    snapshot = Snapshot(net, None)
    net.blocks[0].scale = Loud()
    assert snapshot.difference() == "model.blocks.0.scale (a Loud -> a Loud)"
    net.blocks[0].scale = torch.ones(2)
    assert snapshot.difference() == "model.blocks.0.scale (a Loud -> a Tensor)"


def test_excluded_entries(net):
    block = net.blocks[0]
    snapshot = taken(net, excluded=[(block.__dict__, "scale"), (block.__dict__, "extra"), (block.sizes, None)])
    block.scale, block.extra = 5.0, 1
    block.sizes.append(1)
    assert snapshot.difference() == ""
    block.mode = Mode.TUNE
    assert snapshot.difference().startswith("model.blocks.0.mode")


class WithoutLength(tuple):
    def __len__(self):
        raise NotImplementedError


def test_a_container_that_refuses_len(net):
    net.blocks[0].sizes = [WithoutLength((1, [2]))]
    snapshot = taken(net)
    assert snapshot.difference() == ""
    net.blocks[0].sizes[0][1].append(3)
    assert snapshot.difference() == "model.blocks.0.sizes[0][1][1] (missing -> 3)"


def test_equal_arrays_are_no_difference(net):
    snapshot = taken(net)
    net.blocks[0].array = net.blocks[0].array.copy()
    assert snapshot.difference() == ""


def test_what_reaches_itself(net):
    object.__setattr__(net.blocks[0], "parent", [net])
    net.blocks[0].options["self"] = net.blocks[0].options
    assert taken(net).difference() == ""


def test_defaultdict_is_not_filled_by_the_comparison(net):
    net.blocks[0].options = defaultdict(int, a=1)
    snapshot = taken(net)
    del net.blocks[0].options["a"]
    assert snapshot.difference() == "model.blocks.0.options['a'] (1 -> missing)"
    assert not net.blocks[0].options


def test_watcher_sees_only_code_of_the_user(net):
    watcher = CodeWatcher()
    with watcher:
        net(torch.ones(1, 2))
        watcher.pause()
        scaled_by(1.0)
        watcher.resume()
    ran = {code.co_name for code in watcher.globals_of}
    assert ran == {"forward", "helper", "scaled"}


def test_watcher_gives_the_profiler_back():
    def profiler(frame, event, arg):
        pass

    sys.setprofile(profiler)
    try:
        with CodeWatcher():
            assert sys.getprofile() is not profiler
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    with cProfile.Profile() as profile:
        with CodeWatcher():
            pass
        helper(1.0)
    assert any(entry.code is helper.__code__ for entry in profile.getstats())
