"""The front of memory and time as a drawing."""

import re

from shardtrace.planner.training_plan import NARROW, WIDE, Row, _Axis, draw_front

import pytest

GIB = 2**30
ROWS = [
    Row(10 * GIB, 0.9, 0.0, "zero3", 0, "full 2", 1, {}),
    Row(20 * GIB, 0.7, 0.0, "zero3", 0, "nothing", 1, {}),
    Row(40 * GIB, 0.5, 0.0, "<ddp>", 0, "nothing", 1, {}),
]


def circles(svg):
    return [
        (css, float(x), float(y)) for css, x, y in re.findall(r'<circle class="(\w+)" cx="([\d.]+)" cy="([\d.]+)', svg)
    ]


def test_rows_are_where_they_belong():
    svg = draw_front(ROWS, ROWS[1], 24 * GIB)
    (first, x0, y0), (second, x1, y1), (third, x2, y2) = circles(svg)
    assert (first, second, third) == ("fits", "chosen", "beyond")
    assert (x2 - x1) / (x1 - x0) == pytest.approx(2, rel=0.01)
    assert (y2 - y1) / (y1 - y0) == pytest.approx(1, rel=0.01)
    budget = float(re.search(r'class="budget" x1="([\d.]+)"', svg)[1])
    assert (budget - x1) / (x1 - x0) == pytest.approx(0.4, rel=0.02)
    assert "&lt;ddp&gt;" in svg


def names(svg):
    """The names of points, with the boxes that they need."""
    found = re.findall(r'<text class="name[^"]*" x="([\d.]+)" y="([\d.]+)">([^<]*)<', svg)
    return {text: (float(x), float(y) - 11, float(x) + 6.6 * len(text), float(y) + 4) for x, y, text in found}


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_points_are_named_and_no_name_hides_another(size):
    rows = [Row(GIB * (10 + k), 2.0 / (k + 1), 0.0, "zero3", 0, f"full {12 - k}", 1, {}) for k in range(12)]
    svg = draw_front(rows, rows[-1], 24 * GIB, size)
    found = names(svg)
    assert {int(text.split()[0]) for text in found} == set(range(1, 13))
    assert any("recomputing" in text for text in found) or size is NARROW
    boxes = [*found.values(), *((x - 5, y - 5, x + 5, y + 5) for _, x, y in circles(svg))]
    for k, (left, top, right, bottom) in enumerate(boxes):
        assert 0 <= left < right <= size.width
        for a, b, c, d in boxes[:k]:
            assert right <= a + 0.2 or c <= left + 0.2 or bottom <= b + 0.2 or d <= top + 0.2


@pytest.mark.parametrize("values", [[3.0, 3.0], [0.0, 7.3 * GIB], [1e-9, 2e-9], [0.0]])
def test_ticks_are_round_and_few(values):
    axis = _Axis(values, 0, 100, {"big": 1e9, "small": 1.0})
    assert 2 <= len(axis.ticks) <= 7
    assert all(-1e-6 <= axis(tick) <= 100 + 1e-6 for tick in axis.ticks)
    assert all(len(axis.label(tick)) < 14 for tick in axis.ticks)


def test_one_row_and_none():
    assert len(circles(draw_front(ROWS[:1], None, 5 * GIB))) == 1
    assert circles(draw_front([], None, 5 * GIB)) == []


def test_a_distant_budget_squeezes_no_row():
    """The rows fill the drawing, and their ticks differ."""
    rows = [Row(round(GIB * (1.3 + k / 1e4)), 1.0 - k / 10, 0.0, "zero3", 0, "nothing", 1, {}) for k in range(4)]
    svg = draw_front(rows, rows[0], 80 * GIB)
    assert ">budget 80.00 GiB →</text>" in svg
    assert '<line class="budget"' not in svg
    places = [x for _, x, _ in circles(svg)]
    assert places[-1] - places[0] > 700
    ticks = re.findall(r">([\d.]+ GiB)</text>", svg)
    assert len(ticks) == len(set(ticks)) > 2
