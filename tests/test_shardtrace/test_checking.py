"""``check`` holds a compiled step against eager PyTorch and names what differs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import shardtrace
from shardtrace import cli
from shardtrace.cli import main
from shardtrace.inspector.checking import _judged

import pytest
import torch
from ranks import Fork
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return x + F.dropout(self.norm(self.fc(x)), 0.1).relu()


class Net(nn.Module):
    """``wrong`` when it is compiled, as a rule of Thunder's could be."""

    def __init__(self, wrong=False):
        super().__init__()
        self.blocks, self.wrong = nn.Sequential(Block(), Block()), wrong
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.blocks[0].fc.weight

    def forward(self, x, scale=1.0):
        y = self.blocks[0](x)
        y = torch.mul(y, 1.001 if self.wrong and isinstance(y, FakeTensor) else 1.0)
        return {"loss": (y := self.head(self.blocks[1](y)) * scale).square().mean(), "y": torch.logcumsumexp(y, 0)}


def test_a_model_that_is_right(single_rank):
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = shardtrace.check(model, (X.clone().requires_grad_(), 0.5))
    assert done.ok
    assert not done.lines
    assert done.first is None
    whats = {(row.what, row.name) for row in done.rows}
    assert {("result", "0"), ("result", "1"), ("gradient", "input 0"), ("input", "0")} < whats
    assert {("gradient", "blocks.1.fc.weight"), ("buffer", "blocks.0.norm.running_mean")} < whats
    assert done.by_torch["logcumsumexp"] == 1
    assert "lines of torch: " in str(done)
    assert done.proof.verdict == "proven"
    assert re.search(r"proven: \d+ results .*\ntrusted: torch's kernels", str(done))
    assert "DIFFERENT" not in str(done)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_first_line_that_differs(single_rank):
    done = shardtrace.check(lambda: Net(wrong=True), {"x": X})
    assert not done.ok
    assert "mul at " in str(done.first)
    assert "test_checking.py:" in str(done.first)
    assert done.first.module == ""
    assert done.first.difference == pytest.approx(1e-3, rel=0.1)
    assert {row.verdict for row in done.lines if row.module.startswith("blocks.0")} <= {"equal", "rounding"}
    assert str(done).splitlines()[-1].startswith("DIFFERENT: of ")


