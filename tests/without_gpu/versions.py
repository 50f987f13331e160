"""Runs the tests on releases of torch, each in an environment of its own, and prints a table: ``make versions``.

    python3.12 tests/without_gpu/versions.py 2.10 2.15

The interpreter that runs this is the interpreter of the environments. torch comes without the libraries of CUDA, in
whose place are stubs: an environment takes 4 GB.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import venv
from datetime import date
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CUDA = re.compile(r"^Requires-Dist: (cuda|nvidia)-.*\n", re.MULTILINE)


class Result(NamedTuple):
    """What the tests found, in the order of the columns."""

    python: str
    torch: str
    day: date
    passed: int
    failed: int
    skipped: int
    minutes: int


HEADER = "| Python | torch | date | passed | failed | skipped | minutes |\n|---|---|---|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="of torch, as in 2.15")
    parser.add_argument("--lanes", default="2")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-versions")
    parser.add_argument("--tests", nargs="*", default=[], help="files of tests (all)")
    options = parser.parse_args()
    how = ["--numprocesses", options.lanes, "--dist=loadfile", "--no-loadscope-reorder"]
    rows, failed = [], 0
    for release in options.releases:
        python = environment(options.folder / f"py{platform.python_version()}-torch{release}", release)
        result = run(python, [*how, *options.tests])
        rows.append(f"| {' | '.join(map(str, result))} |")
        failed += result.failed
        print(HEADER, *rows, sep="\n", flush=True)
    return int(failed > 0)


def environment(folder: Path, release: str) -> Path:
    """The interpreter of an environment with a release of torch, all that the tests need, and this checkout."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    print(f"torch {release} into {folder} ...", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    (folder / ".gitignore").write_text("*\n")
    install(python, "--no-deps", f"torch=={release}.*" if release.count(".") == 1 else f"torch=={release}")
    (metadata,) = folder.glob("lib/*/site-packages/torch-*.dist-info/METADATA")
    needs = metadata.read_text()
    if CUDA.search(needs):
        metadata.write_text(CUDA.sub("", needs))  # else pip would install them with the next package
        runtime = "nvidia-cuda-runtime-cu12" if "-cu12==" in needs else "nvidia-cuda-runtime==13.*"
        install(python, "--no-deps", runtime)
        subprocess.run([python, HERE / "cuda_stubs.py", metadata.parents[1] / "torch" / "lib"], check=True)
    install(python, "-e", f"{ROOT}[examples,notebook,test]")
    ready.touch()
    return python


def install(python: Path, *what: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", *what], check=True)


def run(python: Path, options: list[str]) -> Result:
    """Runs the tests with options of pytest."""
    asked = "import platform, torch; print(platform.python_version(), torch.__version__)"
    versions = subprocess.check_output([python, "-c", asked], text=True).split()
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run([python, "-m", "pytest", "-q", f"--junitxml={report}", *options], cwd=ROOT, env=env)
    found = ElementTree.parse(report).getroot()[0]
    total, failures, errors, skipped = (int(found.get(k)) for k in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    minutes = round(float(found.get("time")) / 60)
    return Result(*versions, date.today(), total - failed - skipped, failed, skipped, minutes)


if __name__ == "__main__":
    sys.exit(main())
