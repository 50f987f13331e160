"""``save_checkpoint`` and ``load_checkpoint``: a directory for each step, which is complete or not a checkpoint.

``AsyncCheckpointer`` writes it while training continues. Before a load changes anything, all ranks together verify
everything.

State that only one rank has: its random number generators, and gradients that ``no_sync`` has added up and no step
has reduced yet, which are whole.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from passes.comm.symbols import Kept, KeptGradients
from passes.plan import Axis, Level, ShardedParameter
from shardtrace.checkpoint.files import (
    INDEX,
    CheckpointError,
    Index,
    Prepared,
    ProgressBar,
    SafetensorsReader,
    SafetensorsWriter,
    SavedTensor,
    check_files,
    checksum,
    decode,
    encode,
    find_checkpoint,
    read_index,
    step_directory,
)
from shardtrace.checkpoint.state import (
    Companions,
    Keep,
    ModelState,
    Optimizers,
    agreement,
    companions,
    load_optimizer,
    model_state,
    new_tensors,
    of_owners,
    optimizer_load,
    optimizer_state,
    together,
)
from shardtrace.ranks.mesh import is_alone
from shardtrace.training.full import warn_of_differing_buffers

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

# ---- saving ----


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's generator, torch's (for the CPU and a GPU ``device``), and NumPy's if it is imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.tensor(keys.tolist(), dtype=torch.int64), *rest)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`rng_state` returned, except for generators that do not exist here."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))


def sums_of(model: ModelState) -> dict[str, torch.Tensor]:
    """This rank's sums by the names of their parameters; usually none.

    Raises CheckpointError for sums of shards, which are still to be reduced over replicas.
    """
    found = {}
    for name, sums, parameter in _parameters(model):
        if (Axis.REPLICATE, parameter.index) in sums.by_place:
            raise CheckpointError(
                f"the gradient of parameter {name!r} is not reduced over replicas yet: save after the step that does, "
                "outside of no_sync"
            )
        kept = sums.by_place.get((parameter.plan.axis, parameter.index))
        if kept is not None and kept.parameter.cut is not None:
            raise CheckpointError(
                f"the gradient of parameter {name!r}, with a part of which each rank computes, is not reduced yet: "
                "save after the step that does, outside of no_sync"
            )
        if kept is not None:
            found[name] = kept.total
    return found


def set_sums(model: ModelState, values: Mapping[str, torch.Tensor]) -> None:
    """Replace the model's sums by saved ones. What rounded reductions of the steps before have lost is forgotten."""
    for state in model.states:
        state.runtime.kept.clear()
        state.runtime.errors.clear()
    for name, sums, parameter in _parameters(model):
        if name in values:
            sums.used.add(Level.WHOLE)
            sums.by_place[parameter.plan.axis, parameter.index] = Kept(parameter, values[name].to(model.device))


def _parameters(model: ModelState) -> Iterator[tuple[str, KeptGradients, ShardedParameter]]:
    names = {id(slot.local): name for name, slot in model.slots.items()}
    for state in model.states:
        for entry in state.entries:
            yield names[id(entry.shard)], state.runtime.kept, state.by_stand_in[id(entry.stand_in)]


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    schedulers: Any = (),
    scaler: Any = None,
    extra: Any = None,
    ema: nn.Module | None = None,
    keep_last: int | None = None,
) -> Path:
    """Save model, optimizer and random number generators to ``path/step-<step>``; return that directory.

    A collective: every rank of the model's group must call it, with a ``path`` that is the same directory for all. If
    the model is not sharded, only the calling process saves it. Each rank writes its shards; data that several ranks
    hold is written once. Files are safetensors, the index is JSON. The index is written last, once all files are on
    disk; a directory without it is not a checkpoint. An interrupted save leaves earlier checkpoints as they are.

    The first rank's buffers are saved (see :func:`shardtrace.sync_buffers`). Gradients that ``no_sync`` has added up
    and no step has reduced are saved by each rank. ``.grad`` is not saved: save after ``optimizer.step()``.

    Args:
        path: the directory that holds all checkpoints of a training run, created if it does not exist.
        optimizer: the optimizer, or several in a list.
        step: the training step, greater than that of every checkpoint in ``path``.
        schedulers: one or more objects with ``state_dict()``, such as learning rate schedulers.
        scaler: the ``torch.amp.GradScaler``.
        ema: a second model of the same ranks, such as torch's ``AveragedModel`` of ``model``, in its own slot.
        extra: other values to keep, for each rank its own: None, bool, int, float, str, tensors, and lists, tuples and
            dicts of them.
        keep_last: remove all but this many checkpoints in ``path`` once this one is complete. Default: remove none.

    Raises:
        CheckpointError: on every rank, naming the value that cannot be saved, or the file and what went wrong with it.
    """
    state, others = model_state(model), companions(optimizer, schedulers, scaler, ema)
    prepared = _prepare(state, path, others, extra, step=step, keep_last=keep_last)
    _write(prepared, state.group, ProgressBar("save", show=state.rank == 0))
    return step_directory(prepared.root, step)


