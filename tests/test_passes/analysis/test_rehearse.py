"""What a line does with memory is remembered for inputs that lie alike."""

from passes.analysis.dry_run import Layout, Memory, Result, layouts, rehearse
from passes.plan.runtime import DONE

import pytest
import torch


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


class Runs:
    """Counts runs of a function of ``a`` and ``b``: a view of ``a``, a new value, and a future with it."""

    def __init__(self):
        self.facts, self.number = {}, 0

    def __call__(self, a, b, what="sum"):
        def run():
            self.number += 1
            new = Layout(Memory(36), 0, a.shape, (3, 1), a.dtype)
            view = a._replace(shape=a.shape[::-1], strides=a.strides[::-1])
            future = [DONE, DONE], [new._replace(offset=3, shape=(2, 3)), b], None
            return Result({"view": view, "new": new, "future": future}, 7)

        return rehearse(self.facts, what, {"a": a, "b": b}, ("view", "new", "future"), run)


def test_a_second_run_is_remembered():
    runs = Runs()
    for _ in range(2):
        a, b = layouts([meta(3, 3), meta(3, 3)])
        outputs, temporary = runs(a, b)
        assert temporary == 7
        assert outputs["view"].memory is a.memory
        assert outputs["view"].strides == (1, 3)
        works, (part, given), nothing = outputs["future"]
        assert (works, nothing) == ([DONE, DONE], None)
        assert part.memory is outputs["new"].memory
        assert part.offset == 3
        assert given.memory is b.memory
        assert outputs["new"].memory not in (a.memory, b.memory)
        assert outputs["new"].memory.nbytes == 36
    assert runs.number == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda a: (meta(3, 1), meta(3, 3)),  # another shape
        lambda a: (meta(3, 3).t(), meta(3, 3)),  # other strides
        lambda a: (meta(3, 3), meta(3, 3, dtype=torch.float64)),
        lambda a: (a, a),  # the same memory
        lambda a: (meta(4, 3)[:3], meta(3, 3)),  # a larger storage
        lambda a: (meta(4, 3)[1:], meta(3, 3)),  # another offset
    ],
)
def test_other_layouts_run_again(other):
    runs = Runs()
    runs(*layouts([meta(3, 3), meta(3, 3)]))
    a, b = layouts([*other(meta(3, 3))])
    outputs, _ = runs(a, b)
    assert runs.number == 2
    assert outputs["new"].shape == a.shape


def test_other_work_runs_again():
    runs = Runs()
    runs(*layouts([meta(2, 2), meta(2, 2)]))
    runs(*layouts([meta(2, 2), meta(2, 2)]), what="product")
    assert runs.number == 2


def test_a_future_of_another_type_is_not_remembered():
    facts, futures = {}, []

    def run():
        futures.append(object())
        return Result({"future": (futures[-1], layouts(meta(2)))}, 0)

    for _ in range(2):
        outputs, _ = rehearse(facts, "wire", {}, ("future",), run)
        assert outputs["future"][0] is futures[-1]
    assert facts == {}
