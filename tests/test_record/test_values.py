"""Writes become values: which lines read a part of a base again, and which give it a new value."""

from shardtrace.record.memory import Values, same_place

import pytest
import torch

BASE = torch.zeros(2, 3)


@pytest.fixture
def values():
    """Values whose proxies are texts that tell how they came about."""
    found = Values(
        take=lambda now, base, view: f"part({now})",
        put=lambda now, base, view, new: f"put({now}, {new})",
        keep=lambda now, base, new: f"keep({now}, {new})",
    )
    found.know(BASE, "a")
    return found


def test_what_is_known_is_read(values):
    assert BASE in values
    assert torch.zeros(2) not in values
    assert values.read(BASE) == "a"
    assert not values.is_written(BASE)


def test_a_write_into_the_base(values):
    view = BASE[0]
    values.know(view, "v")
    assert values.read(view) == "v"
    values.write(BASE, "b")
    assert values.read(BASE) == "b"
    assert values.read(view) == "part(b)"
    assert values.is_written(view)


def test_a_write_into_a_view(values):
    first, second = BASE[0], BASE[1]
    values.know(first, "v")
    values.know(second, "w")
    values.write(first, "x")
    assert values.read(first) == "x"
    assert values.read(BASE) == "put(a, x)"
    assert values.read(second) == "part(put(a, x))"  # also where the write was elsewhere
    values.write(second, "y")
    assert values.read(BASE) == "put(put(a, x), y)"
    assert values.read(first) == "part(put(put(a, x), y))"


def test_another_tensor_of_the_whole_base(values):
    alias = BASE.detach()
    values.know(alias, "d")
    values.write(alias, "e")
    assert values.read(BASE) == "e"
    assert not same_place(BASE, BASE.t())
    assert not same_place(BASE, BASE[:1])
    assert same_place(BASE, alias)


def test_a_write_that_autograd_does_not_see(values):
    values.write(BASE, "b", tracked=False)
    assert values.read(BASE) == "b"  # a base without gradients
    base = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        view = base[:1]
    values.know(base, "g")
    values.know(view, "v")
    values.write(view, "w", tracked=False)
    assert values.read(base) == "keep(g, put(g, w))"
    assert values.read(view) == "part(keep(g, put(g, w)))"


def test_what_is_forgotten(values):
    values.forget([BASE])
    assert BASE not in values
    values.know(BASE, "new")
    assert values.read(BASE) == "new"
    assert not values.is_written(BASE)
