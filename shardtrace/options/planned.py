"""A plan: the options of ``fsdp`` that :func:`shardtrace.plan` has chosen, and what they are predicted to cost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from passes.plan import CostModel
from shardtrace.options.front import HEADINGS, Row, Rows, Shown, embed, gib, ms, render
from shardtrace.options.policies import HOMES, ContextParallel, flat, grouped, parse_context
from shardtrace.options.spellings import DEFAULTS

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

VERSION = 1  # of the file format
TYPES: dict[str, Any] = {"str": str, "int": int, "float": int | float, "Mapping": Mapping}  # of fields, by annotation
T = TypeVar("T", Row, "TrainingPlan")


class PlanError(ValueError):
    """A plan that cannot be read, or that is for another model, world size or version."""


class NoPlanFitsError(ValueError):
    """No step fits into the memory. ``least`` is the plan that needs the least."""

    def __init__(self, message: str, least: TrainingPlan) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class TrainingPlan:
    """The result of :func:`shardtrace.plan`. All sizes are bytes of one rank, all times seconds of one step.

    Args:
        model: the class of the model; ``fingerprint`` identifies its parameters.
        world_size, mesh_shape: the ranks, and (replicas, shards) if a hybrid strategy was chosen, or (data, context) if
            sequences are split.
        budget: the memory that a step may need.
        device, links: what was planned for, as text; ``rates`` says where the figures come from: "modelled",
            "calibrated", "partly calibrated" (links are modelled) or "given".
        choices: the options of ``fsdp`` as JSON has them; :attr:`options` are those to pass.
        seconds, exposed, tokens: of a step; ``exposed`` seconds of it compute waits for communication; ``tokens`` are
            those that a rank computes, 0 if the inputs are no integers.
        memory: the bytes at the peak by kind; ``peak`` is their sum.
        mfu: the FLOPs of the model, none recomputed, over those that the device could do meanwhile; 0 if unknown.
        binding: what keeps the step from being faster.
        pareto: the front of memory and time, from the least memory to the fastest step.
        cost: the rates of the cost model.
        notes: what a reader should know.
        allowed: the values of ``gather_dtype`` and ``reduce_wire`` that might be chosen, beside exact ones.
    """

    model: str
    fingerprint: str
    world_size: int
    mesh_shape: tuple[int, int] | None
    budget: float
    device: str
    links: str
    rates: str
    choices: Mapping[str, Any]
    seconds: float
    forward: float
    backward: float
    optimizer: float
    exposed: float
    tokens: int
    memory: Mapping[str, int]
    mfu: float
    binding: str
    pareto: Rows
    cost: CostModel
    notes: tuple[str, ...] = ()
    allowed: Mapping[str, list[str]] = field(default_factory=dict)
    version: int = VERSION
    again: Any = field(default=None, repr=False, compare=False)  # plans for another batch; None if read from a file

    @property
    def peak(self) -> int:
        """The bytes at the peak."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        speed = f", {self._speed}" if self.tokens else ""
        chosen, runner_up = self.chosen, self._next
        parts = [
            f"{self.model} on {self._ranks}",
            "",
            *(f"  {line}" for line in self._options),
            *([f"  mesh_shape = {self.mesh_shape}"] if self.mesh_shape else []),
            "",
            f"step     {ms(self.seconds)}{speed}" + (f", MFU {self.mfu:.1%}" if self.mfu else ""),
            f"         forward {ms(self.forward)}, backward {ms(self.backward)}, optimizer {ms(self.optimizer)}; "
            f"compute waits {ms(self.exposed)} for communication",
            f"memory   {gib(self.peak)} of {gib(self.budget)}",
            *(f"         {gib(n):>12}  {kind}" for kind, n in sorted(self.memory.items(), key=lambda kv: -kv[1])),
            *([f"rounds   {self.rounding}"] if self.rounding else []),
            f"limit    {self.binding}",
            *([f"next     {runner_up}"] if runner_up else []),
            "",
            f"  {HEADINGS}",
            *(f"{'> ' if row is chosen else '  '}{row}" for row in self.pareto),
            *self.notes,
        ]
        return "\n".join(parts)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of :func:`shardtrace.fsdp`. A hybrid strategy, and ``context_parallel``, need a mesh of
        ``mesh_shape`` as well, which ``fsdp(model, plan=plan)`` makes."""
        return grouped(self._decided)

    @property
    def _decided(self) -> dict[str, Any]:
        return options_of(self.choices) | {"cost_model": self.cost}

    def merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of ``fsdp``: all those ``given``, with the options of the plan. Raises PlanError if an option is
        given and decided."""
        decided, own = self._decided, flat(given)
        twice = [n for n in decided if n in own and (n in HOMES or own[n] != DEFAULTS.get(n))]
        if twice:
            raise PlanError(f"the plan decides {', '.join(twice)}: leave it to the plan, or pass plan.options yourself")
        return grouped(own | decided)

    def largest_batch(self) -> int:
        """The largest size of dim 0 of the inputs with which these options fit into the memory.

        Compiles the model two or three times. Raises PlanError for a plan that was read from a file.
        """
        if self.again is None:
            raise PlanError("a plan from a file has no model: call shardtrace.plan(...).largest_batch()")
        size: int = self.again(self)
        return size

    # ---- in words and pictures ----

    @property
    def rounding(self) -> str:
        """The values that a step rounds, and those that it was allowed to, in words. Empty if there are neither."""
        what = {"gather_dtype": "parameters", "reduce_wire": "gradients"}
        rounds = [f"{word} to {value}" for option, word in what.items() if (value := self.choices.get(option))]
        if not rounds and not self.allowed:
            return ""
        text = f"{' and '.join(rounds)} on their way between ranks" if rounds else "nothing"
        allowed = "; ".join(f"{option} {', '.join(values)}" for option, values in self.allowed.items())
        return f"{text} (allowed: {allowed})" if allowed else text

    @property
    def chosen(self) -> Row | None:
        """The row of :attr:`pareto` that this plan is. None if the front was made for other options."""
        return next((row for row in self.pareto if row.options == self.choices), None)

    @property
    def _ranks(self) -> str:
        return f"{self.world_size} ranks of {self.device}, {self.links} ({self.rates} rates)"

    @property
    def _speed(self) -> str:
        return f"{self.tokens / self.seconds:,.0f} tokens/s a rank" if self.tokens else ""

    @property
    def _options(self) -> list[str]:
        return [f"{name} = {value!r}" for name, value in _shortened(self.choices).items() if value is not None]

    @property
    def _next(self) -> str:
        """The runner-up: the next best step, with less memory."""
        less = [row for row in self.pareto if row.memory < self.peak]
        if self.chosen is None or not less:
            return ""
        row = less[-1]
        saved, lost = self.peak - row.memory, row.seconds - self.seconds
        return f"{gib(saved)} less takes {ms(lost)} more: {row.words}"

    def _repr_html_(self) -> str:
        return embed(self._shown)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def to_html(self, path: str | Path) -> Path:
        """Writes the plan as a page of its own: its figures, memory against time, and the table of choices."""
        path = Path(path)
        path.write_text(render(self._shown), encoding="utf-8")
        return path

    @property
    def _shown(self) -> Shown:
        cards = {
            "step": (ms(self.seconds), self._speed),
            "model FLOPs utilization": (f"{self.mfu:.1%}" if self.mfu else "unknown", "of the data sheet's peak"),
            "exposed communication": (ms(self.exposed), f"{self.exposed / self.seconds:.1%} of the step"),
            "memory": (gib(self.peak), f"of {gib(self.budget)}"),
        }
        runner_up = self._next
        return Shown(
            title=f"{self.model}: a plan",
            setting=self._ranks,
            cards=cards,
            memory=self.memory,
            budget=self.budget,
            rows=self.pareto,
            chosen=self.chosen,
            code="\n".join(self._options),
            notes=[
                *([f"Rounds {self.rounding}."] if self.rounding else []),
                f"Limit: {self.binding}.",
                *([f"Next: {runner_up}."] if runner_up else []),
                *self.notes,
            ],
        )

    # ---- files ----

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as text, written to ``path`` if one is given."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "again"}
        data |= {"cost": asdict(self.cost), "pareto": [asdict(row) for row in self.pareto]}
        text = json.dumps(data, indent=2) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> TrainingPlan:
        """Reads a plan from a file, or from the text of one.

        Raises:
            PlanError: if it is no plan, or one of another version.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            data = json.loads(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                raise PlanError(f"the plan is of version {data['version']!r}, not {VERSION}: plan again")
            data["cost"] = CostModel.from_dict(data["cost"])
            data["pareto"] = Rows(_checked(Row(**row)) for row in data["pareto"])
            data["mesh_shape"] = tuple(data["mesh_shape"]) if data["mesh_shape"] else None
            data["notes"] = tuple(data["notes"])
            found = _checked(cls(**data))
            if (shape := found.mesh_shape) and (len(shape) != 2 or math.prod(shape) != found.world_size):
                raise ValueError(f"a mesh of shape {shape} for {found.world_size} ranks")
            options_of(found.choices)
            return found
        except PlanError:
            raise
        except OSError as error:
            raise PlanError(f"there is no plan in {source}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = "the text" if is_text else source
            raise PlanError(f"{what} is no plan of shardtrace ({type(error).__name__}: {error})") from error

    @property
    def hash(self) -> str:
        """Identifies what ``fsdp`` does with the plan. Ranks compare it."""
        text = json.dumps([self.fingerprint, self.world_size, self.choices, asdict(self.cost)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self, model: nn.Module, world_size: int) -> None:
        """Raises PlanError if the plan is for another model or number of ranks."""
        if fingerprint(model) != self.fingerprint:
            raise PlanError(
                f"the plan is for a {self.model} with other parameters than this {type(model).__name__}: names, shapes "
                "or dtypes differ; plan again"
            )
        if world_size != self.world_size:
            raise PlanError(f"the plan is for {self.world_size} ranks, not {world_size}: plan again")


def _checked(record: T) -> T:
    """A dataclass that was read from a file. Raises TypeError for a field that has not its type."""
    for f in fields(record):
        expected, value = TYPES.get(str(f.type).partition("[")[0]), getattr(record, f.name)
        if expected is not None and not isinstance(value, expected):
            raise TypeError(f"{f.name} is {value!r}")
    return record


def fingerprint(model: nn.Module) -> str:
    """Identifies a model's parameters: their names, shapes and dtypes."""
    text = json.dumps([(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- text ----


def _shortened(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The choices with mappings of many names in few words."""

    def short(value: Any) -> Any:
        if not isinstance(value, Mapping) or len(value) < 4:
            return value
        groups: dict[Any, list[str]] = {}
        for name, what in value.items():
            groups.setdefault(what, []).append(name)
        return {f"{n[0]} to {n[-1]} ({len(n)})" if len(n) > 2 else ", ".join(n): w for w, n in groups.items()}

    return {name: short(value) for name, value in choices.items()}


# ---- options as JSON ----


def choices_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``fsdp``, with fields in place of policies, as JSON. Raises TypeError that names one that has no place
    there."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, MixedPrecisionPolicy):
            found[name] = {key: _dtype_name(v) for key, v in asdict(value).items()}
        elif isinstance(value, CPUOffloadPolicy):
            found[name] = {"pin_memory": value.pin_memory}
        elif isinstance(value, ContextParallel):
            found[name] = asdict(value)
        else:
            try:
                found[name] = json.loads(json.dumps(value))
            except TypeError:
                raise TypeError(f"fixed option {name}={value!r} cannot be written into a plan's file") from None
    return found


def options_of(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`choices_of`."""
    options = dict(choices)
    if isinstance(policy := options.get("mp_policy"), Mapping):
        options["mp_policy"] = MixedPrecisionPolicy(**{key: _dtype(v) for key, v in policy.items()})
    if isinstance(policy := options.get("offload_policy"), Mapping):
        options["offload_policy"] = CPUOffloadPolicy(**policy)
    if isinstance(policy := options.get("context_parallel"), Mapping):
        options["context_parallel"] = ContextParallel(**policy)
    return options


def mesh_dim_names(options: Mapping[str, Any]) -> tuple[str, str]:
    """The names of the dimensions of the mesh that some options of ``fsdp`` need."""
    context = parse_context(options.get("context_parallel"))
    return ("data", context.mesh_dim) if context is not None else ("replicate", "shard")


def _dtype_name(value: Any) -> Any:
    return str(value) if isinstance(value, torch.dtype) else value


def _dtype(value: Any) -> Any:
    return getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) else value
