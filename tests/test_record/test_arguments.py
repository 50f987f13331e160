"""What a model may be given: tensors in any object are inputs, everything else is compared before each step."""

import collections
import copy
import dataclasses
import functools
import gc

import shardtrace

import numpy
import pytest
import thunder
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Pair = collections.namedtuple("Pair", "x k")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    k: float


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    x: torch.Tensor
    k: float


class Plain:
    def __init__(self, x, k):
        self.x, self.k, self.own = x, k, self


class Mapping(collections.UserDict): ...


GIVEN = {
    "dataclass": Batch,
    "slots": Slots,
    "object": Plain,
    "named tuple": Pair,
    "user dict": lambda x, k: Mapping(x=x, k=k),
    "dict": lambda x, k: {"x": x, "k": k},
    "ordered dict": lambda x, k: collections.OrderedDict(x=x, k=k),
    "list": lambda x, k: [x, k],
    "nested": lambda x, k: [Batch(x, k), {"k": (k, Plain(x * 2, k))}],
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch):
        if type(batch) is list and isinstance(batch[0], Batch):
            x, k = batch[0].x + batch[1]["k"][1].x, batch[1]["k"][0]
        elif isinstance(batch, (dict, Mapping)):
            x, k = batch["x"], batch["k"]
        else:
            x, k = (batch[0], batch[1]) if isinstance(batch, list) else (batch.x, batch.k)
        y = self.linear(x) * k
        return y + len(batch) if hasattr(batch, "__len__") else y


def both():
    model = Net()
    return copy.deepcopy(model), thunder.jit(shardtrace.fsdp(model))


@pytest.mark.parametrize("given", GIVEN)
def test_each_call_reads_its_own(single_rank, given):
    eager, ours = both()
    for k in (1.0, 2.0, 2.0, 1):
        batch = GIVEN[given](torch.randn(3, 4), k)
        found, expected = ours(batch), eager(batch)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
    torch.testing.assert_close(ours.get_parameter("linear.weight").grad, eager.linear.weight.grad)


@pytest.mark.parametrize("given", ["dict", "list", "user dict"])
def test_a_container_that_has_more(single_rank, given):
    eager, ours = both()
    batch = GIVEN[given](torch.randn(3, 4), 1.0)
    torch.testing.assert_close(ours(batch), eager(batch))
    batch.append(None) if given == "list" else batch.update(more=None)
    torch.testing.assert_close(ours(batch), eager(batch))


def test_the_same_structure_compiles_once(single_rank):
    _, ours = both()
    for _ in range(3):
        ours(Batch(torch.randn(3, 4), 1.0))
    assert thunder.cache_misses(ours) == 1


def test_in_a_jitted_function(single_rank):
    eager, _ = both()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    step = thunder.jit(lambda batch: model(batch).sum())
    for k in (1.0, 2.0):
        batch = Batch(torch.randn(3, 4), k)
        torch.testing.assert_close(step(batch), eager(batch).sum())


class Appends(Net):
    def forward(self, cache):
        y = self.linear(cache.x)
        cache.x = y
        return y


def test_an_argument_that_forward_changes_is_an_error(single_rank):
    with pytest.raises(RuntimeError, match="forward changes its argument, a Plain"):
        thunder.jit(shardtrace.fsdp(Appends()))(Plain(torch.randn(3, 4), 1.0))


@pytest.mark.filterwarnings("ignore:The 'symbolic values' cache option")
def test_symbolic_values_are_refused(single_rank):
    with pytest.raises(RuntimeError, match="recorded for the shapes of one call"):
        thunder.jit(shardtrace.fsdp(Net()), cache="symbolic values")(Batch(torch.randn(3, 4), 1.0))


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, y, *, write=False):
        self.count += 1
        if write:
            y.add_(1)
        return super().forward(x) - y


@pytest.mark.parametrize("in_function", [False, True])
def test_parts_of_one_tensor_are_two_arguments(single_rank, in_function):
    """Thunder takes them for the same tensor where it sees a write, even into a buffer."""
    eager, ours = Counting(), Counting()
    ours.load_state_dict(eager.state_dict())
    shardtrace.fsdp(ours)
    x, y = torch.randn(3, 5, 4).transpose(0, 1)[:2]
    call = thunder.jit(lambda x, y: ours(x, y)) if in_function else thunder.jit(ours)
    torch.testing.assert_close(call(x, y), eager(x, y))


