"""What forward sets is seen and put back, and made again after each step; what cannot be is an error that says why."""

import copy
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import shardtrace
from shardtrace.record.effects import Effects
from shardtrace.record.memory import Memory
from shardtrace.record.reads import Reads
from shardtrace.record.recorder import FakeMode
from shardtrace.record.recording import Recording, apply, check_recurrent, numbered, only_written, record_numbers
from shardtrace.record.snapshot import Snapshot
from shardtrace.record.watcher import CodeWatcher

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

STEPS = 0
SEEN = []
FAKES = FakeTensorMode(allow_non_fake_inputs=True)


class Counter:
    """No module holds one."""

    calls = 0


class Slots:
    __slots__ = ("kept",)


@dataclass
class Result:
    loss: object = None


class Base(nn.Module):
    calls = 0


class Net(Base):
    """``forward`` is given to it: a function of the module and the input."""

    def __init__(self, forward):
        super().__init__()
        self._forward = forward
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.n, self.last, self.seen = 0, None, None
        self.kept, self.table, self.names, self.window = [], {}, {"a"}, deque([1, 2], maxlen=2)
        self.config, self.slots = SimpleNamespace(last=None), Slots()
        self.array, self.number = numpy.ones(1), numpy.ones(())

    def forward(self, x):
        return self._forward(self, x)


def recorded(net, x=None):
    with FAKES, Effects(net) as effects:
        net(torch.ones(2) if x is None else x)
    return effects.found


def state_of(net):
    """All that the tests' forwards change, to compare before with after."""
    held = ("kept", "table", "names", "window", "config", "slots", "array", "number")
    own = {k: v for k, v in net.__dict__.items() if k not in held} | {"n": (net.array.tolist(), net.number.item())}
    inside = list(net.kept), dict(net.table), set(net.names), list(net.window), dict(vars(net.config))
    return own, inside, dict(net._buffers), hasattr(net.slots, "kept"), Base.calls, STEPS, list(SEEN)


def sets(name, value):
    return lambda net, x: setattr(net, name, value(x))


def count_global(net, x):
    global STEPS
    STEPS += 1


def count_class(net, x):
    Base.calls += 1


def remember(x, seen=[]):  # noqa: B006
    remember.calls += 1
    return seen


remember.calls = 0


def closure():
    calls = 0

    def forward(net, x):
        nonlocal calls
        calls += 1

    return forward


CASES = {
    "array": (lambda net, x: net.array.__setitem__(0, 2.0), "contents", "model.array"),
    "scalar array": (lambda net, x: net.number.__iadd__(1), "contents", "model.number"),
    "function": (lambda net, x: remember(x), "attribute", f"global {__name__}.remember.calls"),
    "default": (lambda net, x, seen=[]: seen.append(1), "append", "model._forward.__defaults__[0]"),
    "closure": (closure(), "cell", "variable calls of closure.<locals>.forward"),
    "attribute": (sets("last", lambda x: x * 2), "attribute", "model.last"),
    "new attribute": (sets("extra", lambda x: x * 2), "attribute", "model.extra"),
    "plain": (sets("seen", lambda x: len(x)), "attribute", "model.seen"),
    "deleted": (lambda net, x: delattr(net, "seen"), "attribute", "model.seen"),
    "nested": (sets("last", lambda x: {"a": [x * 2, (x * 3, 1)]}), "attribute", "model.last"),
    "buffer": (sets("mean", lambda x: x * 2), "buffer", "model.mean"),
    "append": (lambda net, x: net.kept.append(x * 2), "append", "model.kept"),
    "item": (lambda net, x: net.table.update(y=x * 2), "item", "model.table['y']"),
    "set": (lambda net, x: net.names.add("b"), "contents", "model.names"),
    "deque": (lambda net, x: net.window.append(3), "contents", "model.window"),
    "config": (lambda net, x: setattr(net.config, "last", x * 2), "attribute", "model.config.last"),
    "slots": (lambda net, x: setattr(net.slots, "kept", x * 2), "attribute", "model.slots.kept"),
    "class": (count_class, "attribute", "Base.calls"),
    "class of no module": (
        lambda net, x: setattr(Counter, "calls", Counter.calls + 1),
        "attribute",
        f"global {__name__}.Counter.calls",
    ),
    "global": (count_global, "attribute", f"global {__name__}.STEPS"),
    "list of a global": (lambda net, x: SEEN.append(x * 2), "append", f"global {__name__}.SEEN"),
}


