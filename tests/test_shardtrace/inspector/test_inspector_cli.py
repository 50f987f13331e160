"""The command ``shardtrace``."""

import os
import runpy
import sys
from pathlib import Path

import shardtrace
from passes.pipeline import AFTER_LOWERING, BEFORE_AUTODIFF
from shardtrace.cli import main
from shardtrace.inspector.checking import Difference, Proof

import pytest
import torch.distributed as dist

FACTORY = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), torch.ones(3, 6)

def nothing():
    return None

def broken():
    return nn.Linear(6, 8), torch.ones(3, 5)

class Counts(nn.Linear):
    def forward(self, x):
        return torch.bincount(super().forward(x).argmax(-1))

def jitted():
    import thunder
    return thunder.jit(nn.Linear(6, 8))

def interrupted():
    raise KeyboardInterrupt

class Interrupt(nn.Linear):
    def forward(self, x):
        raise KeyboardInterrupt

def interrupted_inside():
    return Interrupt(6, 8), torch.ones(3, 6)

def untraceable():
    return Counts(6, 8), torch.ones(3, 6)
"""

SCRIPT = """
import os
import sys
import shardtrace, thunder, torch
import torch.distributed as dist
from torch import nn

def main():
    dist.init_process_group("gloo")
    assert dist.get_rank() == int(os.environ["RANK"])
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(6, 8), sharding_strategy="zero2"))
    try:
        with torch.no_grad():
            jitted(torch.ones(3, 6))
        if sys.argv[1] == "train":
            try:
                jitted(torch.ones(7, 6)).sum().backward()
            except Exception:
                pass
            raise AssertionError("the step was run")
    finally:
        dist.destroy_process_group()
    sys.exit(sys.argv[1])

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "factory_for_cli.py").write_text(FACTORY)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "empty.py").write_text("x = 3\n")
    (tmp_path / "usage.py").write_text("import sys; sys.exit('--rows 16 is too few')\n")
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


