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
    of_run = found.mfu * run.speed / (found.tokens / found.seconds)
    assert of_run == pytest.approx(0.33, abs=0.02)  # as its authors count it
