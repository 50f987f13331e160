"""The files of checkpoints, and their index: found, written and checked by all ranks together.

A checkpoint is a directory ``step-00000100`` with data files and ``index.json``. It is complete if it has its index,
which is renamed into place last, once everything else is on disk. Nothing is ever overwritten. The files are the
storage of torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from passes.plan import Shape

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import (
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

# ---- the index ----


_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_NAMES: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON. Its tensors are put into ``tensors``, under names that begin with ``name``.

    It may hold None, bool, int, float, str, tensors, and lists, tuples and dicts of them. Raises CheckpointError that
    names the place of anything else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if type(value) is list:
        return [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if type(value) in _NAMES:
        pairs = [[encode(k, f"{name}.key", tensors), encode(v, f"{name}.{k}", tensors)] for k, v in value.items()]
        return {_NAMES[type(value)]: pairs}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it holds None, bool, int, float, str, "
        "tensors, and lists, tuples and dicts of them"
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of :func:`encode`. Raises CheckpointError for a value that ``encode`` does not produce."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    tag, inner = next(iter(value.items()), (None, None))
    if len(value) == 1 and tag == "tensor" and isinstance(inner, str) and inner in tensors:
        return tensors[inner]
    if len(value) == 1 and isinstance(inner, list):
        if tag == "tuple":
            return tuple(decode(v, tensors) for v in inner)
        if tag in _MAPPINGS and all(isinstance(pair, list) and len(pair) == 2 for pair in inner):
            try:
                return _MAPPINGS[tag]([(decode(k, tensors), decode(v, tensors)) for k, v in inner])
            except TypeError:  # a key that is a list
                pass
    raise CheckpointError(f"the index holds {str(value)[:100]} where a value should be")


def tensor_names(value: Any) -> list[str]:
    """The tensors that an encoded value refers to."""
    if isinstance(value, list):
        return [name for v in value for name in tensor_names(v)]
    if isinstance(value, dict):
        name = value.get("tensor")
        return [name] if isinstance(name, str) else [n for v in value.values() for n in tensor_names(v)]
    return []


FORMAT = "shardtrace 2"
_FILE = re.compile(r"rank-\d{5,}-\d{3,}\.safetensors")  # no such name leaves the directory
_HEAD = '{"crc32": "%08x", "index":\n'
_TAIL = b"}\n"
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class Chunk(NamedTuple):
    """Rows of a tensor: ``rows`` rows of dim 0, beginning at ``start``; one row for a 0-dim tensor."""

    file: str
    start: int
    rows: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor whose ``chunks``, in the order of their rows, cover it; none if it has no elements.

    ``key`` is its name in the files.
    """

    key: str
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]

    def chunk_shape(self, chunk: Chunk) -> Shape:
        return (chunk.rows, *self.shape[1:]) if self.shape else ()


@dataclass(frozen=True)
class Index:
    """The contents of the index file.

    Args:
        step: the training step.
        files: bytes and CRC-32 of each data file.
        tensors: by name.
        tied: other names of tensors, and their names in ``tensors``.
        state: encoded values other than tensors (:mod:`shardtrace.checkpoint.files`) of the model, the optimizer and
            the schedulers.
        ranks: state that only one rank has, for each rank: its generators and what the caller added.
    """

    step: int
    files: dict[str, tuple[int, int]]
    tensors: dict[str, SavedTensor]
    tied: dict[str, str]
    state: dict[str, Any]
    ranks: list[dict[str, Any]]


def dump_index(index: Index) -> bytes:
    body = {"format": FORMAT, "step": index.step, "files": index.files}
    body["tensors"] = {
        name: [str(t.dtype).removeprefix("torch."), t.shape, t.chunks] for name, t in index.tensors.items()
    }
    body |= {"tied": index.tied, "state": index.state, "ranks": index.ranks}
    text = json.dumps(body).encode()
    return (_HEAD % zlib.crc32(text)).encode() + text + _TAIL


