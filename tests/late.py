"""A backend for tests that behaves like nccl, for tensors on the CPU.

A collective returns at once and runs later, in order of issue, on a thread of its group: its inputs are read and its
results are written at the last moment, when somebody waits for it. Until then its results are NaN. ``wait`` orders and
never raises. A collective that misses a rank never ends, until the group is aborted or its timeout has passed; its
results then stay NaN. The average is one of the reductions, and multiplies by 1/N before it adds. Lists of tensors may
be uneven.

``races`` of a group names the collectives whose memory was written between their issue and their wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

NAME = "late"
PATIENCE = 0.02  # seconds after which a collective runs although nobody waits for it: another rank may

Tensors = Sequence[torch.Tensor]


class LateWork(dist.Work):
    """One collective. ``read`` are its inputs, ``written`` its results; memory in place is in ``written`` only."""

    def __init__(self, name: str, read: Tensors, written: Tensors, run: Callable[[], None], limit: float) -> None:
        super().__init__()
        self.name, self.run = name, run
        self.earlier: LateWork | None = None
        self.wanted, self.over = threading.Event(), threading.Event()
        self._limit = limit
        self._read = [(t, t.clone()) for t in read]
        self._written = [t for t in written if t.is_floating_point()]
        for t in self._written:
            t.fill_(float("nan"))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        work: LateWork | None = self
        while work is not None:  # those before it run first
            work.wanted.set()
            work = work.earlier
        self.over.wait(self._limit)
        self.earlier = None
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()

    def raced(self) -> bool:
        """True if somebody has changed its inputs or written to its results since it was issued."""
        changed = any(not torch.equal(t.nan_to_num(), then.nan_to_num()) for t, then in self._read)
        return changed or any(not t.isnan().all() for t in self._written)


class LateGroup(dist.ProcessGroup):
    """The group of one rank. Gloo carries its messages."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.issued: list[str] = []
        self.races: list[str] = []
        self.patience = PATIENCE
        self._last: LateWork | None = None
        self._timeout = timeout
        self._name = ""
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("late", store), rank, size, timeout)
        self._works: queue.SimpleQueue[LateWork | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return NAME

    def abort(self) -> None:
        """Ends all collectives, now and later, without results."""
        self._ended.set()
        work = self._last
        while work is not None:
            work.over.set()
            work = work.earlier

    def shutdown(self) -> None:
        self._works.put(None)

    # ---- the collectives that shardtrace calls, by torch's names ----

    def allreduce(self, tensors: Any, opts: Any = None) -> LateWork:
        (tensor,) = tensors
        mine = tensor.clone()
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return self._issue("allreduce", [], [tensor], lambda: _write([tensor], [self._reduced(mine, op)]))

    def broadcast(self, tensors: Any, opts: Any) -> LateWork:
        (tensor,), root = tensors, opts.rootRank
        read, written = ([tensor], []) if root == self.rank() else ([], [tensor])
        return self._issue("broadcast", read, written, lambda: self._gloo.broadcast(tensor, root).wait())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LateWork:
        (outs,), (mine,) = outputs, inputs
        return self._issue("allgather", [mine], outs, lambda: _write(outs, self._gathered(mine, outs)))

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> LateWork:
        outs = output.view(self.size(), -1).unbind()
        return self._issue("all_gather_single", [mine], [output], lambda: _write(outs, self._gathered(mine, outs)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> LateWork:
        (mine,), (parts,) = outputs, inputs
        return self._issue("reduce_scatter", parts, [mine], lambda: self._scatter(parts, mine, opts.reduceOp))

    def reduce_scatter_single(self, mine: torch.Tensor, rows: torch.Tensor, opts: Any) -> LateWork:
        parts = rows.view(self.size(), -1).unbind()
        return self._issue("reduce_scatter_single", [rows], [mine], lambda: self._scatter(parts, mine, opts.reduceOp))

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # torch before 2.13

    def all_to_all_single(self, output: torch.Tensor, mine: torch.Tensor, into: Any, out: Any, opts: Any) -> LateWork:
        return self._issue("all_to_all_single", [mine], [output], lambda: self._swap(output, mine, into, out))

    alltoall_base = all_to_all_single  # torch before 2.13

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> LateWork:
        (mine,), outs = inputs, outputs[0] if outputs else []
        return self._issue("gather", [mine], outs, lambda: self._gather(mine, outs))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> LateWork:
        (mine,), parts = outputs, inputs[0] if inputs else [outputs[0]] * self.size()
        read = inputs[0] if inputs else []
        return self._issue("scatter", read, [mine], lambda: self._take(mine, parts, opts.rootRank))

    def barrier(self, opts: Any = None) -> LateWork:
        return self.allreduce([torch.ones(1)])

    # ---- how they run ----

    def _issue(self, name: str, read: Tensors, written: Tensors, run: Callable[[], None]) -> LateWork:
        if self._ended.is_set():
            raise RuntimeError(f"NCCL communicator was aborted on rank {self.rank()}")
        work = LateWork(name, read, written, run, self._timeout.total_seconds())
        work.earlier, self._last = self._last, work
        self.issued.append(name)
        self._works.put(work)
        return work

    @torch.no_grad()
    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            work.wanted.wait(self.patience)
            if work.raced():
                self.races.append(work.name)
            try:
                if not self._ended.is_set():
                    work.run()
            except RuntimeError:  # gloo has lost a rank; a kernel of nccl would go on waiting for it
                self._ended.wait(self._timeout.total_seconds())
                self._ended.set()
            work.over.set()

    def _gathered(self, mine: torch.Tensor, like: Tensors) -> list[torch.Tensor]:
        found = [torch.empty(t.shape, dtype=mine.dtype) for t in like]
        found[self.rank()].copy_(mine.view_as(found[self.rank()]))
        for root, tensor in enumerate(found):
            if tensor.numel():
                self._gloo.broadcast(tensor, root).wait()
        return found

    def _swap(self, output: torch.Tensor, mine: torch.Tensor, into: Any, out: Any) -> None:
        parts = torch.empty_like(output).split_with_sizes(list(into))
        works = [self._gloo.recv([part], rank, 0) for rank, part in enumerate(parts) if part.numel()]
        sent = enumerate(mine.split_with_sizes(list(out)))
        works += [self._gloo.send([part], rank, 0) for rank, part in sent if part.numel()]
        for work in works:
            work.wait()
        _write([output], [torch.cat(parts)])

    def _gather(self, mine: torch.Tensor, outs: Tensors) -> None:
        found = self._gathered(mine, [mine] * self.size())
        _write(outs, found if outs else [])

    def _take(self, mine: torch.Tensor, parts: Tensors, root: int) -> None:
        sent = [part.clone() for part in parts]
        for tensor in sent:
            self._gloo.broadcast(tensor, root).wait()
        _write([mine], [sent[self.rank()]])

    def _reduced(self, mine: torch.Tensor, op: Any) -> torch.Tensor:
        averages = op == dist.ReduceOp.AVG
        parts = self._gathered(mine * (1 / self.size()) if averages else mine, [mine] * self.size())
        total = parts[0]
        for part in parts[1:]:
            total = torch.maximum(total, part) if op == dist.ReduceOp.MAX else total + part
        return total

    def _scatter(self, parts: Tensors, mine: torch.Tensor, op: Any) -> None:
        for rank, part in enumerate(parts):
            total = self._reduced(part.clone(), op)
            if rank == self.rank():
                _write([mine], [total])


def _write(places: Tensors, values: Tensors) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value.view_as(place))


dist.Backend.register_backend(NAME, LateGroup, devices=["cpu"])


@contextmanager
def late_groups(shape: tuple[int, int] | None = None, timeout: float = 60.0) -> Iterator[Any]:
    """What ``fsdp(mesh=...)`` takes: a group of all ranks, or a mesh (replicate, shard) of this shape.

    Plans made inside are those for nccl. Fails at the end if memory of a collective in flight was written.
    """
    mesh: Any
    if shape is None:
        mesh = dist.new_group(backend=NAME, timeout=timedelta(seconds=timeout))
        groups = [mesh]
    else:
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, NAME))
        groups = mesh.get_all_groups()
    with like_nccl():
        yield mesh
    for group in groups:
        assert group.issued
        assert not group.races, f"memory in flight was written: {group.races}"
        dist.destroy_process_group(group)
    _clear_sharding_prop_cache()  # torch gives results of DTensors an earlier mesh of the same ranks


@contextmanager
def like_nccl() -> Iterator[None]:
    """Plans made inside call the backend's collectives, which average."""
    from shardtrace.model import state
    from shardtrace.ranks.mesh import Transport

    with mock.patch.object(state, "transport", return_value=Transport(direct=False, averages=True)):
        yield
