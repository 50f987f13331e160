"""Helpers that all examples share: device, process group, values over ranks, progress bar, tables and options."""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shardtrace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from tqdm import tqdm

# ---- devices and ranks ----


def pick_device(name: str | None = None) -> torch.device:
    """This rank's GPU if there is one, else the CPU. ``name`` ("cpu" or "cuda") decides if given."""
    if (name or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.index >= torch.cuda.device_count():
        sys.exit(
            f"no GPU for rank {device.index}: torch sees {torch.cuda.device_count()}; use fewer ranks or --device cpu"
        )
    torch.cuda.set_device(device)
    return device


def world_size() -> int:
    """The number of ranks. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", 1))


def script() -> str:
    """The name of the running script."""
    return Path(sys.argv[0]).stem


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The process group of torchrun's ranks, or a group of one if the script runs without torchrun."""
    if dist.is_torchelastic_launched():
        shardtrace.init_process_group(device)
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.barrier()  # no rank ends while another still talks to it
    dist.destroy_process_group()  # not after an error: nccl would first wait for collectives that the others left


# ---- values over ranks ----


def sum_over_ranks(values: Sequence[Tensor]) -> list[float]:
    """Sums of 0-dim tensors over ranks, in one all_reduce."""
    total = torch.stack(list(values))
    dist.all_reduce(total)
    sums: list[float] = total.tolist()
    return sums


def mean_over_ranks(values: Sequence[Tensor]) -> list[float]:
    return [total / dist.get_world_size() for total in sum_over_ranks(values)]


def from_ranks(value: Any) -> list[Any]:
    """The values of all ranks, in order of rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- output ----


def is_main() -> bool:
    """True on the rank that prints and writes files."""
    return dist.get_rank() == 0


def progress(iterable: Any = None, **options: Any) -> Any:
    """tqdm's progress bar, on one rank."""
    return tqdm(iterable, disable=not is_main(), **options)


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns, the first one to the left. Integers get separators, floats four digits, None is a dash."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{row[0]:<{widths[0]}}" + "".join(f"{c:>{w + 3}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def parameter_bytes(model: nn.Module) -> int:
    """Of this rank."""
    return sum(_local(p).numel() * p.element_size() for p in model.parameters())


def optimizer_bytes(optimizer: Optimizer) -> int:
    state = (value for values in optimizer.state.values() for value in values.values())
    return sum(_local(t).numel() * t.element_size() for t in state if isinstance(t, Tensor))


def _local(t: Tensor) -> Tensor:
    rows: Tensor = t.to_local() if isinstance(t, DTensor) else t
    return rows


def peak_memory(device: torch.device) -> int:
    """Peak memory so far, in bytes: of torch's allocator on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of one unit of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def traffic(cmodel: nn.Module) -> dict[str, tuple[int, int]]:
    """Collectives of the last call and its backward, read from the traces: count and bytes of each kind and phase."""
    sizes = defaultdict(list)
    for c in shardtrace.collectives(cmodel):
        sizes[f"{c.kind}, {c.phase}"].append(c.bytes)
    return {what: (len(bytes_), sum(bytes_)) for what, bytes_ in sizes.items()}


def traffic_table(counted: dict[str, tuple[int, int]]) -> str:
    rows = [(f"  {what}", *sizes) for what, sizes in counted.items()]
    return table([("collectives in a step", "count", "bytes"), *(rows or [("  none", 0, 0)])])


# ---- the command line ----


def add_count(parser: argparse.ArgumentParser, name: str, default: int, what: str = "", *, at_least: int = 1) -> None:
    """Adds an option that takes a whole number."""
    help_ = f"{what}; default: %(default)s" if what else "default: %(default)s"
    parser.add_argument(name, type=whole_number(at_least), default=default, metavar="N", help=help_)


def whole_number(at_least: int) -> Callable[[str], int]:
    """An argparse type."""

    def parse(value: str) -> int:
        if not value.isdecimal() or int(value) < at_least:
            raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of at least {at_least}")
        return int(value)

    return parse


def non_negative(value: str) -> float:
    """An argparse type."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of at least 0")
    return number


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")


def add_sharding(parser: argparse.ArgumentParser, *, mixed_precision: bool = True) -> None:
    """Adds the options of `fsdp`, without the strategies that need a 2-D mesh."""
    strategies = [s.value for s in shardtrace.ShardingStrategy if not s.needs_mesh]
    parser.add_argument("--sharding-strategy", choices=strategies, default="zero3", help="default: zero3")
    what = "the parameters of one collective: auto (default), none, layer, block, model or a size in MB"
    parser.add_argument("--bucketing-strategy", type=bucketing, default="auto", metavar="WHAT", help=what)
    if mixed_precision:
        what = "compute and communicate in bf16; shards and optimizer state keep their dtype"
        parser.add_argument("--mp-policy", choices=["bf16"], help=what)


def bucketing(value: str) -> str | float:
    """An argparse type."""
    if value in ("auto", "none", "layer", "block", "model"):
        return value
    try:
        megabytes = float(value)
    except ValueError:
        megabytes = 0
    if not 0 < megabytes < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r}, not auto, none, layer, block, model or a size in MB")
    return megabytes


def file(value: str) -> Path:
    """An argparse type."""
    if not Path(value).is_file():
        raise argparse.ArgumentTypeError(f"no file {value!r}")
    return Path(value)


def folder(value: str) -> Path:
    """An argparse type."""
    if not Path(value).is_dir():
        raise argparse.ArgumentTypeError(f"no folder {value!r}")
    return Path(value)


def new_file(value: str) -> Path:
    """An argparse type: a path that can be written, checked before the training instead of after it."""
    path = Path(value)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"no file can be written at {value!r}")
    return path


def new_folder(value: str) -> Path:
    """An argparse type: a folder that exists or can be made."""
    if not next(path for path in (Path(value).absolute(), *Path(value).absolute().parents) if path.exists()).is_dir():
        raise argparse.ArgumentTypeError(f"no folder can be made at {value!r}")
    return Path(value)


def check_batch(size: int, option: str = "--batch-size") -> None:
    """Stops every rank if a batch cannot be divided equally."""
    if size % world_size():
        sys.exit(f"{option} {size} is for all ranks and is not divisible by {world_size()} ranks")
