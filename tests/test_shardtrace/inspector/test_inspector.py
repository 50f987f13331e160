"""``shardtrace.inspect``: what it returns, in tables and as text, and what it says where there is nothing to see."""

import json
import re
from itertools import pairwise

import shardtrace
from shardtrace.inspector.summary import traffic

import pytest
import thunder
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from golden import compile_fake
from models import Block
from torch import nn


def two_linear():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5))


@pytest.fixture(scope="module")
def shown():
    return shardtrace.inspect(two_linear(), torch.ones(3, 6), world_size=2)


def test_text(shown):
    head, _, passes = str(shown).partition("passes:")
    head = head.translate(str.maketrans(" ▁▂▃▄▅▆▇█·µ✓", " 12345678|u="))  # expecttest writes ASCII alone
    assert_expected_inline(
        re.sub(r"\b(f?t)\d+\b", r"\1N", head),
        """\
Sequential: ZeRO-3 over 2 ranks, seen from rank 0 | buckets by block | prefetch 1
predicted with the rates of shardtrace's default CPU, 1gbit (the default) between ranks

step, predicted       1.05 ms, of which 1.02 ms (97 % of the step) wait for communication
peak memory           8.43 KiB at line 36 of backward: ftN = reduce_scatter((tN, tN), b_0)
sent by each rank     4.04 KiB in 5 collectives

time:
                 forward                      backward
  compute                      3             2             181
  exposed        8888888888888858888888888888688888888888887 7888888888888888888888888888
  parameters     8888888888888888888888888888688888888888887
  gradients                                                 48888888888888888888888888888
  memory         666666666666666555555555555555555555555555568777777777777766666666666666

collectives of a step, in bytes of unsharded buckets:
  forward all_gather       2  3.27 KiB  P = 3.27 KiB      =
  backward all_gather      1  1.52 KiB  P = 3.27 KiB  fewer
  backward reduce_scatter  2  3.27 KiB  G = 3.27 KiB      =

largest tensors saved for backward:
  tN cpu f32[3, 64]  768 B  1

""",
    )
    assert "shardtrace: insert_synchronize" in passes


def test_stages(shown):
    names = [stage.name for stage in shown.stages if stage.is_ours and stage.phase != "prologue"]
    ours = [f"shardtrace: {name}" for name in ("shard_parameters", "insert_synchronize", "regather", "schedule")]
    assert names == [*ours, "shardtrace: schedule"]
    unchanged = {stage.name for stage in shown.stages if stage.is_unchanged}
    assert "shardtrace: regather" in unchanged  # tags alone
    scheduled = [stage for stage in shown.stages if stage.phase == "backward"][-1]
    assert set(scheduled.changes) == {"kept", "moved"}
    prologue = shown.stages[-1]
    assert prologue.phase == "prologue"
    checked = (
        "check_tensors((input, t_0_weight_dtensor, t_0_bias_dtensor, t_2_weight_dtensor, t_2_bias_dtensor), metadata)"
    )
    assert checked in [line.code for line in prologue.lines]


def test_collectives(zoo):
    rows = zoo.collectives
    assert [row.kind for row in rows if row.phase == "forward"] == ["all_gather"] * 4
    assert all(row.issue < row.wait for row in rows)
    assert all(row.why_issued.startswith("issued here: ") for row in rows)
    assert all(row.why_waited.startswith("waited for here: ") for row in rows)
    assert rows[2].why_issued == "issued here: not earlier, as more than prefetch=1 would be gathered ahead of use"
    frame = rows.to_pandas()
    assert frame.groupby("phase").bytes.sum().to_dict() == {
        phase: sum(row.bytes for row in rows if row.phase == phase) for phase in ("forward", "backward")
    }


def test_memory(fake_ranks):
    fake_ranks(4)
    cmodel = compile_fake(Block, torch.ones(2, 6))
    memory = shardtrace.memory(cmodel)
    rows = shardtrace.inspect(cmodel).memory
    assert [row.total for row in rows] == [row.total for part in memory[:2] for row in part.lines]
    assert max(row.during for row in rows) == memory.peak
    assert list(rows.to_pandas().columns) == list(rows[0]._fields)