@pytest.mark.parametrize("kind", CASES)
def test_changes_are_found_and_put_back(kind):
    forward, expected, label = CASES[kind]
    net = Net(forward)
    before = state_of(net)
    (change,) = recorded(net)
    assert (change.kind, change.label) == (expected, label)
    assert state_of(net) == before


def test_nothing_is_found_in_a_pure_forward():
    assert recorded(Net(lambda net, x: net.inner(x).relu_() * net.n)) == []


def test_everything_is_put_back_after_an_error():
    def forward(net, x):
        net.last, net.n = x * 2, 1
        raise ValueError("in forward")

    net = Net(forward)
    with pytest.raises(ValueError, match="in forward"):
        recorded(net)
    assert (net.last, net.n) == (None, 0)


def test_apply_does_what_eager_does():
    def forward(net, x):
        net.last = y = x * 2
        net.table["all"] = [y, (x * 3, "text")]
        net.kept.append(y)
        net.config.last, net.seen, net.mean = 5, len(x), net.mean + 1

    net = Net(forward)
    mean = net.mean
    changes, tensors = numbered(recorded(net))
    assert all(isinstance(t, FakeTensor) for t in tensors)
    assert len(tensors) == 3  # y once
    for step in (1.0, 2.0):
        y, z, mean_now = torch.full((2,), step), torch.zeros(2), torch.full((2,), step)
        apply(changes, [{0: mean_now, 1: y, 2: z}[i] for i in order_of(changes, tensors)])
        assert net.last is y
        assert net.table["all"][0] is y
        assert net.table["all"][1] == (z, "text")
        assert (net.config.last, net.seen) == (5, 2)
        assert net.mean is mean
        assert mean.tolist() == [step, step]
    assert len(net.kept) == 2


def order_of(changes, tensors):
    """For each tensor what it is in the test above: 0 the buffer, 1 ``y``, 2 ``x * 3``."""
    by_label = {c.label: c.new for c in changes}
    numbers = {by_label["model.mean"].number: 0, by_label["model.last"].number: 1}
    return [numbers.get(i, 2) for i in range(len(tensors))]


def test_a_buffer_of_another_shape_is_replaced():
    net = Net(lambda net, x: setattr(net, "mean", torch.cat([net.mean, x])))
    changes, _ = numbered(recorded(net))
    longer = torch.ones(4)
    apply(changes, [longer])
    assert net.mean is longer
    assert dict(net.named_buffers())["mean"] is longer


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda net, x: setattr(net, "last", Result(x * 2)),
            r"forward sets model\.last to a Result that holds tensors",
        ),
        (lambda net, x: setattr(net, "last", {x * 2}), r"forward sets model\.last to a set that holds tensors"),
        (lambda net, x: setattr(net, "more", nn.Linear(1, 1)), r"sets the submodule model\.more: make it in __init__"),
        (lambda net, x: setattr(net, "w", nn.Parameter(x * 1)), r"sets the parameter model\.w"),
    ],
)
def test_what_no_step_can_do_is_an_error(forward, message):
    with pytest.raises(RuntimeError, match=message):
        numbered(recorded(Net(forward)))


def test_objects_without_tensors_are_set_as_they_are():
    result = Result(1.0)
    net = Net(lambda net, x: setattr(net, "last", result))
    changes, tensors = numbered(recorded(net))
    apply(changes, tensors)
    assert net.last is result


def counts(forward, **how):
    net, fakes, watcher = Net(forward), FakeMode(), CodeWatcher()
    with fakes:
        x = torch.ones(2)
    memory, names = Memory(fakes, lambda t: None), {id(net): ""}
    reads = Reads(lambda fake: None, {})
    recording = Recording(net, Net.forward, (x,), {}, fakes, {}, memory, names, [], frozenset(), True, reads)
    *_, changes = record_numbers(recording, *recording(watcher), watcher, [], **how)
    assert net.n == 0
    return net, changes


def add_one(net, x):
    net.n += 1


def add_twice(net, x):
    net.n = net.n + len(x)
    net.n = 1 + net.n - 2


def test_a_counter_that_is_only_added_to_is_counted():
    for forward, values in ((add_one, [1, 2, 3]), (add_twice, [1, 2, 3])):
        net, (change,) = counts(forward)
        assert change.kind == "count"
        for value in values:
            apply([change], [])
            assert net.n == value
        assert type(net.n) is int
        assert only_written([change], ()) == [change]


