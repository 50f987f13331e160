"""Pass over the epilogue: runs a backward on the stream on which its forward ran, as autograd does for other functions.

    keep_stream((t0,))        before an epilogue returns the outputs

Thunder hides its backward from autograd's streams behind a tensor on the meta device. It would run on the stream on
which ``loss.backward()`` is called, but autograd makes gradients ready, and reads the results, on forward's stream.
Nothing would order the two. A backward on the stream of its forward costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from passes.analysis.gradients import results_of_step
from passes.comm.symbols import symbol
from passes.compat.jit import nodes_of_thunder

import torch
from thunder.core.devices import DeviceType
from thunder.core.prims import OpTags
from thunder.core.trace import TraceCtx, from_trace

WITHOUT_STREAMS = (DeviceType.CPU, DeviceType.META)


def keep_stream(epilogue: TraceCtx, *, models: Collection[str], record: Sequence[TraceCtx]) -> TraceCtx:
    """Runs a backward on the stream on which its forward ran.

    Takes: an epilogue, and the computation whose outputs it gets, last in ``record``.
    Gives: a line that notes the current stream.
    No-op when: no model was traced, or it computes no tensor on a device with streams.
    """
    *lines, last = epilogue.bound_symbols
    outputs = results_of_step(epilogue, record[-1])
    on_device = tuple(x for x in outputs if x.device.devicetype not in WITHOUT_STREAMS)
    if not on_device or not models:
        return epilogue
    new = from_trace(epilogue)
    new.bound_symbols = [*lines, keeping.bind(on_device, output=None), last]
    return new


class _Streams:
    """The stream of a forward, and the one on which its backward is called."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._forward = self._module.current_stream(device)
        self._called: Any = None

    def enter(self, gradients: Any) -> None:
        called = self._module.current_stream(self._device)
        if called != self._forward:
            self._called = called
            self._forward.wait_stream(called)
            self._module.set_stream(self._forward)

    def leave(self, results: Any, gradients: Any) -> None:
        called, self._called = self._called, None
        if called is not None:
            called.wait_stream(self._forward)
            self._module.set_stream(called)


def _note(outputs: tuple[torch.Tensor, ...]) -> None:
    for node in nodes_of_thunder(outputs, of_backward=True):
        streams = _Streams(outputs[0].device)
        node.register_prehook(streams.enter)
        node.register_hook(streams.leave)


keeping = symbol("keep_stream", lambda outputs: None, _note, tags=[OpTags.DONT_DCE])
