"""The example as a user runs it: by torchrun, in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "gpt2" / "train.py"


def train(tmp_path, ranks, *arguments):
    """Runs the script; returns what it printed and the losses."""
    out = tmp_path / f"{ranks}.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    options = ["--steps=4", "--batch-size=4", "--seq-len=32", "--eval-batches=1", "--sample-bytes=4", f"--json={out}"]
    done = subprocess.run([*torchrun, SCRIPT, *options, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


def test_any_number_of_ranks_gives_the_same_losses(tmp_path):
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    one, expected = train(tmp_path, 1, f"--text={text}")
    two, losses = train(tmp_path, 2, f"--text={text}", "--sharding-strategy=zero2", "--bucketing-strategy=0.5")
    assert losses["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert losses["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert len(losses["losses"]) == 4
    assert "none: a world of one" in one
    assert "reduce_scatter, backward" in two
    assert "all_gather, backward" not in two


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--batch-size=3", "not divisible by 2 ranks"),
        ("--seq-len=999", "longer than the 256 positions of tiny"),
        ("--bucketing-strategy=blocks", "not none, layer, block or a size in MB"),
        ("--text=/nowhere", "no file '/nowhere'"),
    ],
)
def test_bad_arguments(argument, message):
    two_ranks = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, SCRIPT, argument], env=two_ranks, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert message in done.stderr
