"""The calls of streams that order copies, which the proof of passes/analysis/happens_before.py rests on. On a GPU:
tests/gpu."""

from unittest import mock

from passes.plan.host_memory import HostMemory

import pytest
import torch


@pytest.fixture
def calls():
    """Host memory of a device with streams that are not there, and the names of what is called, in order."""
    seen = mock.MagicMock()
    with (
        mock.patch.object(torch, "get_device_module", return_value=seen.module),
        mock.patch("passes.plan.host_memory._Streams", return_value=seen),
    ):
        yield HostMemory(torch.device("cuda:0")), seen


def names(seen):
    return [name for name, _, _ in seen.mock_calls]


def test_a_copy_to_the_device_follows_what_was_enqueued_before_it(calls):
    host, seen = calls
    seen.module.is_available.assert_called()
    seen.reset_mock()
    with host.ahead():
        host.load(torch.ones(2), seen.place)
        host.mark()
    assert names(seen) == [
        "inward.wait_stream",
        "module.stream",
        "module.stream().__enter__",
        "place.copy_",
        "module.Event",
        "module.Event().record",
        "module.stream().__exit__",
    ]
    assert seen.inward.wait_stream.call_args.args == (seen.current,)
    assert seen.module.stream.call_args.args == (seen.inward,)
    host.finish_loads()
    assert names(seen)[-1] == "inward.synchronize"


def test_a_copy_to_the_host_holds_its_memory(calls):
    host, seen = calls
    seen.reset_mock()
    sent = host.send(seen.values)
    assert names(seen) == [
        "outward.wait_stream",
        "module.stream",
        "module.stream().__enter__",
        "values.to",
        "values.record_stream",
        "module.Event",
        "module.Event().record",
        "module.stream().__exit__",
    ]
    assert seen.outward.wait_stream.call_args.args == (seen.current,)
    assert seen.values.record_stream.call_args.args == (seen.outward,)
    assert (sent.row, sent.copied) == (seen.values.to.return_value, seen.module.Event.return_value)