def test_a_written_argument_shares_memory_with_no_other(single_rank):
    x, y = torch.randn(2, 3, 4)
    with pytest.raises(RuntimeError, match=r"an argument of shape \(3, 4\) that shares memory with another one"):
        thunder.jit(shardtrace.fsdp(Counting()))(x, y, write=True)
    y = y.clone()
    expected = y + 1
    thunder.jit(shardtrace.fsdp(Counting()))(x, y, write=True)
    assert torch.equal(y, expected)


class Scaled:
    factor = 1.0

    def __init__(self, k):
        self.k = k

    def __call__(self, y):
        return y * self.k

    def scale(self, y):
        return y * self.k


def with_default(k):
    return lambda y, k=k: y * k


def with_attribute(k):
    def scale(y):
        return y * scale.k

    scale.k = k
    return scale


def nested(k):
    inner = Scaled(k).scale
    return {"apply": lambda y: inner(y)}


CALLED = {
    "lambda": lambda k: lambda y: y * k,
    "default": with_default,
    "attribute": with_attribute,
    "partial": lambda k: functools.partial(torch.mul, other=k),
    "method": lambda k: Scaled(k).scale,
    "object": Scaled,
    "builtin": lambda k: (torch.sin, torch.cos)[int(k) - 1],
    "module": lambda k: (nn.ReLU, nn.Sigmoid)[int(k) - 1](),
    "in a dict": nested,
    "set": lambda k: {"k", k},
    "deque": lambda k: collections.deque([k]),
    "array": lambda k: numpy.array([k]),
    "bytes": lambda k: bytearray([int(k)]),
    "frozen bytes": lambda k: bytes([int(k)]),
    "range": lambda k: range(1, 1 + int(k)),
    "size": lambda k: torch.Size([1] * int(k)),
}


class Calls(Net):
    def forward(self, x, what):
        y = self.linear(x)
        what = what["apply"] if isinstance(what, dict) else what
        if callable(what):
            return what(y)
        return y * float(sum(v for v in what if v != "k"))


@pytest.mark.parametrize("kind", CALLED)
def test_functions_and_collections_count_by_what_they_hold(single_rank, kind):
    model = Calls()
    eager, ours = copy.deepcopy(model), thunder.jit(shardtrace.fsdp(model))
    for k in (1.0, 2.0, 2.0, 1.0):
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x, CALLED[kind](k)), eager(x, CALLED[kind](k)))
        gc.collect()  # another object may get the id
    assert thunder.cache_misses(ours) == (4 if kind == "module" else 2)


class Multiply(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.t = 1.0, torch.ones(4)

    def forward(self, y):
        return y * self.k * self.t


def test_what_a_script_changes_in_place(single_rank):
    model = Calls()
    eager, ours = copy.deepcopy(model), thunder.jit(shardtrace.fsdp(model))
    array, module, scaled = numpy.ones(2), Multiply(), Scaled(1.0)
    tensors = [torch.full((4,), 2.0), torch.full((4,), 3.0)]
    for step in range(4):
        array[1], module.k, scaled.k, Scaled.factor = step, step, step, step
        over_tensor, over_class = (lambda y, t=tensors[step % 2]: y * t), lambda y: y * Scaled.factor
        for what in (array, module, scaled, scaled.scale, over_tensor, over_class):
            x = torch.randn(3, 4)
            torch.testing.assert_close(ours(x, what), eager(x, what))


def test_keywords_that_others_use_for_themselves(single_rank):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, fn=None, **others):
            return fn(self.linear(x)) * sum(others.values())

    model = Takes()
    eager, ours, x = copy.deepcopy(model), shardtrace.fsdp(model), torch.randn(3, 4)
    for fn in (torch.tanh, torch.relu):
        others = {"module": 2.0, "args": 3.0, "inst": torch.tensor(4.0), "partial_function": 5.0}
        torch.testing.assert_close(ours(x, fn=fn, **others), eager(x, fn=fn, **others))


def test_an_iterator_is_refused(single_rank):
    with pytest.raises(RuntimeError, match="an argument is an iterator, a generator: pass a list or a tuple"):
        thunder.jit(shardtrace.fsdp(Calls()))(torch.ones(3, 4), (k for k in (1.0, 2.0)))


class Ordered(Net):
    def forward(self, x, **kwargs):
        for i, value in enumerate(kwargs.values(), 1):
            x = x * i + value
        return self.linear(x)


def reads_order(module, args, kwargs):
    return (args[0] * (2 if next(iter(kwargs)) == "a" else 3),), kwargs


