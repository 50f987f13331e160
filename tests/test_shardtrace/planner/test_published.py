"""Predictions from data sheets against published runs of Llama 3, compiled on the meta device."""

import runpy
from pathlib import Path

import pytest

PUBLISHED = runpy.run_path(str(Path(__file__).parents[3] / "examples/benchmarks/published.py"))


def test_llama_8b_on_eight_gpus():
    """torchtitan's run with FSDP2: seconds within 15 %, memory within 10 %."""
    run = PUBLISHED["RUNS"][0]
    assert (run.model, run.ranks, run.batch) == ("8B", 8, 2)
    found = PUBLISHED["predict"](run)
    assert found.tokens / found.seconds == pytest.approx(run.speed, rel=0.15)
    assert found.peak / 2**30 == pytest.approx(run.memory, rel=0.10)
    of_run = found.mfu_all_scores * run.speed / (found.tokens / found.seconds)
    assert of_run == pytest.approx(0.33, abs=0.02)  # as its authors count it


def test_compiled():
    """torchtitan's run with torch.compile on 128 GPUs: seconds within 15 %, memory within 10 %."""
    run = PUBLISHED["RUNS"][3]
    assert (run.model, run.ranks, run.compiled) == ("8B", 128, True)
    found = PUBLISHED["predict"](run)
    assert found.tokens / found.seconds == pytest.approx(run.speed, rel=0.15)
    assert found.peak / 2**30 == pytest.approx(run.memory, rel=0.10)


def test_a_sequence_over_four_ranks():
    """torchtitan's run of 131,072 tokens: seconds within 15 %, memory within 10 %."""
    run = PUBLISHED["LONG"][2]
    assert (run.tokens, run.context) == (2**17, 4)
    found = PUBLISHED["predict"](run)
    assert found.mesh_shape == (2, 4)
    assert found.tokens / found.seconds == pytest.approx(run.speed, rel=0.15)
    assert found.peak / 2**30 == pytest.approx(run.memory, rel=0.10)


def test_a_million_tokens_over_eight_ranks():
    """Qwen3-8B with flash attention 2: seconds within 15 %."""
    run = PUBLISHED["LONG"][4]
    assert (run.tokens, run.context, run.attention) == (2**20, 8, "flash2")
    found = PUBLISHED["predict"](run)
    assert found.tokens / found.seconds == pytest.approx(run.speed, rel=0.15)
