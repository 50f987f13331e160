"""``fsdp(model, memory=...)``: steps that fit, with the same numbers, or an error before anything runs."""

import copy
import json
import re
from dataclasses import replace

import shardtrace
from passes.plan.cost import hardware
from shardtrace import CompilePolicy, MemoryBudget, MemoryBudgetError, TensorParallel
from shardtrace.planner import contract
from shardtrace.planner.planning import compiled_estimate
from shardtrace.testing import compile_only

import pytest
import thunder
import torch
import torch.nn.functional as F
from contexts import mesh_of
from ranks import on_ranks
from torch import nn
from torch.profiler import ProfilerActivity
from toy_gpt import GPT, GPTConfig, gpt

LONG = 64


def long_gpt():
    """A GPT whose activations are most of its memory, and how its loss is computed."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 96, (8, LONG))
    model = GPT(GPTConfig(n_layer=4, n_embd=32, n_head=2, block_size=LONG, vocab_size=96))
    return model, lambda: model(tokens, tokens)


class Funnel(nn.Module):
    """Blocks of which each is the only one of its kind."""

    def __init__(self):
        super().__init__()
        widths = [(32 * (i + 1), 32 * (i + 2)) for i in range(4)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, b)) for a, b in widths
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def funnel():
    torch.manual_seed(0)
    model, x = Funnel(), torch.randn(512, 32)
    return model, lambda: F.mse_loss(model(x), torch.zeros(512, 160))


def of_transformers(name):
    def make():
        transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[examples]'")
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        sizes |= {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96, "num_key_value_heads": 2}
        sizes |= {"n_positions": LONG, "max_position_embeddings": LONG}
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name, **sizes, bos_token_id=0, eos_token_id=0)
        model, tokens = transformers.AutoModelForCausalLM.from_config(config), torch.randint(0, 96, (8, LONG))
        return model.eval(), lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss  # no dropout

    return make


def measured_peak(step, path):
    """The bytes at the peak of a step beyond those at its start."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        total += event["args"]["Bytes"]
        most = max(most, total)
    return most


