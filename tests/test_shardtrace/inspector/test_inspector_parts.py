"""The parts of an inspection: lines, differences, times, modules."""

import re

import shardtrace
from passes.plan import CostModel, Device, Link
from shardtrace.inspector.drawing import round_size, round_step, shortened
from shardtrace.inspector.lines import Mark, Template, diff, fold
from shardtrace.inspector.page import highlight
from shardtrace.inspector.step_data import count, duration, size
from shardtrace.inspector.summary import Totals

import pytest
import thunder
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn


def marks(old, new):
    signs = {Mark.KEPT: " ", Mark.ADDED: "+", Mark.MOVED: "~", Mark.REMOVED: "-"}
    return [signs[mark] + (old if mark is Mark.REMOVED else new)[place] for mark, place in diff(old, new)]


def test_diff():
    assert marks("abcdef", "abXdef") == [" a", " b", "+X", "-c", " d", " e", " f"]
    assert marks("abcdef", "acdebf") == [" a", " c", " d", " e", "~b", " f"]
    assert marks("aab", "aaab") == [" a", " a", "+a", " b"]
    assert marks("", "ab") == ["+a", "+b"]
    assert marks("ab", "") == ["-a", "-b"]


@given(st.lists(st.integers(0, 12)), st.lists(st.integers(0, 12)))
def test_diff_tells_all(old, new):
    rows = diff(old, new)
    assert [place for mark, place in rows if mark is not Mark.REMOVED] == list(range(len(new)))
    gone = [old[place] for mark, place in rows if mark is Mark.REMOVED]
    came = [new[place] for mark, place in rows if mark is Mark.ADDED]
    assert sorted(old) == sorted([*gone, *(new[place] for mark, place in rows if mark in (Mark.KEPT, Mark.MOVED))])
    assert not set(gone) & set(came)


def test_repeated_blocks_share_templates(three_blocks):
    lines = three_blocks.stages[0].lines
    assert len({line.template for line in lines}) < len(lines) / 2
    (linear, *_) = [line for line in lines if "linear_0(" in line.code]
    assert linear.template.pieces == ("(", ",) = torch_linear_0(", ", ", ", ", ")")
    assert linear.results == linear.names[:1]
    assert [kind.text for kind in linear.template.types] == ["cpu f32[2, 7]"]
    assert linear.template.types[0].bytes == 2 * 7 * 4
    assert (linear.source.file, linear.source.text) == (
        "models.py",
        "return x + F.linear(torch.tanh(self.up(y)), self.down.t())",
    )


def test_futures_are_of_what_is_on_the_wire():
    policy = shardtrace.CommPolicy(gather_dtype="int8", reduce_wire="int8")
    shown = shardtrace.inspect(nn.Linear(64, 64), torch.ones(2, 64), world_size=2, comm_policy=policy)
    lines = [line for phase in shown.record.phases for line in phase.lines]
    types = [kind for line in lines for kind in line.template.types if kind and kind.text.startswith("future")]
    shard = 2048 + 8 * 4 + 32 * 4  # a byte for each element of the weight, a scale for each 256, the bias in f32
    assert types == [("future, 4160 int8", 2 * shard), ("future, 2080 int8", shard)]


def test_lines_belong_to_the_module_that_asked_for_them():
    class Norm(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)])
            self.norm = Norm()

        def forward(self, x):
            for block in self.blocks:
                x = torch.exp(block(x))
            return self.norm(x)

    shown = shardtrace.inspect(
        Model(), torch.ones(2, 4), world_size=2, compile_policy=shardtrace.CompilePolicy(repeated_blocks="inline")
    )
    forward, backward = shown.record.phases
    where = {
        line.code.partition(" = ")[2].partition("(")[0].rpartition(".")[2] + f" {k}": module
        for k, (line, module) in enumerate(zip(forward.lines, forward.modules, strict=True))
        if module is not None
    }
    assert [f"{name.split()[0]} {module or 'Model'}" for name, module in where.items()] == [
        "torch_linear_0 blocks.0.0", "torch_tanh_0 blocks.0.1", "torch_linear_1 blocks.0.2", "torch_exp_0 Model",
        "torch_linear_1 blocks.1.0", "torch_tanh_0 blocks.1.1", "torch_linear_1 blocks.1.2", "torch_exp_0 Model",
        "torch_softmax_0 norm",
    ]  # fmt: skip
    products = [m for line, m in zip(backward.lines, backward.modules, strict=True) if "aten_mm(" in line.code]
    assert [m.split(".")[1] for m in products] == sorted((m.split(".")[1] for m in products), reverse=True)


def test_lines_without_results_are_shown(fake_ranks):
    """Such as ``shape`` and ``dim`` of an intermediate value, which Thunder traces as lines around a model."""
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Linear(6, 8))

    @thunder.jit
    def step(x):
        logits = model(x)
        return logits.view(-1, logits.size(-1))

    step(torch.ones(2, 3, 6))
    shown = shardtrace.inspect(step)
    assert any("_ = " in line.code or "_) = " in line.code for line in shown.stages[0].lines)
    assert shown.collectives
    assert shown._repr_html_()


