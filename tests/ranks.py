"""A pool of rank processes that the tests reuse: starting one costs seconds, and tracing caches nothing across them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from typing import Any


def _serve(rank: int, world_size: int, store: str, connection: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    while (job := connection.recv()) is not None:
        module, function, kwargs = job
        try:
            connection.send((True, getattr(importlib.import_module(module), function)(**kwargs)))
        except BaseException as error:
            connection.send((False, f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Ranks:
    """``world_size`` processes in a gloo group. ``run`` calls a function on all of them and returns their results."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = tempfile.mktemp(prefix="ranks")
        pipes = [context.Pipe() for _ in range(self.world_size)]
        self._connections = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(r, self.world_size, store, pipes[r][1]), daemon=True)
            for r in range(self.world_size)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Any, *, timeout: float = 150, **kwargs: Any) -> list[Any]:
        """The results by rank. A rank that raises fails the test with its traceback; one that hangs, too."""
        results = self.outcomes(function, timeout=timeout, **kwargs)
        for rank, (ok, value) in enumerate(results):
            assert ok, f"rank {rank}: {value}"
        return [value for _, value in results]

    def outcomes(self, function: Any, *, timeout: float = 150, **kwargs: Any) -> list[tuple[bool, Any]]:
        """For each rank whether it returned, and its result or the text of its error."""
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
