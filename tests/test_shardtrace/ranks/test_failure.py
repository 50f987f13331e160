"""Ranks that run different steps and ranks that fail: the right error on all ranks, without delay."""

import copy
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import shardtrace
from passes.plan import Gradients, Progress, Step

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

SCRIPT = """
import atexit
import gc
import json
import os
import signal
import socket
import sys
import time
import shardtrace, thunder, torch
import torch.distributed as dist
from datetime import timedelta
from shardtrace.ranks import failure
from torch import nn

failure.GRACE = 100  # the machine may be busy

def train(rank, store, where, failing):
    if not dist.is_initialized():
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

def late(rank, store, where, failing):
    # over a backend that behaves like nccl: nothing raises by itself when a rank is lost
    from late import like_nccl
    atexit.register(end_without_threads)
    dist.init_process_group("late", init_method=f"file://{store}", rank=rank, world_size=2)
    with like_nccl():
        train(rank, store, "backward", failing)

def end_without_threads():
    # those of the backend may still be in a call of gloo
    sys.stdout.flush()
    os._exit(int(hasattr(sys, "last_type")))

def lost(rank, store, how, failing):
    failure.LOOK_UP, failure.PATIENCE, failure.STOPPED, sys.stderr = 0.1, 1.0, 3, sys.stdout
    kind, _, backend = how.split()
    limit = timedelta(seconds=100)
    if backend == "gloo":
        failure.GRACE = 0.5
        limit = timedelta(seconds=4 if kind == "hung" else 100)
    else:
        from late import like_nccl
        atexit.register(end_without_threads)
        like_nccl().__enter__()
    # a stopped rank may hold the lock of a file; on a busy machine the ranks take longer than the limit to meet
    store = dist.TCPStore("127.0.0.1", ports[how], 2, rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
    cmodel = thunder.jit(shardtrace.fsdp(nn.Linear(8, 8)))
    for step in range(5):
        if step == 3 and rank == failing:  # a step that is not compared
            time.sleep(0.3)  # the others have seen it
            if kind == "killed":
                os._exit(1)
            if kind == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                pass
        cmodel(torch.ones(2, 8)).sum().backward()

def leave(rank, store, how, failing):
    failure.SILENCE = 100  # or the ranks may find first that they wait for each other
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    cmodel = thunder.jit(shardtrace.fsdp(model, bucketing_strategy="layer", checks=shardtrace.Checks(timeout=5)))
    for step in range(4):
        words, bad = torch.tensor([1, 2]), step == 2 and rank == failing
        if bad and how == "fails":
            words += 10
        try:
            loss = cmodel(words).sum()
            if bad and how == "skips backward":
                continue
            loss.backward()
        except IndexError:
            continue
        except BaseException as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
            raise

def alone(rank, store, how, failing):
    failure.LOOK_UP, failure.SILENCE, sys.stderr = 0.1, 1.0, sys.stdout
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    checks = shardtrace.Checks(prove=False)  # the default; a proof is compared, which finds the difference at once
    cmodel = thunder.jit(shardtrace.fsdp(nn.Linear(8, 8), checks=checks))
    for step in range(5):
        if rank == 0 and step == failing:
            with torch.no_grad():
                cmodel(torch.ones(2, 8))
        cmodel(torch.ones(2, 8)).sum().backward()

def apart(rank, store, how, failing):
    limit = timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    model = shardtrace.fsdp(nn.Linear(8, 8))
    cmodel = thunder.jit(model)
    for step in range(5):
        cmodel(torch.ones(2, 8)).sum().backward()
    try:
        if rank == failing:
            shardtrace.clip_grad_norm_(model, 1.0)
        cmodel(torch.ones(2, 8))
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        raise

def elsewhere(rank, store, how, failing):
    failure.LOOK_UP, failure.SILENCE, failure.GRACE, sys.stderr = 0.1, 1.0, 2.0, sys.stdout
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    checks = shardtrace.Checks(timeout=4) if how == "unseen" else shardtrace.Checks()
    model = shardtrace.fsdp(nn.Linear(8, 8), checks=checks)
    def step():
        model(torch.ones(2, 8)).sum().backward()
    for _ in range(4):
        step()
    others = {
        "whole": lambda: shardtrace.full_state_dict(model),
        "reduces": lambda: dist.all_reduce(torch.ones(1)),
        "gathers": lambda: dist.all_gather_object([None, None], rank),
        "unseen": lambda: time.sleep(100),
        "slow": lambda: time.sleep(3),
    }
    try:
        others[how]() if rank == failing else step()
        if how == "slow":
            step() if rank == failing else None
            dist.all_reduce(torch.ones(1)) if rank == failing else time.sleep(3)
            dist.all_reduce(torch.ones(1)) if rank != failing else None
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        raise

def killed(rank, store, how, failing):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = shardtrace.fsdp(nn.Linear(8, 8))
    thunder.jit(model)(torch.ones(2, 8)).sum().backward()
    if rank == failing and how != "save":
        os._exit(1)  # as if it were killed: it leaves no word
    if rank == failing:
        from shardtrace.checkpoint import files
        files.save_file = lambda *args: os._exit(1)
    calls = {
        "clip": lambda: shardtrace.clip_grad_norm_(model, 1.0),
        "save": lambda: shardtrace.save_checkpoint(store + "-checkpoints", model, step=1),
    }
    try:
        calls[how]()
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        raise

for line in sys.stdin:  # the cases of a test, all of which run at once
    folder, *cases = line.split("; ")
    os.chdir(folder)
    ports, ranks, results = {}, {}, []
    for run, how, failing in map(eval, cases):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports[how] = free.getsockname()[1]
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                atexit.register(gc.freeze)  # or Python would look through all objects, a second for each rank
                os.dup2(os.open(f"{how}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
                run(rank, os.path.abspath(how), how, failing)
                sys.exit()
            ranks.setdefault(how, []).append(pid)
    for how, pids in ranks.items():
        codes = []
        for pid in pids:
            if how.startswith("stopped") and codes:
                os.kill(pid, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        results.append([open(f"{how}.out").read(), codes])
    print(json.dumps(results), flush=True)
"""