def test_equal_blocks_have_equal_lines(three_blocks):
    """Also the first lines of a block, which read no parameter, and the last of its backward."""
    for phase in three_blocks.record.phases:
        lines = {}
        for line, module in zip(phase.lines, phase.modules, strict=True):
            if module:
                block, _, part = module.partition(".")
                lines.setdefault(block, []).append((part, line.template.pieces))
        blocks = list(lines.values())
        assert len(blocks) == 3
        assert blocks[0] == blocks[1]
        assert blocks[2] == blocks[1]


def test_fusions_belong_to_the_module_around_their_parameters():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 4))
    fused = {"executors": ["torchcompile"]}
    shown = shardtrace.inspect(model, torch.ones(2, 4), world_size=2, bucketing_strategy=1, jit_options=fused)
    forward = shown.record.phases[0]
    fusions = [(len(line.parts), m) for line, m in zip(forward.lines, forward.modules, strict=True) if line.parts]
    assert fusions == [(4, "")]
    assert "linear(" in forward.lines[forward.modules.index("")].parts[0].code


def test_repeated_modules_are_folded():
    names = ["wte", *(f"h.{k}.{part}" for k in range(3) for part in ("attn", "mlp")), "h.3.attn"]
    tree = fold(names, lambda name: name.rpartition(".")[2] if not name[-1:].isdigit() else "Block")
    wte, h = tree.children
    assert wte.names == ("wte",)
    assert [branch.names for branch in h.children] == [("h.0", "h.1", "h.2"), ("h.3",)]
    assert [branch.names for branch in h.children[0].children] == [("h.0.attn",), ("h.0.mlp",)]


def test_timeline_of_a_slow_link():
    second = CostModel(Link(bandwidth=1e12, latency=1.0), Device(1e12, 1e12, 1e12, overhead=0.25))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    shown = shardtrace.inspect(
        model, torch.ones(2, 4), world_size=2, compile_policy=shardtrace.CompilePolicy(cost_model=second)
    )
    rows = [
        (c.phase[0], c.kind, c.bucket, *(round(t, 2) for t in (c.start, c.stop, c.exposed))) for c in shown.collectives
    ]
    assert rows == [
        ("f", "all_gather", "0", 0.0, 1.0, 1.0),
        ("f", "all_gather", "2", 1.0, 2.0, 0.5),  # linear and tanh run meanwhile
        ("b", "all_gather", "2", 2.25, 3.25, 0.75),  # the gradient of the weight is computed meanwhile
        ("b", "reduce_scatter", "2", 3.25, 4.25, 0.25),  # two gradients are computed meanwhile
        ("b", "reduce_scatter", "0", 4.25, 5.25, 1.0),
    ]
    end = shown.record.phases[-1].timeline.end
    computed = re.compile(r" = (torch_|aten_(mm|tanh))")
    busy = sum(0.25 for p in shown.record.phases for line in p.lines if computed.search(line.code))
    assert end == pytest.approx(busy + sum(c.exposed for c in shown.collectives), abs=1e-6)


def test_code_is_coloured_around_names():
    template = Template(("", " = torch.add(", ", ", ", alpha=1)  # <i>"), 1, ())
    assert highlight(template) == (
        "",
        " = <i class=q>torch.</i><i class=f>add</i>(",
        ", ",
        ", alpha=<i class=m>1</i>)  <i class=c># &lt;i&gt;</i>",
    )


def test_units():
    assert [size(n) for n in (0, 1023, 1024, 1536, 2**20 * 1000, 2**50)] == [
        "0 B", "1023 B", "1 KiB", "1.5 KiB", "1000 MiB", "1024 TiB",
    ]  # fmt: skip
    assert [duration(s) for s in (0, 3e-8, 1.5e-6, 0.00153, 2)] == ["0 s", "0.03 µs", "1.5 µs", "1.53 ms", "2 s"]
    assert [count(n, "line") for n in (1, 1200)] == ["1 line", "1,200 lines"]


@pytest.mark.parametrize("least", [1e-7, 0.0016, 0.3, 1.0, 7.0, 123.4])
def test_ticks_are_round(least):
    step = round_step(least)
    assert least <= step < 2.51 * least
    assert f"{step:.0e}"[0] in "125"
    assert 1 <= round_size(least * 1000) / (least * 1000) < 2 or least * 1000 < 1


def test_names_are_cut_as_far_as_they_differ():
    names = ["model.layers.5", "model.layers.6", "model.norm", "lm_head", "encoder.h.0", "decoder.h.0", "0", ""]
    assert shortened(names) == {
        "model.layers.5": "layers.5",
        "model.layers.6": "layers.6",
        "model.norm": "norm",
        "lm_head": "lm_head",
        "encoder.h.0": "encoder.h.0",
        "decoder.h.0": "decoder.h.0",
        "0": "0",
        "": "",
    }


def test_waiting_matters_above_five_percent():
    assert not Totals(seconds=1.0, exposed=0.05, peak=0, sent=0, collectives=1).waits
    assert Totals(seconds=1.0, exposed=0.06, peak=0, sent=0, collectives=1).waits
    assert not Totals(0.0, 0.0, 0, 0, 0).waits
