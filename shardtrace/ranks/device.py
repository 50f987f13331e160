"""The device of this rank.

Note [Index]: an index of 0 says nothing, because it is that of all that nobody has placed. Any other index was chosen
by the script. LOCAL_RANK counts the ranks of a machine, but a launcher or CUDA_VISIBLE_DEVICES may show each rank only
some of its devices, which are numbered from 0 again.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
