"""Ranks that run different steps, and ranks that fail: an error on all, soon, and the right one."""

import os
import subprocess
import sys

import shardtrace
from passes.plan import Gradients, Step

import pytest
import step_workers as workers
from torch import nn

SCRIPT = """
import sys
import shardtrace, thunder, torch
import torch.distributed as dist

_, store, rank, where, failing = sys.argv
rank = int(rank)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = shardtrace.fsdp(torch.nn.Linear(8, 8))
cmodel = thunder.jit(model)
for step in range(4):
    x = torch.ones(2, 8)
    if step == 2 and rank == int(failing):
        if where == "forward":
            x = "not a tensor"
        else:
            model.weight.register_hook(lambda grad: 1 / 0)
    try:
        cmodel(x).sum().backward()
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        raise
"""


@pytest.mark.parametrize(("how", "check_steps"), [("kept", None), ("eval", True)])
def test_ranks_about_to_run_different_steps(two_ranks, how, check_steps):
    for ok, text in two_ranks.outcomes(workers.different_steps, how=how, check_steps=check_steps):
        assert not ok
        assert text.startswith("RankMismatchError: the ranks differ in the collectives of Linear: rank 0 has ")
        assert "the first difference, at position 1: rank 0 has nothing; rank 1 has backward: " in text


def test_same_steps_are_run(two_ranks):
    for check_steps in (None, True, False):
        two_ranks.run(workers.different_steps, how="reduced", check_steps=check_steps)


@pytest.mark.parametrize(("where", "failing"), [("forward", 1), ("backward", 0)])
def test_the_error_of_one_rank_ends_the_others(tmp_path, where, failing):
    """Without torchrun, which would end them by a signal."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "script.py", str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), where, str(failing)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [line for process in ranks for line in process.communicate(timeout=120)[0].splitlines()]
    assert all(process.returncode == 1 for process in ranks)
    own = next(line for line in said if line.startswith(f"rank {failing}: "))
    assert "RankFailedError" not in own
    other = next(line for line in said if line.startswith(f"rank {1 - failing}: "))
    assert other.startswith(f"rank {1 - failing}: RankFailedError: another rank failed: {own}")


def test_by_default_a_step_is_compared_when_it_sends_other_things(fake_ranks, monkeypatch):
    fake_ranks(2)
    monkeypatch.delenv("SHARDTRACE_CHECK_STEPS")
    compared = []
    monkeypatch.setattr("shardtrace.state.compare", lambda group, what, lines, **options: compared.append(lines))
    train, evaluate = (Step(Gradients.REDUCED, [f"{kind} of weight"]) for kind in ("all_gather", "broadcast"))
    again = Step(Gradients.REDUCED, [*train.collectives])  # another shape, compiled anew
    for check_steps, expected in ((None, [evaluate, train]), (True, [train, again, evaluate, evaluate, train])):
        state = shardtrace.fsdp(nn.Linear(4, 4), check_steps=check_steps)._shardtrace
        compared.clear()
        for step in (train, again, evaluate, evaluate, train):
            state.meet(step)
        assert compared == [step.collectives for step in expected]
