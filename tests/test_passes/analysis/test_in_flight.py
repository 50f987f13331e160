"""Clock, window and pending collectives of a walk through a trace."""

from dataclasses import replace

from passes.analysis.recognise import bucket_of, is_issue
from passes.analysis.seconds import Clock, Pending, Window
from passes.plan import BucketPlan, CostModel, Device, Link, PlainRuntime

import dags
import pytest

COST = CostModel(Link(bandwidth=1e3, latency=0.0), Device(1e9, 1e9, 1e9, 0.0))
PLAN = BucketPlan("M", 2, cost=COST)  # 2 ranks: half of a bucket's bytes go through the link


def issues(plan=PLAN):
    """Two gathers of 2 * 32 * 8 floats, and the reductions of their gradients."""
    trace = dags.build(plan, [[32], [32]], [dags.Step((0,), (0,), 0), dags.Step((1,), (1,), 1)])
    return [b for b in trace.bound_symbols if is_issue(b)]


def test_collectives_of_a_group_follow_each_other():
    first, second = issues()[:2]
    clock = Clock(COST)
    a, b = clock.issue(first), clock.issue(second)
    assert (a.start, a.done, b.start, b.done) == pytest.approx((0, 1.024, 1.024, 2.048))
    clock.compute(0.5)
    assert clock.wait(a) == pytest.approx(0.524)
    assert clock.wait(a) == 0
    assert clock.now == pytest.approx(1.024)
    assert clock.is_done(a, margin=1.0)
    assert not clock.is_done(a, margin=2.0)


def test_groups_have_links_of_their_own():
    clock = Clock(COST)
    clock.issue(issues()[0])
    assert clock.issue(issues(replace(PLAN, runtime=PlainRuntime("another")))[0]).start == 0


def test_a_window_counts_bytes_and_gathers_ahead():
    first, reduce = issues()[:2]
    bucket = bucket_of(first)
    window = Window({PLAN: 2 * bucket.bytes})
    window.enter(first)
    assert window.has_room(bucket)
    assert window.obstacle(bucket, None) == "more than prefetch=1 would be gathered ahead of use"
    assert window.obstacle(bucket, PLAN) == ""
    window.enter(reduce)
    assert not window.has_room(bucket)
    assert window.obstacle(bucket, PLAN) == f"more than {2 * bucket.bytes} bytes would be in flight"
    window.leave(first)
    assert window.obstacle(bucket, None) == ""


def test_one_bucket_may_be_larger_than_the_window():
    first = issues()[0]
    window = Window({PLAN: 1})
    assert window.has_room(bucket_of(first))
    window.enter(first)
    assert not window.has_room(bucket_of(first))


def test_pending_until_the_last_input_comes():
    reduce = issues()[1]
    (grad,) = reduce.args[0]
    pending = Pending([reduce])
    assert pending.ready("x") == []
    assert pending.ready(grad.name) == [reduce]
    assert pending.ready(grad.name) == []
