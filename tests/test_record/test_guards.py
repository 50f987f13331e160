"""State that changes between steps: a step is right, as in eager PyTorch, or an error says what to do."""

import collections
import contextvars
import functools
import gc
import itertools
import os
import types

import shardtrace

import numpy
import pytest
import thunder
import torch
from ranks import on_ranks
from torch import nn

D = 4
FACTOR = 1.0
COUNT = 0
SETTINGS = types.ModuleType("settings")
VARIABLE = contextvars.ContextVar("variable", default=1.0)
ELSEWHERE = types.SimpleNamespace(scale=1.0)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(D, D)
        self.build()

    def build(self): ...


class ListOnModule(Base):
    def build(self):
        self.scales = [1.0, 2.0]

    def forward(self, x):
        return self.linear(x) * sum(self.scales)

    def change(self, step):
        self.scales[0] += 1


class Global(Base):
    def forward(self, x):
        return self.linear(x) * FACTOR

    def change(self, step):
        global FACTOR
        FACTOR = float(step + 2)


class GlobalCounter(Base):
    def forward(self, x):
        global COUNT
        COUNT += 1
        return self.linear(x) * COUNT

    def start(self):
        global COUNT
        COUNT = 0


class Closure(Base):
    def build(self):
        scale = 1.0

        def forward(x):
            return self.linear(x) * scale

        def change(step):
            nonlocal scale
            scale += 1

        self.inner, self.change = forward, change

    def __deepcopy__(self, memo):
        return type(self)()

    def forward(self, x):
        return self.inner(x)


class ObjectElsewhere(Base):
    def forward(self, x):
        return self.linear(x) * ELSEWHERE.scale

    def change(self, step):
        ELSEWHERE.scale = float(step + 2)


class ContextVariable(Base):
    def forward(self, x):
        return self.linear(x) * VARIABLE.get()

    def change(self, step):
        VARIABLE.set(float(step + 2))

    def start(self):
        VARIABLE.set(1.0)


@functools.lru_cache
def positions(rows):
    return torch.arange(float(rows))[:, None], torch.ones(D)


class CachedFunction(Base):
    def forward(self, x):
        a, b = positions(x.shape[0])
        return self.linear(x) + a * b

    def start(self):
        positions.cache_clear()


class HookAdded(Base):
    def forward(self, x):
        return self.linear(x)

    def change(self, step):
        self.linear.register_forward_hook(lambda module, args, output: output * 2)


class HookRegistered(Base):
    """Once, by forward itself; ``n`` counts calls."""

    after, n = False, 0

    def forward(self, x):
        self.n += 1
        y = self.linear(x) if self.after else x
        if not getattr(self, "hooked", False):
            self.hooked = True
            self.linear.register_forward_hook(lambda module, args, output: output * 2)
        return y if self.after else self.linear(y)


class HookRegisteredAfterwards(HookRegistered):
    after = True


class HookRegisteredEachTime(Base):
    def forward(self, x):
        self.linear.register_forward_hook(lambda module, args, output: output * 2)
        return self.linear(x)


class PythonModule(Base):
    def forward(self, x):
        SETTINGS.calls += 1
        return self.linear(x) * SETTINGS.scale

    def start(self):
        SETTINGS.scale, SETTINGS.calls = 1.0, 0

    def change(self, step):
        SETTINGS.scale, self.n = float(step), SETTINGS.calls


class Array(Base):
    def build(self):
        self.array = numpy.ones(2)

    def forward(self, x):
        self.array[0] += 1
        return self.linear(x) * float(self.array.sum())

    def change(self, step):
        self.array[1] = step


class CounterRead(Base):
    def build(self):
        self.n = 0

    def forward(self, x):
        self.n += 1
        return self.linear(x) * self.n


class CounterLeft(Base):
    def build(self):
        self.n = 0

    def forward(self, x):
        self.n += 1
        return self.linear(x)


class TensorLeft(Base):
    def build(self):
        self.last = None

    def forward(self, x):
        y = self.linear(x)
        self.last = y.square().mean()
        return y


class TensorLeftInDict(Base):
    def build(self):
        self.losses = {}

    def forward(self, x):
        y = self.linear(x)
        self.losses["square"] = y.square().mean()
        return y