ORDERS = {
    "model": lambda net: lambda x, kw: net(x, **kw),
    "function": lambda net: (lambda jitted: lambda x, kw: jitted(x, **kw))(thunder.jit(lambda x, **kw: net(x, **kw))),
    "dict": lambda net: thunder.jit(lambda x, kw: net(x, **kw)),
    "hook": lambda net: (net.register_forward_pre_hook(reads_order, with_kwargs=True), lambda x, kw: net(x, **kw))[1],
    "the function's own": lambda net: thunder.jit(lambda x, kw: net(x, b=kw["a"], a=kw["b"])),
}


@pytest.mark.parametrize("how", ORDERS)
def test_the_order_of_keywords(single_rank, how):
    torch.manual_seed(0)
    model, call = Ordered(), ORDERS[how]
    eager, ours = copy.deepcopy(model), call(shardtrace.fsdp(model))
    if how == "hook":
        call(eager)
    given = {"a": torch.ones(4), "b": 2.0}
    for kw in (given, dict(reversed(given.items())), given):
        x = torch.randn(3, 4)
        expected = eager(x, b=kw["a"], a=kw["b"]) if how == "the function's own" else eager(x, **kw)
        torch.testing.assert_close(ours(x, kw), expected)


class Asks(Net):
    def forward(self, x, what):
        return self.linear(x) * float(getattr(x, what)())


@pytest.mark.parametrize("what", ["storage_offset", "is_conj", "_is_view"])
def test_what_no_step_can_tell_of_an_argument_is_refused(single_rank, what):
    with pytest.raises(NotImplementedError, match=f"asks for {what} of a tensor that it was given"):
        shardtrace.fsdp(Asks())(torch.ones(4, 4)[1:], what)


class Strides(Net):
    def forward(self, batch):
        x = batch if isinstance(batch, torch.Tensor) else batch.x
        y = x * float(x.stride(0)) if x.is_contiguous() else torch.as_strided(x, (4, 4), x.stride()) * 3
        return self.linear(y)


def test_strides_of_arguments_are_eagers(single_rank):
    model = Strides()
    eager, ours = copy.deepcopy(model), thunder.jit(shardtrace.fsdp(model))
    columns = torch.randn(4, 8)[:, ::2]
    given = [
        torch.randn(4, 4),
        columns,
        torch.randn(4, 4).t(),
        torch.randn(1, 4).expand(4, 4),
        columns + 1,
        columns.clone(),
    ]
    for x in given:
        torch.testing.assert_close(ours(x), eager(x))
    assert thunder.cache_misses(ours) == 4
    for x in given:
        torch.testing.assert_close(ours(Batch(x, 1.0)), eager(Batch(x, 1.0)))
    assert thunder.cache_misses(ours) == 8


class Own(torch.Tensor):
    """As MONAI's MetaTensor: what it knows of itself is another object in each step."""

    @property
    def known(self):
        return self.own["step"]


