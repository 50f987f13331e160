"""Steps of a GPU, compiled where there is none. (With CPU offload: tests/test_passes/comm/test_host_copies.py.)"""

import shardtrace
from shardtrace.cli import main

import pytest
import torch
from models import Zoo, tokens
from torch import nn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

FACTORY = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(6, 8)), nn.Parameter(torch.ones(8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(torch.addmm(self.bias, x, self.weight))  # unknown to Thunder, which calls it

def model():
    return Odd(), torch.ones(3, 6)
"""


def lines(shown):
    return [(phase.name, [line.code for line in phase.lines]) for phase in shown.record.phases]


@pytest.mark.parametrize("strategy", ["zero3", "owner", "hybrid_zero2"])
def test_the_step_of_a_gpu(strategy):
    """The same collectives as on the CPU, on tensors of a GPU only."""
    ranks = {"mesh_shape": (2, 4)} if strategy.startswith("hybrid") else {"world_size": 8}
    here, there = (
        shardtrace.inspect(
            Zoo(), tokens(2), sharding_strategy=strategy, init_policy=shardtrace.InitPolicy(device=device), **ranks
        )
        for device in ("cpu", "cuda")
    )
    assert sorted(c[:6] for c in here.collectives) == sorted(c[:6] for c in there.collectives)
    assert '"cpu' not in str(lines(there))


def test_the_command(tmp_path, capsys):
    (tmp_path / "odd.py").write_text(FACTORY)
    assert main(["explain", f"{tmp_path}/odd.py:model", "--device", "cuda", "--world-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert "cuda:0 f32[8]" in shown
    assert "cpu" not in shown


def test_real_ranks_need_a_real_device(single_rank):
    with pytest.raises(ValueError, match="torch sees no cuda device on this machine"):
        shardtrace.fsdp(nn.Linear(4, 4), init_policy=shardtrace.InitPolicy(device="cuda"))
