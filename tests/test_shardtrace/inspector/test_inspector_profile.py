"""``shardtrace.profile``: measured times in place of predicted ones."""

import json
import time
from itertools import pairwise

import shardtrace
from shardtrace.inspector.timeline import _stopwatches, stacked
from shardtrace.testing import compile_only

import pytest
import thunder
import torch
import torch.distributed as dist
from hosts import on_absent_cuda
from ranks import on_ranks
from torch import nn


@pytest.fixture(scope="module")
def jitted():
    """A jitted model that was called once, of lines that take far longer than what runs between them."""
    cmodel = thunder.jit(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))))
    cmodel(torch.ones(256, 512)).sum().backward()
    return cmodel


@on_ranks(2)
def test_two_ranks():
    """Rank 1 is late for the steps that rank 0 profiles. Gradients stay the same, and waits are long."""
    late = 0.2  # seconds
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    cmodel, inputs = (
        thunder.jit(shardtrace.fsdp(model, checks=shardtrace.Checks(steps=False))),
        torch.randn(3, 6) + dist.get_rank(),
    )

    def gradients():
        cmodel.zero_grad()
        cmodel(inputs).sum().backward()
        return [p.grad.to_local() for p in cmodel.parameters()]

    before, began = gradients(), time.perf_counter()
    if dist.get_rank() == 1:
        for _ in range(2):
            time.sleep(late)
            gradients()
        return
    with shardtrace.profile(cmodel) as profiled:
        after = [gradients() for _ in range(2)]
    ended = time.perf_counter()
    for again in after:
        assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))

    assert profiled.steps == 2
    predicted, shown = shardtrace.inspect(cmodel), shardtrace.inspect(cmodel, profile=profiled)
    assert (predicted.times, shown.times) == ("predicted", "measured")
    forward, backward = (phase.timeline for phase in shown.record.phases)
    assert all(a < b for clock in (forward, backward) for a, b in pairwise(clock.starts))
    assert late / 2 < backward.end < (ended - began) / 2
    assert late / 2 < sum(row.exposed for row in shown.collectives if row.phase == "forward")
    rows = shown.collectives
    assert [row.issue for row in rows] == [row.issue for row in predicted.collectives]
    assert all(row.start < row.stop - row.exposed and row.times == "measured" for row in rows)
    assert str(shown).count("step, measured") == 1
    assert "measured time" in shown._repr_html_()
    assert shardtrace.inspect(cmodel).times == "predicted"


def test_lines_add_up_to_the_step(jitted):
    with shardtrace.profile(jitted) as profiled:
        began = time.perf_counter()
        jitted(torch.ones(256, 512)).sum().backward()
        step = time.perf_counter() - began
    shown = shardtrace.inspect(jitted, profile=profiled)
    assert 0.5 * step < shown.record.phases[-1].timeline.end < step
    products = sum(
        phase.timeline.starts[i + 1] - phase.timeline.starts[i]
        for phase in shown.record.phases
        for i, line in enumerate(phase.lines)
        if "linear(" in line.code or "matmul(" in line.code
    )
    assert products > 0.2 * step


def test_medians_over_steps(jitted):
    with shardtrace.profile(jitted) as profiled:
        for _ in range(3):
            jitted(torch.ones(256, 512)).sum().backward()
    times = profiled.times(thunder.last_traces(jitted))
    assert times.steps == profiled.steps == 3
    assert "medians over 3 steps" in str(shardtrace.inspect(jitted, profile=profiled))
    runs = profiled._timed[0].backward.runs
    lines = [[marks[i + 1] - marks[i] for marks in runs] for i in range(len(times.seconds[1]))]
    assert times.seconds[1] == tuple(sorted(line)[1] for line in lines)


def test_both_traces_of_a_gpu_are_timed_by_events(fake_ranks):
    """The arguments of backward are lists of tensors."""
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4), init_policy=shardtrace.InitPolicy(device="cuda")))
    compile_only(cmodel, ((on_absent_cuda(3, 4),), {}))
    stopwatches = _stopwatches(thunder.compile_stats(cmodel).interpreter_cache[-1])
    assert [watch._on_cuda for watch in stopwatches] == [True, True]


def test_what_was_compiled_is_back_afterwards(jitted):
    entries = list(thunder.compile_stats(jitted).interpreter_cache)
    with pytest.raises(KeyError), shardtrace.profile(jitted):
        raise KeyError
    assert all(a is b for a, b in zip(entries, thunder.compile_stats(jitted).interpreter_cache, strict=True))


def test_chrome_trace(fake_ranks, tmp_path):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 4))))
    cmodel(torch.ones(3, 6)).sum().backward()
    with shardtrace.profile(cmodel) as profiled:
        cmodel(torch.ones(3, 6)).sum().backward()
    shown = shardtrace.inspect(cmodel, profile=profiled)
    events = json.loads(shown.to_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    assert events[0]["args"]["name"] == "Sequential, ZeRO-3 over 2 ranks, measured"
    lanes = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append(event)
    assert len(lanes) == 3  # compute, and two collectives at once on one link
    for lane in lanes.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(lane))
    assert sum(len(lane) for tid, lane in lanes.items() if tid) == len(shown.collectives)
    spans = shown.record.phases[0].timeline.spans
    assert [[s.bucket for s in row] for row in stacked(spans)] == [["0", "2"], ["1"]]


def test_what_cannot_be_shown(jitted):
    with (
        pytest.raises(TypeError, match=r"takes what thunder.jit returned, not Linear"),
        shardtrace.profile(nn.Linear(3, 3)),
    ):
        pass
    fresh = thunder.jit(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match=r"call it once before profile\(\)"), shardtrace.profile(fresh):
        pass
    with shardtrace.profile(jitted) as profiled:
        pass
    with pytest.raises(ValueError, match=r"did not run inside profile\(\)"):
        shardtrace.inspect(jitted, profile=profiled)
    with shardtrace.profile(jitted) as profiled:
        jitted(torch.ones(256, 512))
    with pytest.raises(ValueError, match=r"its backward did not run"):
        shardtrace.inspect(jitted, profile=profiled)
    with pytest.raises(TypeError, match="a profile is of a jitted model"):
        shardtrace.inspect(nn.Linear(3, 3), torch.ones(2, 3), world_size=2, profile=profiled)
