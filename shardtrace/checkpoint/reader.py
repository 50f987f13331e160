"""The reader that torch.distributed.checkpoint calls: it finds tensors in safetensors files by the index."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.index import SavedTensor
from shardtrace.checkpoint.progress_bar import ProgressBar
from shardtrace.checkpoint.writer import done

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future


class SafetensorsReader(StorageReader):
    """Reads tensors by name from verified files."""

    def __init__(self, directory: Path, tensors: dict[str, SavedTensor], progress: ProgressBar) -> None:
        self.directory, self.tensors, self.progress = directory, tensors, progress

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(tensor) for name, tensor in self.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            which = item.storage_index.index
            assert which is not None  # the plan sets it
            by_file.setdefault(self.tensors[item.storage_index.fqn].chunks[which].file, []).append(item)
        total = sum(self._bytes(item) for item in plan.items)
        with self.progress.of(total) as advance:
            for file, items in by_file.items():
                with safe_open(self.directory / file, framework="pt") as data:
                    for item in items:
                        key = self.tensors[item.storage_index.fqn].key
                        slices = tuple(
                            slice(start, start + length)
                            for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                        )
                        value = data.get_slice(key)[slices] if slices else data.get_tensor(key)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(value)
                        planner.commit_tensor(item, target)
                        advance(self._bytes(item))
        return done(None)

    def _bytes(self, item: ReadItem) -> int:
        return math.prod(item.lengths) * self.tensors[item.storage_index.fqn].dtype.itemsize

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _metadata(tensor: SavedTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(
            torch.Size((c.start, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()),
            torch.Size(tensor.chunk_shape(c)),
        )
        for c in tensor.chunks
    ]
    return TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
