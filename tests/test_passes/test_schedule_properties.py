"""Invariants of every schedule, on random traces: limits, order, results, and no wait of compute for a collective that
could have been issued earlier."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from dataclasses import dataclass, replace

import shardtrace  # noqa: F401
from passes.analysis.recognise import (
    bucket_of,
    is_collective,
    is_deletion,
    is_gather,
    is_issue,
    is_return,
    is_unpack,
    is_wait,
)
from passes.analysis.seconds import collective_seconds, compute_seconds
from passes.analysis.verify import VerificationError, verify
from passes.plan import BucketPlan, CostModel, Device, Link, PlainRuntime
from passes.schedule import schedule

import dags
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SPEED = st.sampled_from([1e3, 1e5, 1e7, 1e9])  # bytes/s: from all communication exposed to all hidden


@st.composite
def made_up(draw):
    """A plan (without a group), the rows of its buckets, and the steps of a trace that uses them."""
    rows = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=8))
    cost = CostModel(Link(draw(SPEED), draw(st.sampled_from([0.0, 1e-3]))), Device(1e9, 1e9, draw(SPEED), 1e-6))
    limit = draw(st.one_of(st.none(), st.integers(1, 8000)))
    plan = BucketPlan("M", 2, prefetch=draw(st.integers(0, 3)), max_inflight_bytes=limit, cost=cost)
    unreduced = set(range(len(rows)))
    steps = []
    for n in range(draw(st.integers(1, 14))):
        values = draw(st.lists(st.integers(0, n), min_size=1, max_size=2))
        uses = draw(st.lists(st.integers(0, len(rows) - 1), max_size=2, unique=True))
        reduce = draw(st.one_of(st.none(), st.sampled_from(sorted(unreduced)))) if unreduced else None
        unreduced.discard(reduce)
        steps.append(dags.Step(tuple(values), tuple(uses), reduce))
    return plan, rows, steps, draw(st.booleans())


every = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def compute(lines):
    return [b for b in lines if not (is_collective(b) or is_deletion(b))]


@every
@given(made_up())
def test_the_schedule_holds_its_limits_and_is_a_function_of_the_trace(made):
    plan, rows, steps, backward = made
    trace = dags.build(plan, rows, steps, backward=backward)
    new = schedule(trace)
    if new is trace:
        return
    verify(new)
    lines = new.bound_symbols
    assert [b.flat_proxy_outs for b in compute(lines)] == [b.flat_proxy_outs for b in compute(trace.bound_symbols)]
    assert Counter(b.sym.name for b in lines if is_collective(b)) == Counter(
        b.sym.name for b in trace.bound_symbols if is_collective(b)
    )
    assert [str(b) for b in schedule(trace).bound_symbols] == [str(b) for b in lines]
    waits_stand_before_first_use(lines)
    limits_hold(lines, plan)


def waits_stand_before_first_use(lines):
    """Only other collectives are between the wait for a gather and the line that uses it."""
    for i, bsym in enumerate(lines):
        if is_wait(bsym) and is_gather(bsym):
            following = next(b for b in lines[i:] if not (is_collective(b) or is_deletion(b)))
            used = {a.name for a in following.flat_proxy_args}
            assert is_return(following) or used & {o.name for o in bsym.flat_proxy_outs}


def limits_hold(lines, plan):
    inflight, ahead = {}, 0
    largest = max(bucket_of(b).bytes for b in lines if is_issue(b))
    limit = plan.max_inflight_bytes or (plan.prefetch + 1) * largest
    for bsym in lines:
        if is_issue(bsym):
            inflight[bsym.output.name] = bucket_of(bsym).bytes
            assert sum(inflight.values()) <= limit or len(inflight) == 1
            ahead += is_gather(bsym)
            assert ahead <= plan.prefetch + 1
        elif is_wait(bsym):
            del inflight[bsym.args[0].name]
            ahead -= is_gather(bsym)
        elif not is_deletion(bsym) and not is_unpack(bsym):
            assert ahead <= plan.prefetch  # while compute runs, all gathers in flight are ahead of use


@dataclass
class At:
    """Times at a line of a schedule that runs as its cost model predicts."""

    now: float = 0.0
    link: float = 0.0


def stalls(lines, plan):
    """The futures of the gathers that compute has to wait for."""
    at, done, found = At(), {}, []
    for bsym in lines:
        if is_issue(bsym):
            done[bsym.output.name] = at.link = max(at.now, at.link) + collective_seconds(plan.cost, bucket_of(bsym))
        elif is_wait(bsym):
            future = bsym.args[0].name
            if is_gather(bsym) and done[future] > at.now + 1e-12:
                found.append(future)
            at.now = max(at.now, done[future])
        elif not is_deletion(bsym):
            at.now += compute_seconds(plan.cost, bsym)
    return found


@every
@given(made_up())
def test_compute_waits_for_no_gather_that_could_have_been_issued_earlier(made):
    plan, rows, steps, backward = made
    trace = dags.build(plan, rows, steps, backward=backward)
    lines = schedule(trace).bound_symbols
    largest = max((bucket_of(b).bytes for b in lines if is_issue(b)), default=0)
    limit = plan.max_inflight_bytes or (plan.prefetch + 1) * largest
    for future in stalls(lines, plan):
        issued = next(i for i, b in enumerate(lines) if is_issue(b) and b.output.name == future)
        before = [i for i in range(issued) if not (is_collective(lines[i]) or is_deletion(lines[i]))]
        if not before or is_unpack(lines[before[-1]]):
            continue  # nothing is computed before it
        earlier = lines[: before[-1]]
        gathers = [b.output.name for b in lines[:issued] if is_issue(b) and is_gather(b)]
        waited = {b.args[0].name for b in earlier if is_wait(b)}
        under_way = [b for b in earlier if is_issue(b) and b.output.name not in waited]
        ahead = sum(is_gather(b) for b in under_way)
        inflight = sum(bucket_of(b).bytes for b in under_way)
        follows_a_later_one = any(name not in {b.output.name for b in earlier if is_issue(b)} for name in gathers)
        no_room = bool(under_way) and inflight + bucket_of(lines[issued]).bytes > limit
        assert follows_a_later_one or ahead >= plan.prefetch or no_room


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=made_up())
def test_the_result_is_the_same_bit_for_bit(single_rank, made):
    plan, rows, steps, backward = made
    plan = replace(plan, runtime=PlainRuntime(torch.distributed.group.WORLD), world_size=1)
    trace = dags.build(plan, rows, steps, backward=backward)
    for expected, got in zip(dags.run(trace), dags.run(schedule(trace)), strict=True):
        assert torch.equal(expected, got)


def chain(plan, buckets=4):
    """Each step uses the next bucket, and reduces it."""
    return dags.build(plan, [[32]] * buckets, [dags.Step((i,), (i,), i) for i in range(buckets)])


def collectives(trace):
    words = {
        "all_gather": "gather",
        "reduce_scatter": "reduce",
        "wait_all_gather": "wait",
        "wait_reduce_scatter": "done",
    }
    return " ".join(
        f"{words[b.sym.name]}{bucket_of(b).label}" if is_collective(b) else "|"
        for b in trace.bound_symbols
        if is_collective(b) or b.sym.name == "mul"
    )


def cost(link, memory):
    return CostModel(Link(link, 0.0), Device(1e12, 1e12, memory, 0.0))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # everything is hidden: gathers arrive just in time, reductions are done soon
        (cost(1e6, 1e3), "gather0 wait0 gather1 | reduce0 wait1 done0 gather2 | reduce1 wait2 done1 gather3 | "),
        # nothing is hidden: gathers are one bucket ahead, a reduction is waited for when the next needs its room
        (cost(1e3, 1e9), "gather0 gather1 wait0 | reduce0 wait1 gather2 | done0 reduce1 wait2 gather3 | "),
    ],
)
def test_the_cost_model_decides(model, expected):
    plan = BucketPlan("M", 2, cost=model)
    assert collectives(schedule(chain(plan))).startswith(expected)


def test_64_blocks_cost_at_most_9_times_what_8_do():
    def calls(blocks):
        """Function calls of scheduling and verifying. Time is proportional to them, but noisier."""
        plan = BucketPlan("M", 2)
        steps = [
            dags.Step((i * 6 + k,), (i,) if k == 0 else (), i if k == 5 else None)
            for i in range(blocks)
            for k in range(6)
        ]
        trace = dags.build(plan, [[4] * 12] * blocks, steps)
        profile = cProfile.Profile()
        profile.runcall(lambda: verify(schedule(trace)))
        return pstats.Stats(profile).total_calls

    assert calls(64) <= 9 * calls(8)


def test_verify_finds_too_many_bytes_in_flight():
    plan = BucketPlan("M", 2, prefetch=3)
    trace = schedule(chain(plan))
    strict = replace(plan, max_inflight_bytes=1)
    for bsym in trace.bound_symbols:
        if is_collective(bsym):
            bucket_of(bsym).plan = strict
    with pytest.raises(VerificationError, match="bytes are in flight with bucket 1, max_inflight_bytes is 1"):
        verify(trace)