def compiled_steps(check_steps):
    """A function that runs a step of a given kind. All ranks have compiled all kinds."""
    model = shardtrace.fsdp(nn.Linear(4, 4), checks=shardtrace.Checks(steps=check_steps, timeout=20))
    cmodel, x = thunder.jit(model), torch.ones(2, 4)

    def step(kind):
        with torch.no_grad() if kind == "eval" else model.no_sync() if kind == "kept" else nullcontext():
            loss = cmodel(x).sum()
        with model.no_sync() if kind in ("kept", "switched") else nullcontext():
            if kind != "eval":
                loss.backward()

    for kind in ("kept", "eval", "switched", "reduced"):
        step(kind)
    lines = [b.sym.name for b in thunder.last_traces(cmodel)[-1].bound_symbols]
    assert ("check_ranks" in lines) == (check_steps is not False)
    return step


@on_ranks(2)
@pytest.mark.parametrize(("how", "check_steps"), [("kept", None), ("eval", True), ("switched", True)])
def test_ranks_about_to_run_different_steps(how, check_steps):
    step = compiled_steps(check_steps)
    with pytest.raises(shardtrace.RankMismatchError) as raised:
        step(how if dist.get_rank() == 0 else "reduced")
    text = str(raised.value)
    assert text.startswith("the ranks differ in the collectives of Linear: rank 0 has ")
    assert "the first difference, at position 1: rank 0 has nothing; rank 1 has backward: " in text


@on_ranks(2)
def test_same_steps_are_run():
    for check_steps in (None, True, False):
        compiled_steps(check_steps)("reduced")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A process that has imported Thunder. The ranks of all tests are its forks."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("SHARDTRACE_CHECK_STEPS", None)
    command, pipe = [sys.executable, folder / "script.py"], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def run_ranks(script, tmp_path):
    """The output of the two ranks of each case, which end with these exit codes, or with [1, 1]. They run without
    torchrun, which would kill them with a signal."""

    def run(*cases, codes=None):
        print(tmp_path, *cases, sep="; ", file=script.stdin, flush=True)
        found = json.loads(script.stdout.readline())
        assert [ended for _, ended in found] == (codes or len(cases) * [[1, 1]]), "\n".join(text for text, _ in found)
        return [text for text, _ in found]

    return run


