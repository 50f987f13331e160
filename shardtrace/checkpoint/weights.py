"""Whole weights in safetensors files: those of other programs straight into shards, and export."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from passes.plan import Shape
from shardtrace.checkpoint.files import CheckpointError, ProgressBar, write_new
from shardtrace.checkpoint.state import ModelState, Slot, agreement, model_state
from shardtrace.model.distribute import sample

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

# ---- loading ----


Source = str | os.PathLike[str] | Mapping[str, torch.Tensor]  # a folder, a file, or a state dict
Rename = Callable[[str], str | None]


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a ``shape`` that ``read`` returns rows of: ``read(slice(start, stop))``, or ``read(...)`` for all.

    ``kind`` is "floating", "complex" or "integer". ``sample`` stands for values that are in memory.
    """

    key: str
    shape: Shape
    kind: str
    place: str  # for messages
    read: Callable[[Any], torch.Tensor]
    sample: str = ""


def load_safetensors(
    weights: Source, model: nn.Module, *, strict: bool = True, rename: Rename | None = None
) -> _IncompatibleKeys:
    """Load whole weights into shards, in place. Each rank reads only its own rows of each tensor.

    A collective: every rank of the model's group must call it and see the same files. If the model is not sharded, the
    calling process loads all of it. The host holds one tensor's rows at a time beside the shards. Values are converted
    to the dtype of the parameter. One of the names of a tied weight is enough. For models of Hugging Face, keys that
    the model's class declares to be ignored are ignored, and the weights of a base model get its prefix.

    Args:
        weights: a folder with safetensors files (those of its index, if there is one), a file, an index, or a mapping
            of names to tensors, such as a state dict.
        strict: raise if keys are missing or unexpected.
        rename: gives the name in the model for a name in the files, or None to leave that tensor out.

    Returns:
        The missing and the unexpected keys, like ``nn.Module.load_state_dict``.

    Raises:
        CheckpointError: on every rank, naming the file, key or shape that does not fit; nothing has been loaded then.
            (If the disk fails later, the error says that the model was loaded in part.)
    """
    state = model_state(model)
    with agreement(state, "the weights to load") as said:
        found = stored_tensors(weights, state.module, rename)
        said.lines = weights_lines(found)
        keys = check_weights(found, state, strict=strict)
    read_weights(found, state)
    return keys


def stored_tensors(weights: Source, module: nn.Module, rename: Rename | None = None) -> dict[str, Stored]:
    """The tensors of files or of a state dict, by their names in ``module``. Reads only the files' headers.

    Raises CheckpointError that names the file or the key at fault.
    """
    if isinstance(weights, Mapping):
        if odd := [key for key, value in weights.items() if not isinstance(value, torch.Tensor)]:
            raise CheckpointError(f"{odd[0]} of the state dict is a {type(weights[odd[0]]).__name__}, not a tensor")
        found = {
            key: Stored(key, tuple(v.shape), _kind(v.dtype), "the state dict", v.__getitem__, sample(v))
            for key, v in weights.items()
        }
    else:
        found = {}
        for path in _safetensors_files(Path(weights)):
            for key, stored in _tensors_of(path).items():
                if key in found:
                    raise CheckpointError(f"{key} is in {found[key].place} and in {path}: remove one of the files")
                found[key] = stored
    renamed: dict[str, Stored] = {}
    for key, stored in found.items():
        name = rename(key) if rename is not None else key
        if name in renamed:
            raise CheckpointError(f"rename gives {renamed[name].key} and {key} the same name, {name}")
        if name is not None:
            renamed[name] = stored
    return _as_from_pretrained(renamed, module)


def check_weights(found: Mapping[str, Stored], model: ModelState, *, strict: bool) -> _IncompatibleKeys:
    """The missing and the unexpected keys. Raises CheckpointError that names shapes and kinds that do not fit, with
    ``strict`` also these keys. The model may be on the meta device."""
    names = _names(model)
    missing = [name for name, all_names in names.items() if not any(n in found for n in all_names)]
    known = {n for all_names in names.values() for n in all_names}
    unexpected = [name for name in found if name not in known]
    problems = []
    for first, all_names in names.items():
        shape, kind = model.slots[first].full_shape, _kind(model.slots[first].local.dtype)
        for name, one in ((n, found[n]) for n in all_names if n in found):
            if one.shape != shape:
                problems.append(f"{name} of {one.place} has shape {one.shape}, the model's is {shape}")
            if one.kind != kind:
                problems.append(
                    f"{name} of {one.place} has {one.kind} values, the model's are {kind}: convert them first"
                )
    if strict:
        problems += [f"missing key {name}" for name in missing] + [f"unexpected key {name}" for name in unexpected]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the weights do not fit {type(model.module).__name__}: {'; '.join(problems[:8])}{more}. Pass rename= if "
            "only names differ, or strict=False to load what fits"
        )
    return _IncompatibleKeys(missing, unexpected)


