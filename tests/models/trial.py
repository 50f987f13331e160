"""One model: a step in eager PyTorch, the same step sharded, and the comparison. Each runs in processes of its own.

Note [The reference]: a step of eager PyTorch on the whole batch, in one process. If that differs from the mean of the
gradients of the ranks' shares (BatchNorm's statistics, an expert's capacity, random numbers), no data parallel training
can reproduce it. Then the mean of the shares is the reference, each computed by eager PyTorch with the rank's seed.

Note [What is equal]: the loss and every parameter after a step of SGD, within ``TOLERANCE`` of the largest value of the
tensor, or of 1. Small gradients hide in that. Therefore gradients are compared as well, within ``GRADIENT_TOLERANCE``
of the largest value of the tensor, plus ``NEGLIGIBLE`` of the largest gradient of the model. The same parameters have
none, those that no rank's share uses: the step has weight decay, which moves a parameter whose gradient is zeros.

Note [Rounding]: some networks with BatchNorm and random weights amplify rounding so much that float32 decides nothing:
in eager PyTorch a relative change of ``ROUNDING`` of the parameters changes a gradient by a tenth. If it changes more
than a tenth of what is tolerated, the model is judged in float64, and its row says so.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import shardtrace

import catalogue
import thunder
import torch
import torch.distributed as dist
from case import Case, in_float64, prepared, seed
from torch import nn

LEARNING_RATE, DECAY = 0.1, 0.1
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-3
NEGLIGIBLE = 1e-5
ROUNDING = 1e-7  # relative; what it changes in eager PyTorch is in the row
SEED, STEP_SEED = 0, 1
GRACE = 5.0  # seconds that the other rank has after one has failed

Tensors = dict[str, torch.Tensor]
processes = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Settings:
    """How the sweep is run. ``ranks`` 0 runs eager PyTorch only. ``mesh``: such as (1, 2, "tensor"), the ranks that have
    batches of their own, those that share one, and how. ``executors``: those of ``thunder.jit``, not its default."""

    ranks: int = 2
    fake: bool = False  # compile for ``ranks`` fake ranks; nothing is compared
    strategy: str = "zero3"
    limit: float = 120.0  # seconds for the reference, and again for the sharded step
    mesh: tuple[int, int, str] | None = None
    executors: Sequence[str] = ()

    @property
    def shares(self) -> int:
        """Into how many shares the batch is divided."""
        return self.mesh[0] if self.mesh is not None else self.ranks or 2

    def compiled(self, model: nn.Module) -> Any:
        """The model, sharded and jitted."""
        jit_options = {"executors": list(self.executors)} if self.executors else {}
        return thunder.jit(shardtrace.fsdp(model, **self.options()), **jit_options)

    def options(self) -> dict[str, Any]:
        """Of fsdp."""
        found: dict[str, Any] = {"sharding_strategy": self.strategy}
        if self.mesh is not None:
            *shape, name = self.mesh
            device_mesh = dist.init_device_mesh("cpu", tuple(shape), mesh_dim_names=("data", name))
            found |= {"mesh": device_mesh, f"{name}_parallel": name}
        return found


def try_model(family: str, name: str, settings: Settings, log: Path) -> dict[str, Any]:
    """The row of one model. ``log`` gets what its processes print, with tracebacks."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    row: dict[str, Any] = {"family": family, "name": name, "ranks": settings.ranks, "fake": settings.fake}
    reference_file = log.with_suffix(".pt")
    began = time.monotonic()
    try:
        arguments = (family, name, settings.shares, reference_file)
        answers = run_processes(make_reference, [arguments], settings.limit, log)
        row["eager_seconds"] = round(time.monotonic() - began, 1)
        if answers[0]["outcome"] != "done":
            return {**row, **answers[0], "outcome": "eager fails", "how": answers[0]["outcome"]}
        row.update(answers[0]["facts"])
        if settings.ranks == 0:
            return {**row, "outcome": "eager"}
        began = time.monotonic()
        ranks = 1 if settings.fake else settings.ranks
        store = log.with_suffix(".store")
        store.unlink(missing_ok=True)
        jobs = [(family, name, rank, settings, reference_file, store) for rank in range(ranks)]
        answers = run_processes(shard_and_compare, jobs, settings.limit, log)
        row["seconds"] = round(time.monotonic() - began, 1)
        return {**row, **worst(answers)}
    finally:
        for file in (reference_file, log.with_suffix(".store")):
            file.unlink(missing_ok=True)


