"""Checkpoints of Fabric: a folder of shards, or one file as a single process writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passes.compat.jit import unjitted
from shardtrace.checkpoint import (
    full_optimizer_state_dict,
    latest_checkpoint,
    load_checkpoint,
    load_full_optimizer_state_dict,
    load_safetensors,
    save_checkpoint,
)
from shardtrace.checkpoint.files import CheckpointError, decode, find_checkpoint, read_index
from shardtrace.checkpoint.state import model_state
from shardtrace.checkpoint.storage import agreement
from shardtrace.model.state import states_in
from shardtrace.training.full import full_state_dict, load_full_state_dict

import torch
from torch import nn
from torch.optim import Optimizer

Filter = Mapping[str, Callable[[str, Any], bool]]


@dataclass(frozen=True, eq=False)
class Parts:
    """The state that a script passes to ``fabric.save`` or ``fabric.load``: its sharded model, optimizers by key, and
    all other values."""

    key: str
    model: nn.Module
    optimizers: dict[str, Optimizer]
    others: dict[str, Any]

    @property
    def sorted_optimizers(self) -> list[Optimizer]:
        return [self.optimizers[key] for key in sorted(self.optimizers)]


def parts_of(state: Mapping[str, Any], call: str) -> Parts:
    """Raises ValueError unless the state has exactly one sharded model."""
    models = [key for key, value in state.items() if isinstance(value, nn.Module) and _is_sharded(value)]
    if len(models) != 1:
        raise ValueError(
            f"{call} takes one model that fabric.setup has sharded, state={{'model': model, ...}}; there are "
            f"{len(models)} in {[*state]}: use a path for each model"
        )
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    others = {key: value for key, value in state.items() if key != models[0] and key not in optimizers}
    return Parts(models[0], state[models[0]], optimizers, others)


def _is_sharded(module: nn.Module) -> bool:
    return bool(states_in(unjitted(module)))


# ---- a folder of shards ----


def save_shards(path: Path, parts: Parts) -> None:
    """Save to a folder. A save to the same folder replaces the one before once it is complete."""
    last = latest_checkpoint(path)
    step = 0 if last is None else int(last.name.removeprefix("step-")) + 1
    others = {key: _state_of(value) for key, value in parts.others.items()}
    extra = {"keys": [*others], "others": others}
    save_checkpoint(path, parts.model, parts.sorted_optimizers, step=step, extra=extra, keep_last=1)


def load_shards(path: Path, parts: Parts, state: MutableMapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Load a folder. Returns the values that the state does not ask for."""
    with agreement(model_state(parts.model), f"the checkpoint {path}", KeyError):
        _check_keys(parts.others, _keys_in(path), strict)
    found: dict[str, Any] = load_checkpoint(path, parts.model, parts.sorted_optimizers).extra["others"]
    return _restore(found, parts, state)


def _keys_in(path: Path) -> list[str]:
    pairs = read_index(find_checkpoint(path)).ranks[0]["extra"]
    try:
        return list(decode(dict(pairs["dict"])["keys"], {}))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} was not saved by fabric.save: load it by shardtrace.load_checkpoint") from None


# ---- one file ----


def save_file(path: Path, parts: Parts, filter_: Filter) -> None:
    """Save whole tensors to one file, which the first rank writes. A file at this path is replaced once it is
    complete."""
    full: dict[str, Any] = {parts.key: full_state_dict(parts.model, rank0_only=True, cpu=True)}
    for key, optimizer in parts.optimizers.items():
        full[key] = full_optimizer_state_dict(parts.model, optimizer, rank0_only=True, cpu=True)
    model = model_state(parts.model)
    with agreement(model, f"the model saved to {path}"):
        if model.rank == 0:
            full |= {key: _state_of(value) for key, value in parts.others.items()}
            for key, keeps in filter_.items():
                if isinstance(full[key], Mapping):
                    full[key] = {k: v for k, v in full[key].items() if keeps(k, v)}
            _write(path, full)


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: state_dict_type='full' writes a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, temporary)
        os.replace(temporary, path)
    except Exception as problem:  # of the disk, or of pickling: every rank raises it
        raise CheckpointError(f"cannot write {path}: {type(problem).__name__}: {problem}") from None


def load_file(
    path: Path, parts: Parts, state: MutableMapping[str, Any], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a file of whole tensors. Each rank reads only its rows. Returns the values that the state does not ask
    for."""
    found = read_file(path, parts.model, weights_only)
    with agreement(model_state(parts.model), f"the checkpoint {path}", KeyError):
        _check_keys(state, [*found], strict)
    if parts.key in found:
        load_full_state_dict(parts.model, found.pop(parts.key), strict=strict)
    for key, optimizer in parts.optimizers.items():
        if key in found:
            load_full_optimizer_state_dict(parts.model, optimizer, found.pop(key))
    return _restore(found, parts, state)


def load_raw(path: Path, model: nn.Module, *, strict: bool, weights_only: bool | None) -> None:
    """Load a whole state dict, from a file of torch.save or from safetensors files, into shards."""
    if path.is_dir() or path.suffix in (".safetensors", ".json"):
        load_safetensors(path, model, strict=strict)
    else:
        load_full_state_dict(model, read_file(path, model, weights_only), strict=strict)


def read_file(path: Path, model: nn.Module, weights_only: bool | None) -> dict[str, Any]:
    """The contents of a file of torch.save, mapped into memory. Raises CheckpointError on every rank."""
    with agreement(model_state(model), f"the file {path}"):
        try:
            found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        except Exception as problem:  # torch raises many kinds: every rank raises it
            raise CheckpointError(f"cannot load {path}: {type(problem).__name__}: {problem}") from None
    return found


# ---- both ----


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _check_keys(wanted: Mapping[str, Any], saved: list[str], strict: bool) -> None:
    missing = [key for key in wanted if key not in saved]
    if strict and missing:
        raise KeyError(f"{missing[0]!r} is not in the checkpoint, which has {saved}: pass strict=False to leave it out")


def _restore(found: dict[str, Any], parts: Parts, state: MutableMapping[str, Any]) -> dict[str, Any]:
    for key, value in parts.others.items():
        if key not in found:
            continue
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(found.pop(key))
        else:
            state[key] = found.pop(key)
    return found
