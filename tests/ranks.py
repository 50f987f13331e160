"""Tests on several ranks: a pool of rank processes that all tests of a lane share, and ranks that run a script.

``on_ranks`` runs the body of a test on the ranks of the pool. Importing torch and Thunder takes seconds of CPU. One
process does it and all ranks are its forks. It has run nothing, so no fork copies the lock of a running thread.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

# Helpers of the tests whose failing asserts show their values, as those of the tests do.
REWRITTEN = ("exchange", "on_gpus", "sharded_training")

Test = TypeVar("Test", bound=Callable[..., None])


# What all forks have imported, Thunder after what makes it importable. The rest would take two seconds in each fork of
# which a script or a test needs it; what is not installed is left out.
PRELOADED = ["shardtrace", "thunder", "pytest"]
PRELOADED += [
    f"transformers.models.{name}" for name in ("gpt2.modeling_gpt2", "llama.modeling_llama", "gemma2.modeling_gemma2")
]
PRELOADED += ["transformers.trainer", "lightning.fabric"]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def on_ranks(world_size: int) -> Callable[[Test], Test]:
    """Run the body of a test on ``world_size`` ranks of a gloo group; it passes if it passes on every rank. One rank
    proves what it compiles, another one in the next test.

    The test is a function of a module. Its arguments (parameters, or fixtures such as ``tmp_path``) are pickled.
    Results that one process has to compare come from ``ranks_of(world_size).run(function, ...)`` instead.
    """

    def mark(test: Test) -> Test:
        return pytest.mark.usefixtures("ranks_of")(pytest.mark.on_ranks(world_size)(test))

    return mark


def _serve(rank: int, world_size: int, store: str, connection: Any, device: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["LOCAL_RANK"] = str(rank)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _rewrite_asserts()
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"  # gloo for what is compared with the CPU
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    from passes.proof import prove as proof

    prove, turns, last = proof.prove, count(rank), ""
    while (job := connection.recv()) is not None:
        module, function, kwargs = job
        if module != last:  # see small_heap of the conftest
            last = module
            gc.collect()
            gc.freeze()
        proof.prove = prove if next(turns) % world_size == 0 else lambda *_: proof.Proof("proven")
        torch.manual_seed(0)  # ranks must begin with the same parameters
        try:
            connection.send((True, getattr(importlib.import_module(module), function)(**kwargs)))
        except BaseException as error:
            connection.send((False, f"{type(error).__name__}: {error}\n\n{_shown()}"))
    dist.destroy_process_group()


def _rewrite_asserts() -> None:
    """Let a failing assert of a test module show its values, as in pytest's own process."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    files = " ".join(["test_*.py", *(f"{name}.py" for name in REWRITTEN)])
    pytest.Config.fromdictargs({}, ["-c", os.devnull, "--noconftest", "-o", f"python_files={files}"])


def _shown() -> str:
    """The exception that is being handled with its traceback, from the body of the test on."""
    error = pytest.ExceptionInfo.from_current()
    error.traceback = error.traceback[1:] or error.traceback
    return str(error.getrepr(style="short"))