def test_floats_are_added_in_the_order_of_forward():
    def forward(net, x):
        net.n = net.n + 0.1
        net.n = net.n + 0.2

    net, (change,) = counts(forward)
    for _ in range(3):
        apply([change], [])
    expected = 0
    for k in (0.1, 0.2) * 3:
        expected = expected + k
    assert net.n == expected


def test_a_counter_of_a_base_class_is_left_out_of_the_snapshot():
    net, changes = counts(count_class)
    snapshot = Snapshot(net, None, excluded=[change.entry for change in only_written(changes, ())])
    apply(changes, [])
    try:
        assert (Base.calls, snapshot.difference()) == (1, "")
    finally:
        Base.calls = 0


@pytest.mark.parametrize(
    "read",
    [
        lambda net, x: net.n % 10 == 0,
        lambda net, x: x * net.n,
        lambda net, x: x + net.n,
        lambda net, x: net.n > 5,
        lambda net, x: range(net.n),
        lambda net, x: torch.full((2,), net.n),
        lambda net, x: bool(net.n),
        lambda net, x: [1, 2][net.n],
        lambda net, x: f"step {net.n}",
        lambda net, x: {0: 1}.get(net.n),
        lambda net, x: float(net.n),
        lambda net, x: net.n.bit_length(),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_counter_that_is_read_is_not_counted(read, first):
    def forward(net, x):
        net.n += 0 if first else 1
        read(net, x)
        net.n += 1

    _, (change,) = counts(forward, computing=False)
    assert change.kind == "attribute"
    assert only_written([change], ()) == []


def next_record(net, changes, tensors):
    """The changes of a second recording, with the first's in place."""
    apply(changes, [torch.zeros(t.shape) for t in tensors])
    return recorded(net)


def rope(net, x):
    if len(x) != net.seen:
        net.seen, net.last = len(x), torch.arange(len(x)).cos()
    return x * net.last


def test_a_cache_settles():
    net = Net(rope)
    before = Snapshot(net, None)
    first, tensors = numbered(recorded(net))
    assert before.difference() == ""
    second = next_record(net, first, tensors)
    assert second == []
    assert before.difference().startswith("model.last (None -> a Tensor)")


def test_the_last_loss_is_only_written():
    net = Net(sets("last", lambda x: x * 2))
    found = recorded(net)
    assert only_written(found, ()) == []  # None before: forward may ask for it
    second = next_record(net, *numbered(found))
    assert [c.label for c in only_written(second, ())] == ["model.last"]
    snapshot = Snapshot(net, None, excluded=[c.entry for c in only_written(second, ())])
    net.last = torch.ones(2)
    assert snapshot.difference() == ""


def test_a_list_that_grows_is_only_written():
    net = Net(lambda net, x: net.kept.append(x * 2))
    second = next_record(net, *numbered(recorded(net)))
    assert [c.label for c in only_written(second, ())] == ["model.kept"]
    assert only_written(second, {id(net.kept[0])}) == []


def test_a_recurrent_tensor_is_an_error_unless_it_is_a_buffer():
    for name in ("last", "mean"):
        net = Net(
            lambda net, x, name=name: setattr(net, name, x if getattr(net, name) is None else getattr(net, name) + x)
        )
        net.last = torch.ones(2)
        found = recorded(net)
        used = {id(getattr(net, name))}
        if name == "mean":
            check_recurrent(found, used)
        else:
            assert only_written(found, used) == []
            with pytest.raises(RuntimeError, match=r"reads model\.last, a tensor that the step before has left there"):
                check_recurrent(found, used)


class ReturnsLogits(nn.Module):
    """Its loss is an attribute, as in llama2.c."""

    last_loss: torch.Tensor | None = None

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x, targets=None):
        logits = self.head(x)
        self.last_loss = nn.functional.cross_entropy(logits, targets) if targets is not None else None
        return logits


def test_training_on_a_loss_that_forward_sets(single_rank):
    """Accumulated over two micro-batches, with evaluation between the steps."""
    torch.manual_seed(0)
    eager = ReturnsLogits()
    sharded = shardtrace.fsdp(copy.deepcopy(eager))
    batches = [(torch.randn(3, 4), torch.randint(5, (3,))) for _ in range(4)]
    for model in (eager, sharded):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            for x, targets in batches[2 * step : 2 * step + 2]:
                model(x, targets)
                (model.last_loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batches[0][0])
            assert model.last_loss is None
    torch.testing.assert_close(dict(sharded.named_parameters()), dict(eager.named_parameters()))
