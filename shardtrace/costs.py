"""The cost model of a machine: the cache of calibrations, and the choice of one for all ranks."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from passes.plan import CostModel, Device, Link, default_cost_model
from passes.plan.cost import FREE, Hardware, cluster, links_of
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import backend_for, is_alone

import torch
import torch.distributed as dist

VERSION = 2  # of the file format, and of the meaning of its rates


def of_first_rank(group: dist.ProcessGroup, device: torch.device, model: CostModel | None) -> CostModel:
    """The cost model of the first rank of ``group``. Other ranks may pass None. Call it on all ranks."""
    box = [None if model is None else asdict(model)]
    on = device if backend_for(group, {device.type}) == "nccl" else None  # nccl sends only tensors on a GPU
    with communicating("the cost model of the first rank", group):
        dist.broadcast_object_list(box, group=group, group_src=0, device=on)
    assert box[0] is not None
    return CostModel.from_dict(box[0])


def cache_folder() -> Path:
    """``$SHARDTRACE_CACHE``, else ``$XDG_CACHE_HOME/shardtrace``, else ``~/.cache/shardtrace``."""
    if own := os.environ.get("SHARDTRACE_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardtrace"
    except RuntimeError:  # a user without a home folder, as in some containers
        return Path(tempfile.gettempdir()) / "shardtrace"


@dataclass(frozen=True)
class Key:
    """The conditions of a calibration. Without a link, ``backend`` is "none" and ``world_size`` is 1."""

    device: str
    backend: str
    world_size: int

    @property
    def path(self) -> Path:
        name = f"{self.device}-{self.backend}-{self.world_size}"
        return cache_folder() / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-').lower()}.json"


def cost_model_key(device: torch.device, group: dist.ProcessGroup | None) -> Key:
    """The key of ``device`` in ``group``."""
    return Key(_device_name(device), backend_for(group, {device.type}), 1 if group is None else group.size())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    info = Path("/proc/cpuinfo")  # on Linux
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"  # torchrun gives each rank one by default


def write_cost_model(model: CostModel, device: torch.device, group: dist.ProcessGroup | None) -> Path:
    """Writes to the cache atomically and returns the file. Raises OSError if the cache is not writable."""
    key = cost_model_key(device, group)
    data = {"version": VERSION, "key": asdict(key), "torch": torch.__version__, "model": asdict(model)}
    key.path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=key.path.parent, prefix=key.path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(data, indent=2) + "\n")
        os.replace(temporary, key.path)
    except BaseException:
        os.unlink(temporary)
        raise
    return key.path


def load_cost_model(device: torch.device, group: dist.ProcessGroup) -> CostModel:
    """The cached calibration of this machine, or the best substitute. Call it on all ranks of ``group`` at once.

    All ranks get the model that the group's first rank finds. It looks for a calibration of this device, backend and
    world size; then for one of the nearest world size; then for one of the device without a link, to which it adds the
    default link. If there is none, it takes the defaults. A fake group always gets the defaults, so that its traces are
    the same on every machine. A file that cannot be used is ignored with a warning that names it.
    """
    if dist.get_backend(group) == "fake":
        return default_cost_model(device.type, "fake")
    model = _find(cost_model_key(device, group)) if dist.get_rank(group) == 0 else None
    if dist.get_rank(group) == 0 and model is None:
        model = default_cost_model(device.type, backend_for(group, {device.type}))
        if without_link := _find(cost_model_key(device, None)):
            model = replace(model, device=without_link.device)
    return model if is_alone(group) and model is not None else of_first_rank(group, device, model)


def find_cost_model(device: torch.device, backend: str, world_size: int) -> CostModel | None:
    """This machine's calibration for the nearest world size. None if there is none."""
    return _find(Key(_device_name(device), backend, world_size))


def _find(key: Key) -> CostModel | None:
    if exact := _read(key.path, key):
        return exact[1]
    stem = key.path.stem.rpartition("-")[0]
    paths = (path for path in sorted(key.path.parent.glob(f"{stem}-*.json")) if path != key.path)
    others = [found for path in paths if (found := _read(path, key))]
    return min(others, key=lambda found: abs(found[0].world_size - key.world_size))[1] if others else None


def _read(path: Path, wanted: Key) -> tuple[Key, CostModel] | None:
    """The contents of a file if its key is ``wanted``, except for the world size."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION:
            raise ValueError(f"it is of version {data['version']!r}, not {VERSION}")
        key, model = Key(**data["key"]), CostModel.from_dict(data["model"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"ignoring the calibration in {path} ({why}): calibrate again, or remove it", stacklevel=2)
        return None
    return (key, model) if key == replace(wanted, world_size=key.world_size) else None


class Rates(NamedTuple):
    """A cost model, and in words where it comes from and what its links are."""

    cost: CostModel
    source: str
    links: str


def rates_of(device: Hardware, links: Mapping[str, Any], world_size: int) -> Rates:
    """The rates of a device by name and of links by name, as in :func:`passes.plan.cost.cluster`. For "cpu", this
    machine's calibration, if there is one; a link that is named replaces the measured one."""
    modelled, names = cluster(device, **links), str(links_of(device, **links))
    measured = find_cost_model(torch.device("cpu"), "gloo", world_size) if device.name == "cpu" else None
    if measured is None:
        return Rates(modelled, "modelled", names)
    if any(name is not None for name in links.values()):
        return Rates(replace(modelled, device=measured.device), "partly calibrated", names)
    return Rates(measured, "calibrated", "a measured link")


# ---- as text ----


def table(model: CostModel, default: CostModel, key: Key) -> str:
    """The cost model as text, beside the defaults."""
    rows = [(f"device: {key.device}", "measured", "default")]
    rows += _rows(DEVICE_UNITS, model.device, default.device)
    if key.backend != "none":
        rows.append((f"link: {key.backend}, {key.world_size} ranks", "", ""))
        rows += _rows(LINK_UNITS, model.link, default.link)
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:{width}} {value:>16} {usual:>16}".rstrip() for name, value, usual in rows)


# in the order of the fields
DEVICE_UNITS = (
    ("fp32 products", 1e-9, "GFLOP/s"),
    ("bf16 products", 1e-9, "GFLOP/s"),
    ("memory", 1e-9, "GB/s"),
    ("overhead of a line", 1e6, "us"),
    ("from host memory", 1e-9, "GB/s"),
    ("attention", 100.0, "% of products"),
    ("exp, tanh, ...", 1e-9, "G elements/s"),
    ("new memory", 1e-9, "GB/s"),
    ("rounding", 100.0, "% of memory"),
)
LINK_UNITS = (
    ("bandwidth", 1e-9, "GB/s"),
    ("latency", 1e6, "us"),
    ("hop to a further rank", 1e6, "us"),
    ("compute for a collective", 1e6, "us"),
    ("compute for its bytes", 1e9, "s/GB"),
)


def _rows(
    units: Sequence[tuple[str, float, str]], measured: Link | Device, default: Link | Device
) -> list[tuple[str, str, str]]:
    def text(value: float, scale: float, unit: str) -> str:
        return f"{value * scale:,.4g} {unit}" if value < FREE else "takes no time"

    pairs = zip(units, astuple(measured), astuple(default), strict=True)
    return [(f"  {name}", text(a, scale, unit), text(b, scale, unit)) for (name, scale, unit), a, b in pairs]
