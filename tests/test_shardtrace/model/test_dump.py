"""The traces after each pass, as files."""

import thunder
import torch
from golden import compile_fake
from torch import nn


def test_each_pass_writes_its_trace(fake_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDTRACE_DUMP", str(tmp_path / "traces"))
    fake_ranks(2)
    cmodel = compile_fake(lambda: nn.Linear(4, 4), torch.ones(2, 4))
    names = sorted(p.name for p in (tmp_path / "traces").iterdir())
    assert names == [
        "00-computation-shard_parameters.py",
        "01-prologue-shard_prologue.py",
        "02-prologue-insert_guards.py",
        "03-prologue-merge_checks.py",
        "04-epilogue-watch_backward.py",
        "05-computation-insert_synchronize.py",
        "06-computation-regather.py",
        "07-forward-schedule.py",
        "08-backward-schedule.py",
    ]
    assert (tmp_path / "traces" / names[7]).read_text() == f"{thunder.last_traces(cmodel)[-1]}\n"


def test_only_the_first_rank_writes(fake_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDTRACE_DUMP", str(tmp_path))
    fake_ranks(2, rank=1)
    compile_fake(lambda: nn.Linear(4, 4), torch.ones(2, 4))
    assert list(tmp_path.iterdir()) == []
