"""The variables that a line assigns, found while it runs."""

import sys

from shardtrace.record.watcher import assigned

import pytest

FOUND = []


def seen(*values):
    FOUND.append(assigned(sys._getframe(1)))
    return values[0] if len(values) == 1 else values


class Seen:
    def __add__(self, other):
        FOUND.append(assigned(sys._getframe(1)))
        return self

    def __getitem__(self, key):
        FOUND.append(assigned(sys._getframe(1)))
        return self


def one():
    found = seen(1)
    return found


def several():
    a, b, c = seen(1, 2, 3)
    return a, b, c


def starred():
    a, *rest = seen(1, 2, 3)
    return a, rest


def returned():
    return seen(1)


def attribute():
    one.kept = seen(1)


def within():
    found = [seen(1)]
    return found


def operator():
    x = Seen()
    total = x + x
    return total


def item():
    x = Seen()
    part = x[0]
    return part


def of_a_closure():
    kept = seen(1)
    return lambda: kept


def in_a_comprehension():
    return [seen(x) for x in (1, 2)]


def in_a_loop():
    for _ in range(2):
        x = seen(1)
    return x


def nested():
    outer = str(seen(1))
    return outer


@pytest.mark.parametrize(
    ("function", "variables"),
    [
        (one, [("found",)]),
        (several, [("a", "b", "c")]),
        (starred, [()]),
        (returned, [()]),
        (attribute, [()]),
        (within, [()]),
        (operator, [("total",)]),
        (item, [("part",)]),
        (of_a_closure, [("kept",)]),
        (in_a_comprehension, [(), ()]),
        (in_a_loop, [("x",), ("x",)]),
        (nested, [()]),
    ],
)
def test_variables(function, variables):
    FOUND.clear()
    function()
    assert variables == FOUND
