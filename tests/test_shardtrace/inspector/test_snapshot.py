"""Snapshots of a GPU's memory. Without a GPU: the calls, in their order."""

import contextlib

import shardtrace

import pytest
import torch


@pytest.fixture
def calls(monkeypatch):
    found = []

    def record(module, name, result=None):
        def call(*args, **kwargs):
            found.append((name, args, kwargs))
            return result

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, result in (("reset_peak_memory_stats", None), ("memory_allocated", 5), ("max_memory_allocated", 9)):
        record(torch.cuda, name, result)
    for name in ("_record_memory_history", "_dump_snapshot"):
        record(torch.cuda.memory, name)
    return found


@pytest.mark.parametrize("error", [None, MemoryError])
def test_the_file_of_a_rank(fake_ranks, tmp_path, calls, error):
    fake_ranks(4, rank=2)
    with contextlib.suppress(MemoryError), shardtrace.memory_snapshot(tmp_path / "step.pickle") as measured:
        if error:
            raise error
    assert measured == shardtrace.MemorySnapshot(tmp_path / "step-rank2.pickle", before=5, peak=9)
    names = [name for name, *_ in calls]
    assert names.index("_record_memory_history") < names.index("_dump_snapshot")
    assert calls[-1] == ("_record_memory_history", (), {"enabled": None})


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_without_a_gpu(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"torch sees none: shardtrace\.memory"),
        shardtrace.memory_snapshot(tmp_path / "file"),
    ):
        pass
