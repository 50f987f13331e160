"""Kill processes that save checkpoints, and print the step of the latest checkpoint that each one leaves.

Each process is a fork of this one, so that none spends time on imports.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import shardtrace  # isort: split

from shardtrace.checkpoint import files

import torch
import torch.distributed as dist
from torch import nn

# The file operations of a save. After a kill the system still writes all that it was given: the test is their order.
OPERATIONS = [(files.os, "fsync"), (files.shutil, "rmtree"), (files, "save_file"), (files, "checksum")]
OPERATIONS += [(Path, name) for name in ("mkdir", "rename", "unlink")]


def built(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose values all equal the step."""
    model = nn.Linear(64, 65)
    for p in model.parameters():
        nn.init.constant_(p, step)
    return model, torch.optim.SGD(model.parameters())


def latest(path: str) -> int:
    """The step of the latest checkpoint. Asserts that it can be loaded and holds the values that were saved."""
    model, optimizer = built(0)
    step = shardtrace.load_checkpoint(path, model, optimizer).step
    assert all(bool((p == step).all()) for p in model.parameters())
    return step


def forked(function, *arguments) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
    return pid


def save_and_die(path: str, moment: int) -> None:
    """Save a second step. The process kills itself at the given moment: each file operation has one before and one after."""
    passed = 0

    def tick():
        nonlocal passed
        passed += 1
        if passed == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(original):
        def operation(*args, **kwargs):
            tick()
            result = original(*args, **kwargs)
            tick()
            return result

        return operation

    for owner, name in OPERATIONS:
        mock.patch.object(owner, name, watched(getattr(owner, name))).start()
    shardtrace.save_checkpoint(path, *built(2), step=2, keep_last=1)


def each(root: Path) -> list[int]:
    """Kill a save before and after each of its file operations, until one completes."""
    found = []
    while True:
        path = root / str(len(found))
        shardtrace.save_checkpoint(path, *built(1), step=1)
        (path / "step-00000002").mkdir()  # left by an interrupted save
        _, status = os.waitpid(forked(save_and_die, str(path), len(found) + 1), 0)
        if not os.WIFSIGNALED(status):
            assert status == 0
            return found
        found.append(latest(str(path)))
        last = shardtrace.save_checkpoint(path, *built(3), step=3, keep_last=1)  # nothing that was left is in the way
        assert [p.name for p in path.iterdir()] == [last.name]
        shutil.rmtree(path)


def save_for_ever(path: str, store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    step = files.latest_checkpoint(path)
    step = int(step.name.removeprefix("step-")) if step else 0
    while True:
        dist.barrier()
        step += 1
        model, optimizer = built(step)
        shardtrace.save_checkpoint(path, shardtrace.fsdp(model), optimizer, step=step, keep_last=2)


def at_random(path: Path) -> list[int]:
    """Two ranks save over and over. Ten times, both are killed at a random moment."""
    moments, found = random.Random(0), []
    for turn in range(10):
        before = found[-1] if found else 0
        pids = [forked(save_for_ever, str(path), f"{path}-{turn}", rank) for rank in range(2)]
        try:
            deadline = time.monotonic() + 120  # of a disk that writes much else
            while (now := files.latest_checkpoint(path)) is None or now.name == f"step-{before:08d}":
                assert time.monotonic() < deadline, f"no checkpoint in turn {turn}"
                time.sleep(0.005)
            time.sleep(moments.uniform(0, 0.1))
        finally:  # one that lives on would hold the pipes of whoever waits for this process
            for pid in moments.sample(pids, 2):
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
        found.append(latest(str(path)))
        assert found[-1] > before
    return found


if __name__ == "__main__":
    mode, path = sys.argv[1:]
    print(json.dumps(each(Path(path)) if mode == "each" else at_random(Path(path) / "checkpoints")))
