"""The default process group, made so that torchrun can restart the ranks.

Note [Restarts]: torchrun's agent lends its store to the ranks. Since torch 2.5 it is the same store after a restart
(https://github.com/pytorch/pytorch/issues/135712), and it still has the keys of the ranks that died. Gloo then connects
to their addresses ("Connection refused"), and counters do not start at zero. The number of restarts cannot tell the
attempts apart, because each node counts its own. Therefore the ranks first agree on a name that no attempt had before,
and use it as the prefix of all their keys.

Note [Exit]: when a collective of gloo is done, the thread that ran it releases its tensors and needs the GIL for that.
If the interpreter is being finalized by then, Python ends the thread in the middle of a destructor. The process aborts
("terminate called without an active exception") although its work was done, and torchrun restarts it.
"""

from __future__ import annotations

import atexit
import json
import time
import uuid
from datetime import timedelta
from typing import Any

from shardtrace.ranks.device import resolve_device, use_device

import torch
import torch.distributed as dist

POLL = 0.01  # seconds
NAP = 0.05  # seconds at exit in which gloo's threads can take the GIL: Note [Exit]


def init_process_group(device: torch.device | str = "cpu", *, timeout: float = 300.0, **options: Any) -> None:
    """Makes the default process group from torchrun's environment if there is none: nccl for a CUDA ``device``, else
    gloo.

    Unlike ``torch.distributed.init_process_group``, it also works after a restart of the ranks (``--max-restarts``).
    A GPU becomes the current device before the group is made and is bound to it (``device_id``).

    Args:
        device: "cuda" without an index is the GPU that ``torch.cuda.set_device`` has set, unless that is the first one.
            Else LOCAL_RANK counts through the GPUs that this rank sees: if ``CUDA_VISIBLE_DEVICES`` shows it only one,
            that is "cuda:0".
        timeout: seconds to wait for the other ranks: until they have started, and in each collective.
        options: further arguments of ``torch.distributed.init_process_group``.

    Raises:
        RuntimeError: names the ranks that did not start in time.
    """
    if dist.is_initialized():
        return
    device = resolve_device(options.get("device_id") or device, None)
    if device.type == "cuda":
        use_device(device)
        options["device_id"] = device
    store, rank, world_size = next(dist.rendezvous("env://"))
    name = attempt_name(store, rank, world_size, timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.PrefixStore(name, store)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, **options)


def leave_in_peace() -> None:
    """Gives gloo's threads time to finish before the interpreter exits: Note [Exit]."""
    atexit.unregister(_nap)  # so that it is registered once
    atexit.register(_nap)


def _nap() -> None:
    time.sleep(NAP)


def attempt_name(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """A name that no attempt had before, the same on the ``world_size`` ranks that are alive now.

    Each rank writes a hello with a number of its own. The first rank answers with the hellos that it reads. A rank
    accepts an answer only if its own hello is in it, and acknowledges it. Until all ranks have done so, the first rank
    reads again, because a hello may be from a dead rank.
    """
    store = dist.PrefixStore("shardtrace/attempt", store)
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    store.set(f"hello/{rank}", mine)
    missing = list(range(world_size))
    while time.monotonic() < deadline:
        if rank == 0:
            keys = [f"hello/{r}" for r in range(world_size)]
            hellos = [store.get(key).decode() if store.check([key]) else "" for key in keys]
            store.set("answer", json.dumps([mine, hellos]))
        if store.check(["answer"]):
            name, hellos = json.loads(store.get("answer"))
            if rank < len(hellos) and hellos[rank] == mine:
                store.set(f"heard/{rank}", name)
                if rank > 0:
                    return str(name)
                missing = [r for r in missing if not store.check([k := f"heard/{r}"]) or store.get(k).decode() != mine]
                if not missing:
                    return mine
        time.sleep(POLL)
    late = f"rank(s) {', '.join(map(str, missing))}" if rank == 0 else "rank 0"
    raise RuntimeError(f"{late} did not start within {timeout:g} s")
