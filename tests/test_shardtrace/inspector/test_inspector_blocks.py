"""Blocks that are called: their lines, modules, times, passes and memory inside each call."""

import json
import re
from collections import Counter

import shardtrace
from shardtrace.inspector.lines import Function
from shardtrace.inspector.page import page_data
from shardtrace.inspector.summary import first_lines, module_costs

import pytest
import thunder
import torch
from models import Block
from torch import nn

FUNCTIONS = ["Block_forward", "Block_backward"]


def calls(phase):
    return [(line, module) for line, module in zip(phase.lines, phase.modules, strict=True) if line.function]


def test_lines_of_a_call(three_calls):
    forward, backward = three_calls.record.phases
    assert [module for _, module in calls(forward)] == ["0", "1", "2"]
    assert [module for _, module in calls(backward)] == ["2", "1", "0"]
    assert [f.name for f in {line.function: None for line, _ in calls(forward)}] == ["Block_forward"]  # read once
    for line, _ in calls(forward):
        assert line.parts == line.function.lines
        assert any("torch_tanh_0(" in part.code for part in line.parts)
        assert sum(line.function.seconds) > 0


def test_traced_calls_have_lines_too(three_calls):
    for name in ("traced", "shardtrace: outline"):
        (stage,) = [s for s in three_calls.stages if (s.phase, s.name) == ("forward", name)]
        (function,) = {line.function for line in stage.lines if line.function}
        assert function.name == "Block"
        assert any("torch_tanh_0(" in line.code for line in function.lines)


def test_modules_cost_what_they_cost_inline(three_blocks, three_calls):
    inline, called = module_costs(three_blocks.record), module_costs(three_calls.record)
    assert called.keys() == inline.keys()
    assert "1.up" in called
    for name, cost in inline.items():
        assert called[name] == pytest.approx(cost), name
    assert three_calls.totals[3:] == three_blocks.totals[3:]  # bytes sent, collectives
    assert three_calls.totals.peak == pytest.approx(three_blocks.totals.peak, rel=0.05)
    at = first_lines(three_calls.record)
    assert re.fullmatch(r"forward:\d+:\d+", at["1.up"])
    _, line, part = at["1.up"].split(":")
    assert "t_0_up_weight" in three_calls.record.phases[0].lines[int(line)].parts[int(part)].code


def test_lines_of_a_call_share_its_time(three_calls):
    for phase in three_calls.record.phases:
        starts = phase.timeline.starts
        spent = Counter()
        for work in phase.work():
            spent[work.line] += work.seconds
            assert (work.part is None) == (phase.lines[work.line].function is None)
        for i, module in enumerate(phase.modules):
            assert spent[i] == pytest.approx(starts[i + 1] - starts[i] if module is not None else 0)


def test_names_of_modules_in_a_call():
    function = Function("Block_forward", "h.0", (), (), ())
    assert [function.module_in("h.13", m) for m in ("h.0", "h.0.attn.q", "h.01", "rope")] == [
        "h.13", "h.13.attn.q", "h.01", "rope",
    ]  # fmt: skip
    assert Function("Block", "", (), (), ()).module_in("inner", "attn") == "inner.attn"


def test_passes_of_functions(three_calls):
    phases = list(dict.fromkeys(stage.phase for stage in three_calls.stages))
    assert phases == ["forward", "backward", *FUNCTIONS, "prologue"]
    names = [stage.name for stage in three_calls.stages if stage.phase == "Block_forward"]
    assert names[0] == "traced"
    assert {"shardtrace: regather", "Grad transform pass", "shardtrace: outline"} <= set(names)
    function = calls(three_calls.record.phases[0])[0][0].function
    assert [s for s in three_calls.stages if s.phase == "Block_forward"][-1].lines == function.lines
    assert "Block_backward  shardtrace: outline" in str(three_calls)


def test_saved_tensors_have_their_own_names(three_blocks, three_calls):
    rows = [
        str(shown).partition("largest tensors saved")[2].partition("passes:")[0]
        for shown in (three_blocks, three_calls)
    ]
    inline, called = ([line.split()[1:] for line in text.splitlines()[1:] if line.strip()] for text in rows)
    assert sorted(called) == sorted(inline)


def test_page_has_the_lines_of_a_function_once(three_calls):
    data = json.loads(page_data(three_calls.record))
    assert [f["name"] for f in data["functions"]] == ["Block", *FUNCTIONS]
    texts = [
        "".join(
            p + n
            for p, n in zip(map(plain, data["templates"][t][0]), [*(data["names"][n] for n in names), ""], strict=True)
        )
        for t, _, *names in data["lines"]
    ]
    assert sum(bool(re.search(r"\w = torch_tanh_0\(", text)) for text in texts) == 1  # for three calls
    for call, function in data["calls"].items():
        assert data["functions"][function]["name"] in texts[int(call)]
    for f in data["functions"]:
        stage = data["stages"][f["stage"]]
        assert stage["phase"] in (f["name"], f"{f['name']}_forward")
        assert len(f["lines"]) == len(f["modules"]) == len(f["seconds"])
    assert {data["modules"][m] for f in data["functions"] for m in f["modules"] if m >= 0} == {"0", "0.up"}


def plain(piece):
    return re.sub("<.*?>", "", piece)


def test_block_traces_and_the_printed_trace(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(nn.Sequential(nn.Linear(6, 6), Block(), Block())))
    with pytest.raises(TypeError, match="called yet"):
        shardtrace.block_traces(cmodel)
    cmodel(torch.ones(2, 6))
    traces = shardtrace.block_traces(cmodel)
    assert list(traces) == ["Block", "Block_forward", "Block_backward"]
    assert "def Block_forward(" in str(traces["Block_forward"][-1])
    forward, backward = thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]
    assert functions_in(str(forward)) == ["computation", "Block_forward"]
    assert functions_in(str(backward)) == ["backward_fn", "Block_backward"]
    assert functions_in(forward.python()) == ["computation"]  # what is executed
    with torch.no_grad():
        cmodel(torch.ones(2, 6))
    assert not any("ward" in name for name in shardtrace.block_traces(cmodel))
    assert functions_in(str(shardtrace.block_traces(cmodel)["Block"][-1])) == ["Block"]


def functions_in(text):
    return re.findall(r"^def (\w+)\(", text, re.MULTILINE)


def test_block_traces_of_a_model_without_repeated_blocks(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(nn.Linear(3, 3)))
    cmodel(torch.ones(2, 3))
    assert shardtrace.block_traces(cmodel) == {}
