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


def run_ranks(folder, script, *arguments):
    """What both ranks of a script print, without torchrun, which would end one by a signal when the other fails."""
    (folder / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("SHARDTRACE_CHECK_STEPS", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py", str(folder / "store"), str(rank), *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    return said


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
    said = "".join(run_ranks(tmp_path, SCRIPT, where, str(failing))).splitlines()
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
    nothing = Step(None)  # such as an evaluation with whole parameters, which one rank may do alone
    again = Step(Gradients.REDUCED, [*train.collectives])  # another shape, compiled anew
    start, trained, evaluated = "after start", "after backward", "after forward"
    steady = [(start, train), (trained, again), (trained, train), (trained, evaluate), (evaluated, evaluate)]
    steady += [(evaluated, nothing), (evaluated, evaluate), (evaluated, train), (trained, train)]
    changed = [steady[1], steady[3], steady[4], steady[7], steady[8]]  # its collectives, or what went before it
    for check_steps, expected in ((None, changed), (True, [s for s in steady if s[1] is not nothing])):
        state = shardtrace.fsdp(nn.Linear(4, 4), check_steps=check_steps)._shardtrace
        compared.clear()
        for _, step in steady:
            state.meet(step)
            state.progress.end(step)
            if step in (train, again):
                state.progress.begin(step, "backward")
                state.progress.end(step)
        assert compared == [[f"{step.collectives[0]}, where a step begins {place}"] for place, step in expected]


LEAVING = """
import sys
import shardtrace, thunder, torch
import torch.distributed as dist
from torch import nn

_, store, rank, how = sys.argv
rank = int(rank)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
cmodel = thunder.jit(shardtrace.fsdp(model, bucketing_strategy="layer", timeout=3))
for step in range(4):
    words, bad = torch.tensor([1, 2]), step == 2 and rank == 1
    if bad and how == "error in forward":
        words += 10
    try:
        loss = cmodel(words).sum()
    except IndexError:
        continue
    if bad and how == "backward skipped":
        continue
    loss.backward()
"""


@pytest.mark.parametrize(
    ("how", "place"),
    [("backward skipped", "after forward"), ("error in forward", "in forward, 2 collectives sent")],
)
def test_a_rank_that_leaves_a_step_sends_nothing_more(tmp_path, how, place):
    """Its script goes on with the next batch. Its shards would be taken for others, and the numbers be wrong."""
    first, second = run_ranks(tmp_path, LEAVING, how)
    error = (
        "rank(s) 0 did not come to compare the collectives of Sequential within 3 s: they do something else, while here "
        f"a step begins {place}"
    )
    assert f"RankMismatchError: {error}" in second
    assert f"RankFailedError: another rank failed: rank 1: RankMismatchError: {error}" in first


def test_a_step_that_all_ranks_leave_alike(two_ranks):
    two_ranks.run(workers.all_leave_a_step)