def worst(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer for all ranks: the first failure, or the one that differs most."""
    order = ["refused", "crashed", "timeout", "done"]
    answer = min(answers, key=lambda answer: order.index(answer["outcome"]))
    if answer["outcome"] != "done":
        return answer
    facts = [answer["facts"] for answer in answers]
    return next((f for f in facts if f["outcome"] == "wrong"), facts[0])


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def run_processes(
    function: Callable[..., dict[str, Any]], jobs: list[tuple[Any, ...]], limit: float, log: Path
) -> list[dict[str, Any]]:
    """What ``function`` returns for each job, each in a process of its own, or how the process ended instead."""
    readers, running = [], []
    for number, job in enumerate(jobs):
        reader, writer = processes.Pipe(duplex=False)
        process = processes.Process(target=_answer, args=(function, job, writer, log, number))
        process.start()
        writer.close()
        readers.append(reader)
        running.append(process)
    answers: list[dict[str, Any] | None] = [None] * len(jobs)
    deadline = time.monotonic() + limit
    while None in answers and time.monotonic() < deadline:
        for number, reader in enumerate(readers):
            if answers[number] is None and reader.poll(0.02):
                answers[number] = _read(reader, running[number])
                if answers[number]["outcome"] != "done":
                    deadline = min(deadline, time.monotonic() + GRACE)
    for process in running:
        process.join(timeout=1)
        if process.is_alive():
            process.kill()
            process.join()
    late = "crashed" if any(a and a["outcome"] != "done" for a in answers) else "timeout"
    return [
        answer
        or {"outcome": late, "error": f"no answer within {limit:g} s" if late == "timeout" else "other rank failed"}
        for answer in answers
    ]


def _read(reader: Any, process: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(reader.recv())
        return answer
    except EOFError:
        process.join(timeout=5)
        return {"outcome": "crashed", "error": f"the process ended with exit code {process.exitcode}"}


def _answer(function: Callable[..., Any], job: tuple[Any, ...], writer: Any, log: Path, number: int) -> None:
    """The body of a process. It ends at once, because a hanging thread must not keep it."""
    target = log if number == 0 else log.with_suffix(f".{number}.log")
    file = os.open(target, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    try:
        answer = {"outcome": "done", "facts": function(*job)}
    except BaseException as error:
        traceback.print_exc()
        answer = {"outcome": "refused", **describe(error)}
    writer.send(json.dumps(answer))
    writer.close()
    os._exit(0)


def describe(error: BaseException) -> dict[str, str]:
    """The class, the first line, and the place of an error."""
    lines = str(error).strip().splitlines() or [""]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/shardtrace/" in frame.filename or "/passes/" in frame.filename]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (*ours[-1:], *frames[-1:])]
    return {"error": f"{type(error).__name__}: {lines[0][:300]}", "place": " < ".join(dict.fromkeys(reversed(places)))}


# ---------------------------------------------------------------------------------------------------------------------
# Eager PyTorch


def build(family: str, name: str, dtype: str = "float32") -> Case:
    """The model, the same in every process."""
    seed(SEED)
    case = prepared(catalogue.build(family, name))
    return in_float64(case) if dtype == "float64" else case


@dataclass(frozen=True)
class Eager:
    """Steps of one model in eager PyTorch."""

    family: str
    name: str
    dtype: str

    def step(
        self, rank: int = 0, world_size: int = 1, *, step_seed: int = STEP_SEED, nudge: float = 0.0
    ) -> tuple[float, Tensors, nn.Module]:
        """The loss and the gradients of one share of the batch (zeros for None), and the model afterwards.

        ``nudge`` is a relative change of the parameters.
        """
        case = build(self.family, self.name, self.dtype)
        if nudge:
            with torch.no_grad():
                for parameter in case.model.parameters():
                    if parameter.is_floating_point():
                        parameter.mul_(1 + nudge * torch.randn_like(parameter))
        seed(step_seed)
        loss = case.call(case.model, rank, world_size)
        loss.backward()
        named = case.model.named_parameters()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
        return loss.item(), grads, case.model


def make_reference(family: str, name: str, world_size: int, file: Path, dtype: str = "float32") -> dict[str, Any]:
    """Writes what the ranks are compared with: Note [The reference]."""
    eager = Eager(family, name, dtype)
    began = time.monotonic()
    loss, grads, model = eager.step()
    seconds = time.monotonic() - began
    if not all(torch.isfinite(value).all() for value in (torch.tensor(loss), *grads.values())):
        raise ValueError("the loss or a gradient is not finite")
    if not any(value.any() for value in grads.values()):
        raise ValueError("no parameter has a gradient")
    start = {key: value.detach() for key, value in model.named_parameters()}  # forward may have written into them
    shares = [eager.step(rank, world_size) for rank in range(world_size)]
    near = eager.step(0, world_size, nudge=ROUNDING if dtype == "float32" else ROUNDING * 1e-8)
    rounding = compare(start, *shares[0][:2], *near[:2])
    if dtype == "float32" and not _is_exact(rounding):
        return make_reference(family, name, world_size, file, "float64")
    facts: dict[str, Any] = {
        "parameters": sum(value.numel() for value in start.values()),
        "eager_step": round(seconds, 2),
        "dtype": dtype,
        "rounding": rounding["difference"],
        "gradient_rounding": rounding["gradient_difference"],
    }
    if eager.step(step_seed=STEP_SEED + 1)[0] != loss:
        facts["random"] = True
    mean_loss = sum(share[0] for share in shares) / world_size
    mean = {key: sum(share[1][key] for share in shares) / world_size for key in grads}
    if compare(start, loss, grads, mean_loss, mean)["outcome"] == "wrong":
        facts["reference"] = "shares"
        loss, grads = mean_loss, mean
    buffers = [_buffers(share[2]) for share in shares]
    initial = {key: value.detach() for key, value in build(family, name, dtype).model.named_parameters()}
    unused = [set(_without_gradient(share[2])) for share in shares]
    kept = {"loss": loss, "grads": grads, "initial": initial, "start": start, "buffers": buffers, "dtype": dtype}
    kept["unused"] = sorted(set.intersection(*unused))
    torch.save(kept, file)
    return facts


def _is_exact(rounding: Mapping[str, Any]) -> bool:
    return rounding["difference"] <= TOLERANCE / 10 and rounding["gradient_difference"] <= GRADIENT_TOLERANCE / 10


def _without_gradient(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is None and p.numel()]


def _buffers(model: nn.Module) -> Tensors:
    return {name: value.clone() for name, value in model.named_buffers() if value.is_floating_point()}


def compare(
    start: Mapping[str, torch.Tensor], loss: float, grads: Tensors, our_loss: float, our_grads: Tensors
) -> dict[str, Any]:
    """How far our loss, parameters after a step and gradients are from the expected ones: Note [What is equal]."""
    with torch.no_grad():
        expected = {name: value - LEARNING_RATE * grads[name] for name, value in start.items()}  # decay cancels
        ours = {name: value - LEARNING_RATE * our_grads[name] for name, value in start.items()}
    return judge(loss, expected, grads, our_loss, ours, our_grads)


def judge(
    loss: float, expected: Tensors, grads: Tensors, our_loss: float, ours: Tensors, our_grads: Tensors
) -> dict[str, Any]:
    """The outcome, the largest differences and where they are."""
    differences = {"loss": abs(loss - our_loss) / max(1.0, abs(loss))}
    differences |= {name: _largest(ours[name] - value) / max(1.0, _largest(value)) for name, value in expected.items()}
    largest = max(map(_largest, grads.values()), default=0.0)
    relative = {
        name: _largest(our_grads[name] - value) / (_largest(value) + NEGLIGIBLE / GRADIENT_TOLERANCE * largest or 1.0)
        for name, value in grads.items()
    }
    where = max(differences, key=lambda name: _rank(differences[name]))
    row: dict[str, Any] = {"outcome": "equal", "difference": differences[where]}
    if relative:
        worst_gradient = max(relative, key=lambda name: _rank(relative[name]))
        row["gradient_difference"] = relative[worst_gradient]
        if not relative[worst_gradient] <= GRADIENT_TOLERANCE:
            bad = [name for name, value in relative.items() if not value <= GRADIENT_TOLERANCE]
            row |= {"outcome": "wrong", "where": f"gradient of {worst_gradient}", "wrong_gradients": len(bad)}
    if not differences[where] <= TOLERANCE:
        row |= {"outcome": "wrong", "where": where}
    return row


def _largest(value: torch.Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0


def _rank(value: float) -> float:
    return float("inf") if value != value else value


# ---------------------------------------------------------------------------------------------------------------------
# Sharded


def shard_and_compare(
    family: str, name: str, rank: int, settings: Settings, reference_file: Path, store: Path
) -> dict[str, Any]:
    """One rank's step, and what it finds."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.ranks))
    if settings.fake:
        with shardtrace.testing.fake_ranks(settings.ranks):
            case = build(family, name)
            began = time.monotonic()
            cmodel = settings.compiled(case.model)
            seed(STEP_SEED)
            case.call(cmodel, 0, settings.shares).backward()
            return {"outcome": "compiled", "step": round(time.monotonic() - began, 2)}
    limit = timedelta(seconds=settings.limit)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), settings.ranks), rank=rank, world_size=settings.ranks, timeout=limit
    )
    reference = torch.load(reference_file, weights_only=True)
    case = build(family, name, reference["dtype"])
    for key, value in case.model.named_parameters():
        if not torch.equal(value, reference["initial"][key]):
            raise AssertionError(f"the sweep's own fault: {key} is initialized differently in each process")
    return _sharded_step(case, rank, settings, reference)


