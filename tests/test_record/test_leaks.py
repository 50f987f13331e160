"""A fake tensor that stays with an object of the user is an error with its name."""

import contextvars
import weakref

import shardtrace
from shardtrace.record import effects
from shardtrace.record.effects import check_leaks

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

FAKES = FakeTensorMode()
KEPT = {}
LAST = None


class Box:
    """An object with a dict, or with its values inline."""


class Slots:
    __slots__ = ("kept",)


def fake():
    with FAKES:
        return torch.ones(2, 3)


def references(*tensors):
    return [weakref.ref(t) for t in tensors]


def keep_in_global(t):
    global LAST
    LAST = t


def closure():
    kept = None

    def keep(t):
        nonlocal kept
        kept = t

    return keep


KEEP = closure()
BOX, MODULE, SLOTS = Box(), nn.Linear(1, 1), Slots()
NAMED = {
    "attribute": (lambda t: setattr(BOX, "kept", t), "attribute 'kept' of a Box"),
    "dict in a list": (
        lambda t: setattr(BOX, "kept", [{"y": t}]),
        "item 'y' of a dict in item 0 of a list in attribute 'kept' of a Box",
    ),
    "set": (lambda t: setattr(BOX, "kept", {t}), "a set in attribute 'kept' of a Box"),
    "class": (lambda t: setattr(Box, "kept", t), "attribute 'kept' of the class Box"),
    "slots": (lambda t: setattr(SLOTS, "kept", t), "a Slots"),
    "global": (keep_in_global, f"the global variable 'LAST' of {__name__}"),
    "dict of a global": (lambda t: KEPT.update(y=t), f"item 'y' of a dict in the global variable 'KEPT' of {__name__}"),
    "closure": (KEEP, "the variable 'kept' of closure.<locals>.keep"),
}


@pytest.fixture(autouse=True)
def clean():
    yield
    for owner in (Box, BOX, MODULE, SLOTS):
        if hasattr(owner, "kept"):
            del owner.kept
    KEPT.clear()
    keep_in_global(None)
    KEEP(None)


@pytest.mark.parametrize("kind", NAMED)
def test_the_holder_is_named(kind):
    keep, name = NAMED[kind]
    tensor = fake()
    made = references(tensor)
    keep(tensor)
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


def test_a_cycle_is_collected_first():
    box, tensor = Box(), fake()
    box.me, box.tensor = box, tensor
    made = references(tensor)
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

    monkeypatch.setattr(effects, "_caches", search)
    model = shardtrace.fsdp(ReadsAndHooks())
    for _ in range(4):  # the second and the fourth step record again
        model(torch.ones(2, 3), torch.tensor([1, 2])).sum().backward()
