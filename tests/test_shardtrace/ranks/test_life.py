"""Signs of life: which ranks are lost, and which are only busy. Processes that sleep stand for the other ranks."""

import os
import signal
import subprocess
import sys
import time

from shardtrace.ranks import failure
from shardtrace.ranks.failure import Life

import pytest
import torch.distributed as dist


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


def ranks(monkeypatch, process, size=2):
    """A store, this process as rank 0, and others of which rank 1 is ``process``."""
    store, found = dist.HashStore(), [Life(rank, size) for rank in range(size)]
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: process.pid)
        found[1].look(store)
    return store, found


def looks(one, store, number):
    return [text for _ in range(number) if (text := one.look(store))]


def test_a_rank_that_is_busy_is_not_lost(monkeypatch, process):
    store, (mine, _) = ranks(monkeypatch, process)
    assert looks(mine, store, failure.SILENT + 2) == []


def test_a_rank_that_was_killed(monkeypatch, process):
    store, (mine, other) = ranks(monkeypatch, process)
    process.kill()
    while failure._state(store.get(f"{failure.PULSE}/1").decode()) not in ("Z", ""):
        time.sleep(0.01)
    assert mine.look(store).startswith("rank 1: its process is gone")  # nobody has asked for its exit status
    process.wait()
    assert mine.look(store).startswith("rank 1: its process is gone")
    other.leave(store)
    assert mine.look(store) == ""


def test_a_rank_that_is_stopped(monkeypatch, process):
    store, (mine, _) = ranks(monkeypatch, process)
    process.send_signal(signal.SIGSTOP)
    while failure._state(store.get(f"{failure.PULSE}/1").decode()) != "T":
        time.sleep(0.01)
    assert looks(mine, store, failure.STOPPED) == []
    assert mine.look(store) == "rank 1: its process has been stopped for 8 s"
    process.send_signal(signal.SIGCONT)


def test_the_first_rank_is_stopped(monkeypatch, process):
    """Its store would not answer: it is asked for nothing."""
    store = dist.HashStore()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: process.pid)
        Life(0, 3).look(store)
    mine = Life(1, 3)
    assert mine.look(store) == ""
    process.send_signal(signal.SIGSTOP)
    while not mine.first_is_stopped():
        time.sleep(0.01)
    assert mine.waited_for_first() == ""
    assert all(mine.first_is_stopped() for _ in range(failure.STOPPED))
    assert mine.waited_for_first() == "rank 0: its process has been stopped for 8 s"
    process.send_signal(signal.SIGCONT)


def test_a_rank_of_another_machine(monkeypatch, process):
    store, (mine, other) = ranks(monkeypatch, process)
    monkeypatch.setattr(failure, "_machine", lambda: "another")
    assert looks(mine, store, failure.SILENT) == []
    assert mine.look(store) == "rank 1: it has shown no sign of life for 300 s"
    other.look(store)
    assert mine.look(store) == ""


def test_the_next_rank_that_is_there_is_watched(monkeypatch, process):
    """Rank 1 leaves, rank 2 is in no sharded model, rank 3 shows signs."""
    store, (mine, other, *_) = ranks(monkeypatch, process, size=4)
    other.leave(store)
    process.kill()
    assert mine.look(store) == ""
    process.wait()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: process.pid)
        Life(3, 4).look(store)
    assert mine.look(store).startswith("rank 3: its process is gone")
