"""The storage of torch.distributed.checkpoint, and one error for all ranks."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardtrace.checkpoint.files import (
    INDEX,
    CheckpointError,
    Chunk,
    Index,
    ProgressBar,
    SavedTensor,
    checksum,
    dump_index,
    is_complete,
    new_directory,
    remove_old,
    step_directory,
    sync_directory,
    sync_file,
    write_new,
)
from shardtrace.checkpoint.state import ModelState
from shardtrace.ranks.consensus import RankMismatchError, compare
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import (
    CheckpointException,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

# ---- one error for all ranks ----


@dataclass
class Said:
    """What a rank says before ranks are compared: its lines, and for how many seconds the others may be busy, in
    addition to the timeout of ``fsdp``."""

    lines: list[str] = field(default_factory=list)
    timeout: float = 0.0


@contextmanager
def agreement(model: ModelState, what: str, *errors: type[Exception]) -> Iterator[Said]:
    """Around a block that runs on every rank and communicates nothing; yields what it fills in.

    Raises CheckpointError on every rank if a block has raised one of ``errors`` or a CheckpointError, or if the ranks
    have said different lines.
    """
    said, found = Said(), ""
    caught: tuple[type[Exception], ...] = (CheckpointError, *errors)
    try:
        yield said
    except caught as error:
        found = str(error)
    if model.group is not None:
        timeout = said.timeout + model.states[0].options.checks.timeout
        try:
            compare(model.group, what, said.lines, timeout=timeout, error=found)
        except RankMismatchError as mismatch:
            found = found or str(mismatch)
    if found:
        raise CheckpointError(found) from None


@contextmanager
def together(group: dist.ProcessGroup | None, what: str, failure: str) -> Iterator[dict[str, Any]]:
    """Around a call of torch.distributed.checkpoint; yields its arguments for the ranks of ``group``.

    Raises CheckpointError that begins with ``failure`` and has the failures of all ranks.
    """
    alone = group is None or is_alone(group)
    try:
        with nullcontext() if group is None else communicating(what, group), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield {"process_group": None if alone else group, "no_dist": alone}
    except CheckpointException as exception:
        failures = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(exception.failures.items())]
        raise CheckpointError(f"{failure}: {'; '.join(failures)}") from None


# ---- the storage ----


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
