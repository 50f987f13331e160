"""Starts the ranks of a job, one process each, and makes sure that all of them end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cleanup import undisturbed
from job import Job
from slow_link import End

HERE = Path(__file__).parent
MODULES = HERE.parent / "gpt2", HERE.parents[1]  # the model; shardtrace where it is not installed
LOG_TAIL = 4000  # characters shown of a failed rank's output


class RankFailed(RuntimeError):
    """A rank ended with an error. The message holds its output."""


def run_ranks(job: Job, ends: Sequence[End] = (), script: Path = HERE / "ranks.py") -> list[dict[str, Any]]:
    """Runs the job and returns its results. ``ends`` are the network namespaces of the ranks, if there are any;
    ``script`` is run by each rank, with the file of the job."""
    with tempfile.TemporaryDirectory(prefix="shardtrace-benchmark-") as folder:
        processes = []
        try:
            port = "29500" if ends else str(_free_port())  # any port is free in a new namespace
            for rank in range(job.processes):
                processes.append(_start(job, rank, port, Path(folder), ends, script))
            _wait(processes, Path(folder))
        finally:
            with undisturbed():
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()
        results: list[dict[str, Any]] = json.loads((Path(folder) / "result").read_text())
        return results


def _start(job: Job, rank: int, port: str, folder: Path, ends: Sequence[End], script: Path) -> subprocess.Popen[bytes]:
    interface = ends[rank].interface if ends else None
    file = folder / f"job-{rank}"
    file.write_text(json.dumps(replace(job, result=str(folder / "result"), interface=interface).as_json()))
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.processes),
        "MASTER_ADDR": ends[0].address if ends else "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, MODULES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = interface or "lo"
    command = [sys.executable, "-W", "ignore", str(script), str(file)]
    # gloo and the profiler chat on stdout and stderr, which go to a file; rank 0 gets the terminal for its bar
    terminal = os.dup(2)
    try:
        with open(folder / f"log-{rank}", "wb") as log:
            return subprocess.Popen(
                [*(ends[rank].enter if ends else []), *command],
                env={**environment, "BENCHMARK_TERMINAL": str(terminal)},
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[terminal],
            )
    finally:
        os.close(terminal)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Returns when all ranks have ended well. Raises as soon as one has failed: the others would wait for it."""
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            break
        time.sleep(0.1)
    for rank, code in enumerate(codes):
        if code:
            log = (folder / f"log-{rank}").read_text(errors="replace")
            raise RankFailed(f"rank {rank} ended with exit code {code}:\n{log[-LOG_TAIL:]}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