def plain(t, step):
    t.scale, t.options = float(step // 2), {"k": [step // 2]}
    return t


def own(t, step):
    t = t.as_subclass(Own)
    t.own = {"step": step, "affine": torch.eye(2)}
    return t


def of_class(t, step):
    return own(t, step) if step > 1 else t


# what forward does with a tensor, what the script passes in its place, how many steps are compiled
READ = {
    "an attribute": (lambda y, t: y * t.scale, plain, 2),
    "a default": (lambda y, t: y * getattr(t, "scale", 5.0), lambda t, step: plain(t, step) if step < 3 else t, 3),
    "whether there is one": (
        lambda y, t: y * 2 if hasattr(t, "options") else y, lambda t, step: plain(t, step) if step > 1 else t, 2
    ),
    "in a dict": (lambda y, t: y * t.options["k"][0], plain, 2),
    "another one": (lambda y, t: y * getattr(t, "none", 3.0), plain, 1),
    "nothing": (lambda y, t: y * t, own, 1),
    "its class": (lambda y, t: y * 2 if isinstance(t, Own) else y, of_class, 2),
    "the class of a result": (lambda y, t: y * 2 if isinstance((y * t)[0], Own) else y, of_class, 2),
    "a parameter": (
        lambda y, t: y * 2 if isinstance(t, nn.Parameter) else y,
        lambda t, step: nn.Parameter(t, requires_grad=False) if step > 1 else t, 2,
    ),
    "to make a parameter": (lambda y, t: y * nn.Parameter(t, requires_grad=False), of_class, 2),
    "its type": (lambda y, t: y * 2 if type(t) is Own else y, of_class, 2),
    "the type of a result": (lambda y, t: y * 2 if type(y * t) is Own else y, of_class, 2),
    "the types of both": (lambda y, t: y * {torch.Tensor: 2, Own: 3}[type(t)] if type(y) is torch.Tensor else y, of_class, 2),
    "a builtin class": (lambda y, t: y if isinstance(t, (list, tuple)) else y * 2, own, 1),
}  # fmt: skip


class Given(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, t):
        return self.how(self.linear(x), t["t"][0] if isinstance(t, dict) else t)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("what", READ)
def test_attributes_and_classes_of_arguments(single_rank, what, inside):
    how, make, compiled = READ[what]
    model = Given(how)
    eager, ours = copy.deepcopy(model), thunder.jit(shardtrace.fsdp(model))
    for step in range(4):
        x, t = torch.randn(3, 4), make(torch.ones(4), step)
        t = {"t": [t]} if inside else t
        torch.testing.assert_close(ours(x, t), eager(x, t))
    assert thunder.cache_misses(ours) == compiled


@functools.singledispatch
def scale(value):
    return 2.0


@scale.register
def _(value: nn.Parameter):
    return 3.0


class Meta(type):
    def __call__(cls, *args):
        return type.__call__(cls, *args)


class Made(metaclass=Meta):
    def __init__(self, scale):
        self.scale = scale


def makes_classes(m, x, y):
    class Inner(type):
        pass

    class Named(metaclass=Inner):
        scale = 2.0

    assert type(Named) is Inner
    assert type(Inner) is type
    assert isinstance(Inner, type)
    return y * Made(3.0).scale * Named.scale * type("Other", (), {"scale": 5.0}).scale


# each is of the class that it has in eager PyTorch
TYPES = {
    "argument": lambda m, x, y: y * 2 if type(x) is torch.Tensor else y,
    "result": lambda m, x, y: y * 2 if type(y) in (torch.Tensor, Own) else y,
    "parameter": lambda m, x, y: y * 2 if type(m.linear.weight) is nn.Parameter else y,
    "buffer": lambda m, x, y: y * 2 if type(m.held) is type(x) else y,
    "made": lambda m, x, y: y * 2 if list(map(type, [torch.ones(2), y.new_ones(2)])) == [torch.Tensor] * 2 else y,
    "name": lambda m, x, y: y * len(type(y).__name__),
    "class": lambda m, x, y: y * 2 if y.__class__ is m.held.__class__ is torch.Tensor else y,
    "class of a parameter": lambda m, x, y: y * 2 if m.linear.weight.__class__ is nn.Parameter else y,
    "dispatch": lambda m, x, y: y * scale(y) + scale(m.linear.weight),
    "constructor": lambda m, x, y: y * type(m.held)([1.0, 2.0, 3.0, 4.0]),
    "modules": lambda m, x, y: y * 2 if type(m) is Types and type(m.linear) is nn.Linear else y,
    "in a checkpoint": lambda m, x, y: checkpoint(
        lambda t: t * 2 if type(t) is torch.Tensor else t, y, use_reentrant=False
    ),
    "classes": makes_classes,
}


class Types(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("held", torch.ones(4))

    def forward(self, x):
        return self.how(self, x, self.linear(x))


@pytest.mark.parametrize("what", TYPES)
def test_types_of_tensors(single_rank, what):
    model = Types(TYPES[what])
    eager, ours = copy.deepcopy(model), shardtrace.fsdp(model)
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x), eager(x))
    assert "type" not in globals()


def sets(y, t):
    t.seen = True
    return y


def changes(y, t):
    t.options["k"].append(1)
    return y


@pytest.mark.parametrize(
    ("how", "make", "match"),
    [
        (lambda y, t: y * t.own["affine"].sum(), own, "'own' of an argument, an attribute that holds tensors"),
        (lambda y, t: y * t.known, own, "reads 'known' of a Own"),
        (lambda y, t: y * vars(t)["scale"], plain, "reads all attributes of an argument"),
        (sets, plain, "sets 'seen' of an argument"),
        (changes, plain, "changes its argument, a Tensor with attributes"),
    ],
)
def test_what_no_step_can_do_with_attributes_is_refused(single_rank, how, make, match):
    with pytest.raises((NotImplementedError, RuntimeError), match=match):
        shardtrace.fsdp(Given(how))(torch.randn(3, 4), make(torch.ones(4), 1))
