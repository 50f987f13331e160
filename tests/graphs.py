"""A stand-in for CUDA graphs on the CPU: it records the operators of a capture, and runs only these when it is replayed.

Like a graph, a replay reads the memory that the capture has read, writes the memory that it has written, and runs no
Python. During a capture, reading a value of a tensor is an error, as CUDA makes it one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FORBIDDEN = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")  # wait for the device


STREAMS = ("synchronize", "Stream", "current_stream", "stream")


class Graph:
    """What ``torch.cuda.CUDAGraph`` stands for. ``made`` counts all graphs, ``replays`` all of their replays."""

    made = replays = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        type(self).replays += 1
        with torch.no_grad():
            for function, args, kwargs, results in self.calls:
                found = function(*args, **kwargs)
                for place, value in zip(pytree.tree_leaves(results), pytree.tree_leaves(found), strict=True):
                    if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                        place.data.copy_(value)  # autograd does not learn of it


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith(FORBIDDEN):
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        results = function(*args, **(kwargs or {}))
        self.graph.calls.append((function, args, kwargs or {}, results))
        return results


@contextmanager
def graphs_on_cpu() -> Iterator[type[Graph]]:
    """Lets ``thunder.transforms.cudagraph`` capture and replay on the CPU."""

    class Counted(Graph):
        def __init__(self) -> None:
            super().__init__()
            Counted.made += 1

    def capture(graph: Graph, **options: Any) -> Any:
        return _Recorder(graph)

    with (
        mock.patch.object(torch.cuda, "CUDAGraph", Counted),
        mock.patch.object(torch.cuda, "graph", capture),
        mock.patch.multiple(torch.cuda, **dict.fromkeys(STREAMS, mock.DEFAULT)),
    ):
        yield Counted
