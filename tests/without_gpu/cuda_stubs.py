"""Libraries of CUDA that define the functions torch links to, and do nothing: the CUDA build of torch then loads
without gigabytes of them, on a machine without a GPU.

    python tests/without_gpu/cuda_stubs.py FOLDER     # writes them; put FOLDER into LD_LIBRARY_PATH

Only libcudart is the real one, because torch asks it for the number of GPUs. Needs gcc and readelf.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

STUBBED = re.compile(
    r"lib(cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusparse|cusparseLt|nccl|nvrtc|nvshmem_host)\.so"
)
FUNCTIONS = re.compile(r"cu|nccl|nvrtc|nvshmem")
FAILURE = 999  # what each function returns; CUDA's "unknown error"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch, (cudart,) = _package("torch"), _package("nvidia").glob("*/lib/libcudart.so.*")  # neither is imported
    users = [*torch.glob("lib/*.so"), *torch.glob("_C*.so")]
    libraries = sorted({name for path in users for name in _needed(path) if STUBBED.match(name)})
    version_of = {library: version for path in users for library, version in _versions(path) if library in libraries}
    known = {name for path in [*users, cudart] for name, _, defined in _symbols(path) if defined}
    missing: dict[str, set[str]] = defaultdict(set)  # functions, by version
    for path in users:
        for name, version, defined in _symbols(path):
            if not defined and name not in known and (version or FUNCTIONS.match(name)):
                missing[version].add(name)
    for library in libraries:  # the loader looks for a function without a version in all of them
        version = version_of.get(library, "")
        _build(folder / library, missing[version], version)
    print(f"{len(libraries)} libraries in {folder}")


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations, name
    return Path(next(iter(spec.submodule_search_locations)))


def _needed(path: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", path))


def _versions(path: Path) -> Iterator[tuple[str, str]]:
    """Libraries whose functions have a version (one for all of them), and that version."""
    yield from re.findall(r"File: (\S+)  Cnt: 1\n.*Name: (\S+)", _readelf("--version-info", path))


def _symbols(path: Path) -> Iterator[tuple[str, str, bool]]:
    """The functions that a library defines or looks for: their names, versions (may be empty), and which of the two."""
    for line in _readelf("--dyn-syms", path).splitlines():
        if found := re.search(r" (UND|\d+) (\w+)(?:@+([\w.]+))?(?: \(\d+\))?$", line):
            yield found[2], found[3] or "", found[1] != "UND"


def _readelf(what: str, path: Path) -> str:
    return subprocess.run(["readelf", "--wide", what, path], capture_output=True, text=True, check=True).stdout


def _build(path: Path, functions: Iterable[str], version: str) -> None:
    code, script = path.with_suffix(".c"), path.with_suffix(".map")
    code.write_text("".join(f"int {name}(void) {{ return {FAILURE}; }}\n" for name in sorted(functions)))
    script.write_text(f"{version} {{ global: *; }};\n")
    flags = ["-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
    flags += [f"-Wl,--version-script={script}"] if version else []
    subprocess.run(["gcc", *flags, code, "-o", path], check=True)
    code.unlink()
    script.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