class BufferReassigned(Base):
    def build(self):
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        y = self.linear(x)
        self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return y * self.mean


class BufferReadThenReassigned(BufferReassigned):
    """Backward needs the value from before."""

    def forward(self, x):
        y = self.linear(x) * (self.mean + 1) * self.mean.add(2)
        y = y * self.mean
        self.mean = self.mean * 0.9 + y.detach().mean(0) + 1
        return y


class Attribute(Base):
    def build(self):
        self.scale = 1.0

    def forward(self, x):
        return self.linear(x) * self.scale

    def change(self, step):
        self.scale = 1 if step == 0 else True if step == 1 else 3.0  # equal numbers of another type, too


class SubmoduleAttribute(Base):
    def forward(self, x):
        return self.linear(x) * self.linear.scale

    def build(self):
        self.linear.scale = 1.0

    def change(self, step):
        self.linear.scale += 1


class ClassAttribute(Base):
    scale = 1.0

    def forward(self, x):
        return self.linear(x) * self.scale

    def change(self, step):
        type(self).scale = float(step + 2)

    def start(self):
        type(self).scale = 1.0


class Config(Base):
    def build(self):
        self.config = types.SimpleNamespace(scale=1.0, unused=object())

    def forward(self, x):
        return self.linear(x) * self.config.scale

    def change(self, step):
        self.config.scale += 1


class DictOnModule(Base):
    def build(self):
        self.options = {"scale": 1.0}

    def forward(self, x):
        y = self.linear(x)
        return y * self.options["scale"] + len(self.options)

    def change(self, step):
        self.options[f"more{step}"] = None


class Training(Base):
    def forward(self, x):
        return self.linear(x) * (2.0 if self.training else 3.0)

    def change(self, step):
        self.train(not self.training)


class RequiresGrad(Base):
    def forward(self, x):
        return self.linear(x)

    def change(self, step):
        self.linear.weight.requires_grad_(step % 2 == 1)


class DefaultDtype(Base):
    def forward(self, x):
        return self.linear(x.float()) * torch.ones(D).element_size()

    def start(self):
        torch.set_default_dtype(torch.float32)

    def change(self, step):
        torch.set_default_dtype((torch.float64, torch.float32)[step % 2])


class Environment(Base):
    def forward(self, x):
        scale = float(os.environ.get("SCALE", "3")) if "SCALE" in os.environ else 5.0
        return self.linear(x) * scale * len(os.getenv("OTHER", ""))

    def start(self):
        os.environ.pop("SCALE", None)
        os.environ["OTHER"] = "a"

    def change(self, step):
        os.environ["OTHER" if step == 1 else "SCALE"] = str(10 + step)


class LongList(Base):
    def build(self):
        self.scales, self.table = [1.0] * 100, collections.deque(range(100))

    def forward(self, x):
        return self.linear(x) * sum(self.scales) * self.table[80]

    def change(self, step):
        self.scales[70 + step] += 1
        self.table[80] = step // 2


class LongDict(Base):
    def build(self):
        self.table = {f"k{i}": 1.0 for i in range(100)}

    def forward(self, x):
        return self.linear(x) * sum(self.table.values()) * list(self.table).index("k99")

    def change(self, step):
        self.table.update({f"k{step}": self.table.pop(f"k{step}") + 1})


class LongListOfObjects(Base):
    def build(self):
        self.options = [types.SimpleNamespace(scale=1.0, sizes=[1, 2]) for _ in range(100)]

    def forward(self, x):
        return self.linear(x) * sum(o.scale for o in self.options) + self.options[80].sizes[1]

    def change(self, step):
        self.options[90 - step].scale += 1
        self.options[80].sizes[1] = step // 2