def test_hybrid(folder, capsys):
    arguments = ["explain", "factory_for_cli.py:model", "--sharding-strategy", "hybrid_zero3"]
    assert main([*arguments, "--mesh", "8x2", "--rank", "15"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Sequential: hybrid ZeRO-3 over 16 ranks, seen from rank 15")
    assert "backward all_reduce" in text
    assert main(arguments) == 1
    assert "for fake ranks mesh_shape=(replicas, shards)" in capsys.readouterr().err
    assert main([*arguments, "--mesh", "8x2", "--world-size", "8"]) == 1
    assert "a mesh of shape (8, 2) has 16 ranks, not --world-size 8" in capsys.readouterr().err


def test_prove(folder, capsys, monkeypatch):
    assert main(["prove", "factory_for_cli.py:model", "--world-size", "64"]) == 0
    assert capsys.readouterr().out.startswith("proven: ")
    for argument in ("train", "evaluate"):
        assert main(["prove", "script.py", "--world-size", "4", "--", argument]) == 0
        assert capsys.readouterr().out.startswith("proven: ")
    wrong = Proof("unproven", differences=(Difference(("output 0",), "sin(x)", "tanh(x)", "model.py:3"),))
    monkeypatch.setattr("shardtrace.inspector.inspection.prove_compiled", lambda *args: wrong)
    assert main(["prove", "factory_for_cli.py:model"]) == 1
    what = "output 0 (model.py:3):\n    the step computes sin(x)\n    the unsharded program computes tanh(x)"
    assert capsys.readouterr().out == f"unproven\n  {what}\n"
    assert main(["inspect", "factory_for_cli.py:model"]) == 0
    page = (folder / "trace.html").read_text()
    assert '<details class="note proof unproven"><summary>unproven</summary>' in page
    assert what in page


def test_rates(folder, capsys):
    """By the flags of "plan". The text and the page name them."""
    cluster = ["--device", "a100-80", "--link", "100gbit", "--mp-policy", "bf16"]
    assert main(["explain", "factory_for_cli.py:model", "--world-size", "16", *cluster]) == 0
    text = capsys.readouterr().out
    rates = "predicted with the rates of a100-80's data sheet, nvlink3 in machines of 8, 100gbit between"
    assert text.splitlines()[1] == rates
    assert "  0 cuda" in text or "cuda:0 bf16" in text
    assert main(["inspect", "factory_for_cli.py:model", "--node-ranks", "4", "--node-link", "pcie4"]) == 0
    rates = "predicted with the rates of h100-sxm&#x27;s data sheet, pcie4 in machines of 4, 400gbit between"
    assert f"<p>{rates}</p>" in (folder / "trace.html").read_text()
    assert main(["explain", "factory_for_cli.py:model", "--device", "h1000"]) == 1
    assert "there is no device 'h1000': choose one of a100-40" in capsys.readouterr().err


def test_what_cannot_be_changed_is_refused(folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "script.py", "--sharding-strategy", "zero3", "--device", "cuda", "--", "train"])
    assert stop.value.code == 2
    refused = "script.py is a script, which passes its own options to fsdp: --sharding-strategy, --device would change"
    assert refused in capsys.readouterr().err
    assert main(["explain", "factory_for_cli.py:jitted", "--prefetch", "2"]) == 1
    assert "returns a jitted model, which --prefetch cannot change" in capsys.readouterr().err


def test_a_plan_checkpointing_and_offload(folder, capsys):
    assert main(["plan", "factory_for_cli.py:model", "--world-size", "4", "--out", "plan.json"]) == 0
    capsys.readouterr()
    assert main(["explain", "factory_for_cli.py:model", "--plan", "plan.json"]) == 0  # on as many ranks as the plan has
    assert capsys.readouterr().out.startswith("Sequential: DDP over 4 ranks")
    assert main(["explain", "factory_for_cli.py:model", "--plan", "plan.json", "--link", "1gbit"]) == 1
    assert "shardtrace: the plan decides the rates (--device, --link, --node-link" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["prove", "factory_for_cli.py:model", "--plan", "nowhere.json"])
    assert "error: --plan: there is no plan in nowhere.json" in capsys.readouterr().err
    placed = ["--activation-checkpointing", "full", "--offload"]
    assert main(["explain", "factory_for_cli.py:model", *placed]) == 0
    with pytest.raises(SystemExit):
        main(["inspect", "script.py", *placed])
    assert "its own options to fsdp: --activation-checkpointing, --offload would change" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--out", "--chrome-trace"])
def test_a_file_that_cannot_be_written_is_an_error_before_the_work(folder, flag, capsys):
    for path in ("nowhere/page.html", "."):
        with pytest.raises(SystemExit) as stop:
            main(["inspect", "factory_for_cli.py:model", flag, path])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert f"{flag}: {path} cannot be written" in error
        assert "compiling" not in error


@pytest.mark.parametrize("target", ["interrupted", "interrupted_inside"])
def test_interrupt(folder, capsys, target):
    """Ctrl-C while the target is made, and while Thunder interprets."""
    assert main(["explain", f"factory_for_cli.py:{target}"]) == 130
    assert capsys.readouterr().err.endswith("shardtrace: explain was interrupted\n")


def test_memory(folder, capsys):
    """A step under a budget, which the text names, or an error in flags."""
    assert main(["explain", "factory_for_cli.py:model", "--memory", "1GB"]) == 0
    assert "memory: peak " in capsys.readouterr().out
    assert main(["prove", "factory_for_cli.py:model", "--memory", "1B"]) == 1
    error = capsys.readouterr().err
    assert "shardtrace: no step of Sequential with these inputs fits into 1B" in error
    assert "(--memory " in error
    assert "Other options that save memory: --mp-policy bf16" in error


def test_explain_module(folder, capsys):
    assert main(["explain", "factory_for_cli:model", "--sharding-strategy", "zero2"]) == 0
    assert capsys.readouterr().out.startswith("Sequential: ZeRO-2 over 8 ranks, seen from rank 0")
    wires = ["--gather-dtype", "int8", "--reduce-wire", "int3", "--error-feedback"]
    assert main(["explain", "factory_for_cli:model", *wires]) == 1
    assert "unknown --reduce-wire 'int3'" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["train", "evaluate"])