def read_weights(found: Mapping[str, Stored], model: ModelState) -> None:
    """Reads this rank's rows. A tied weight is read under all of its names that are there. Raises CheckpointError on
    every rank if one of them cannot read, or if a tied weight has different values."""
    stored = {first: [found[n] for n in names if n in found] for first, names in _names(model).items()}
    parts = {first: model.slots[first].part() for first, held in stored.items() if held}
    total = sum(part.nbytes for part, _ in parts.values() if part is not None)
    bar = ProgressBar("load", show=model.rank == 0).of(total)
    with agreement(model, "the weights that were loaded"), bar as advance, torch.no_grad():
        for first, (part, start) in parts.items():
            try:
                _fill(part, model.slots[first], start, stored[first])
            except (OSError, SafetensorError, RuntimeError, ValueError) as problem:
                one = stored[first][0]
                raise CheckpointError(
                    f"the model was loaded only in part: cannot read {one.key} of {one.place}: {problem}"
                ) from None
            advance(0 if part is None else part.nbytes)


def weights_lines(found: Mapping[str, Stored]) -> list[str]:
    """What must be equal on all ranks."""
    return [f"{name} of shape {stored.shape}{stored.sample}" for name, stored in found.items()]


def _kind(dtype: torch.dtype) -> str:
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _names(model: ModelState) -> dict[str, list[str]]:
    """All names of each tensor of a model, by its first one."""
    names = {name: [name] for name in model.slots}
    for name, first in model.tied.items():
        names[first].append(name)
    return names


def _fill(part: torch.Tensor | None, slot: Slot, start: int, stored: list[Stored]) -> None:
    """Reads the rows of this rank's part from ``start`` on, and zeros the padding behind it. Raises ValueError if the
    names of a tied weight have different values."""
    if part is None:
        slot.local.detach().zero_()
        return
    whole = slot.is_whole or part.shape == slot.full_shape
    if not whole and slot.entry is not None:
        slot.entry.rows[part.shape[0] :].zero_()
    if whole or part.numel():
        rows = ... if whole else slice(start, start + part.shape[0])
        first, *others = stored
        part.copy_(first.read(rows))
        for other in others:
            if not torch.equal(other.read(rows).to(part), part):
                raise ValueError(
                    f"{other.key} has other values, and the model has one tensor for both: leave one of them out, or "
                    "untie them in the model"
                )


def _safetensors_files(path: Path) -> list[Path]:
    if path.is_dir():
        if (path / "model.safetensors").is_file():
            return [path / "model.safetensors"]
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) > 1 and path / SAFETENSORS_INDEX not in indexes:
            raise CheckpointError(f"{path} has several indexes ({', '.join(i.name for i in indexes)}): name one")
        if indexes:
            return _safetensors_files(path / SAFETENSORS_INDEX if path / SAFETENSORS_INDEX in indexes else indexes[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"there are no *.safetensors files in {path}")
        return files
    if not path.is_file():
        raise CheckpointError(f"there is no file or folder {path}")
    return _files_of_index(path) if path.name.endswith(".index.json") else [path]


def _files_of_index(path: Path) -> list[Path]:
    try:
        names = list(dict.fromkeys(json.loads(path.read_text())["weight_map"].values()))
        files = [path.parent / name for name in names if Path(name).name == name]  # no name leaves the folder
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
        raise CheckpointError(f"{path} is no index of safetensors files: {problem!r}") from None
    if len(files) < len(names):
        raise CheckpointError(f"{path} names files outside its folder")
    if absent := [file for file in files if not file.is_file()]:
        raise CheckpointError(f"{absent[0]} is missing, which {path.name} lists")
    return files


def _tensors_of(path: Path) -> dict[str, Stored]:
    try:
        with safe_open(path, framework="pt") as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  a file is no mapping
            return {
                key: Stored(
                    key, tuple(p.get_shape()), _kind_in_file(p.get_dtype()), str(path), partial(_read, path, key)
                )
                for key, p in parts.items()
            }
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} is no safetensors file, or is damaged: {problem}") from None


