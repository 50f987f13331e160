"""What takes long is said: compiling, planning."""

import re
import sys
import threading
import time

import shardtrace
from passes.pipeline import AFTER_LOWERING, BEFORE_AUTODIFF
from shardtrace.ranks import progress as module
from shardtrace.ranks.progress import NAME, progress

import pytest
import torch
from golden import compile_fake
from models import Zoo, tokens


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    assert ended()  # that of a model which another test has compiled
    monkeypatch.setattr(module, "SILENCE", 0.01)
    monkeypatch.setattr(module, "LOOK_UP", 0.001)


def ended():
    """Waits for the thread, which ends by itself."""
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(60)
    return not any(thread.name == NAME for thread in threading.enumerate())


def test_compiling(fake_ranks, capfd):
    """Each line says what is done; the time between them doubles."""
    fake_ranks(2)
    compile_fake(Zoo, *tokens(2))
    assert ended()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("shardtrace: compiling Zoo for 0 s: ")
    assert len(lines) < 15
    assert any(line.endswith(": recording the forward") for line in lines)


class Branching(torch.nn.Module):
    """PyTorch runs it: what it does depends on values."""

    def forward(self, x):
        time.sleep(0.2)  # many looks
        return x * 2 if x.sum().item() > 1 else x * 3


def test_a_module_that_pytorch_runs(fake_ranks, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # where each look says something
    fake_ranks(2)
    compile_fake(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), Branching()), torch.ones(2, 4))
    assert ended()
    assert ": a try of Sequential.1, which PyTorch runs, on its values" in capfd.readouterr().err


def test_a_terminal_has_one_line(fake_ranks, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fake_ranks(2)
    compile_fake(Zoo, *tokens(2))
    assert ended()
    said = capfd.readouterr().err
    assert "\n" not in said
    assert said.endswith("\r\x1b[K")  # it is cleared
    assert ": differentiating" in said
    passes = {entry.run.__name__ for entry in (*BEFORE_AUTODIFF, *AFTER_LOWERING)}
    assert passes & set(re.findall(r": pass (\w+)", said))
    assert ": choosing kernels" in said


def test_the_first_rank_alone(fake_ranks, monkeypatch, capfd):
    monkeypatch.setattr(module, "is_alone", lambda group: False)
    fake_ranks(2, 1)
    compile_fake(lambda: torch.nn.Linear(4, 4), torch.ones(2, 4))
    assert capfd.readouterr().err == ""


def test_two_models_between_two_looks(fake_ranks, monkeypatch, capfd):
    monkeypatch.setattr(module, "LOOK_UP", 0.2)
    fake_ranks(2)
    compile_fake(lambda: torch.nn.Linear(4, 4), torch.ones(2, 4))
    compile_fake(Zoo, *tokens(2))
    assert ended()
    assert ": compiling Zoo for" in capfd.readouterr().err.splitlines()[-1]


def test_planning(capfd):
    shardtrace.plan(torch.nn.Linear(64, 64), torch.zeros(2, 64), world_size=2, device="cpu", memory=1e9)
    assert ended()
    assert "shardtrace: planning Linear for 0 s: " in capfd.readouterr().err


def test_what_is_short_is_silent(monkeypatch, capfd):
    monkeypatch.setattr(module, "SILENCE", 3600)
    with progress("nothing"):
        time.sleep(0.05)
    assert ended()
    assert capfd.readouterr().err == ""