def test_totals(zoo):
    rows, totals = zoo.collectives, zoo.totals
    assert totals.seconds == zoo.memory[-1].time  # when the last line, the return, begins
    assert totals.exposed == pytest.approx(sum(row.exposed for row in rows))
    assert totals.peak == max(row.during for row in zoo.memory)
    assert totals.collectives == len(rows)
    assert 0 < totals.sent < sum(row.bytes for row in rows)


def test_times_never_run_backwards(zoo):
    times = [row.time for row in zoo.memory]
    assert times == sorted(times)


def test_chrome_trace(zoo, tmp_path):
    events = json.loads(zoo.to_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    on_link = [event for event in spans if event["tid"] == 1]
    assert [event["name"] for event in on_link] == [
        f"{row.kind} {row.bucket}" for row in sorted(zoo.collectives, key=lambda r: r.start)
    ]
    computing = [event for event in spans if event["tid"] == 0]
    for lane in (computing, on_link):
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(lane))
    peak = max(sum(event["args"].values()) for event in events if event["ph"] == "C")
    assert peak == max(row.total for row in zoo.memory)


def test_hybrid(tmp_path):
    """Gradients of shards go over a second link, which forward does not use."""
    strategy = {"sharding_strategy": "hybrid_zero3", "mesh_shape": (8, 4)}
    shown = shardtrace.inspect(two_linear(), torch.ones(3, 6), **strategy)
    assert str(shown).startswith("Sequential: hybrid ZeRO-3 over 32 ranks, seen from rank 0")
    spans = [span for phase in shown.record.phases for span in phase.timeline.spans]
    assert {(span.kind, span.link) for span in spans} == {("all_gather", 0), ("reduce_scatter", 0), ("all_reduce", 1)}
    assert shown.record.phases[1].timeline.links == ["4 ranks", "8 ranks"]
    events = json.loads(shown.to_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "all_reduce" and event["tid"] == 2 for event in events) == 2
    html = shown._repr_html_()
    assert "network 0" in html
    assert "network 1" in html
    with pytest.raises(ValueError, match=r"a mesh of shape \(8, 4\) has 32 ranks, not world_size=64"):
        shardtrace.inspect(two_linear(), torch.ones(3, 6), world_size=64, **strategy)
    with pytest.raises(ValueError, match=r"mesh_shape must be \(replicas, shards\)"):
        shardtrace.inspect(two_linear(), torch.ones(3, 6), mesh_shape=(8,), sharding_strategy="hybrid_zero3")


def test_nothing_is_run_and_the_model_stays_as_it_is():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x) if isinstance(x, torch.Tensor) else None

    model = Model(6, 6)
    before = model.weight.clone()
    shardtrace.inspect(model, {"x": torch.ones(2, 6)}, world_size=64, rank=63)
    assert torch.equal(model.weight, before)
    assert type(model) is Model
    assert not dist.is_initialized()


def test_a_step_that_never_runs_has_no_memory():
    size = 2**17  # a shard of 34 GB
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(size, size, bias=False), nn.BatchNorm1d(size))
    shown = shardtrace.inspect(model, torch.ones(2, size, device="meta"), world_size=2)
    assert max(row.total for row in shown.memory) > size * size * 4


def test_meta_model_of_any_number_of_ranks():
    with torch.device("meta"):
        model = two_linear()
    shown = shardtrace.inspect(
        model,
        (torch.ones(3, 6),),
        world_size=1024,
        sharding_strategy="zero2",
        compile_policy=shardtrace.CompilePolicy(prefetch=2),
    )
    assert str(shown).startswith(
        "Sequential: ZeRO-2 over 1,024 ranks, seen from rank 0 · buckets by block · prefetch 2"
    )


def test_not_called_yet(fake_ranks):
    fake_ranks(2)
    text = str(shardtrace.inspect(thunder.jit(shardtrace.fsdp(two_linear()))))
    assert "ZeRO-3 over 2 ranks" in text
    assert "was not called yet" in text


