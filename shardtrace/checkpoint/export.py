"""Export of whole models to safetensors files, which PyTorch and Hugging Face load without shardtrace."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.agreement import agreement
from shardtrace.checkpoint.files import CheckpointError, ProgressBar, write_new
from shardtrace.checkpoint.state import ModelState, Slot, model_state

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

SAFETENSORS_INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


def export_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, config: Any = None, max_file_bytes: float = 5e9
) -> None:
    """Write the whole model to ``path/model.safetensors``, or to several files and their index if it is larger.

    The names, files and index are those that ``transformers`` writes and ``from_pretrained`` loads. A plain module
    loads a single file with ``safetensors.torch.load_model``. A tied weight is written once, under its first name; the
    file's metadata lists the others. A collective: parameters are gathered one at a time. The first rank of the model's
    group writes, and holds one file's tensors in host memory.

    Args:
        path: a directory, created if it does not exist.
        config: also write ``config.json``: the config of a model of Hugging Face (``model.config``), or a mapping. For
            the former, ``architectures`` becomes the class of the model.
        max_file_bytes: the largest size of a file, unless it holds a single tensor.

    Raises:
        CheckpointError: on every rank, if a file of this name exists already or cannot be written.
    """
    root, state = Path(path).absolute(), model_state(model)
    files = _files(state, max_file_bytes)
    with agreement(state, f"a model to export to {root}") as said:
        said.lines = [f"max_file_bytes={max_file_bytes}"]
        _check(root, files, state, config)
    error = ""
    with ProgressBar("export", show=state.rank == 0).of(sum(map(_bytes, state.slots.values()))) as advance:
        for file, names in files.items():
            values = {}
            for name in names:
                slot = state.slots[name]
                whole = slot.whole()
                if state.rank == 0 and not error:
                    values[name] = whole.cpu().contiguous()
                advance(_bytes(slot))
            if values:
                aliases = {name: first for name, first in state.tied.items() if first in values}
                save = functools.partial(save_file, values, metadata={"format": "pt", **aliases})
                error = _write(root / file, save)
    texts = {} if state.rank else _texts(files, state, config)
    for file, text in texts.items():
        error = error or _write(root / file, functools.partial(Path.write_text, data=text))
    with agreement(state, f"the model exported to {root}"):
        if error:
            raise CheckpointError(error)


def _files(model: ModelState, max_file_bytes: float) -> dict[str, list[str]]:
    """The names of the tensors in each file."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, slot in model.slots.items():
        if parts[-1] and size + _bytes(slot) > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += _bytes(slot)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts, 1)}


def _bytes(slot: Slot) -> int:
    return torch.Size(slot.full_shape).numel() * slot.local.element_size()


def _check(root: Path, files: Mapping[str, list[str]], model: ModelState, config: Any) -> None:
    if not (config is None or isinstance(config, Mapping) or hasattr(config, "to_json_string")):
        raise CheckpointError(f"config is a {type(config).__name__}: pass model.config of Hugging Face, or a mapping")
    if model.extra:
        raise CheckpointError(f"{min(model.extra)} is an extra state, which safetensors files cannot hold")
    for name in (*files, SAFETENSORS_INDEX, "model.safetensors", *([CONFIG] if config is not None else [])):
        if (root / name).exists():
            raise CheckpointError(f"{root / name} exists already: export to another directory, or remove it")


def _write(path: Path, write: Callable[[Path], object]) -> str:
    """Write a file completely or not at all. Returns its error, or "", so that no rank waits in a gather."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, write)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        return f"cannot write {path}: {error}"
    return ""


def _texts(files: Mapping[str, list[str]], model: ModelState, config: Any) -> dict[str, str]:
    """The texts to write, by file: the index of several files, and the config."""
    texts = {}
    if len(files) > 1:
        total = sum(map(_bytes, model.slots.values()))
        weights = {name: file for file, names in files.items() for name in names}
        texts[SAFETENSORS_INDEX] = (
            json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2) + "\n"
        )
    if config is not None:
        texts[CONFIG] = _config(config, type(model.module).__name__)
    return texts


def _config(config: Any, architecture: str) -> str:
    """The text of ``config.json``."""
    if isinstance(config, Mapping):
        return json.dumps(config, indent=2) + "\n"
    config = copy.deepcopy(config)
    config.architectures = [architecture]
    text: str = config.to_json_string()
    return text