class Ranks:
    """``world_size`` processes in a gloo group, started at first use. On "cuda" each has a GPU and an nccl group; they
    are no forks, because importing Thunder asks for GPUs, and CUDA cannot be used in a fork of a process that did."""

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size, self.device = world_size, device
        self._processes: list[Any] = []

    def _start(self) -> None:
        store = tempfile.mktemp(prefix="ranks")
        pipes = [context.Pipe() for _ in range(self.world_size)]
        self._connections = [mine for mine, _ in pipes]
        start = context if self.device == "cpu" else multiprocessing.get_context("spawn")
        self._processes = [
            start.Process(target=_serve, args=(r, self.world_size, store, pipes[r][1], self.device), daemon=True)
            for r in range(self.world_size)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *, timeout: float = 150, **kwargs: Any) -> list[Any]:
        """Call a function of a module on every rank; return the results by rank.

        The test fails with the traceback of each rank that raises. TimeoutError if a rank hangs.
        """
        results = self.outcomes(function, timeout=timeout, **kwargs)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
        if failures:
            pytest.fail("\n\n".join(failures), pytrace=False)
        return [value for _, value in results]

    def outcomes(self, function: Callable[..., Any], *, timeout: float = 150, **kwargs: Any) -> list[tuple[bool, Any]]:
        """For each rank, whether it returned, and its result or the text of its error."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function.__module__, function.__name__, kwargs))
        results = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(timeout):
                self.stop(kill=True)
                raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
            results.append(connection.recv())
        return results

    def stop(self, *, kill: bool = False) -> None:
        for process, connection in zip(self._processes, getattr(self, "_connections", []), strict=False):
            if kill:
                process.kill()
            else:
                connection.send(None)
        for process in self._processes:
            process.join(20)
        self._processes = []


def run_script(path: Path, arguments: Sequence[str], world_size: int, timeout: float = 150) -> str:
    """Run a script on ranks of its own with torchrun's environment; return what they print. One rank proves what it
    compiles, another one in the next script.

    AssertionError with their stderr if a rank fails or does not end in time.
    """
    turn = next(_scripts)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
    environment |= {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": 0}
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        streams = Path(folder) / "stdout", Path(folder) / "stderr"
        processes = [
            context.Process(
                target=_run_script,
                args=(path, arguments, environment | {"RANK": rank, "LOCAL_RANK": rank}, streams),
                kwargs={"proves": (turn + rank) % world_size == 0},
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()
        printed, errors = (stream.read_text() for stream in streams)
        codes = [process.exitcode for process in processes]
        assert not any(codes), f"exit codes {codes}\n{errors}"
        return printed


_scripts = count()


class Fork:
    """A script in a process of its own, with the interface of subprocess.Popen. It is a fork, which saves the imports."""

    def __init__(
        self,
        path: Path,
        arguments: Sequence[str],
        environment: dict[str, Any],
        streams: Sequence[Path | str],
        *,
        daemon: bool = True,
    ) -> None:
        """``streams``: the files of stdout and stderr, to which it appends. A ``daemon`` has no processes of its own that
        multiprocessing starts."""
        self._process = context.Process(target=_run_script, args=(path, arguments, environment, streams), daemon=daemon)
        sys.path.insert(0, str(Path(__file__).parent))  # this module, although others have its name
        self._process.start()
        sys.path.pop(0)
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()


def run_restarted(path: Path, arguments: Sequence[str], world_size: int, folder: Path) -> None:
    """Run a script by torchrun's agent, which restarts ranks that fail. Writes their ids into ``folder``, by rank."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world_size, max_restarts=3, run_id=folder.name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method="forkserver",
    )  # fmt: skip
    elastic_launch(config, _run_rank)(path, arguments, folder)


def _run_rank(path: Path, arguments: Sequence[str], folder: Path) -> None:
    number = folder / f"rank {os.environ['RANK']}"
    number.with_suffix(".new").write_text(str(os.getpid()))
    number.with_suffix(".new").rename(number)
    _run_script(path, arguments, {}, (folder / "printed", folder / "errors"), proves=os.environ["RANK"] == "0")


def _run_script(
    path: Path,
    arguments: Sequence[str],
    environment: dict[str, Any],
    streams: Sequence[Path | str],
    *,
    proves: bool = True,
) -> None:
    if not proves:
        from passes.proof import prove as proof

        proof.prove = lambda *_: proof.Proof("proven")
    for number, stream in enumerate(streams, 1):
        with open(stream, "a") as file:
            os.dup2(file.fileno(), number)
    os.environ.update({name: str(value) for name, value in environment.items()})
    sys.argv = [str(path), *arguments]
    sys.path[:0] = [str(path.parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(str(path), run_name="__main__")