def test_the_error_of_one_rank_ends_the_others(run_ranks):
    parts = run_ranks('(train, "forward", 1)', '(train, "backward", 0)', '(late, "late", 1)')
    for failing, said in zip((1, 0, 1), map(str.splitlines, parts), strict=True):
        own = next(line for line in said if line.startswith(f"rank {failing}: "))
        assert "RankFailedError" not in own
        other = next(line for line in said if line.startswith(f"rank {1 - failing}: "))
        assert other.startswith(f"rank {1 - failing}: RankFailedError: another rank failed: {own}")


def test_a_rank_that_is_killed_or_hangs_ends_the_others(run_ranks):
    """Rank 0 holds the store of the first case. A rank that does not communicate for long is ended."""
    cases = ('(lost, "killed in late", 0)', '(lost, "stopped in late", 1)')
    cases += ('(lost, "stopped in gloo", 1)', '(lost, "hung in gloo", 1)')
    killed, nccl, gloo, hung = run_ranks(*cases, codes=[[1, 1], [1, -9], [1, -9], [1, -15]])
    error = "another rank failed: no sign of life from rank {}: "
    gone = error.format(0) + "the store that it held does not answer, so it may have been killed"
    assert f"RankFailedError: {gone} (noticed in a collective of root)" in killed
    stopped = error.format(1) + "its process has been stopped for 3 s"
    assert f"RankFailedError: {stopped} (noticed in a collective of root)" in nccl
    assert f"RankFailedError: {stopped} (noticed in a collective of root)" in gloo
    late = "RankFailedError: the other ranks did not come to a collective of root in time"
    assert f"shardtrace: rank 1: another rank failed: rank 0: {late}" in hung
    assert "shardtrace: rank 1: ends, because it did not come to a line that raises this" in hung


def test_a_rank_that_leaves_a_step_sends_nothing_more(run_ranks):
    """Its script goes on with the next batch. Other ranks would take its shards for those of another bucket."""
    parts = run_ranks('(leave, "skips backward", 0)', '(leave, "fails", 0)')
    for said, place in zip(parts, ("after forward", "in forward, 2 collectives sent"), strict=True):
        error = (
            "RankMismatchError: rank(s) 1 did not come to compare the collectives of Sequential within 5 s: they do "
            f"something else, while here a step begins {place}"
        )
        assert f"rank 0: {error}\n" in said
        assert f"rank 1: RankFailedError: another rank failed: rank 0: {error}" in said


def test_a_part_that_one_rank_runs_by_itself_and_a_rank_that_is_killed(run_ranks):
    """Both ranks say after a while where they wait, and end with an error that names both places. A rank that is killed
    outside of a step leaves no word."""
    waits = ('(alone, "at first", 0)', '(alone, "later", 4)')
    parts = run_ranks(*waits, '(apart, "apart", 0)', '(killed, "clip", 1)', '(killed, "save", 1)')
    for said in parts[:2]:
        for rank in range(2):
            assert re.search(rf"shardtrace: rank {rank}, at \S+script.py:\d+ in alone, waits for .*, for 1 s now", said)
        assert re.search(r"the others to compare .*, for 1 s now: rank\(s\) \d did not come yet. Perhaps only", said)
        error = (
            "RankFailedError: the ranks wait for each other: rank ., at .*script.py:.* waits for the others to compare "
            "the collectives of Linear, rank ., at .*script.py:.* waits for a collective of root. Probably only some "
            "ranks run a part of the script, as in `if rank == 0: evaluate"
        )
        assert len(re.findall(error, said)) == 2, said
    assert re.search("RankFailedError: the other ranks did not come to .* in time. Perhaps only some ranks", parts[2])
    for said, where in zip(
        parts[3:], ("the norms of the gradients of all ranks", "a checkpoint to be saved"), strict=True
    ):
        # its connection breaks before or after its process is looked for
        error = "(no sign of life from rank 1: its process is gone and|it) left no report, so it may have been killed"
        assert re.search(
            rf"rank 0: RankFailedError: another rank failed: {error}: see its output \(noticed in {where}\)", said
        )