def read_index(directory: Path) -> Index:
    """The index of a checkpoint. Raises CheckpointError for anything that is not a valid index."""
    path = directory / INDEX
    data = path.read_bytes()
    text = data[len(_HEAD % 0) : -len(_TAIL)]
    crc32 = zlib.crc32(text)
    if data != (_HEAD % crc32).encode() + text + _TAIL:
        raise CheckpointError(f"{path} is damaged, or not an index of shardtrace: its checksum does not match")
    try:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has the format {body['format']!r}, this is {FORMAT!r}: another version saved it"
            )
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in body["files"].items()}
        tensors = {str(name): _tensor(name, *what) for name, what in body["tensors"].items()}
        tied = {str(name): str(first) for name, first in body["tied"].items()}
        ranks = [dict(rank) for rank in body["ranks"]]
        index = Index(int(body["step"]), files, tensors, tied, dict(body["state"]), ranks)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of shardtrace: {type(error).__name__}: {error}") from None
    for problem in _problems(index):
        raise CheckpointError(f"{path}: {problem}")
    return index


def _tensor(key: str, dtype: str, shape: list[int], chunks: list[Any]) -> SavedTensor:
    return SavedTensor(
        key,
        _DTYPES[dtype],
        tuple(int(size) for size in shape),
        tuple(Chunk(str(file), int(start), int(rows)) for file, start, rows in chunks),
    )


def _problems(index: Index) -> Iterator[str]:
    for name in index.files:
        if not _FILE.fullmatch(name):
            yield f"{name!r} is not the name of a data file"
    if not index.ranks:
        yield "it lists no rank"
    for name, first in index.tied.items():
        if first not in index.tensors or name in index.tensors:
            yield f"{name} is tied to {first}, which does not fit the tensors"
    for name, tensor in index.tensors.items():
        if min(tensor.shape, default=0) < 0:
            yield f"{name} has shape {tensor.shape}"
        if any(c.file not in index.files for c in tensor.chunks):
            yield f"{name} is in a file that is not listed"
        rows = (tensor.shape or (1,))[0] if math.prod(tensor.shape) else 0
        ends = [0, *(c.start + c.rows for c in tensor.chunks)]
        if ends[-1] != rows or any(c.start != end or c.rows < 1 for c, end in zip(tensor.chunks, ends, strict=False)):
            yield f"{name} is not covered by its chunks once and only once"


# ---- the files ----


def check_files(directory: Path, index: Index, rank: int, ranks: int, progress: ProgressBar) -> None:
    """Check that the files are those of the index; this rank reads every ``ranks``-th.

    Raises CheckpointError that names the file and the key that differ from the index.
    """
    _check_names(directory, set(index.files))
    mine = sorted(index.files)[rank::ranks]
    held: dict[str, dict[str, tuple[torch.dtype, Shape]]] = {name: {} for name in index.files}
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            held[chunk.file][tensor.key] = (tensor.dtype, tensor.chunk_shape(chunk))
    with progress.of(sum(index.files[name][0] for name in mine)) as advance:
        for name in mine:
            path, (size, crc32) = directory / name, index.files[name]
            if (found := path.stat().st_size) != size:
                raise CheckpointError(
                    f"{path} has {found:,} bytes, {INDEX} says {size:,}: it was truncated or replaced"
                )
            if (value := checksum(path)) != crc32:
                raise CheckpointError(f"{path} is damaged: its checksum is {value:08x}, {INDEX} says {crc32:08x}")
            _check_keys(path, held[name])
            advance(size)


def _check_keys(path: Path, expected: dict[str, tuple[torch.dtype, Shape]]) -> None:
    with safe_open(path, framework="pt") as data:
        found = set(data.keys())
        if found != expected.keys():
            raise CheckpointError(f"{path} and the index do not hold the same keys: {min(found ^ expected.keys())}")
        for key, (dtype, shape) in expected.items():
            view = data.get_slice(key)
            saved_shape = tuple(view.get_shape())
            saved_dtype = view[:0].dtype if saved_shape else data.get_tensor(key).dtype
            if (saved_dtype, saved_shape) != (dtype, shape):
                raise CheckpointError(
                    f"{path} holds {key} as {saved_dtype} of shape {saved_shape}, the index says {dtype} of {shape}"
                )


