"""The writer that torch.distributed.checkpoint calls: it writes safetensors files and a JSON index."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardtrace.checkpoint.files import (
    INDEX,
    checksum,
    is_complete,
    new_directory,
    remove_old,
    step_directory,
    sync_directory,
    sync_file,
    write_new,
)
from shardtrace.checkpoint.index import Chunk, Index, SavedTensor, dump_index
from shardtrace.checkpoint.progress_bar import ProgressBar

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILE_BYTES = 1 << 30  # the most that a data file has, unless it holds a single tensor


class Written(NamedTuple):
    """The file that holds a tensor's chunk."""

    file: str
    bytes: int
    crc32: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """The data that a rank saves: tensors, its ``own`` other state, and ``shared`` state from the first rank.

    ``root`` is the directory of checkpoints, of which ``keep_last`` are kept; None: all.
    """

    root: Path
    step: int
    tensors: dict[str, torch.Tensor]
    own: dict[str, Any]
    shared: dict[str, Any]
    keep_last: int | None


class SafetensorsWriter(StorageWriter):
    """Writes a checkpoint: each rank writes its tensors, then the first rank writes the index."""

    def __init__(self, prepared: Prepared, progress: ProgressBar) -> None:
        self.prepared, self.progress = prepared, progress
        self.directory = step_directory(prepared.root, prepared.step)
        self._made = False  # the first rank makes it

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=self.prepared.own)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on the first rank, before any rank writes."""
        self.ranks = [plan.storage_data for plan in plans]
        new_directory(self.prepared.root, self.prepared.step)
        self._made = True
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        with self.progress.of(sum(_bytes(item) for item in plan.items)) as advance:
            for number, items in enumerate(_files(plan.items)):
                path = self.directory / f"rank-{plan.storage_data:05d}-{number:03d}.safetensors"
                save_file({item.index.fqn: _value(planner, item) for item in items}, path)
                written = Written(path.name, path.stat().st_size, checksum(path))
                sync_file(path)
                results += [WriteResult(item.index, _bytes(item), written) for item in items]
                advance(written.bytes)
        sync_directory(self.directory)
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on the first rank, once all ranks have written."""
        files: dict[str, tuple[int, int]] = {}
        chunks: dict[str, list[Chunk]] = {}
        for result in (r for of_rank in results for r in of_rank):
            written: Written = result.storage_data
            files[written.file] = (written.bytes, written.crc32)
            chunks.setdefault(result.index.fqn, []).append(_chunk(metadata, result.index, written.file))
        tensors = {name: _saved(name, metadata, chunks.get(name, [])) for name in metadata.state_dict_metadata}
        state, keep_last = self.prepared.shared, self.prepared.keep_last
        tied = state.pop("tied")
        index = Index(self.prepared.step, dict(sorted(files.items())), tensors, tied, state, self.ranks)
        text = dump_index(index)
        write_new(self.directory / INDEX, lambda path: path.write_bytes(text))
        if keep_last is not None:
            remove_old(self.prepared.root, keep_last)

    def discard(self) -> None:
        """Removes what a save that failed has written, once no rank writes any more."""
        if self._made and not is_complete(self.directory):
            shutil.rmtree(self.directory, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _files(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """The items that have elements, split into files."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        if file and size + _bytes(item) > FILE_BYTES:
            yield file
            file, size = [], 0
        if _bytes(item):
            file, size = [*file, item], size + _bytes(item)
    if file:
        yield file


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None  # only tensors are saved
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _value(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    return value.detach().cpu().contiguous()


def _tensor_metadata(metadata: Metadata, name: str) -> TensorStorageMetadata:
    saved = metadata.state_dict_metadata[name]
    assert isinstance(saved, TensorStorageMetadata)  # only tensors are saved
    return saved


def _chunk(metadata: Metadata, index: MetadataIndex, file: str) -> Chunk:
    saved = _tensor_metadata(metadata, index.fqn)
    assert index.index is not None  # the global plan sets it
    chunk = saved.chunks[index.index]
    return Chunk(file, chunk.offsets[0], chunk.sizes[0]) if saved.size else Chunk(file, 0, 1)


def _saved(name: str, metadata: Metadata, chunks: list[Chunk]) -> SavedTensor:
    saved = _tensor_metadata(metadata, name)
    in_order = tuple(sorted(chunks, key=lambda chunk: chunk.start))
    return SavedTensor(name, saved.properties.dtype, tuple(saved.size), in_order)


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
