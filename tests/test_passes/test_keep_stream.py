"""A backward runs on the stream of its forward. A recorder stands in for the device."""

from unittest import mock

import shardtrace
from passes import borders as module

import pytest
import thunder
import torch
from torch import nn


class Stream:
    def __init__(self, name, seen):
        self.name, self.wait_stream = name, lambda other: seen.append(f"{name} waits for {other.name}")


@pytest.fixture
def device(monkeypatch):
    """A device whose current stream is ``device.now``, and what is called in ``device.seen``."""
    found = mock.MagicMock(seen=[])
    found.current_stream = lambda device: found.now

    def set_stream(stream):
        found.now = stream
        found.seen.append(f"on {stream.name}")

    found.set_stream = set_stream
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    monkeypatch.setattr(module, "WITHOUT_STREAMS", ())
    return found


def test_backward_runs_on_the_stream_of_forward(single_rank, device):
    forward, side = (Stream(name, device.seen) for name in ("forward", "side"))
    model = nn.Linear(4, 4)
    cmodel = thunder.jit(shardtrace.fsdp(model))
    for called, expected in (
        (forward, ["backward"]),
        (side, ["forward waits for side", "on forward", "backward", "side waits for forward", "on side"]),
    ):
        device.now = forward
        x = torch.ones(2, 4, requires_grad=True)
        loss = cmodel(x).sum()
        handle = (
            loss.grad_fn.next_functions[0][0]
            .next_functions[0][0]
            .register_prehook(lambda gradients: device.seen.append("backward"))
        )
        device.seen.clear()
        device.now = called
        loss.backward()
        handle.remove()
        assert device.seen == expected
        assert device.now is called
        assert model.weight.grad is not None
    assert "keep_stream(" in str(thunder.compile_stats(cmodel).last_epilogue_traces[-1])


def test_nothing_to_do_without_streams(single_rank):
    cmodel = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4)))
    cmodel(torch.ones(2, 4)).sum().backward()
    assert "keep_stream" not in str(thunder.compile_stats(cmodel).last_epilogue_traces[-1])
