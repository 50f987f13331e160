"""The process groups of this process after a failure: their abort, and errors that nobody has waited for."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

from passes.compat.versions import aborted_together

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

TAG = 0x5AE  # of a message that nobody sends


def abort_groups(timeout: float) -> None:
    """Ends the collectives of all process groups, of nccl's in the kernels that wait for another rank.

    As ``_abort_process_group`` of torch, but the groups stay known, so that code that cleans up may still ask for its
    rank. Communicators are aborted together because one could wait for the kernels of another. An abort can hang, hence
    the ``timeout`` in seconds. Gloo has no abort, but closes all connections of a group if a message does not come in
    time. A message that nobody sends is therefore received for a millisecond.
    """
    thread = threading.Thread(target=_abort, name="shardtrace-abort", daemon=True)
    thread.start()
    thread.join(timeout)


def _abort() -> None:
    names = c10d._world.pg_names
    groups = sorted(names, key=lambda group: names[group], reverse=True)
    pairs = [(group, _backend(group)) for group in groups]
    nccl = [pair for pair in pairs if isinstance(pair[1], getattr(c10d, "ProcessGroupNCCL", ()))]
    with aborted_together(*nccl[0]) if nccl else contextlib.nullcontext():
        for group in groups:
            gloo: Any = _backend(group, "cpu")
            with contextlib.suppress(RuntimeError):  # it may be gone; or what gloo raises when it closes connections
                group.abort()
                if type(gloo) is getattr(c10d, "ProcessGroupGloo", None) and group.size() > 1:
                    other = (group.rank() + 1) % group.size()
                    gloo.recv([torch.empty(1)], other, TAG).wait(timedelta(milliseconds=1))


def asynchronous_error() -> str:
    """The name of the error that has ended a collective of some group of nccl, such as "TIMEOUT"; empty if there is
    none. Does not wait for the device."""
    for group in list(c10d._world.pg_names):
        get_error = getattr(_backend(group), "get_error", None)
        name: str = get_error().name if get_error is not None else "SUCCESS"
        if name != "SUCCESS":
            return name
    return ""


def _backend(group: dist.ProcessGroup, device: str = "cuda") -> Any:
    """What sends the tensors of a device for ``group``, by default of a GPU; None if nothing does."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None
