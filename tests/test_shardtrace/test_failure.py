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
import os
import sys
import shardtrace, thunder, torch
import torch.distributed as dist

def train(rank, store, where, failing):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = shardtrace.fsdp(torch.nn.Linear(8, 8))
    cmodel = thunder.jit(model)
    for step in range(4):
        x = torch.ones(2, 8)
        if step == 2 and rank == failing:
            if where == "forward":
                x = "not a tensor"
            else:
                model.weight.register_hook(lambda grad: 1 / 0)
        try:
            cmodel(x).sum().backward()
        except BaseException as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
            raise

for where, failing in (("forward", 1), ("backward", 0)):
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            train(rank, os.path.abspath(where), where, failing)
            sys.exit()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    print(f"exit codes {codes}", flush=True)
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


def test_the_error_of_one_rank_ends_the_others(tmp_path):
    """Without torchrun, which would end them by a signal. The ranks are forks of a process that has imported Thunder."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    parts = done.stdout.split("exit codes [1, 1]\n")
    assert (len(parts), parts[-1]) == (3, ""), done.stdout + done.stderr
    for failing, said in ((1, parts[0].splitlines()), (0, parts[1].splitlines())):
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