class LongContainers(Base):
    """Of more entries than are looked into if the code does not name the container."""

    def build(self):
        self.table, self.words = dict.fromkeys(range(5000), 1.0), {f"word{i}" for i in range(3000)}
        self.queue, self.tensors = collections.deque([1.0] * 2000), [torch.ones(D)] * 1500
        self.unnamed = dict.fromkeys(range(2000))

    def forward(self, x):
        known = 2 if "word2999" in self.words else 1
        return self.linear(x) * self.table[4000] * self.queue[1500] * self.tensors[1400] * known

    def change(self, step):
        self.table[4000] += step % 2
        self.queue[1500] = 1.0 + step // 3
        if step == 2:
            self.words.remove("word2999")
            self.words.add("another")
        if step == 4:
            self.tensors[1400] = torch.full((D,), 2.0)
        self.unnamed[1000] = step


class GrowingCache(Base):
    def build(self):
        self.cache = {}

    def forward(self, x):
        rows = x.shape[0]
        if rows not in self.cache:
            self.cache[rows] = torch.arange(float(rows))[:, None]
        return self.linear(x) + self.cache[rows]


KINDS = [
    ContextVariable, ListOnModule, Global, GlobalCounter, Closure, ObjectElsewhere, HookAdded, CounterRead, CounterLeft, TensorLeft,
    TensorLeftInDict, BufferReassigned, BufferReadThenReassigned, Attribute, SubmoduleAttribute, ClassAttribute, Config, DictOnModule, Training,
    RequiresGrad, GrowingCache, DefaultDtype, Environment, LongList, LongDict, LongListOfObjects, LongContainers, HookRegistered, HookRegisteredAfterwards, HookRegisteredEachTime, PythonModule, Array,
]  # fmt: skip


def run(model, call):
    global FACTOR
    FACTOR, ELSEWHERE.scale = 1.0, 1.0
    getattr(model, "start", lambda: None)()
    found = []
    for step in range(4):
        x = torch.randn(3 if step < 3 else 5, D, generator=torch.Generator().manual_seed(step))
        out = call(x)
        loss = out.sum() + (model.last if isinstance(getattr(model, "last", None), torch.Tensor) else 0)
        loss = loss + sum(getattr(model, "losses", {}).values())
        model.zero_grad()
        loss.backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [b.clone() for b in model.buffers()] + [torch.tensor(getattr(model, "n", 0))]
        getattr(model, "change", lambda step: None)(step)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_right(single_rank, kind):
    check(kind)


@on_ranks(1)
def test_a_cached_function():
    """The cache is found among all objects, of which a rank has fewer than a lane of tests."""
    gc.unfreeze()
    check(CachedFunction)
    gc.freeze()


def check(kind):
    eager, ours = kind(), kind()
    expected = run(eager, eager)
    jitted = thunder.jit(shardtrace.fsdp(ours))
    found = run(ours, jitted)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


ITERATORS = {
    "list": lambda: iter([1.0, 2.0, 3.0, 4.0]),
    "generator": lambda: (k for k in range(1, 9)),
    "count": itertools.count,
    "inside": lambda: enumerate(iter(range(9))),
    "dict": lambda: iter({1: 2, 3: 4, 5: 6}),
}


class Advances(Base):
    def __init__(self, held):
        super().__init__()
        self.held, self.advances = held, True

    def forward(self, x):
        k = next(self.held) if self.advances else 1
        return self.linear(x) * (k[1] if isinstance(k, tuple) else k)


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_forward_advances_is_refused(single_rank, kind):
    model = shardtrace.fsdp(Advances(ITERATORS[kind]()))
    with pytest.raises(NotImplementedError, match=r"forward advances Advances\.held, an iterator"):
        model(torch.ones(3, D))
    model.advances = False
    model(torch.ones(3, D))


NUMBERS = itertools.count(1)
HELD = {"numbers": [(float(k) for k in range(1, 9))], "pairs": enumerate([1.0, 2.0, 3.0])}


def next_of(iterator):
    return lambda: next(iterator)


NEXT = next_of(iter([1.0, 2.0, 3.0]))


