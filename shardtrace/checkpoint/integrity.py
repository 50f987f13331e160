"""Checks of a checkpoint's files against its index."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from passes.plan import Shape
from shardtrace.checkpoint.files import INDEX, CheckpointError, checksum
from shardtrace.checkpoint.index import Index
from shardtrace.checkpoint.progress_bar import ProgressBar

import torch
from safetensors import safe_open


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