def test_explain_script(folder, capsys, argument):
    """Its first training step, of which nothing is run; the first call of a script that has none."""
    before = {**os.environ}
    assert main(["explain", "script.py", "--world-size", "4", "--rank", "2", "--", argument]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Linear: ZeRO-2 over 4 ranks, seen from rank 2")
    assert "forward all_gather" in text
    assert ("backward reduce_scatter" in text) == (argument == "train")
    assert os.environ == before
    assert not dist.is_initialized()


def test_example_is_a_target(capsys, tmp_path):
    script = Path(__file__).parents[3] / "examples/gpt2/train.py"
    arguments = [
        "--world-size",
        "64",
        "--",
        "--layers",
        "1",
        "--batch-size",
        "64",
        "--seq-len",
        "16",
        "--device",
        "cpu",
    ]
    assert main(["explain", str(script), *arguments]) == 0
    assert capsys.readouterr().out.startswith("GPT: ZeRO-3 over 64 ranks")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.py", "there is no file missing.py"),
        ("missing.py:model", "there is no file missing.py"),
        ("missing_module:model", "there is no module missing_module: is missing_module a file?"),
        ("factory_for_cli.py:other", "there is no function other in factory_for_cli.py"),
        ("factory_for_cli.py:nothing", "must return a module and its inputs"),
        ("factory_for_cli.py:broken", "--traceback shows where"),
        (
            "factory_for_cli.py:untraceable",
            "factory_for_cli.py:16 in forward:\n    return torch.bincount(super().forward(x).argmax(-1))",
        ),
        ("empty.py", "empty.py called no sharded model"),
        ("usage.py", "usage.py left by sys.exit('--rows 16 is too few') before it called a sharded model"),
    ],
)
def test_errors(folder, capsys, target, message):
    assert main(["explain", target]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "--sharding-strategy", "zero4"], "unknown --sharding-strategy 'zero4': choose one of"),
        (["plan", "--memory", "10XB"], "--memory 10XB: write it as 80GB or 72GiB"),
        (
            ["plan", "--memory", "1MB", "--world-size", "4"],
            "fits into 1MB: the least is .* with --bucketing-strategy .*or a lower precision --mp-policy bf16",
        ),
    ],
)
def test_errors_are_in_flags(folder, capsys, arguments, message):
    command, *options = arguments
    assert main([command, "factory_for_cli.py:model", *options]) == 1
    said = capsys.readouterr().err
    for part in message.split(".*"):
        assert part in said.replace("(--mp", "--mp")
    assert "_strategy" not in said


def test_an_unknown_flag(folder, capsys):
    for flag, meant in (("--shard-strategy=zero3", "did you mean --sharding-strategy?"), ("--xyz", "check --help")):
        with pytest.raises(SystemExit) as stop:
            main(["check", "factory_for_cli.py:model", flag])
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert f"check has no {flag.partition('=')[0]}: " in said
        assert meant in said


@pytest.mark.parametrize(
    "arguments", [[], ["inspect"], ["explain", "x.py", "--world-size", "many"], ["explain", "x.py", "--mesh", "8"]]
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "file.py:function" in text
    assert "Exit codes: 0; 1 if" in text


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"shardtrace {shardtrace.__version__}\n"


def test_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shardtrace", "explain"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("shardtrace", run_name="__main__")
    assert stop.value.code == 2
    assert "shardtrace explain" in capsys.readouterr().err


def test_the_passes_are_listed(capsys):
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(BEFORE_AUTODIFF) + len(AFTER_LOWERING)
    assert (
        "after lowering   schedule                optional  Places each collective, and frees gathered parameters."
        in lines
    )
    assert any(
        line.startswith("before autodiff  keep_random                       Lets backward use") for line in lines
    )