class AdvancesElsewhere(Base):
    def __init__(self, how):
        super().__init__()
        self.how, self.advances = how, True

    def forward(self, x):
        return self.linear(x) * (self.how() if self.advances else 1)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        (lambda: next(NUMBERS), r"global .*\.NUMBERS"),
        (lambda: next(HELD["numbers"][0]), r"global .*\.HELD\['numbers'\]\[0\]"),
        (lambda: next(HELD["pairs"])[1], r"global .*\.HELD\['pairs'\]"),
        (NEXT, "variable iterator of next_of.*"),
    ],
)
def test_an_iterator_elsewhere_that_forward_advances_is_refused(single_rank, how, where):
    model = shardtrace.fsdp(AdvancesElsewhere(how))
    with pytest.raises(NotImplementedError, match=f"forward advances {where}, an iterator"):
        model(torch.ones(3, D))
    model.advances = False
    model(torch.ones(3, D))


class Statistics(Base):
    def build(self):
        self.norm = nn.BatchNorm1d(D)
        self.register_buffer("seen", torch.zeros(D))

    def forward(self, x):
        y = self.norm(self.linear(x))
        self.seen.add_(y.detach().abs().mean(0))
        return y * self.seen.clone()


def counts(net, y):
    net.count += 1
    return y


def scales(net, y):
    net.count += 1
    return y * net.count


def writes(net, y):
    net.held.add_(1)
    return y * net.held


def replaces(net, y):
    net.buffer = net.buffer * 0.5 + y.detach().mean(0)
    return y * net.buffer


class Sets(Base):
    def __init__(self, forward):
        super().__init__()
        self.how, self.count, self.held = forward, 0, torch.ones(D)
        self.register_buffer("buffer", torch.ones(D))

    def forward(self, x):
        return self.how(self, self.linear(x))


@pytest.mark.parametrize("forward", [counts, scales, writes, replaces])
def test_two_calls_in_a_step_of_which_one_sets(single_rank, forward):
    """The second one reads what the first one has left in a buffer. What depends on anything else is refused."""
    eager, ours = Sets(forward), shardtrace.fsdp(Sets(forward))
    jitted = thunder.jit(lambda x: ours(x) + ours(x * 2))
    x = torch.ones(3, D)
    if forward in (scales, writes):
        with pytest.raises(
            NotImplementedError, match="calls Sets several times, and a call depends on what an earlier"
        ):
            jitted(x)
    else:
        for _ in range(2):
            torch.testing.assert_close(jitted(x), eager(x) + eager(x * 2))
            assert ours.count == eager.count


COLLECTIONS = 0


def test_what_a_collection_of_garbage_runs_is_no_state_of_the_forward(single_rank):
    """Hypothesis counts the seconds of collections in a global, by a callback like this one."""

    def count(phase, info):
        global COLLECTIONS
        COLLECTIONS += 1

    cmodel = thunder.jit(shardtrace.fsdp(nn.Sequential(*(nn.Linear(D, D) for _ in range(4)))))
    thresholds, before = gc.get_threshold(), COLLECTIONS
    gc.callbacks.append(count)
    gc.set_threshold(20)
    try:
        for _ in range(2):
            cmodel(torch.ones(2, D)).sum().backward()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(count)
    assert before < COLLECTIONS
    assert thunder.cache_misses(cmodel) == 1


def test_two_calls_in_a_step(single_rank):
    """The second one reads the buffers that the first one has written."""
    ours, eager = Statistics(), Statistics()
    shardtrace.fsdp(ours)

    def step(model, x):
        return (model(x) * model(x * 2 + 1)).sum()

    jitted = thunder.jit(lambda x: step(ours, x))
    for seed in range(2):
        x = torch.randn(3, D, generator=torch.Generator().manual_seed(seed))
        found, expected = jitted(x), step(eager, x)
        torch.testing.assert_close(found, expected)
        for loss in (found, expected):
            loss.backward()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)


MODULES = {
    "LSTM": (lambda: nn.LSTM(D, D, 2), lambda out: out[0]),
    "attention": (lambda: nn.MultiheadAttention(D, 2), lambda out: out[0]),
    "batch norm": (lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)), lambda out: out),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), lambda out: out),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)), lambda out: out),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_are_recorded_once(single_rank, name):
    build, result = MODULES[name]
    jitted = thunder.jit(shardtrace.fsdp(build()))
    for _ in range(3):
        x = torch.randn(3, D)
        result(jitted(x, x, x) if name == "attention" else jitted(x)).sum().backward()
    assert thunder.cache_misses(jitted) == 1