def train(make, path, memory):
    """The first gradients, and the bytes at the peak of the second step of a training loop."""
    model, loss = make()
    shardtrace.fsdp(model, memory=memory, checks=shardtrace.Checks(recording=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        loss().backward()
        gradients = [p.grad.clone() for p in model.parameters()] if not optimizer.state else []
        optimizer.step()
        optimizer.zero_grad()
        return gradients

    gradients = step()
    held = [*model.parameters(), *model.buffers(), *(t for s in optimizer.state.values() for t in s.values())]
    return gradients, sum(t.nbytes for t in held) + measured_peak(step, path)


@pytest.mark.parametrize("make", [long_gpt, funnel, of_transformers("llama")])
def test_the_measured_peak_is_in_the_budget(single_rank, tmp_path, capfd, make):
    path = tmp_path / "step.json"
    expected, most = train(make, path, "1GB")
    assert "recomputing nothing" in capfd.readouterr().err
    budget = 0.7 * most
    gradients, peak = train(make, path, f"{budget:.0f}B")
    assert peak <= 1.01 * budget
    said = re.search(r"fits into .*B: peak .* (recomputing (all|what is cheap) .*)", capfd.readouterr().err)
    assert said
    exact = "chunks" not in said[1]
    close = (lambda a, b: torch.equal(a, b)) if exact else (lambda a, b: torch.allclose(a, b, atol=1e-6))
    assert all(map(close, expected, gradients))


def compiled(budget, *, blocks=4, batch=8, **options):
    """A jitted GPT that is compiled for the fake ranks, and the line that says what was chosen."""
    function = thunder.jit(shardtrace.fsdp(gpt(blocks), memory=budget, **options))
    tokens = torch.zeros(batch, 16, dtype=torch.int64)
    compile_only(function, ((tokens, tokens), {}))
    stages = (str(trace.get_provenance()) for trace in thunder.last_traces(function))
    return function, next((found[1] for stage in stages if (found := re.search("memory: (.*)", stage))), "")


@pytest.fixture
def predictions(monkeypatch):
    """The estimates of the chosen steps, and the setting of each."""
    found, say = [], contract.Steps._say

    def noted(self, choice, family, estimate, asked):
        found.append((estimate, self.contract.setting, choice))
        say(self, choice, family, estimate, asked)

    monkeypatch.setattr(contract.Steps, "_say", noted)
    return found


@pytest.mark.parametrize(
    ("strategy", "blocks", "budget"),
    [("zero2", 2, "0.55MB"), ("ddp", 2, "0.95MB"), ("owner", 2, "0.7MB"), ("tensor", 4, "0.75MB")],
)
def test_what_runs_is_what_was_predicted(fake_ranks, predictions, strategy, blocks, budget):
    fake_ranks(4)
    options = {"sharding_strategy": strategy}
    if strategy == "tensor":  # some of the buckets stay, in two parts each
        tensor = TensorParallel("tensor", {"wte.weight": "whole"})
        options = {"mesh": mesh_of((2, 2), "tensor"), "tensor_parallel": tensor}
    function, line = compiled(budget, blocks=blocks, **options)
    [(expected, setting, choice)] = predictions
    assert choice.recomputed
    assert "recomputing" in line
    assert expected.peak <= float(budget[:-2]) * 1e6
    assert compiled_estimate(function, setting) == expected


def test_what_the_script_decides_is_left_alone(fake_ranks, predictions):
    fake_ranks(4)
    policy = CompilePolicy(prefetch=2, chunk_loss=None)
    with pytest.raises(MemoryBudgetError, match=r'prefetch 2, .* more .*memory: CompilePolicy\(chunk_loss="auto"\)'):
        compiled("0.5MB", activation_checkpointing={"h.0": "full"}, compile_policy=policy)
    compiled("2MB", activation_checkpointing={"h.0": "full"}, compile_policy=policy)
    [(_, _, choice)] = predictions
    assert (choice.recomputed, choice.chunks, choice.prefetch) == ({}, None, 2)


def test_nothing_fits(fake_ranks):
    fake_ranks(4)
    with pytest.raises(MemoryBudgetError) as error:
        compiled("400KB")
    assert str(error.value) == (
        "no step of GPT with these inputs fits into 400KB: the least is 622 KiB, recomputing all of h.0 to h.3 (4), "
        'prefetch 0, 232 KiB more (memory="637.1KB" would fit). Smallest changes that would do: a batch of about 2 '
        'instead of 8. Other options that save memory: mp_policy="bf16"'
    )


def test_a_gpu_keeps_activations_in_host_memory_where_nothing_else_fits(fake_ranks, predictions, monkeypatch):
    fake_ranks(2)
    with pytest.raises(MemoryBudgetError):
        compiled("3.5MB", batch=64)
    monkeypatch.setattr(contract, "hardware", lambda name: replace(hardware("cpu"), name="a GPU"))
    function, line = compiled("3.5MB", batch=64)
    assert "keeping in host memory" in line
    [(expected, setting, _)] = predictions
    assert expected.peak <= 3.5e6
    assert compiled_estimate(function, setting) == expected


def test_two_shapes_and_one_again(single_rank, capfd):
    model = shardtrace.fsdp(gpt(4), memory="1.2MB")
    for batch in (2, 8, 2):
        x = torch.zeros(batch, 16, dtype=torch.int64)
        model(x, x).backward()
    said = re.findall(r"peak .*, predicted, (recomputing \w+)", capfd.readouterr().err)
    assert said == ["recomputing nothing", "recomputing all"]


def test_without_gradients(single_rank, capfd):
    x = torch.zeros(8, 16, dtype=torch.int64)
    with torch.no_grad():
        shardtrace.fsdp(gpt(4), memory=MemoryBudget("500KB", optimizer=None))(x, x)
        assert not capfd.readouterr().err
        with pytest.raises(MemoryBudgetError, match="a forward without gradients needs"):
            shardtrace.fsdp(gpt(4), memory=MemoryBudget("200KB", optimizer=None))(x, x)


@on_ranks(2)
def test_ranks_choose_alike():
    torch.manual_seed(0)
    model, tokens = gpt(4), torch.randint(0, 48, (8, 16))
    plain = shardtrace.fsdp(copy.deepcopy(model))
    model = shardtrace.fsdp(model, memory="1.2MB", compile_policy=CompilePolicy(chunk_loss=None))
    for m in (plain, model):
        m(tokens, tokens).backward()
    traces = (str(trace.get_provenance()) for trace in thunder.last_traces(model))
    assert any("memory: peak" in line and "recomputing all" in line for line in traces)
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), expected.grad.to_local())


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("80 apples", "write it as 80GB or 72GiB"),
        (80, "write 80GB, or 80B if that is meant"),
        (-1.0, "write it as 80GB"),
    ],
)
def test_no_budget(memory, message):
    with pytest.raises(ValueError, match=message):
        shardtrace.fsdp(nn.Linear(2, 2), memory=memory)


def test_an_optimizer_that_does_not_exist():
    with pytest.raises(ValueError, match=r"torch\.optim has no optimizer 'Adamw'"):
        MemoryBudget("1GB", optimizer="Adamw")