def _kind_in_file(dtype: str) -> str:
    """Of a dtype as safetensors writes it, such as "BF16", "C64" or "BOOL"."""
    return "floating" if dtype.startswith(("F", "BF")) else "complex" if dtype.startswith("C") else "integer"


def _read(path: Path, key: str, rows: Any) -> torch.Tensor:
    """Rows of a tensor. The file is mapped anew each time, so that pages that were read are given back."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key) if rows is ... else file.get_slice(key)[rows]


def _as_from_pretrained(found: dict[str, Stored], module: nn.Module) -> dict[str, Stored]:
    """What ``from_pretrained`` of Hugging Face does with names: it ignores those that the class declares, and adds the
    prefix of the base model if the weights are those of a base model."""
    known = module.state_dict(keep_vars=True).keys()
    prefix = getattr(module, "base_model_prefix", "")
    if prefix and hasattr(module, prefix) and not any(name in known for name in found):
        found = {f"{prefix}.{name}": stored for name, stored in found.items()}
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return {n: s for n, s in found.items() if n in known or not any(re.search(pattern, n) for pattern in ignored)}


# ---- export ----


DTYPES = {dtype: name for name, dtype in _TYPES.items()}  # as safetensors files name them
SAFETENSORS_INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


def export_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, config: Any = None, max_file_bytes: float = 5e9
) -> None:
    """Write the whole model to ``path/model.safetensors``, or to several files and their index if it is larger.

    The names, files and index are those that ``transformers`` writes and ``from_pretrained`` loads. A plain module
    loads a single file with ``safetensors.torch.load_model``. A tied weight is written once, under its first name; the
    file's metadata lists the others. A collective: parameters are gathered one at a time, and freed once they are
    written. Beside the shards, each rank holds one whole parameter; the first rank of the model's group, which writes,
    holds it in host memory, too.

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
            whole = _gathered(state, names, advance)
            if state.rank == 0 and not error:
                error = _write(root / file, functools.partial(_stream, _header(state, names), whole))
            deque(whole, maxlen=0)  # every rank gathers all of them, whoever writes
    texts = {} if state.rank else _texts(files, state, config)
    for file, text in texts.items():
        error = error or _write(root / file, functools.partial(Path.write_text, data=text))
    with agreement(state, f"the model exported to {root}"):
        if error:
            raise CheckpointError(error)


def _gathered(model: ModelState, names: Sequence[str], advance: Callable[[int], object]) -> Iterator[torch.Tensor]:
    """Whole tensors, one at a time. A collective."""
    for name in names:
        yield model.slots[name].whole()
        advance(_bytes(model.slots[name]))


def _header(model: ModelState, names: Sequence[str]) -> bytes:
    """The beginning of a safetensors file: the length of a JSON text, and the text, which says where each tensor is."""
    aliases = {name: first for name, first in model.tied.items() if first in names}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name in names:
        slot, begin = model.slots[name], end
        end += _bytes(slot)
        shape, dtype = list(slot.full_shape), DTYPES[slot.local.dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _stream(header: bytes, values: Iterator[torch.Tensor], path: Path) -> None:
    """Writes a safetensors file tensor by tensor, so that only one of them is in memory."""
    with path.open("wb") as file:
        file.write(header)
        for value in values:
            file.write(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del value  # before the next one is gathered


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
    for part in parts:  # large elements first, so that each tensor begins at a multiple of its elements
        part.sort(key=lambda name: -model.slots[name].local.element_size())
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts, 1)}


def _bytes(slot: Slot) -> int:
    return torch.Size(slot.full_shape).numel() * slot.local.element_size()


def _check(root: Path, files: Mapping[str, list[str]], model: ModelState, config: Any) -> None:
    if not (config is None or isinstance(config, Mapping) or hasattr(config, "to_json_string")):
        raise CheckpointError(f"config is a {type(config).__name__}: pass model.config of Hugging Face, or a mapping")
    for name, slot in model.slots.items():
        if slot.local.dtype not in DTYPES:
            raise CheckpointError(
                f"{name} is of {slot.local.dtype}, which safetensors files cannot hold: convert it first"
            )
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
    except (OSError, ValueError) as error:
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
