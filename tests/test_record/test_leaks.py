"""A fake tensor that stays with an object of the user is an error with its name."""

import contextvars
import gc
import types
import weakref

import shardtrace
from shardtrace.record import effects
from shardtrace.record.effects import check_leaks

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

FAKES = FakeTensorMode()


class Holders:
    """The objects of this file that keep a tensor. They are made after ``small_heap`` has hidden what was there before,
    so that each search takes milliseconds: it sees all of them."""

    def __init__(self):
        class Box:
            """An object with a dict, or with its values inline."""

        class Slots:
            __slots__ = ("kept",)

        self.Box, self.box, self.slots = Box, Box(), Slots()
        self.script = types.ModuleType("script")
        self.script.LAST, self.script.KEPT = None, {}
        self.keep_in_closure = closure()

    def clear(self):
        for owner in (self.Box, self.box, self.slots):
            if hasattr(owner, "kept"):
                del owner.kept
        self.script.KEPT.clear()
        self.script.LAST = None
        self.keep_in_closure(None)


def fake():
    with FAKES:
        return torch.ones(2, 3)


def references(*tensors):
    return [weakref.ref(t) for t in tensors]


def closure():
    kept = None

    def keep(t):
        nonlocal kept
        kept = t

    return keep


NAMED = {
    "attribute": (lambda made, t: setattr(made.box, "kept", t), "attribute 'kept' of a Box"),
    "dict in a list": (
        lambda made, t: setattr(made.box, "kept", [{"y": t}]),
        "item 'y' of a dict in item 0 of a list in attribute 'kept' of a Box",
    ),
    "set": (lambda made, t: setattr(made.box, "kept", {t}), "a set in attribute 'kept' of a Box"),
    "class": (lambda made, t: setattr(made.Box, "kept", t), "attribute 'kept' of the class Box"),
    "slots": (lambda made, t: setattr(made.slots, "kept", t), "a Slots"),
    "global": (lambda made, t: setattr(made.script, "LAST", t), "the global variable 'LAST' of script"),
    "dict of a global": (
        lambda made, t: made.script.KEPT.update(y=t),
        "item 'y' of a dict in the global variable 'KEPT' of script",
    ),
    "closure": (lambda made, t: made.keep_in_closure(t), "the variable 'kept' of closure.<locals>.keep"),
}


@pytest.fixture(scope="module")
def all_holders():
    return Holders()


@pytest.fixture
def holders(all_holders):
    yield all_holders
    all_holders.clear()


@pytest.mark.parametrize("kind", NAMED)
def test_the_holder_is_named(kind, holders):
    keep, name = NAMED[kind]
    tensor = fake()
    made = references(tensor)
    keep(holders, tensor)
    del tensor
    with pytest.raises(RuntimeError) as error:
        check_leaks(made)
    assert f"a tensor of shape (2, 3) in {name}, where" in str(error.value)


def test_a_context_variable_is_found():
    variable = contextvars.ContextVar("variable")
    tensor = fake()
    made = references(tensor)
    token = variable.set([tensor])
    del tensor
    try:
        with pytest.raises(RuntimeError, match="item 0 of a list in a context variable"):
            check_leaks(made)
    finally:
        variable.reset(token)


def test_what_is_gone_is_no_leak():
    check_leaks(references(fake()))


@pytest.mark.parametrize("age", ["young", "old"])
def test_a_cycle_is_collected_first(holders, age):
    box, tensor = holders.Box(), fake()
    box.me, box.tensor = box, tensor
    made = references(tensor)
    if age == "old":
        gc.collect()  # what survives is in the oldest generation
    del box, tensor
    check_leaks(made)
    assert made[0]() is None


def test_local_variables_and_graphs_are_no_leak():
    with FAKES:
        x = torch.ones(2, requires_grad=True)
        y = x.exp()  # saved by its own gradient
        z = y * 2
    made = references(y)
    local = [y]
    check_leaks(made)
    del y, local
    check_leaks(made)
    assert z.grad_fn is not None


class ReadsAndHooks(nn.Module):
    """Is recorded twice, because forward registers a hook, and reads a value."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(3, 3)

    def forward(self, x, lengths):
        if not self.part._forward_hooks:
            self.part.register_forward_hook(lambda *given: None)
        return self.part(x)[: lengths.max().item()]


def test_nobody_is_searched_if_no_fake_stays(single_rank, monkeypatch):
    """The search takes a second for each tensor of a large process."""

    def search(*given):
        raise AssertionError("a record keeps its fakes")

    monkeypatch.setattr(effects, "gc", types.SimpleNamespace(collect=search))
    model = shardtrace.fsdp(ReadsAndHooks())
    for _ in range(4):  # the second and the fourth step record again
        model(torch.ones(2, 3), torch.tensor([1, 2])).sum().backward()