def _prepare(
    model: ModelState,
    path: str | os.PathLike[str],
    others: Companions,
    extra: Any,
    *,
    step: int,
    keep_last: int | None,
    keep: Keep = torch.Tensor.detach,
) -> Prepared:
    """Collect what to save. ``keep`` is applied to each tensor: it returns the tensor itself, or a copy.

    Raises CheckpointError on every rank.
    """
    root = Path(path).absolute()
    if model.group is not None:
        warn_of_differing_buffers(model.module, model.group)
    with agreement(model, f"a checkpoint to save to {root}") as said:
        said.lines = [f"step {step}, keep_last={keep_last}"]
        if not _is_count(step, 0):
            raise CheckpointError(f"step must be a whole number of at least 0, not {step!r}")
        if keep_last is not None and not _is_count(keep_last, 1):
            raise CheckpointError(f"keep_last must be a whole number of at least 1, or None, not {keep_last!r}")
        tensors, own, shared = _collect(model, others, extra, keep)
    return Prepared(root=root, step=step, tensors=tensors, own=own, shared=shared, keep_last=keep_last)


def _is_count(number: Any, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _collect(
    model: ModelState, others: Companions, extra: Any, keep: Keep
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """The tensors, this rank's own other state, and the state that the first rank saves for all."""
    tensors: dict[str, torch.Tensor | None] = {}
    tied: dict[str, str] = {}
    for label, one in others.models(model).items():
        tensors |= {
            f"{label}.{name}": slot.distributed(keep(slot.local))
            for name, slot in one.slots.items()
            if slot.home is not None or model.rank == 0  # buffers may differ: the first rank's are saved
        }
        tied |= {f"{label}.{name}": f"{label}.{first}" for name, first in one.tied.items()}
    saved = [
        optimizer_state(optimizer, model, tensors, keep, f"optimizer.{number}" if number else "optimizer")
        for number, optimizer in enumerate(others.optimizers)
    ]
    plain: dict[str, torch.Tensor] = {}
    own: dict[str, Any] = {
        "rng": encode(rng_state(model.device), f"ranks.{model.rank}.rng", plain),
        "extra": encode(extra, f"ranks.{model.rank}.extra", plain),
        "accumulated": encode(sums_of(model), f"ranks.{model.rank}.accumulated", plain),
        "sharing": model.sharing,  # which says how much the gradient of a rank counts
        "optimizers": [of_owners(one, model) for one in saved],
    }
    shared: dict[str, Any] = {}
    if model.rank == 0:
        states = [scheduler.state_dict() for scheduler in others.schedulers]
        scaler = others.scaler.state_dict() if others.scaler is not None else None
        shared = {
            "tied": tied,
            "extra_state": {key: encode(value, f"extra_state.{key}", plain) for key, value in model.extra.items()},
            "optimizers": saved,
            "schedulers": encode(states, "schedulers", plain),
            "scaler": encode(scaler, "scaler", plain),
        }
    tensors |= {name: keep(value) for name, value in plain.items()}
    return {name: value for name, value in tensors.items() if value is not None}, own, shared


def _write(prepared: Prepared, group: dist.ProcessGroup | None, progress: ProgressBar) -> None:
    """Write a checkpoint through torch.distributed.checkpoint. Raises CheckpointError on every rank."""
    writer = SafetensorsWriter(prepared, progress)
    failure = f"step {prepared.step} was not saved to {prepared.root}"
    try:
        with together(group, "a checkpoint to be saved", failure) as arguments:
            planner = DefaultSavePlanner(flatten_state_dict=False)
            dcp.save(prepared.tensors, storage_writer=writer, planner=planner, **arguments)
    except CheckpointError:
        writer.discard()
        raise


class AsyncCheckpointer:
    """Saves checkpoints in a thread: ``save`` returns once this rank's tensors are copied to host memory.

    Only one save runs at a time, so that there is only one copy: ``save`` waits for the previous one. An error in the
    thread is raised on every rank by the next ``save`` or by ``wait``. Leave the context, or call ``wait``, before
    training ends:

        with shardtrace.AsyncCheckpointer() as checkpointer:
            for step in range(steps):
                ...
                checkpointer.save("checkpoints", model, optimizer, step=step)
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardtrace-checkpoint")
        self._pending: Future[None] | None = None
        self._groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def save(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        step: int,
        schedulers: Any = (),
        scaler: Any = None,
        extra: Any = None,
        ema: nn.Module | None = None,
        keep_last: int | None = None,
    ) -> Path:
        """Save like :func:`shardtrace.save_checkpoint`; return the directory, which will be complete later."""
        self.wait()
        state, others = model_state(model), companions(optimizer, schedulers, scaler, ema)
        prepared = _prepare(state, path, others, extra, step=step, keep_last=keep_last, keep=_copied)
        self._pending = self._thread.submit(_write, prepared, self._group(state), ProgressBar("save", show=False))
        return step_directory(prepared.root, step)

    def wait(self) -> None:
        """Wait until no save is in progress. Raises CheckpointError, on every rank, if the last one failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _group(self, model: ModelState) -> dist.ProcessGroup | None:
        """A group of the same ranks for the thread only: in one group, collectives of two threads would mix."""
        group = model.group
        if group is None or is_alone(group):
            return None
        if group not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            part = len(ranks) < dist.get_world_size()  # ranks outside do not call this
            self._groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=part)
        return self._groups[group]

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the save in progress; its error does not replace another one."""
        try:
            if kind is None:
                self.wait()
        finally:
            self._thread.shutdown(wait=True)  # its group stays: another of the same ranks could get the same name


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory that nothing else changes."""
    return tensor.detach().to("cpu", copy=True)


# ---- loading ----


SLOWEST = 50e6  # bytes per second; files are expected to be read at least as fast


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    ``ranks`` is the number of ranks that saved it. ``extra`` is what this rank had saved, or what the first rank had
    saved if the number of ranks has changed.
    """

    path: Path
    step: int
    ranks: int
    extra: Any


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    schedulers: Any = (),
    scaler: Any = None,
    ema: nn.Module | None = None,
) -> Checkpoint:
    """Load a checkpoint into a model, its optimizer, schedulers and scaler, in place.

    A collective: every rank of the model's group must call it. If the model is not sharded, only the calling process
    loads it. The number of ranks and the strategy may differ from those of the run that saved. Random number generators
    are set if the number of ranks is the same; training then continues bit for bit as if it had not been interrupted.

    Nothing in a checkpoint is ever run or unpickled. Before anything is changed, all ranks together verify every file:
    its name, size and checksum, and that its keys, shapes and dtypes are those of the model and the optimizer. If the
    disk fails after that, the model is left partly loaded.

    Args:
        path: a checkpoint, or a directory of checkpoints, from which the latest complete one is loaded.
        optimizer: new, or in use; or several in a list, in the order in which they were saved. Default: the saved state
            of optimizers is ignored. Likewise ``schedulers``, ``scaler`` and ``ema``.

    Raises:
        CheckpointError: on every rank, naming the file, tensor or parameter that is wrong.
    """
    state, others = model_state(model), companions(optimizer, schedulers, scaler, ema)
    with agreement(state, "the checkpoint to load", OSError, SafetensorError) as said:
        try:
            found = _checked(Path(path), state, others)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as problem:
            if isinstance(problem, CheckpointError):
                raise
            raise CheckpointError(f"the index of {path} is not one: {type(problem).__name__}: {problem}") from None
        said.timeout = sum(size for size, _ in found.index.files.values()) / SLOWEST
        said.lines = [f"{found.path} with an index of checksum {checksum(found.path / INDEX):08x}"]
    reader = SafetensorsReader(found.path, found.tensors, ProgressBar("load", show=state.rank == 0))
    failure = f"{found.path} was loaded only in part"
    with together(state.group, "a checkpoint to be loaded", failure) as arguments, torch.no_grad():
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(found.targets, storage_reader=reader, planner=planner, **arguments)
    for restore in found.restores:
        restore()
    return Checkpoint(found.path, found.index.step, len(found.index.ranks), found.extra)


@dataclass(frozen=True, eq=False)
class _Found:
    """A checkpoint that fits the model. ``targets`` are the tensors to read into, by name. ``restores`` are called once
    they are read."""

    path: Path
    index: Index
    tensors: dict[str, SavedTensor]
    targets: dict[str, torch.Tensor]
    restores: list[Callable[[], object]]
    extra: Any


def _checked(path: Path, model: ModelState, others: Companions) -> _Found:
    """The checkpoint at ``path``. This rank checks its share of the files.

    Raises CheckpointError that says what is wrong; nothing has been changed.
    """
    directory = find_checkpoint(path.absolute())
    index = read_index(directory)
    tensors = {**index.tensors, **{name: index.tensors[first] for name, first in index.tied.items()}}
    targets: dict[str, torch.Tensor | None] = {}
    for label, one in others.models(model).items():
        _check_model(label, one, tensors)
        targets |= {f"{label}.{name}": slot.distributed() for name, slot in one.slots.items()}
    _check_companions(directory, index, others)
    same = len(index.ranks) == model.ranks
    sharing: dict[str, int] = index.ranks[0].get("sharing", {})
    alike = same and model.states and model.sharing == sharing
    if any(rank["accumulated"] != {"dict": []} for rank in index.ranks) and not alike:
        how = " and ".join(["", *(f"{option} over {size}" for option, size in sharing.items())])
        raise CheckpointError(
            f"{directory} was saved inside an accumulation of gradients (no_sync) on {len(index.ranks)} ranks{how}, "
            "and can be loaded only by a model that is sharded so"
        )

    def decoded(value: Any) -> Any:  # adds to targets
        return decode(value, new_tensors(value, tensors, targets))

    restores: list[Callable[[], object]] = []
    for number, optimizer in enumerate(others.optimizers):
        values = optimizer_load(optimizer, model, _saved_optimizer(index, number), tensors, targets)
        restores.append(partial(load_optimizer, optimizer, values))
    restores += _restores(index, model, others, decoded)
    own = index.ranks[model.rank if same else 0]
    restores.append(partial(set_sums, model, decoded(own["accumulated"]) if same else {}))
    if same:
        restores.append(partial(set_rng_state, decoded(own["rng"]), model.device))
    extra = decoded(own["extra"])
    check_files(directory, index, model.rank, model.ranks, ProgressBar("verify", show=model.rank == 0))
    mine = {name: target for name, target in targets.items() if target is not None}
    return _Found(directory, index, tensors, mine, restores, extra)


def _restores(
    index: Index, model: ModelState, others: Companions, decoded: Callable[[Any], Any]
) -> Iterator[Callable[[], object]]:
    """Calls that hand their state to the model's modules, the schedulers and the scaler."""
    saved = index.state["extra_state"]
    if saved.keys() != model.extra.keys():
        raise CheckpointError(f"the checkpoint holds the extra states {[*saved]}, the model {[*model.extra]}")
    for key, value in saved.items():
        yield partial(model.module.get_submodule(key.rpartition(".")[0]).set_extra_state, decoded(value))
    states = decoded(index.state["schedulers"]) if others.schedulers else []
    for scheduler, value in zip(others.schedulers, states, strict=True):
        yield partial(scheduler.load_state_dict, value)
    if others.scaler is not None:
        yield partial(others.scaler.load_state_dict, decoded(index.state["scaler"]))


def _check_companions(directory: Path, index: Index, others: Companions) -> None:
    saved, wanted = len(index.state["optimizers"]), len(others.optimizers)
    if wanted and not saved:
        raise CheckpointError(f"{directory} holds no optimizer: pass none to load only the model")
    if wanted and wanted != saved:
        raise CheckpointError(f"{directory} holds {saved} optimizer(s), {wanted} are to be loaded")
    saved, wanted = len(index.state["schedulers"]), len(others.schedulers)
    if wanted and wanted != saved:
        raise CheckpointError(f"{directory} holds {saved} schedulers, {wanted} are to be loaded")
    if others.scaler is not None and index.state["scaler"] is None:
        raise CheckpointError(f"{directory} holds no scaler")


def _saved_optimizer(index: Index, number: int) -> dict[str, Any]:
    """The state of one of the optimizers that the first rank saved, and that of the parameters that other ranks own."""
    saved = index.state["optimizers"][number]
    state = {**saved["state"]}
    for rank in index.ranks:
        state |= rank["optimizers"][number]
    return {**saved, "state": state}


def _check_model(label: str, model: ModelState, tensors: dict[str, SavedTensor]) -> None:
    """Raise CheckpointError that names what the checkpoint and the model do not have in common."""
    prefix = f"{label}."
    saved = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if not saved and model.slots:
        raise CheckpointError(f"the checkpoint holds no {label}")
    names = {name: name for name in model.slots} | model.tied
    problems = [f"missing key {name}" for name in names if name not in saved]
    problems += [f"unexpected key {name}" for name in saved if name not in names]
    for name, slot in model.slots.items():
        if name in saved and saved[name].shape != slot.full_shape:
            problems.append(f"{name} has shape {saved[name].shape}, the model's is {slot.full_shape}")
        elif name in saved and saved[name].dtype != slot.local.dtype:
            problems.append(f"{name} is {saved[name].dtype}, the model's is {slot.local.dtype}")
    for name, first in model.tied.items():
        if name in saved and first in saved and saved[name] is not saved[first]:
            problems.append(f"{name} and {first} are tied in the model, and two tensors in the checkpoint")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the checkpoint does not fit {type(model.module).__name__}: {'; '.join(problems[:8])}{more}"
        )
