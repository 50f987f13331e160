"""The process group over which a model is sharded, and the device of this rank.

Note [Index]: an index of 0 says nothing, because it is that of all that nobody has placed. Any other index was chosen
by the script. LOCAL_RANK counts the ranks of a machine, but a launcher or CUDA_VISIBLE_DEVICES may show each rank only
some of its devices, which are numbered from 0 again.

The default process group is made so that torchrun can restart the ranks.

Note [Restarts]: torchrun's agent lends its store to the ranks. Since torch 2.5 it is the same store after a restart
(https://github.com/pytorch/pytorch/issues/135712), and it still has the keys of the ranks that died. Gloo then
connects to their addresses ("Connection refused"), and counters do not start at zero. The number of restarts cannot
tell the attempts apart, because each node counts its own. Therefore the ranks first agree on a name that no attempt
had before, and use it as the prefix of all their keys.

Note [Exit]: when a collective of gloo is done, the thread that ran it releases its tensors and needs the GIL for
that. If the interpreter is being finalized by then, Python ends the thread in the middle of a destructor. The process
aborts ("terminate called without an active exception") although its work was done, and torchrun restarts it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# ---- the device ----


def choose_device(
    device: torch.device | str | None,
    mesh: DeviceMesh | dist.ProcessGroup | None,
    current: torch.device | None,
    *,
    on_host: bool = False,
) -> torch.device:
    """The device of shards. Its type, as FSDP2 chooses it: that of ``device``, else of the mesh, else of this rank's
    GPU, if there is one. Its index: :func:`resolve_device`.

    ``current`` is the device of the model. It stays there if the process group cannot reach GPUs through nccl, unless
    it is in host memory on purpose (``on_host``).
    """
    if device is None and isinstance(mesh, DeviceMesh):
        device = mesh.device_type
    if device is None and (on_host or _reaches_gpus(mesh)):
        device = _best()
    return resolve_device(device, current)


def _reaches_gpus(mesh: DeviceMesh | dist.ProcessGroup | None) -> bool:
    if not torch.cuda.is_available():
        return False
    group = mesh if isinstance(mesh, dist.ProcessGroup) else dist.group.WORLD
    return group is None or "cuda:nccl" in dist.get_backend_config(group).split(",")


def resolve_device(device: torch.device | str | None, current: torch.device | None) -> torch.device:
    """A device with an index: ``device``, else ``current`` unless it is meta, else a GPU if there is one, else the CPU.

    A GPU without an index is the first of these that the script has chosen: the one that the default process group is
    bound to (``device_id``), ``current`` (the model's), the one that ``torch.cuda.set_device`` has set: Note [Index].
    If it has chosen none, LOCAL_RANK deals out the GPUs that this rank sees.
    """
    if device is None and current is not None and current.type != "meta":
        device = current
    resolved = torch.device(device or _best())
    if resolved.type != "cuda" or resolved.index is not None:
        return resolved
    bound = dist.group.WORLD.bound_device_id if dist.group.WORLD is not None else None
    if bound is not None and bound.type == "cuda":
        return torch.device("cuda", bound.index)
    own = (current.index or 0) if current is not None and current.type == "cuda" else 0
    found = own or (torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    visible = torch.cuda.device_count() or 1
    return torch.device("cuda", found or int(os.environ.get("LOCAL_RANK", 0)) % visible)


def _best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of this process, which collectives of objects and generated kernels use."""
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


# ---- the process group ----


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


Mesh = DeviceMesh | dist.ProcessGroup


class Groups(NamedTuple):
    """The process groups of a model: all of its ranks, those that share one copy of its shards, those that hold the
    same shard (None unless a strategy is hybrid), those that hold the parts of one sequence (None if ranks have whole
    sequences), those that compute with parts of parameters (None if ranks use whole ones), and those that are given one
    batch (None if each has its own). ``mesh`` has the same ranks: in two dimensions, ``outer`` and ``inner``, for a
    hybrid strategy."""

    mesh: DeviceMesh
    everyone: dist.ProcessGroup
    inner: dist.ProcessGroup
    outer: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    sharing: dist.ProcessGroup | None = None
    # of all ranks, in order, the number of each in its "context" or "tensor" group
    seats: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def resolve_groups(
    mesh: Mesh | None,
    device: torch.device,
    *,
    hybrid: bool,
    dims: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> Groups:
    """The groups of a mesh. A hybrid strategy needs a 2-D DeviceMesh (replicate, shard). ``dims`` are the names of the
    dimensions whose ranks compute together, by option of ``fsdp``: "context_parallel" or "expert_parallel", and
    "tensor_parallel".

    Raises ValueError if a hybrid strategy or one of these options gets another mesh, otherwise the errors of
    :func:`resolve_group`.
    """
    if dims:
        return _sharing(mesh, dims, hybrid=hybrid)
    if not hybrid:
        group = resolve_group(mesh, device, timeout)
        mesh = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.from_group(group, device.type)
        return Groups(mesh, group, group)
    if not is_2d(mesh):
        found = f"one of shape {tuple(mesh.mesh.shape)}" if isinstance(mesh, DeviceMesh) else repr(mesh)
        raise ValueError(
            f"a hybrid strategy needs a mesh of two dimensions, (replicate, shard), not {found}, and so does "
            "zero3_secondary: pass "
            "mesh=torch.distributed.init_device_mesh(device_type, (replicas, shards), mesh_dim_names=(...)), "
            "for fake ranks mesh_shape=(replicas, shards)"
        )
    return Groups(mesh, _everyone(mesh), mesh.get_group(1), mesh.get_group(0))


def _sharing(mesh: Mesh | None, dims: Mapping[str, str], *, hybrid: bool) -> Groups:
    """The groups of a mesh of which the ranks along ``dims`` compute together: a name for each option of ``fsdp``."""
    kinds = [option.removesuffix("_parallel") for option in dims]
    for option, dim in dims.items():
        if not isinstance(mesh, DeviceMesh) or dim not in (mesh.mesh_dim_names or ()):
            found = f"one of {mesh.mesh_dim_names}" if isinstance(mesh, DeviceMesh) else repr(mesh)
            raise ValueError(
                f"{option}={dim!r} needs a DeviceMesh that has a dimension of this name, not {found}: pass "
                f"mesh=torch.distributed.init_device_mesh(device_type, ({', '.join(('data', *kinds))}), "
                f"mesh_dim_names={('data', *dims.values())})"
            )
        if hybrid:
            raise ValueError(
                f"{option} shards parameters over all ranks of the mesh, and cannot be combined with a hybrid "
                'strategy or "zero3_secondary": choose "zero3", "zero2" or "ddp"'
            )
    assert isinstance(mesh, DeviceMesh)
    if len({*dims.values()}) < len(dims):
        raise ValueError(f"{' and '.join(dims)} both name {dims['tensor_parallel']!r}: give each a dimension")
    every = mesh.mesh_dim_names or ()
    by_role = {"tensor" if option == "tensor_parallel" else "context": dim for option, dim in dims.items()}
    groups = {role: mesh.get_group(dim) for role, dim in by_role.items()}
    sharing = next(iter(groups.values()))
    if len(groups) > 1:
        sharing = mesh[tuple(d for d in every if d in dims.values())]._flatten().get_group()
    everyone = _everyone(mesh)
    place_of = {int(mesh.mesh[place]): place for place in product(*map(range, mesh.mesh.shape))}
    places = [place_of[rank] for rank in dist.get_process_group_ranks(everyone)]
    seats = {role: tuple(p[every.index(dim)] for p in places) for role, dim in by_role.items()}
    flat = DeviceMesh.from_group(everyone, mesh.device_type)
    return Groups(flat, everyone, everyone, sharing=sharing, seats=seats, **groups)


def _everyone(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh."""
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    found: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    return found


def resolve_group(mesh: Mesh | None, device: torch.device, timeout: float = 300.0) -> dist.ProcessGroup:
    """The group of a 1-D DeviceMesh, a ProcessGroup itself, or the default group.

    If there is no default group, it is made from torchrun's environment: nccl if ``device`` is CUDA, else gloo. Its
    collectives then have ``timeout`` seconds.
    Raises ValueError for a mesh that is not 1-D, RuntimeError if there is neither a group nor such an environment.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one dimension, this one has shape {tuple(mesh.mesh.shape)}: pass mesh['name'], or "
                'sharding_strategy="hybrid_zero3" to shard over the last dimension and replicate over the first'
            )
        return mesh.get_group()
    if isinstance(mesh, dist.ProcessGroup):
        if dist.get_rank(mesh) < 0:
            raise ValueError("this rank is not in the process group that was passed as mesh")
        return mesh
    if mesh is not None:
        raise TypeError(f"mesh must be a DeviceMesh or a ProcessGroup, not {type(mesh).__name__}")
    if not dist.is_initialized():
        if (
            not dist.is_torchelastic_launched()
            and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        ):
            raise RuntimeError(
                "there is no process group and no torchrun environment to make one from: start the script with "
                "torchrun, call torch.distributed.init_process_group first, or pass mesh="
            )
        init_process_group(device, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    return group


def size_of(mesh: Mesh | None) -> int:
    """The number of ranks of a mesh or group, else of the default group or of torchrun's environment."""
    if isinstance(mesh, DeviceMesh | dist.ProcessGroup):
        return mesh.size()
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def mesh_of_nodes(ranks: int, mesh: Mesh | None, device: torch.device, *, timeout: float) -> DeviceMesh:
    """A mesh (nodes, ranks of a node) of all ranks. Raises ValueError for a 2-D mesh or one of fewer ranks, or if nodes
    would differ."""
    size = resolve_group(None, device, timeout).size()
    if is_2d(mesh) or resolve_group(mesh, device, timeout).size() != size:
        raise ValueError(
            f'reshard_after_forward={ranks} makes a mesh of all ranks: pass sharding_strategy="zero3_secondary" with '
            "a 2-D mesh (nodes, ranks of a node) instead"
        )
    if size % ranks:
        raise ValueError(f"reshard_after_forward={ranks} does not divide the {size} ranks: pass a divisor, or True")
    return init_device_mesh(device.type, (size // ranks, ranks), mesh_dim_names=("replicate", "shard"))


def is_2d(mesh: Mesh | None) -> TypeGuard[DeviceMesh]:
    """True for a mesh that a hybrid strategy needs."""
    return isinstance(mesh, DeviceMesh) and mesh.ndim == 2


def backend_for(group: dist.ProcessGroup | None, devices: set[str]) -> str:
    """The backend that ``group`` uses for tensors on ``devices`` (types, such as "cpu"). "mixed" if there are several,
    "none" if there is no other rank.

    A fake group reports the default backend of a real one, so that its traces are those of a real run.
    """
    if group is None or group.size() == 1:
        return "none"
    if dist.get_backend(group) == "fake":
        return "nccl" if devices == {"cuda"} else "gloo"
    by_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    backends = {by_device.get(device, "none") for device in devices}
    return backends.pop() if len(backends) == 1 else "mixed"


class Transport(NamedTuple):
    """The fields of a plan with these names: how its collectives travel."""

    direct: bool
    averages: bool


def transport(group: dist.ProcessGroup, devices: set[str]) -> Transport:
    """The transport for the backend that ``group`` uses for tensors on ``devices`` (types)."""
    backend = backend_for(group, devices)
    return Transport(direct=backend == "gloo" and devices == {"cpu"}, averages=backend == "nccl")


def is_alone(group: dist.ProcessGroup) -> bool:
    """True if there is no other rank to talk to. The other ranks of a fake group do not exist."""
    return group.size() == 1 or dist.get_backend(group) == "fake"


# ---- the C library's memory ----


KEPT_FREE = 2**30  # bytes: larger blocks are still returned at once, and free memory beyond this at the end of the heap
# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Lets glibc's malloc keep the memory that a step frees, so that the next step does not fault it in again.

    By default glibc returns freed memory to the system if a block is large or if much is free at the end of the heap.
    A step on a CPU frees all of its activations and gathered parameters, and the next one faults each page in again.
    This sets the thresholds for this process, and returns whether it did.

    Does nothing if the environment chooses them (``MALLOC_...``, ``GLIBC_TUNABLES``) or may have chosen another
    allocator (``LD_PRELOAD``), or with another C library. A later call of mallopt takes precedence.
    """
    chosen = "LD_PRELOAD" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or chosen or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(which, KEPT_FREE) == 1 for which in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
