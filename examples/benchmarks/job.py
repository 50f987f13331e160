"""The job that the starting process hands to the ranks: plain data in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class CannotRun(RuntimeError):
    """This machine lacks something that a setting needs. The message says what."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of one rank's batch."""

    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    optimizer: str = "sgd"
    experts: int = 0  # in the place of each MLP
    model: str = "GPT"  # or "Llama"
    vocab: int = 256
    hidden: int = 0  # of a Llama's MLP
    dtype: str = "float32"  # of parameters and compute; the GPT has this one


@dataclass(frozen=True)
class Job:
    setting: str
    backend: str  # "gloo", "nccl", or "fake": a group whose other ranks do not exist
    world_size: int
    device: str
    sizes: Sizes
    rounds: int
    steps_per_round: int
    only: str  # a regular expression: the contenders to run
    result: str = ""  # the file that rank 0 writes
    rates: tuple[float, ...] = ()  # of the link, in Gbit/s
    interface: str | None = None  # this rank's end of the link, in its network namespace
    given: dict[str, Any] = field(default_factory=dict)  # results of an earlier job

    @property
    def processes(self) -> int:
        return 1 if self.backend == "fake" else self.world_size

    def name(self, rate: float | None) -> str:
        return self.setting if rate is None else f"{self.setting} {rate:g} Gbit/s"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(path: Path) -> Job:
        data = json.loads(path.read_text())
        return Job(**{**data, "sizes": Sizes(**data["sizes"]), "rates": tuple(data["rates"])})
