"""Each invariant, broken on purpose in a trace that held it."""

from dataclasses import replace

from passes.analysis.recognise import is_collective, is_deletion
from passes.analysis.verify import VerificationError, verify, verify_schedule
from passes.comm.sequence import GATHER, TO_HEADS, Part
from passes.plan import Bucket
from passes.plan.plan import ContextPlan, Split

import pytest
import thunder
import torch
from golden import compile_fake, stage
from thunder.core import dtypes, prims
from thunder.core.devices import cpu
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import del_last_used
from torch import nn


def four_linear():
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))


@pytest.fixture
def cmodel(fake_ranks):
    fake_ranks(2)
    return compile_fake(four_linear, torch.ones(3, 4))


def edited(trace, edit):
    """The trace with its lines passed through ``edit``, and with new deletions after the last uses."""
    new = from_trace(trace)
    new.bound_symbols = edit([b for b in trace.bound_symbols if not is_deletion(b)])
    return del_last_used(new)


def at(lines, name, nth=0):
    return [i for i, b in enumerate(lines) if b.sym.name == name][nth]


def moved(lines, source, target):
    lines.insert(target, lines.pop(source))
    return lines


def test_our_schedules_hold(cmodel):
    verify(stage(cmodel, "schedule"))
    verify(stage(cmodel, "schedule", thunder.last_backward_traces))


def lost_wait(lines):
    del lines[at(lines, "wait_all_gather")], lines[at(lines, "torch_linear_0")]
    return lines


def second_wait(lines):
    lines.insert(at(lines, "torch_linear_0"), lines[at(lines, "wait_all_gather")].from_bsym())
    return lines


def wait_before_issue(lines):
    return moved(lines, at(lines, "wait_all_gather"), at(lines, "all_gather"))


def future_read(lines):
    i = at(lines, "torch_linear_0")
    future = lines[at(lines, "all_gather")].output
    lines[i] = lines[i].from_bsym(args=(lines[i].args[0], future))
    return lines


def gathered_twice(lines):
    with thunder.core.trace.tracectx(thunder.core.trace.TraceCtx()):
        again = lines[at(lines, "all_gather")].output.replace(name="again")
    issue = lines[at(lines, "all_gather")].from_bsym(output=again)
    wait = lines[at(lines, "wait_all_gather")]
    wait = wait.from_bsym(args=(again, wait.args[1]), output=())
    i = at(lines, "torch_linear_0")
    return [*lines[:i], issue, wait, *lines[i:]]


def wrong_shape(lines):
    i = at(lines, "all_gather")
    lines[i] = lines[i].from_bsym(args=((lines[at(lines, "torch_linear_0")].args[0],), lines[i].args[1]))
    return lines


def everything_at_once(lines):
    for nth in range(1, 4):
        moved(lines, at(lines, "all_gather", nth), at(lines, "wait_all_gather"))
    return lines


def unsharded_is_saved(lines):
    (result, (saved, other)) = lines[-1].args
    full = lines[at(lines, "wait_all_gather", 3)].output[0]
    lines[-1] = lines[-1].from_bsym(args=(result, ((*saved, full), other)))
    return lines


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lost_wait, r"future \w+ is never waited for"),
        (second_wait, "is waited for twice"),
        (wait_before_issue, "is used before it exists"),
        (future_read, "is read without a wait"),
        (gathered_twice, r"parameter 0.weight is gathered twice"),
        (wrong_shape, r"input should have shape \(2, 4\) and dtype \S+ as 0.weight"),
        (everything_at_once, r"3 buckets are unsharded at once, 1 needed, prefetch 1: 0, 2, 3"),
        (unsharded_is_saved, r"unsharded, of bucket 3 \(3.weight\), is saved for backward"),
    ],
)
def test_broken_forward(cmodel, edit, message):
    with pytest.raises(VerificationError, match=message) as caught:
        verify(edited(stage(cmodel, "schedule"), edit))
    assert "\n> " in str(caught.value)  # the line and its neighbours


def test_use_after_del(cmodel):
    trace = from_trace(stage(cmodel, "schedule"))
    lines = list(stage(cmodel, "schedule").bound_symbols)
    trace.bound_symbols = moved(lines, at(lines, "python_del", 1), at(lines, "torch_linear_0"))
    with pytest.raises(VerificationError, match="is used after it was deleted"):
        verify(trace)


@pytest.mark.parametrize("op", [GATHER, TO_HEADS], ids=lambda op: op.issue.name)
def test_a_sequence_in_flight_is_not_written(op):
    trace, part = TraceCtx(), Part(ContextPlan(2), Split.along(2, 8))
    with tracectx(trace):
        x, y = (TensorProxy(name, shape=(1, 2, 4, 4), device=cpu, dtype=dtypes.float32) for name in "xy")
        future = op.issue(x, part)
        prims.copy_(y, x, grad_enabled=False)
        prims.python_return(op.wait(future, part))
    with pytest.raises(VerificationError, match=f"x is written .* by compute, and may still be read by {future.name}"):
        verify_schedule(trace)
    trace.bound_symbols = moved(trace.bound_symbols, at(trace.bound_symbols, "copy_"), 2)
    verify_schedule(trace)


def test_zero2_gathers_in_backward(cmodel):
    backward = stage(cmodel, "schedule", thunder.last_backward_traces)

    def as_zero2(lines):
        buckets = {}
        for i, b in enumerate(lines):
            if is_collective(b):
                old = b.args[1]
                new = Bucket(old.label, old.name, replace(old.plan, regather=False), old.members, old.dtype)
                lines[i] = b.from_bsym(args=(b.args[0], buckets.setdefault(old, new)))
        return lines

    with pytest.raises(VerificationError, match="bucket 3 is gathered again in backward, where it is to be kept"):
        verify(edited(backward, as_zero2))
