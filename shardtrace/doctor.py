"""What works in this environment, and what to install: ``shardtrace doctor``.

Needs only Python's library. It looks at torch and Thunder in processes of their own, so that it also works where they
cannot be imported.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Release = tuple[int, int]

VERSION = "0.1.0"  # of shardtrace
PYTHON: tuple[Release, Release] = ((3, 10), (3, 13))  # the first and the last that are supported
TORCH: tuple[Release, Release] = ((2, 10), (2, 15))
THUNDER = "0.2.6"
NVFUSER: Release = (2, 10)  # the last torch that it is built for
EXTRAS = {  # packages that are imported, under the names of their distributions
    "plan": ("scipy",),
    "hf": ("transformers", "accelerate", "tqdm"),
    "lightning": ("lightning", "tqdm"),
    "notebook": ("ipykernel", "jupytext", "matplotlib", "nbclient", "nbformat", "pandas"),
    "docs": ("mkdocs", "mkdocs-material", "mkdocstrings"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 300  # for one look, on a machine that is busy

OF_TORCH = """
import torch
try:
    torch.cuda.init()
    why = ""
except Exception as error:
    why = str(error).splitlines()[0]
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if not why else []
found = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": names, "why": why}
"""
OF_THUNDER = """
import shardtrace, thunder, torch
from shardtrace.planner.calibrate import cache_folder, cost_model_key, find_cost_model
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
key = cost_model_key(device, None)
backends = ("none", "nccl" if device.type == "cuda" else "gloo")
found = {
    "nvfuser": thunder.nvfuser_executor is not None,
    "machine": key.device,
    "folder": str(cache_folder()),
    "calibrated": any(find_cost_model(device, backend, 1) is not None for backend in backends),
}
"""
OF_GROUP = """
import torch
import torch.distributed as dist
backend, device = {group}
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
ones = torch.ones(2, device=device)
dist.all_reduce(ones)
assert ones.tolist() == [1.0, 1.0], ones
dist.destroy_process_group()
found = {{}}
"""


@dataclass(frozen=True)
class Finding:
    """A line of the report. ``works`` is None where something optional is absent, False where something required is."""

    name: str
    works: bool | None
    text: str

    def __str__(self) -> str:
        state = {True: "ok", None: "-", False: "MISSING"}[self.works]
        return f"{state:<8} {self.name:<12} {self.text}"


def main() -> int:
    """Prints the report. The exit code is 1 if something required is missing, else 0."""
    findings = examine()
    print(*findings, sep="\n")
    return int(any(f.works is False for f in findings))


def examine() -> list[Finding]:
    """Looks at everything, in half a minute at most on a usual machine."""
    with ThreadPoolExecutor() as pool:
        torch, thunder, gloo = pool.map(look, (OF_TORCH, OF_THUNDER, OF_GROUP.format(group=("gloo", "cpu"))))
    nccl = look(OF_GROUP.format(group=("nccl", "cuda"))) if torch.get("devices") else {}
    return [
        of_python(sys.version_info[:3]),
        of_torch(torch),
        of_thunder(thunder, installed("lightning-thunder")),
        of_nvfuser(torch, thunder),
        of_group("gloo", gloo),
        of_nccl(torch, nccl),
        of_device(torch, driver()),
        of_calibration(thunder),
        *map(of_extra, EXTRAS),
        of_browser(),
    ]


# ---- looking ----


def look(code: str) -> dict[str, Any]:
    """Runs ``code`` in a process of its own and returns its ``found``; if it fails, ``{"error": its last line}``."""
    ask = [sys.executable, "-W", "ignore", "-c", f"{code}\nimport json; print('\\n' + json.dumps(found))"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {SECONDS} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def installed(distribution: str) -> str | None:
    """The version of a distribution. None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def driver() -> str | None:
    """The version of NVIDIA's driver. None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True)
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


# ---- judging ----


def of_python(release: tuple[int, ...]) -> Finding:
    name = ".".join(map(str, release))
    if PYTHON[0] <= release[:2] <= PYTHON[1]:
        return Finding("Python", True, name)
    return Finding("Python", False, f"{name}: needs {_span(PYTHON)}, which Thunder supports")


def of_torch(found: dict[str, Any]) -> Finding:
    (first, last), install = TORCH, f"pip install '{_torch_range()}'"
    if "error" in found:
        return Finding("torch", False, f"{found['error']}: {install}")
    release = _release(found["version"])
    if release < first:
        return Finding("torch", False, f"{found['version']} is too old, needs {_span(TORCH)}: {install}")
    if release > last:
        text = f"{found['version']} is newer than {_span(TORCH)}, with which shardtrace was tried: {install}"
        return Finding("torch", False, text)
    return Finding("torch", True, f"{found['version']}, {'CUDA ' + found['cuda'] if found['cuda'] else 'CPU build'}")


def of_thunder(found: dict[str, Any], release: str | None) -> Finding:
    if release != THUNDER:
        text = f"{release or 'not installed'}: pip install lightning-thunder=={THUNDER}"
        return Finding("thunder", False, text)
    if "error" in found:
        return Finding("thunder", False, f"{release} cannot be imported: {found['error']}")
    return Finding("thunder", True, f"{release}; import shardtrace before thunder")


def of_nvfuser(torch: dict[str, Any], thunder: dict[str, Any]) -> Finding:
    if thunder.get("nvfuser"):
        return Finding("nvFuser", True, "Thunder uses it")
    instead = 'executors=["sdpa", "torch_kernels", "torchcompile"] fuses without it'
    if not torch.get("devices"):
        text = f"no CUDA device; {instead}"
    elif _release(torch["version"]) > NVFUSER:
        text = f"not built for torch after {_span((NVFUSER,))}; {instead}"
    else:
        text = f"pip install 'shardtrace[nvfuser]' (Python 3.10 or 3.12); {instead}"
    return Finding("nvFuser", None, text)


def of_group(backend: str, found: dict[str, Any]) -> Finding:
    if "error" in found:
        return Finding(backend, False, f"a group of one rank fails: {found['error']}")
    return Finding(backend, True, "a group of one rank works")


def of_nccl(torch: dict[str, Any], found: dict[str, Any]) -> Finding:
    return of_group("nccl", found) if torch.get("devices") else Finding("nccl", None, "no CUDA device")


def of_device(torch: dict[str, Any], driver: str | None) -> Finding:
    """A GPU that torch does not see is something required: the machine was bought for it."""
    if torch.get("devices"):
        return Finding("device", True, f"{', '.join(torch['devices'])}; driver {driver or 'unknown'}")
    if driver is None:
        return Finding("device", True, "CPU; no NVIDIA driver")
    why = torch.get("why", "torch cannot be imported")
    text = f"driver {driver}, but torch sees no CUDA device ({why}): install a build of torch for it, see pytorch.org"
    return Finding("device", False, text)


def of_calibration(thunder: dict[str, Any]) -> Finding:
    if "error" in thunder:
        return Finding("calibration", None, "unknown: Thunder cannot be imported")
    if thunder["calibrated"]:
        return Finding("calibration", True, f"of {thunder['machine']}, in {thunder['folder']}")
    run = "torchrun --nproc_per_node=2 -m shardtrace calibrate"
    return Finding("calibration", None, f"none of {thunder['machine']} in {thunder['folder']}: {run}")


def of_extra(name: str) -> Finding:
    found = {package: installed(package) for package in EXTRAS[name]}
    if missing := [package for package, release in found.items() if release is None]:
        return Finding(name, None, f"{', '.join(missing)} missing: pip install 'shardtrace[{name}]'")
    return Finding(name, True, ", ".join(f"{package} {release}" for package, release in found.items()))


def of_browser() -> Finding:
    """Only tests of the inspector's page need one."""
    if found := next(filter(None, map(shutil.which, BROWSERS)), None):
        return Finding("chromium", True, found)
    return Finding("chromium", None, "none, for tests of the inspector's page: apt-get install chromium")


# ---- releases ----


def _release(name: str) -> Release:
    """``(2, 15)`` of "2.15.0+cpu"."""
    major, minor = name.split(".")[:2]
    return int(major), int(minor)


def _span(releases: tuple[Release, ...]) -> str:
    return " to ".join(f"{major}.{minor}" for major, minor in releases)


def _torch_range() -> str:
    (first, (major, minor)) = TORCH
    return f"torch>={_span((first,))},<{major}.{minor + 1}"


if __name__ == "__main__":
    sys.exit(main())
