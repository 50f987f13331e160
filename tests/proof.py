"""What `make gpu` proves on one GPU over nccl (tests/gpu). tests/test_proof.py rehearses it on the CPU, over a backend
that behaves like nccl."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import shardtrace  # isort: split

from passes.analysis.liveness import step_liveness
from passes.plan import Placement
from shardtrace.model import distribute, state
from shardtrace.model.shards import Home
from shardtrace.ranks.mesh import Transport

import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from torch import nn

EXECUTORS = {"default": None, "torchcompile": ["sdpa", "torch_kernels", "torchcompile"], "nvfuser": ["sdpa", "nvfuser"]}
WIDTH, BLOCKS, ROWS = 512, 3, 16
TOLERANCE = {None: (1e-5, 2e-6), "bf16": (5e-2, 5e-2)}  # relative and absolute, by precision


# hybrid strategies with their meshes (replicate, shard): on two GPUs one dimension is trivial
MESHES = [
    ("hybrid_zero3", (2, 1)),
    ("hybrid_zero3", (1, 2)),
    ("hybrid_zero3", (2, 2)),
    ("hybrid_zero2", (2, 2)),
    ("zero3_secondary", (2, 2)),
]


class Proof(NamedTuple):
    """A line of the table that ``make gpu`` prints."""

    what: str
    case: str
    result: str


def table(proofs: list[Proof]) -> str:
    """The proofs, grouped by what they prove, in columns."""
    order = list(dict.fromkeys(p.what for p in proofs))
    lines = sorted(proofs, key=lambda p: order.index(p.what))
    widths = [max(len(p[i]) for p in lines) for i in (0, 1)]
    return "\n".join(f"{p.what:{widths[0]}}  {p.case:{widths[1]}}  {p.result}" for p in lines)


def missing_gpus(needed: int, seen: int) -> str:
    """Why a test of so many GPUs cannot run; empty if it can."""
    return "" if seen >= needed else f"needs {needed} GPU{'s' * (needed > 1)}, torch sees {seen}"


def missing_nvfuser(asked: bool) -> str:
    """Why a proof with nvFuser cannot run; empty if it can. Raises AssertionError if ``asked`` for."""
    if thunder.nvfuser_executor is not None:
        return ""
    assert not asked, "make gpu NVFUSER=1 asks for nvFuser, which does not import here: pip install '.[nvfuser]'"
    return "nvFuser does not import here: make gpu NVFUSER=1 makes this a failure"


# ---- numbers: a model whose collectives run, in a group of one ----


@contextmanager
def talking_to_itself() -> Iterator[None]:
    """Lets ``fsdp`` shard over a group of one as over any other. Otherwise a world of one replicates parameters."""

    def homes(chosen: Any, target: Any, *, evenness: float) -> dict[str, Home]:
        group, host = target.groups.everyone, target.host
        homes = {name: Home(s.placement, group, host=host) for name, s in chosen.strategies.items()}
        for p in chosen.places:
            if p.parameter.dim() == 0 and homes[p.name].placement is Placement.SHARD:  # as over any group
                homes[p.name] = Home(Placement.REPLICATE, group)
        return homes

    like_nccl = Transport(direct=False, averages=True)
    with (
        mock.patch.object(distribute, "find_homes", homes),
        mock.patch.object(state, "transport", return_value=like_nccl),
    ):
        yield


def numbers_over_a_group_of_one(
    group: Any, device: torch.device, strategy: str, *, precision: str | None = None, executors: list[str] | None = None
) -> str:
    """Trains the Zoo over a group of one, in which all collectives run, and one without shardtrace. Returns what was
    compared."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Zoo().to(device))
    expected, model = models
    if precision is not None:  # buffers and parameters without elements keep their dtype, which would widen the others
        model.shift, model.nothing.data = model.shift.bfloat16(), model.nothing.data.bfloat16()
    with talking_to_itself():
        shardtrace.fsdp(
            model,
            sharding_strategy=strategy,
            mp_policy=precision or "fp32",
            mesh=group,
            init_policy=shardtrace.InitPolicy(device=device),
        )
    cmodel = thunder.jit(model, executors=executors)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, cmodel)]
    before, steps, apart = issued(group), 3, 0.0
    rtol, atol = TOLERANCE[precision]
    for step in range(steps):
        batch = [t.to(device) for t in tokens(6, step)]
        losses = [m(*batch) for m in (expected, cmodel)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1].float(), losses[0], rtol=rtol, atol=atol)
        apart = max(apart, (losses[1] - losses[0]).abs().item())
    ran, collectives = issued(group) - before, shardtrace.collectives(cmodel)
    kinds = sorted({c.kind for c in collectives})
    assert ran == steps * len(collectives) > 0, f"{ran} collectives ran in {steps} steps of {len(collectives)}"
    for name, value in shardtrace.full_state_dict(model).items():
        torch.testing.assert_close(
            value.to(device), expected.state_dict()[name], rtol=rtol, atol=atol, check_dtype=False
        )
    return f"{ran} collectives ran ({', '.join(kinds)}); losses of {steps} steps differ by {apart:.1e}"


