"""The backend that behaves like nccl: what it promises to the tests that run over it."""

import time

import pytest
import torch
import torch.distributed as dist
from late import late_groups


def test_results_are_late_and_in_order(single_rank):
    with late_groups() as group:
        group.patience = 30.0
        first, second = torch.ones(4), torch.ones(4)
        works = [dist.all_reduce(t, group=group, async_op=True) for t in (first, second)]
        assert first.isnan().all()
        assert second.isnan().all()
        assert works[1].wait()
        assert works[0].is_completed()  # a communicator runs one after the other
        assert torch.equal(second, torch.ones(4))
        rows = [torch.empty(3), torch.empty(0)][:1]
        dist.all_gather(rows, torch.arange(3.0), group=group)
        assert rows[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("what", ["input", "result"])
def test_a_write_to_memory_in_flight_is_seen(single_rank, what):
    def race():
        with late_groups() as group:
            group.patience = 30.0
            mine, rows = torch.ones(4), torch.empty(4)
            work = dist.all_gather_into_tensor(rows, mine, group=group, async_op=True)
            (mine if what == "input" else rows).zero_()
            work.wait()

    with pytest.raises(AssertionError, match="all_gather_single"):
        race()


def test_a_wait_ends_without_an_error_when_the_group_is_aborted(single_rank):
    with late_groups() as group:
        group.patience = 30.0
        rows = torch.ones(4)
        work = dist.all_reduce(rows, group=group, async_op=True)
        group.abort()
        assert work.wait()
        assert rows.isnan().all()
        with pytest.raises(RuntimeError, match="NCCL communicator was aborted"):
            dist.all_reduce(rows, group=group)


def test_a_collective_without_a_peer_lasts_until_its_timeout(single_rank, monkeypatch):
    def lost(*args):
        raise RuntimeError("Connection reset by peer")

    with late_groups(timeout=0.5) as group:
        monkeypatch.setattr(group, "_reduced", lost)
        rows, start = torch.ones(4), time.monotonic()
        work = dist.all_reduce(rows, group=group, async_op=True)
        assert time.monotonic() - start < 0.4
        assert work.wait()
        assert time.monotonic() - start > 0.4
        assert rows.isnan().all()
