"""The command ``shardtrace``."""

import os
import runpy
import sys

from shardtrace.cli import main

import pytest

FACTORY = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), torch.ones(3, 6)

def nothing():
    return None

def broken():
    return nn.Linear(6, 8), torch.ones(3, 5)
"""

SCRIPT = """
import sys
import shardtrace, thunder, torch
from torch import nn

rows = int(sys.argv[1])
jitted = thunder.jit(shardtrace.fsdp(nn.Linear(6, 8), sharding_strategy="zero2"))
if __name__ == "__main__":
    jitted(torch.ones(rows, 6)).sum().backward()
    torch.distributed.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "factory_for_cli.py").write_text(FACTORY)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "empty.py").write_text("x = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return tmp_path


def test_inspect_factory(folder, capsys):
    arguments = ["inspect", "factory_for_cli.py:model", "--world-size", "64", "--rank", "3", "--out", "page.html"]
    assert main([*arguments, "--chrome-trace", "trace.json", "--bucketing-strategy", "2.5", "--prefetch", "0"]) == 0
    assert capsys.readouterr().out == "wrote page.html\nwrote trace.json\n"
    page = (folder / "page.html").read_text()
    assert "ZeRO-3 over 64 ranks, seen from rank 3 · buckets by 2.5 MB · prefetch 0" in page
    assert (folder / "trace.json").exists()


def test_explain_module(folder, capsys):
    assert main(["explain", "factory_for_cli:model", "--sharding-strategy", "zero2"]) == 0
    assert capsys.readouterr().out.startswith("Sequential: ZeRO-2 over 8 ranks, seen from rank 0")


def test_explain_script(folder, capsys):
    assert main(["explain", "script.py", "--world-size", "4", "--", "7"]) == 0
    assert capsys.readouterr().out.startswith("Linear: ZeRO-2 over 4 ranks")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.py", "there is no file missing.py"),
        ("missing.py:model", "there is no file missing.py"),
        ("missing_module:model", "there is no module missing_module: is missing_module a file?"),
        ("factory_for_cli.py:other", "there is no function other in factory_for_cli.py"),
        ("factory_for_cli.py:nothing", "must return a module and what it is called with"),
        ("factory_for_cli.py:broken", "--traceback shows where"),
        ("empty.py", "leaves no jitted model in a global variable"),
    ],
)
def test_errors(folder, capsys, target, message):
    assert main(["explain", target]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["explain", "x.py", "--world-size", "many"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "file.py:function" in capsys.readouterr().out


def test_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shardtrace", "explain"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("shardtrace", run_name="__main__")
    assert stop.value.code == 2
    assert "shardtrace explain" in capsys.readouterr().err
