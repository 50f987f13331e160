"""The search: budgets, recipes, and the order of what it finds."""

import ctypes
from dataclasses import replace

from shardtrace.planner.search import (
    EXACT,
    NOTHING,
    Candidate,
    Point,
    Program,
    explore,
    explore_near,
    fastest,
    front,
    on_host,
)

import pytest
import scipy.optimize


@pytest.fixture(scope="module")
def points(family):
    explore(family)
    return family.points


def test_the_blocks_are_one_class(family):
    (blocks,) = family.classes
    assert blocks.labels == tuple(f"h.{i}" for i in range(6))
    assert list(family.variants) == [NOTHING, "cheap", "full"]
    assert set(family.outside) == family.buckets.keys() - set(blocks.labels)


def test_no_recipe_beats_the_search(points):
    recipes = [p for p in points if p.name]
    assert len(recipes) == 6  # nothing, cheap or full, with everything gathered again or kept
    for recipe in recipes:
        chosen = fastest(points, recipe.estimate.peak)
        assert chosen.estimate.seconds <= recipe.estimate.seconds


def test_blocks_may_keep_what_they_save_on_the_host(family, points):
    """Copies are waited for if they take longer than the blocks beside them; what travels takes no memory meanwhile."""
    away = replace(family, variants=family.variants | on_host(family.variants), _points={})
    every = tuple((f"h.{i}", "host") for i in range(6))
    found, plain = away.point(Candidate("zero", every)).estimate, family.point(Candidate("zero")).estimate
    assert found.away > 0
    assert found.memory["saved"] < plain.memory["saved"] / 2
    assert found.seconds >= plain.seconds
    explore_near(away, plain.peak * 0.9)
    best = fastest(away.points, plain.peak * 0.9)
    assert best.estimate.seconds <= fastest(points, plain.peak * 0.9).estimate.seconds


def test_more_memory_is_never_slower(points):
    sizes = sorted({p.estimate.peak for p in points})
    seconds = [fastest(points, size).estimate.seconds for size in sizes]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]
    assert fastest(points, sizes[0] - 1) is None


def test_there_are_steps_between_the_recipes(points):
    """Some blocks recompute, and some buckets are kept."""
    assert any(0 < len(p.candidate.recomputed) < 6 or 0 < len(p.candidate.kept) < 8 for p in front(points))


def test_the_front_is_sorted_both_ways(points):
    found = front(points)
    assert [p.estimate.peak for p in found] == sorted(p.estimate.peak for p in found)
    assert [p.estimate.seconds for p in found] == sorted((p.estimate.seconds for p in found), reverse=True)


def test_of_equals_the_smaller_one(points):
    point = points[0]
    larger = Point(Candidate("other"), point.estimate._replace(peak=point.estimate.peak + 1))
    assert fastest([larger, point], 1e12) is point


def test_first_blocks_recompute_and_last_buckets_are_kept(points):
    for point in points:
        for what in ("full",):
            numbers = sorted(int(name[2:]) for name, w in point.candidate.recomputed if w == what)
            assert numbers == list(range(len(numbers)))
        kept = sorted(int(label[2:]) for label in point.candidate.kept if label.startswith("h."))
        assert kept == list(range(6 - len(kept), 6))


def test_what_the_solver_prints_is_dropped(family, capfd, monkeypatch):
    """Also what stays in C's buffer."""
    solve = scipy.optimize.milp

    def noisy(*args, **kwargs):
        ctypes.CDLL(None).printf(b"degeneracy?\n")
        return solve(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", noisy)
    assert Program(family, EXACT).solve(1e9) is not None
    ctypes.CDLL(None).fflush(None)
    print("ours", flush=True)
    assert capfd.readouterr().out == "ours\n"


@pytest.fixture(scope="module")
def numbers(family):
    """Steps with each number of first blocks that recompute all and of next ones that recompute the cheap."""
    found = replace(family, _points={})
    names = [name for c in family.classes for name, _ in c.calls]
    for full in range(len(names) + 1):
        for cheap in range(len(names) + 1 - full):
            recomputed = tuple(zip(names, ["full"] * full + ["cheap"] * cheap, strict=False))
            for kept in (frozenset(), frozenset(family.buckets)):
                found.point(Candidate(family.name, recomputed, kept, 1))
    return found.points


@pytest.mark.parametrize("part", [0.0, 0.05, 0.3, 0.7])
def test_near_a_budget_no_number_of_blocks_is_faster(family, numbers, part):
    near, peaks = replace(family, _points={}), [p.estimate.peak for p in numbers]
    budget = min(peaks) + part * (max(peaks) - min(peaks))
    explore_near(near, budget)
    assert fastest(near.points, budget).estimate.seconds <= 1.05 * fastest(numbers, budget).estimate.seconds
