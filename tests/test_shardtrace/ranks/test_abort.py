"""The abort of all process groups, with recorders in the place of groups of nccl."""

import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock
from unittest.mock import call

from shardtrace.ranks import failure
from shardtrace.ranks.failure import abort_groups, asynchronous_error

import pytest


class Nccl:
    """What torch's ProcessGroupNCCL has."""

    def __init__(self, seen, error="SUCCESS"):
        self._group_start, self._group_end = seen.group_start, seen.group_end
        self.get_error = lambda: SimpleNamespace(name=error)


def group(name, seen, backend):
    found = mock.MagicMock()
    found.abort = getattr(seen, name)
    found._get_backend.side_effect = [backend] * 9 if backend else RuntimeError("no backend for cuda")
    return found


@pytest.fixture
def groups(monkeypatch):
    """Sets the groups of this process: a backend for each name."""
    seen = mock.MagicMock()

    def make(**backends):
        names = {group(name, seen, backend): str(i) for i, (name, backend) in enumerate(backends.items())}
        monkeypatch.setattr(failure.c10d, "_world", SimpleNamespace(pg_names=names))
        monkeypatch.setattr(failure.c10d, "ProcessGroupNCCL", Nccl, raising=False)
        return seen

    return make


def test_all_groups_are_aborted_and_those_of_nccl_together(groups):
    seen = groups(gloo=None)
    seen = groups(everyone=Nccl(seen), shard=Nccl(seen), gloo=None)
    seen.shard.side_effect = RuntimeError("was destroyed")
    abort_groups(10.0)
    assert [name for name, _, _ in seen.mock_calls] == ["group_start", "gloo", "shard", "everyone", "group_end"]


def test_nccl_of_torch_2_14_aborts_in_a_region_of_the_process_group(groups, monkeypatch):
    class Nccl:
        """Without start and end."""

    @contextmanager
    def manager(group, device):
        seen.begin(device.type)
        yield
        seen.end()

    seen = groups(everyone=Nccl(), shard=Nccl())
    monkeypatch.setattr(failure.c10d, "ProcessGroupNCCL", Nccl)
    monkeypatch.setattr(failure.c10d._world, "pg_coalesce_state", {}, raising=False)
    monkeypatch.setattr(failure.c10d, "_coalescing_manager", manager)
    abort_groups(10.0)
    assert seen.mock_calls == [call.begin("cuda"), call.shard(), call.everyone(), call.end()]


def test_an_abort_that_hangs_does_not_hold_the_program(groups):
    groups(everyone=None).everyone.side_effect = lambda: time.sleep(1.5)
    start = time.monotonic()
    abort_groups(0.01)
    assert time.monotonic() - start < 1.4


def test_the_error_of_a_collective_that_nobody_waits_for(groups):
    seen = mock.MagicMock()
    groups(gloo=None, everyone=Nccl(seen))
    assert asynchronous_error() == ""
    groups(gloo=None, everyone=Nccl(seen), shard=Nccl(seen, "TIMEOUT"))
    assert asynchronous_error() == "TIMEOUT"
    seen.group_start.assert_not_called()