def _check_names(directory: Path, names: set[str]) -> None:
    """Raise CheckpointError unless the directory holds the index and exactly these regular files."""
    found = {entry.name for entry in os.scandir(directory) if not entry.name.startswith(".")} - {INDEX}
    if missing := names - found:
        raise CheckpointError(f"{directory / min(missing)} is missing")
    if foreign := found - names:
        raise CheckpointError(f"{directory / min(foreign)} is not of this checkpoint: its {INDEX} does not list it")
    for name in names:
        if not stat.S_ISREG(os.lstat(directory / name).st_mode):
            raise CheckpointError(f"{directory / name} is not a regular file")


# ---- directories and files ----


DELAY = 2.0  # seconds before a bar appears


class ProgressBar:
    """Shows bytes done and bytes per second on a terminal after DELAY, with tqdm if it is installed.

    Args:
        what: its label.
        show: False on ranks other than the first, and where there may be another bar.
    """

    def __init__(self, what: str, *, show: bool) -> None:
        self.what, self.show = what, show

    @contextmanager
    def of(self, total: int) -> Iterator[Callable[[int], object]]:
        """Yield a function to be called with each number of bytes done."""
        try:
            from tqdm import tqdm
        except ImportError:
            yield lambda done: None
            return
        off = not (self.show and sys.stderr.isatty())
        with tqdm(total=total, desc=self.what, unit="B", unit_scale=True, delay=DELAY, disable=off) as bar:
            yield bar.update


INDEX = "index.json"
_STEP = re.compile(r"step-(\d{8,})")
_BLOCK = 1 << 22  # bytes per read


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded. Raised on every rank; a load has changed nothing by then."""


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> dict[int, Path]:
    """The checkpoint directories in ``root``, complete or not, by step, in ascending order."""
    found = {int(m[1]): p for p in root.iterdir() if (m := _STEP.fullmatch(p.name))} if root.is_dir() else {}
    return dict(sorted(found.items()))


def is_complete(directory: Path) -> bool:
    return (directory / INDEX).is_file()


def latest_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step in the directory ``path``; None if there is none."""
    return next((p for p in reversed(steps_in(Path(path)).values()) if is_complete(p)), None)


def find_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a checkpoint, else the latest in it. Raises CheckpointError if there is none."""
    if is_complete(path):
        return path
    if _STEP.fullmatch(path.name) and path.is_dir():
        raise CheckpointError(f"{path} has no {INDEX}: its save was interrupted; load the checkpoint before it")
    found = latest_checkpoint(path)
    if found is None:
        raise CheckpointError(f"there is no complete checkpoint in {path}")
    return found


def new_directory(root: Path, step: int) -> Path:
    """Make an empty directory for a step. The remains of an interrupted save of this step are removed.

    Raises CheckpointError if there is a complete checkpoint of this step or a later one, which would stay the latest.
    """
    last = latest_checkpoint(root)
    if last is not None and int(last.name.removeprefix("step-")) >= step:
        raise CheckpointError(
            f"cannot save step {step}: there is {last} already; save to another directory, or remove the later ones"
        )
    directory = step_directory(root, step)
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    sync_directory(root)
    sync_directory(root.parent)
    return directory


def remove_old(root: Path, keep_last: int) -> None:
    """Remove all but the latest ``keep_last`` complete checkpoints, and interrupted saves before the latest."""
    complete = [step for step, path in steps_in(root).items() if is_complete(path)]
    for step, path in steps_in(root).items():
        if step < complete[-1] and step not in complete[-keep_last:]:
            (path / INDEX).unlink(missing_ok=True)  # no longer complete
            sync_directory(path)
            shutil.rmtree(path)


def write_new(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file completely or not at all, even if the machine stops. ``write`` gets the path to write to."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    sync_file(temporary)
    if path.exists():
        raise CheckpointError(f"{path} exists already")
    temporary.rename(path)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file  # its names and renames reach the disk


def checksum(path: Path) -> int:
    """CRC-32 of a file: it detects every flipped bit and every burst of errors of up to 32 bits.

    It guards against accidents. It is no signature: whoever can change a file can change its index too.
    """
    value = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


# ---- the storage of torch.distributed.checkpoint ----


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
