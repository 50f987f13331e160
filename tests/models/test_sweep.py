"""The sweep itself: it tells equal from wrong, refused, crashed and late, and writes the table."""

import subprocess
import sys
from pathlib import Path

import faults
import outcomes

HERE = Path(__file__).parent


def test_every_fault_has_its_outcome(tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["--family", "faults", "--limit", "12", "--jobs", "2", "--out", out]
    done = subprocess.run(
        [sys.executable, HERE / "sweep.py", *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = outcomes.read(out)
    assert {name: row["outcome"] for (_, name), row in rows.items()} == faults.OUTCOMES
    assert "faint" in rows["faults", "gradient_wrong"]["where"]
    assert "raised on purpose" in rows["faults", "raises"]["error"]


def test_table():
    rows = [
        {"family": "a", "name": "one", "outcome": "equal", "difference": 1e-8},
        {"family": "a", "name": "two", "outcome": "refused", "error": "ValueError: a | b"},
        {"family": "b", "name": "three", "outcome": "wrong", "difference": 0.5, "where": "loss"},
        {"family": "b", "name": "four", "outcome": "eager fails", "error": "ImportError: natten"},
    ]
    assert outcomes.markdown(rows).splitlines() == [
        "| family | trained by eager | equal | wrong | refused | crashed | timeout |",
        "|---|---|---|---|---|---|---|",
        "| a | 2 | 1 | 0 | 1 | 0 | 0 |",
        "| b | 1 | 0 | 1 | 0 | 0 | 0 |",
        "| all | 3 | 1 | 1 | 1 | 0 | 0 |",
        "",
        "| model | outcome | reason |",
        "|---|---|---|",
        "| a `two` | refused | ValueError: a \\| b |",
        "| b `three` | wrong | 5.0e-01, gradients 0.0e+00 at loss |",
    ]