def test_ranks_that_wait_in_different_collectives(run_ranks):
    """In two of ours, or in one of the script's own, which it must not take for ours. A slow rank is waited for."""
    ways = {"whole": 1, "reduces": 0, "gathers": 1, "unseen": 0, "slow": 0}
    cases = [f'(elsewhere, "{how}", {rank})' for how, rank in ways.items()]
    parts = run_ranks(*cases, codes=3 * [[1, 1]] + [[-15, 1], [0, 0]])
    names = ("the shards of", "all_reduce of torch.distributed", "all_gather of torch.distributed")
    for said, (how, rank), name in zip(parts, ways.items(), names, strict=False):
        place = rf"rank {rank}, at \S+script.py:\d+ in <lambda>, waits for {name}"
        reason = f"the ranks wait for each other: (?:rank .*)?{place}.*Probably only some ranks"
        assert re.search(rf"rank {1 - rank}: RankFailedError: {reason}", said), said
        if how == "whole":
            assert re.search(rf"rank {rank}: RankFailedError: {reason}", said), said
        else:  # the script's own collective breaks: the reason is said beside its error
            assert f"rank {rank}: RuntimeError: " in said, said  # behind what the other rank prints meanwhile
            assert len(re.findall(f"shardtrace: rank {rank}: {reason}", said)) == 1, said
    assert "waits for a collective of root, and the others did not come within 4 s. Probably" in parts[3]
    assert "for 1 s now" in parts[4]


T, V = "train", "evaluate"
STEADY = [
    # steps, and the numbers of those that are compared: a step is compared if it differs from the last successor of
    # the step before it
    ([T, T, T, T], [1, 2]),
    ([T, T, T, V, V, V, T, T, T], [1, 2, 3, 4, 5, 6, 7, 8]),
    (4 * [T, V], [1, 2, 3]),
    ([T, T, T, "skipped", T, T], [1, 2, 4, 5]),
    (4 * ["skipped", T], [1, 2, 3]),  # two forwards for each backward
    ([T, T, T, "nothing", T], [1, 2]),  # such as an evaluation with whole parameters, which one rank may run by itself
]


@pytest.mark.parametrize(("steps", "expected"), STEADY)
def test_by_default_a_step_is_compared_when_it_is_not_the_usual_one(fake_ranks, monkeypatch, steps, expected):
    fake_ranks(2)
    monkeypatch.delenv("SHARDTRACE_CHECK_STEPS")
    compared = []
    monkeypatch.setattr("shardtrace.model.state.compare", lambda *args, **options: compared.append(args))
    kinds = {T: ["all_gather of weight"], V: ["broadcast of weight"], "nothing": []}
    runtime = shardtrace.fsdp(nn.Linear(4, 4))._shardtrace.runtime
    runtime.progress = Progress()  # as with real ranks
    numbers = []
    for number, kind in enumerate(steps):
        before = len(compared)
        step = Step(Gradients.REDUCED, list(kinds.get(kind, kinds[T])))  # compiled again, as for another shape
        runtime.compare_step(step)
        numbers += [number] * (len(compared) - before)
        runtime.progress.end(step)
        if kind == T:
            runtime.progress.begin(step, "backward")
            runtime.progress.end(step)
    assert numbers == expected


@on_ranks(2)
@pytest.mark.parametrize("check_steps", [None, False])
def test_a_step_that_all_ranks_leave_alike(check_steps):
    """All ranks skip a batch that fails in the middle of forward, and training goes on as without it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    single = copy.deepcopy(model)
    shardtrace.fsdp(model, bucketing_strategy="layer", checks=shardtrace.Checks(timeout=20, steps=check_steps))
    cmodel, words = thunder.jit(model), torch.tensor([1, 2])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, model)]
    for step in range(4):
        progress = model._shardtrace.runtime.progress
        if step == 2:
            with pytest.raises(IndexError):
                cmodel(words + 10)
            assert progress._in_flight
            continue
        for run, optimizer in zip((single, cmodel), optimizers, strict=True):
            optimizer.zero_grad()
            run(words).square().sum().backward()
            optimizer.step()
        assert not progress._in_flight
    found = shardtrace.full_state_dict(model)
    for name, value in single.state_dict().items():
        torch.testing.assert_close(found[name], value)