def issued(group: Any) -> int:
    """How many collectives this rank has issued in a group."""
    count: int = len(group.issued) if hasattr(group, "issued") else group._get_sequence_number_for_group()
    return count


# ---- traces and memory: one of many ranks, whose peers are fake ----


class Blocks(nn.Module):
    """Blocks of two linear layers, large enough that what the allocator rounds up to does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def traces_and_memory(device: torch.device, strategy: str, *, executors: list[str] | None = None) -> tuple[str, str]:
    """Compiles (which verifies) and runs a step of this rank, counts its collectives, and compares the peak of memory
    with that of the traces. Returns both results."""
    with benchmarks():
        from memory import metered

    x = torch.randn(ROWS, WIDTH, device=device)

    def build() -> tuple[nn.Module, Any]:
        model = shardtrace.fsdp(Blocks(), sharding_strategy=strategy, init_policy=shardtrace.InitPolicy(device=device))
        return model, thunder.jit(model, executors=executors)

    (model, cmodel), built = metered(build, device)
    whole = 4 * BLOCKS * (8 * WIDTH * WIDTH + 5 * WIDTH)
    assert abs(built.kept * dist.get_world_size() / whole - 1) < 0.05, f"{built.kept} bytes of shards"

    def step() -> None:
        cmodel(x).backward()
        model.zero_grad()

    _, warm = metered(lambda: [step() for _ in range(3)], device)
    rows = shardtrace.collectives(cmodel)
    gathers = [("all_gather", "forward")] * BLOCKS + [("all_gather", "backward")] * BLOCKS * (strategy == "zero3")
    assert sorted((c.kind, c.phase) for c in rows) == sorted([*gathers, *[("reduce_scatter", "backward")] * BLOCKS])
    forward = next(t for t in reversed(thunder.last_traces(cmodel)) if t.bound_symbols)
    backward = thunder.last_backward_traces(cmodel)[-1]
    lines = len(forward.bound_symbols) + len(backward.bound_symbols)

    _, stepped = metered(step, device)
    kept = x.nbytes + built.kept + warm.kept
    shards = [entry.rows for entry in model._shardtrace.entries]
    arguments = sum(s.nbytes() for s in {t.untyped_storage() for t in (x, *shards)})
    promised = step_liveness(forward, backward, persistent=kept - arguments).peak
    measured = kept + stepped.peak
    assert abs(measured / promised - 1) < 0.1, f"peak of {measured} bytes, predicted {promised}"
    return (
        f"{lines} lines verified, {len(rows)} collectives",
        f"peak {measured / 1e6:.1f} MB, predicted {promised / 1e6:.1f} MB",
    )


# ---- time ----

RIVALS = {
    "FSDP2 eager": "fsdp2 reshard",
    "FSDP2 compiled": "fsdp2 reshard compiled",
    "torch.compile, one process": "single compiled",
    "eager, one process": "single eager",
}


def step_times(results: list[dict[str, Any]]) -> list[Proof]:
    """The step of each of our contenders over that of each rival: ``results`` of examples/benchmarks."""
    with benchmarks():
        from targets import middle, speed, variants

    proofs = []
    for result in results:
        for name, _ in variants(result):
            speeds = {label: speed(result, name, rival) for label, rival in RIVALS.items()}
            compared = [f"{1 / value:.2f} of {label}" for label, value in speeds.items() if value is not None]
            proofs.append(Proof("step time", name, f"{1e3 * middle(result, name):.1f} ms: {', '.join(compared)}"))
    return proofs


@contextmanager
def benchmarks() -> Iterator[None]:
    """Lets modules of examples/benchmarks, which are scripts and not a package, be imported."""
    folder = str(Path(__file__).parents[1] / "examples" / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