class OtherWay(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y.sin() * 2 if isinstance(y, FakeTensor) else y.cos() * 2


def test_lines_that_only_one_of_the_two_has(single_rank):
    text = str(shardtrace.check(OtherWay(4, 4), X))
    assert "called only when the model is compiled: sin at" in text
    assert "called only when the model is not compiled: cos at" in text


@pytest.mark.parametrize(
    ("ours", "eager", "exact", "verdict"),
    [
        ([1.0, 2.0], [1.0, 2.0], None, "equal"),
        ([0.0, float("nan")], [-0.0, float("nan")], None, "equal"),
        ([1.0, 2.0 + 1e-6], [1.0, 2.0], [1.0, 2.0], "rounding"),
        ([1.0, 2.0 + 1e-5], [1.0, 2.0], [1.0, 2.0], "different"),
        ([1.0, 2.0 + 1e-5], [1.0, 2.0], [1.0, 2.0 + 9e-6], "rounding"),  # nearer than eager PyTorch
        ([1.0, 2.0 + 1e-5], [1.0, 2.0], None, "rounding"),
        ([1.0, 2.0 + 1e-3], [1.0, 2.0], [7.0, 9.0], "different"),  # float64 computes something else
        ([1.0, float("inf")], [1.0, 2.0], None, "different"),
    ],
)
def test_what_is_rounding(ours, eager, exact, verdict):
    row = _judged("result", "", "0", *map(torch.tensor, (ours, eager)), exact and torch.tensor(exact).double())
    assert row.verdict == verdict


def test_another_dtype_or_integer_is_different():
    ones = torch.ones(2)
    for ours, eager in ((ones.double(), ones), (ones[:1], ones), (ones.long(), 2 * ones.long())):
        assert _judged("result", "", "0", ours, eager, None).verdict == "different"


class InOwnDtype(nn.Linear):
    def forward(self, x):
        return super().forward(x) @ torch.eye(4, dtype=torch.float32)


def test_a_model_that_does_not_run_in_float64(single_rank):
    done = shardtrace.check(InOwnDtype(4, 4), X)
    assert done.ok
    assert "does not run in float64" in str(done)


FACTORY = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
class OtherWay(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if WRONG and isinstance(x, FakeTensor) else 1)
"""
SCRIPT = """
import shardtrace, thunder
if __name__ == "__main__":
    model = thunder.jit(shardtrace.fsdp(OtherWay(4, 4)))
    model(torch.ones(2, 4)).sum().backward()
"""


FUNCTION = "def build():\n    return OtherWay(4, 4), torch.ones(2, 4)\n"


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("script", [False, True])
def test_command(tmp_path, capsys, wrong, script):
    file = tmp_path / "model.py"
    end = SCRIPT if script else FUNCTION
    file.write_text(FACTORY.replace("WRONG", str(wrong)) + end)
    assert main(["check", str(file) if script else f"{file}:build"]) == wrong
    assert ("DIFFERENT" in capsys.readouterr().out) == wrong


class Losing(nn.Linear):
    def forward(self, x):
        logits = super().forward(x)
        return logits.square().mean(), logits


def test_only_the_loss_is_compared_where_only_it_is_returned():
    done = shardtrace.check(Losing(4, 4), X, compile_policy=shardtrace.CompilePolicy(returns="loss"))
    assert done.ok
    assert [row.name for row in done.rows if row.what == "result"] == ["0"]


def fork(command, env, stdout, stderr):
    """A rank of the command line as a fork, which has imported Thunder already."""
    assert command[:3] == [sys.executable, "-m", "shardtrace"]
    streams = f"/proc/{os.getpid()}/fd"
    out = os.devnull if stdout is subprocess.DEVNULL else f"{streams}/1"
    script = Path(shardtrace.__file__).with_name("__main__.py")
    return Fork(script, command[3:], env, (out, f"{streams}/{stderr.fileno()}"))


def test_command_on_two_ranks(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(cli, "subprocess", SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL))
    (tmp_path / "model.py").write_text(FACTORY.replace("WRONG", "False") + FUNCTION)
    command = ["check", f"{tmp_path}/model.py:build", "--world-size", "2"]
    assert main(command) == 0
    said = capfd.readouterr().out
    assert said.count("equal to the bit: of ") + said.count("the same: of ") == 1  # one rank prints
    assert main([*command, "--mp-policy", "bf16"]) == 1
    assert "--mp-policy bf16 rounds, and eager PyTorch does not" in capfd.readouterr().out
    assert main(["check", f"{tmp_path}/model.py:other", "--world-size", "2"]) == 1
    assert capfd.readouterr().err.count("there is no function other") == 1


WITH_OPTIONS = """
import shardtrace, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
shardtrace.init_process_group("cpu")
MESH = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
model = shardtrace.fsdp(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), OPTIONS)
model(torch.ones(2, 8)).sum().backward()
"""


def test_a_script_is_checked_with_its_options(tmp_path, capsys):
    file = tmp_path / "script.py"
    file.write_text(WITH_OPTIONS.replace("OPTIONS", "mp_policy='bf16'").replace("RANKS", "1"))
    assert main(["check", str(file)]) == 1
    assert "mp_policy='bf16' rounds" in capsys.readouterr().out


def test_a_script_is_checked_on_its_mesh(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(cli, "subprocess", SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL))
    file = tmp_path / "script.py"
    file.write_text(WITH_OPTIONS.replace("OPTIONS", "mesh=MESH, tensor_parallel='tensor'").replace("RANKS", "2"))
    assert main(["check", str(file), "--world-size", "2"]) == 0
    assert "tensor_parallel='tensor', mesh=DeviceMesh((data=1, tensor=2)" in capfd.readouterr().out


def test_a_script_for_more_ranks_names_the_flag(tmp_path, capsys):
    file = tmp_path / "script.py"
    file.write_text(WITH_OPTIONS.replace(", OPTIONS", "").replace("RANKS", "2"))
    assert main(["check", str(file)]) == 1
    assert "the script ran as the only rank: --world-size 2 checks it on two" in capsys.readouterr().err