def _sharded_step(case: Case, rank: int, settings: Settings, reference: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    cmodel = settings.compiled(case.model)
    share = rank * settings.shares // settings.ranks
    optimizer = torch.optim.SGD(cmodel.parameters(), lr=LEARNING_RATE, weight_decay=DECAY)
    seed(STEP_SEED)
    loss = case.call(cmodel, share, settings.shares)
    loss.backward()
    seconds = time.monotonic() - began
    optimizer.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    names = list(reference["start"])
    ours, unused = _whole(cmodel, names), set(reference["unused"])
    more = [name for name in _without_gradient(cmodel) if name in reference["start"] and name not in unused]
    with torch.no_grad():
        for parameter in cmodel.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    our_grads = _whole(cmodel, names)
    expected = {
        key: value if key in unused else value - LEARNING_RATE * (reference["grads"][key] + DECAY * value)
        for key, value in reference["start"].items()
    }
    mean = total.item() / settings.ranks
    row = judge(reference["loss"], expected, reference["grads"], mean, ours, our_grads)
    buffers, found = reference["buffers"][share], _buffers(case.model)
    wrong = [key for key, value in buffers.items() if _differs(found.get(key), value)]
    if wrong and row["outcome"] == "equal":
        row |= {"outcome": "wrong", "where": f"buffer {wrong[0]}"}
    if more and row["outcome"] == "equal":
        row |= {"outcome": "wrong", "where": f"no gradient of {more[0]}"}
    if any("no parameter is split over" in str(t.get_provenance()) for t in thunder.last_traces(cmodel)):
        row["whole"] = True
    return {**row, "step": round(seconds, 2)}


def _differs(ours: torch.Tensor | None, value: torch.Tensor) -> bool:
    if ours is None or ours.shape != value.shape:
        return True
    ours, value = torch.nan_to_num(ours), torch.nan_to_num(value)
    return not _largest(ours - value) <= TOLERANCE * max(1.0, _largest(value))


def _whole(cmodel: Any, names: list[str]) -> Tensors:
    full = shardtrace.full_state_dict(cmodel)
    missing = [name for name in names if name not in full]
    if missing:  # a hook renames the keys of the state dict
        with shardtrace.full_params(cmodel), contextlib.suppress(AttributeError):
            own = dict(cmodel._model.named_parameters())
            full = {**full, **{name: own[name].detach().clone() for name in missing}}
    return {name: full[name].clone() for name in names}
