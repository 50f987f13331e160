"""No wrong step is missed. ``make mutants`` tries 5,000 of all models and settings; here a sample of them."""

import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kinds import KINDS, mutate
from run import OUTCOMES, mutant_of, pairs, prover_of, rows, table
from steps import PAIRS, SETTINGS, compile_step
from verdict import compare, is_sound, judge, remember

SAMPLE = [
    ("gpt", "zero3"),
    ("tied and frozen", "hybrid"),
    ("noisy", "inline"),
    ("torch", "added"),
    ("kinds", "secondary"),
]


@pytest.fixture(autouse=True)
def lone(monkeypatch):
    """Steps are compiled among ranks of their own."""
    monkeypatch.setenv("SHARDTRACE_CHECK_STEPS", "0")


def test_every_setting_has_a_model():
    assert {setting for settings in PAIRS.values() for setting in settings} == SETTINGS.keys()
    assert len(PAIRS) >= 10
    assert len(pairs()) == sum(map(len, PAIRS.values()))


def test_none_is_missed():
    found = list(rows(SAMPLE, lambda n: range(60)))
    counts = Counter((row.mutant.kind.name, row.verdict.outcome) for row in found)
    missed = [row for row in found if row.verdict.outcome == "missed"]
    assert not missed, "\n".join(f"{r.model}/{r.setting} {r.seed}: {r.mutant.where}: {r.verdict.why}" for r in missed)
    assert len({name for name, _ in counts}) > 25
    assert sum(n for (_, outcome), n in counts.items() if outcome == "prove") > len(found) / 3
    assert table(counts).splitlines()[0].split() == list(OUTCOMES)


def test_a_mutant_is_made_by_its_seed():
    step = compile_step("kinds", "zero3")
    first, second, other = (mutant_of(step, "kinds", "zero3", seed).where for seed in (1, 1, 2))
    assert first == second != other


OF_PARTS = [
    "leave a sum pending",
    "take the part of another rank",
    "change divisor",
    "change group",
]


@pytest.mark.parametrize(
    ("model", "setting", "kinds"),
    [
        ("gpt", "tensor", [*OF_PARTS, "sum twice", "add on each rank", "keep own gradients"]),
        ("llama", "tensor ddp", [*OF_PARTS, "skip a reduction"]),  # sums of rows
    ],
)
def test_wrong_sums_over_ranks_that_share_a_batch_are_found(model, setting, kinds):
    step = compile_step(model, setting)
    prove = prover_of(step)
    remember(step)
    for kind in [*kinds, "drop a source"]:  # some are equal, such as the other one of two repeated heads
        found = (mutate(step, Random(seed), kind) for seed in range(24))
        mutants = [*islice(filter(None, found), 12)]
        assert {judge(m.step, step, prove).outcome for m in mutants} <= {"verify", "prove"}, kind
        if kind not in ("change group", "drop a source"):  # of which not all give other numbers
            assert any(judge(m.step, step, None).outcome == "missed" for m in mutants), kind


@pytest.mark.parametrize(
    ("model", "setting"),
    [("tied and frozen", "owner"), ("kinds", "kept"), ("gpt", "torchcompile"), ("llama", "tensor inline")],
)
def test_the_right_step_runs(model, setting):
    step = compile_step(model, setting)
    remember(step)
    assert is_sound(step)
    assert compare(step, step) == ""


def test_without_a_prover_wrong_steps_show_when_they_run():
    step = compile_step("kinds", "zero3")
    remember(step)
    wrong = [mutate(step, Random(seed), "change divisor") for seed in range(4)]
    assert {judge(m.step, step, None).outcome for m in wrong} == {"missed"}
    right = mutate(step, Random(0), "do not free")
    assert judge(right.step, step, None).outcome == "equivalent"


def test_kinds_have_names_of_their_own():
    assert len(KINDS) > 30