def test_not_sharded():
    cmodel = thunder.jit(two_linear())
    cmodel(torch.ones(3, 6))
    shown = shardtrace.inspect(cmodel)
    assert "not sharded by shardtrace.fsdp" in str(shown)
    assert shown.collectives == []
    assert len(shown.memory) > 10


def test_several_compilations():
    cmodel = thunder.jit(two_linear())
    for rows in (3, 4, 3):
        cmodel(torch.ones(rows, 6))
    assert "f32[3, 64]" in str(shardtrace.inspect(cmodel))  # that of the last call
    assert "compilation 0 of 2" in str(shardtrace.inspect(cmodel))
    assert "f32[4, 64]" in str(shardtrace.inspect(cmodel, compilation=1))
    with pytest.raises(IndexError, match="there are 2 compilations, so none with number 2"):
        shardtrace.inspect(cmodel, compilation=2)


def test_function_that_closes_over_a_model(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(two_linear())

    def step(x):
        return model(x).sum()

    cstep = thunder.jit(step)
    cstep(torch.ones(3, 6))
    shown = shardtrace.inspect(cstep)
    assert shown.record.setup.model == "Sequential"
    assert [row.bucket for row in shown.collectives] == ["0", "2", "2", "2", "0"]


def test_wrong_arguments(fake_ranks):
    with pytest.raises(TypeError, match=r"takes what .* returned, or a module, not int"):
        shardtrace.inspect(3)
    with pytest.raises(TypeError, match="pass example_inputs and world_size as well"):
        shardtrace.inspect(two_linear())
    with pytest.raises(TypeError, match="without further arguments"):
        shardtrace.inspect(thunder.jit(two_linear()), torch.ones(3, 6))
    with pytest.raises(ValueError, match="there is no rank 4 of 4"):
        shardtrace.inspect(two_linear(), torch.ones(3, 6), world_size=4, rank=4)
    fake_ranks(2)
    with pytest.raises(RuntimeError, match="in a process group already"):
        shardtrace.inspect(two_linear(), torch.ones(3, 6), world_size=4)
    with pytest.raises(TypeError, match="is sharded: pass what"):
        shardtrace.inspect(shardtrace.fsdp(two_linear()), torch.ones(3, 6), world_size=2)


@pytest.mark.parametrize(
    ("strategy", "name", "formulas"),
    [
        ("ddp", "DDP", {"all_reduce": "G"}),
        ("zero1", "ZeRO-1", {"all_gather": "P", "reduce_scatter": "G"}),
        ("owner", "ZeRO-3 by owners", {"broadcast": "P", "reduce": "G"}),
        ({"0.*": "ddp", "*": "zero2"}, "ZeRO-2 and DDP", {"all_gather": "P", "reduce_scatter": "G", "all_reduce": "G"}),
    ],
)
def test_traffic_of_every_strategy(strategy, name, formulas, tmp_path):
    shown = shardtrace.inspect(two_linear(), torch.ones(3, 6), world_size=2, sharding_strategy=strategy)
    assert str(shown).splitlines()[0].startswith(f"Sequential: {name} over 2 ranks")
    rows = traffic(shown.record)
    assert {row.kind: row.formula for row in rows if row.number} == formulas
    assert all(row.agrees for row in rows if (row.phase, row.formula) != ("backward", "P"))
    assert name in shown.to_html(tmp_path / "page.html").read_text()


def test_traffic_in_mixed_precision():
    shown = shardtrace.inspect(
        two_linear(), torch.ones(3, 6), world_size=2, mp_policy="bf16", sharding_strategy="zero2"
    )
    assert all(row.agrees for row in traffic(shown.record))


def test_title_is_the_class_of_what_was_jitted(fake_ranks):
    """Also if only a part of it is sharded. That of a function is the class of the model that it calls."""

    class FSDPNet(nn.Sequential):
        pass

    fake_ranks(2)
    net = FSDPNet(nn.Linear(4, 4), nn.Tanh())
    shardtrace.fsdp(net[0])
    jitted = thunder.jit(net)
    step = thunder.jit(lambda x: net[0](x).sum())
    for run, title in ((jitted, "FSDPNet"), (step, "Linear")):
        run(torch.ones(2, 4)).sum().backward()
        assert shardtrace.inspect(run).record.setup.model == title
