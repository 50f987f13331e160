"""The options of ``fsdp`` that few scripts need, by what they are about. Each option is a field of one policy."""

from __future__ import annotations

import ast
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from passes.chunk_loss import Chunks
from passes.comm.quantized import FP8, INT4, INT8, ROUNDED, SMALLEST, gather_wire, reduction_wire
from passes.pipeline import check_disabled
from passes.plan import CostModel, Placement, Wire, shard_shape
from shardtrace.options.strategy import Eager, Names, Repeated, ShardingStrategy, refuse_conflict

import torch
from thunder.core.dtypes import to_dtype
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

# ---- values ----


def parse_count(name: str, value: Any, expected: str, *, least: int = 0) -> int:
    """``value`` if it is a whole number of at least ``least``. Raises ValueError that says what is ``expected``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    return value


def needs(library: str, *, extra: str, what: str) -> None:
    """Raises ImportError that says what to install if ``library`` is missing. Call it before any work."""
    if find_spec(library) is None:
        raise ImportError(
            f"{what} needs {library}, which is not installed: pip install {library}, or shardtrace's extra, "
            f"pip install '.[{extra}]' in its folder",
            name=library,
        )


UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(memory: str | float) -> float:
    """An amount of memory: "80GB", "72GiB", or a number of bytes. Raises ValueError for anything else, and for so few
    bytes that a unit was forgotten."""
    found = memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([a-zA-Z]*)\s*", memory)
        unit = UNITS.get(match[2].lower()) if match else None
        found = float(match[1]) * unit if match and unit else 0.0
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
        raise ValueError(f"memory={memory!r}: write it as 80GB or 72GiB, or as a number of bytes")
    if found < 1e6 and str(memory)[-1].isdigit():
        raise ValueError(
            f"memory={memory!r} would be {found:g} bytes: write {found:g}GB, or {found:g}B if that is meant"
        )
    return float(found)


_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def parse_precision(value: Any) -> MixedPrecisionPolicy | None:
    """Accepts PyTorch's policy, or the name of the dtype in which parameters are gathered and gradients reduced.

    Raises ValueError that lists the names, or that names a policy's dtype that is not floating point.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in _DTYPES:
        return MixedPrecisionPolicy(param_dtype=_DTYPES[value.lower()])
    if isinstance(value, torch.dtype) and value in _DTYPES.values():
        return MixedPrecisionPolicy(param_dtype=value)
    if not isinstance(value, MixedPrecisionPolicy):
        known = ", ".join(map(repr, _DTYPES))
        raise ValueError(
            f"unknown mp_policy {value!r}: choose one of {known}, or pass a torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(value, name)
        if dtype is not None and dtype not in _DTYPES.values():
            known = ", ".join(sorted({str(d) for d in _DTYPES.values()}))
            raise ValueError(f"{name} of mp_policy is {dtype}: choose one of {known}, or None")
    if value.reduce_dtype is torch.float16 and value.param_dtype is not torch.float16:
        computed = "their own dtype" if value.param_dtype is None else value.param_dtype
        warnings.warn(
            f"mp_policy averages gradients in torch.float16, which are computed in {computed}: those beyond 65504 "
            "become inf, and small ones zero. reduce_dtype=torch.float32 or torch.bfloat16 holds them",
            stacklevel=2,
        )
    return value


# ---- wires ----


GATHERS = {"int8": INT8, "fp8": FP8, "float8_e4m3fn": FP8}
REDUCTIONS = {"int8": INT8, "int4": INT4}

WireRules = tuple[tuple[str, Wire | None], ...]  # patterns of names; the first that matches counts


def parse_gather_dtype(value: Any) -> WireRules:
    """Accepts "int8", "fp8", their torch dtypes, a :class:`passes.Wire`, None, or a mapping of name patterns to these.

    Raises ValueError that lists the names.
    """
    known: dict[str, Wire] = {}
    if not isinstance(value, Mapping):
        wire = _gather(value, known)
        return (("*", wire),) if wire is not None else ()
    if not value or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError(f"gather_dtype={value!r}: a mapping is of patterns such as 'h.*' to dtypes")
    return tuple((pattern, _gather(dtype, known)) for pattern, dtype in value.items())


def _gather(value: Any, known: dict[str, Wire]) -> Wire | None:
    if value is None:
        return None
    if isinstance(value, Wire):
        if value.reduces:
            raise ValueError(f"gather_dtype is a wire that carries gradients: pass reduce_wire={value.name!r}")
        return value
    name = str(value).removeprefix("torch.").lower() if isinstance(value, (str, torch.dtype)) else ""
    if name not in GATHERS:
        raise ValueError(
            f"unknown gather_dtype {value!r}: choose one of {', '.join(map(repr, GATHERS))}, or pass a passes.Wire, "
            "or a mapping of name patterns to these; mp_policy='bf16' gathers in bf16"
        )
    format = GATHERS[name]
    return known.setdefault(format.name, gather_wire(format))


def parse_reduce_wire(value: Any, error_feedback: Any, precision: MixedPrecisionPolicy | None = None) -> Wire | None:
    """Accepts "int8", "int4" or None.

    Raises ValueError that lists the names, or that says why there can be no error feedback.
    """
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback must be True or False, not {error_feedback!r}")
    if value is None:
        if error_feedback:
            raise ValueError("error_feedback=True has no rounding to make up for: pass reduce_wire='int8' or 'int4'")
        return None
    name = str(value).removeprefix("torch.").lower() if isinstance(value, (str, torch.dtype)) else ""
    if name not in REDUCTIONS:
        known = ", ".join(map(repr, REDUCTIONS))
        raise ValueError(f"unknown reduce_wire {value!r}: choose one of {known}; bf16 is a reduce_dtype of mp_policy")
    if error_feedback and precision is not None and torch.float16 in (precision.param_dtype, precision.reduce_dtype):
        raise ValueError(
            "error_feedback=True keeps errors from step to step, and fp16 scales the gradients of each step by another "
            "number: use bf16, or leave error_feedback out"
        )
    return reduction_wire(REDUCTIONS[name], error_feedback=error_feedback)


class Allowed(NamedTuple):
    """The wires that a plan may choose, by the values of ``gather_dtype`` and ``reduce_wire``."""

    gathers: Mapping[str, Wire] = MappingProxyType({})
    reductions: Mapping[str, Wire] = MappingProxyType({})
    error_feedback: bool = False

    @property
    def values(self) -> dict[str, list[str]]:
        """The names, by option."""
        named = {"gather_dtype": list(self.gathers), "reduce_wire": list(self.reductions)}
        return {option: names for option, names in named.items() if names}


NO_WIRES = Allowed()


def parse_allowed(allowed: Any, fixed: Mapping[str, Any]) -> Allowed:
    """The options that a plan may choose: a mapping of "gather_dtype" and "reduce_wire" to names, or to one name.

    Raises ValueError for another option or name, an option that is ``fixed`` as well, or errors that cannot be kept.
    """
    if not isinstance(allowed, Mapping) or not allowed.keys() <= {"gather_dtype", "reduce_wire"}:
        raise ValueError(
            f"allowed={allowed!r}: a plan may choose gather_dtype and reduce_wire, as in "
            '{"gather_dtype": ["int8", "fp8"], "reduce_wire": "int8"}; other options belong to fixed'
        )
    if both := [name for name in allowed if fixed.get(name) is not None]:
        raise ValueError(f"{both[0]} is fixed and allowed: leave it out of one of them")
    names = {name: [v] if isinstance(v, (str, torch.dtype)) else list(v) for name, v in allowed.items()}
    feedback, known = fixed.get("error_feedback", False), dict[str, Wire]()
    precision = parse_precision(fixed.get("mp_policy"))
    gathers = [_gather(value, known) for value in names.get("gather_dtype", ())]
    reductions = [parse_reduce_wire(value, feedback, precision) for value in names.get("reduce_wire", ())]
    if None in gathers or None in reductions:
        raise ValueError(f"allowed={allowed!r}: None need not be there, because exact steps are always tried")
    return Allowed({w.name: w for w in gathers if w}, {w.name: w for w in reductions if w}, feedback)


class Travelling(NamedTuple):
    """A parameter that may travel: its values, its strategy, and the ranks over which it is spread and reduced."""

    parameter: nn.Parameter
    strategy: ShardingStrategy
    shards: int
    ranks: int


def assign_gathers(
    rules: WireRules, parameters: Mapping[str, Travelling], names: Names = MappingProxyType({})
) -> dict[str, Wire | None]:
    """The wire of the first pattern that matches any of a parameter's names, by its first name; None for no wire.
    ``names`` are those of parameters that have several.

    Raises ValueError that names a pattern that matches nothing, or nothing that a wire can gather, or a parameter whose
    names match patterns of different wires.
    """
    chosen: dict[str, list[str]] = {pattern: [] for pattern, _ in rules}
    found: dict[str, Wire | None] = {}
    for name, p in parameters.items():
        every = names.get(name, (name,))
        matching = [(pattern, wire) for pattern, wire in rules if any(fnmatchcase(n, pattern) for n in every)]
        refuse_conflict("gather_dtype", every, rules, lambda pattern, n: fnmatchcase(n, pattern))
        gathered = p.shards > 1 and p.strategy.placement is not Placement.REPLICATE
        found[name] = matching[0][1] if matching and gathered else None
        for pattern, _ in matching:
            chosen[pattern].append(name)
    for pattern, wire in rules:
        if not chosen[pattern]:
            if pattern == "*":
                continue
            raise ValueError(f"no parameter matches {pattern!r} of gather_dtype; there are: {', '.join(parameters)}")
        if wire is not None:
            own = wire.name not in {format.name for format in GATHERS.values()}
            _refuse(
                f"gather_dtype={wire.name or 'Wire'!r}" + ("" if pattern == "*" else f" for {pattern!r}"),
                {name: parameters[name] for name in chosen[pattern]},
                lambda p, own=own: _why_not_gathered(p, own=own),  # type: ignore[misc]
            )
    return found


def refuse_reductions(wire: Wire | None, parameters: Mapping[str, Travelling], *, error_feedback: bool) -> None:
    """Raises ValueError if a wire of gradients has nothing to do, or may keep no errors."""
    if wire is None:
        return
    _refuse(f"reduce_wire={wire.name!r}", parameters, _why_not_reduced)
    for name, p in parameters.items():
        if error_feedback and p.parameter.dtype == torch.float16:
            raise ValueError(
                f"error_feedback=True keeps errors from step to step, and the gradient of parameter {name!r} is fp16, "
                "which is scaled by another number in each step: leave error_feedback out"
            )


def _refuse(what: str, parameters: Mapping[str, Travelling], why_not: Callable[[Travelling], str]) -> None:
    """Raises ValueError if there is a reason ``why_not`` for each of the parameters."""
    reasons = {name: why_not(p) for name, p in parameters.items()}
    if reasons and all(reasons.values()):
        name, reason = next(iter(reasons.items()))
        rest = f", and none of {len(reasons)} parameters can be rounded" if len(reasons) > 1 else ""
        raise ValueError(f"{what} changes nothing: {name!r} {reason}{rest}; leave it out")


def _why_not_gathered(p: Travelling, *, own: bool) -> str:
    if p.strategy.placement is Placement.REPLICATE:
        return f"is whole on every rank ({p.strategy.value}) and not gathered"
    if p.shards == 1:
        return "is on one rank and not gathered"
    return "" if own else _why_not_rounded(p.parameter, p.parameter.numel(), p.shards, p.strategy)


def _why_not_reduced(p: Travelling) -> str:
    if p.ranks == 1:
        return "is on one rank, which reduces nothing"
    if not p.parameter.requires_grad:
        return "is frozen and has no gradient"
    return _why_not_rounded(p.parameter, p.parameter.numel(), p.shards if p.shards > 1 else p.ranks, p.strategy)


def _why_not_rounded(parameter: nn.Parameter, numel: int, ranks: int, strategy: ShardingStrategy) -> str:
    if to_dtype(parameter.dtype) not in ROUNDED:
        return f"is {parameter.dtype} and travels as it is"
    if strategy.placement is Placement.SHARD:
        rows, *rest = shard_shape(tuple(parameter.shape), ranks)
        numel = rows * torch.Size(rest).numel()
    elif strategy.placement is Placement.REPLICATE:
        numel = -(-numel // ranks)
    if numel < SMALLEST:
        return f"has {numel} elements on a rank, fewer than {SMALLEST}, and travels as it is"
    return ""


# ---- policies ----


@dataclass(frozen=True, kw_only=True)
class InitPolicy:
    """Where parameters begin: their device, their owners and their first values.

    Args:
        device: the device of shards and buffers; with ``offload_policy``, the device that computes. Default, as in
            FSDP2: the mesh's device type, else this rank's GPU if there is one, else the CPU. Its GPU is the one that
            the process group is bound to, or the model is on, or ``torch.cuda.set_device`` has set (an index of 0 says
            nothing), else LOCAL_RANK counts through those that this rank sees. A model stays where it is if the process
            group was made without nccl.
        weights: values for all parameters and persistent buffers, of which each rank reads only its rows: a folder of
            safetensors files, one file, or a state dict (:func:`shardtrace.load_safetensors`). The model may be on the
            meta device (:func:`shardtrace.init_empty_weights`) and is then never whole. ``fsdp`` raises CheckpointError
            if they do not fit.
        broadcast_from: the global rank whose parameters and buffers all ranks take over. Default: the group's first
            rank if a strategy replicates parameters; otherwise each rank keeps its own values.
        param_init_fn: for meta-device models: called with each module that owns meta parameters or buffers, once these
            have memory. Default: the module's ``reset_parameters``. At most one module is whole at a time.
        evenness: for "owner": 1 (default) gives each tensor to the rank with the fewest bytes, 0 keeps the tensors of
            a module together.

    Raises:
        ValueError, TypeError: the error names the field and the values that it accepts.
    """

    device: torch.device | str | None = None
    weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None = None
    broadcast_from: int | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    evenness: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.evenness) or not 0 <= self.evenness <= 1:
            raise ValueError(f"evenness must be a number from 0 to 1, not {self.evenness!r}")
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise TypeError(f"param_init_fn must be a function of a module, or None, not {self.param_init_fn!r}")
        _check("broadcast_from", self.broadcast_from, int | None, "a global rank, or None")
        _check("weights", self.weights, str | os.PathLike | Mapping | None, "a path or a state dict")


@dataclass(frozen=True, kw_only=True)
class CommPolicy:
    """How parameters travel to their use, and gradients to the shards.

    Args:
        gather_dtype: round parameters for their way from shards to use: "int8" (blocks of 256 elements with a scale
            each) or "fp8" (torch.float8_e4m3fn, likewise), a :class:`passes.Wire`, or a mapping of name patterns to
            these and None, of which the first that matches counts. All ranks compute with the same rounded values;
            shards, gradients and the optimizer stay exact. Parameters with fewer than 1024 elements on a rank, and
            those that are not fp32, bf16 or fp16, travel as they are.
        reduce_wire: round gradients for their way to the shards: "int8" or "int4" (blocks of 128 elements). Each rank's
            gradient is rounded once, sent to the owner of the shard, and added up there in fp32. Replicas ("ddp",
            hybrid strategies) then gather the sum, rounded to int8.
        error_feedback: with ``reduce_wire``, add what a step's rounding has lost to the gradients of the next step.
            Takes 2 bytes for each element of a gradient that a rank sends. Checkpoints do not have them.
        sum_reductions: add gradients up and divide this rank's shard of the sum in the kernel that casts it, instead
            of averaging in the collective, with which nccl uses neither its zero-copy nor its PAT kernels. fp16
            divides by about the root of the number of ranks before, and by the rest after. The same as FSDP2's
            ``set_force_sum_reduction_for_comms``. Changes nothing on gloo.
        gradient_divide_factor: the number by which the sum of the batches' gradients is divided. Default: the number of
            batches, for their mean: of ranks, if each has its own. 1 leaves the sum, for a loss that is divided by the
            tokens of all batches.
        accumulation_dtype: the dtype in which :func:`shardtrace.no_sync` adds up gradients of lower precision. None:
            their own dtype.

    Raises:
        ValueError, TypeError: the error names the field and the values that it accepts.
    """

    gather_dtype: str | torch.dtype | Wire | Mapping[str, str | torch.dtype | Wire | None] | None = None
    reduce_wire: str | None = None
    error_feedback: bool = False
    sum_reductions: bool = False
    gradient_divide_factor: float | None = None
    accumulation_dtype: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        parse_gather_dtype(self.gather_dtype)
        parse_reduce_wire(self.reduce_wire, self.error_feedback)
        _check("sum_reductions", self.sum_reductions, bool, "True or False")
        factor = self.gradient_divide_factor
        if factor is not None and (not _is_number(factor) or not 0 < factor < math.inf):
            raise ValueError(f"gradient_divide_factor must be a positive number, or None for the ranks, not {factor!r}")
        _check("accumulation_dtype", self.accumulation_dtype, torch.dtype | None, "a torch.dtype, or None")


@dataclass(frozen=True, kw_only=True)
class CompilePolicy:
    """How a step is compiled, and when its collectives are issued.

    Args:
        jit: whether a sharded module that is called compiles itself, and how: the arguments of ``thunder.jit``, such as
            ``{"executors": ["torchcompile"]}``. False leaves it to a ``thunder.jit`` around the model.
            ``fsdp(model, compile=...)`` is the same.
        repeated_blocks: "once" compiles blocks that make the same calls of torch once, and calls the function for each
            of them. "inline" compiles every block. A class (or several) names the blocks if they are not those of
            "block" buckets.
        eager: the modules that PyTorch runs and differentiates, each as one line of the trace: names (or patterns) and
            classes. "auto" chooses the smallest ones whose forward depends on the values of tensors (``.item()``,
            ``nonzero``, a branch); the provenance of the trace names them. None: such a forward is an error.
        kernels: whether a step runs what eager PyTorch runs, forward and backward (torch's operators, and
            :data:`shardtrace.kernels`), if ``thunder.jit`` was given no executors and none of its default ones fuses,
            as without nvFuser. Steps then take the time and the memory of eager PyTorch.
        prefetch: how many buckets may be gathered ahead of use. At most ``prefetch + 1`` buckets are unsharded at once,
            unless the model uses several at once. Default: 1; 2 if there are blocks in blocks; 3 if parameters are kept
            until backward has used them, because gathering ahead then takes no more memory in the end, or if "auto"
            splits blocks.
        max_inflight_bytes: bytes of unsharded buckets whose gather or reduction may be in flight at once. A single
            bucket may be larger. Default: ``prefetch + 1`` times the largest bucket.
        cost_model: the durations of collectives and compute, which decide where collectives are issued and waited for.
            Must be equal on all ranks. Default: the measurements of ``shardtrace calibrate`` on the machine of the
            group's first rank, else those of a slow link and a fast device.
        chunk_loss: in how many chunks of rows the loss of a language model is computed, so that its logits are never
            there as a whole. "auto": 8 or more, if they take more than 64 MiB. None: at once. Logits that forward also
            returns are there in any case, see ``returns``.
        returns: "all" that forward returns; or "loss", and not the logits: if a tensor of the result is a single
            floating number, tensors with dims are left out of it. A read of one is an error.
        disable_passes: names of passes to leave out, for debugging. ``shardtrace passes`` lists those that can be.

    Raises:
        ValueError, TypeError: the error names the field and the values that it accepts.
    """

    jit: bool | Mapping[str, Any] = True
    repeated_blocks: Repeated = "once"
    eager: Eager = "auto"
    kernels: bool = True
    prefetch: int | None = None
    max_inflight_bytes: int | None = None
    cost_model: CostModel | None = None
    chunk_loss: Chunks = "auto"
    returns: Literal["all", "loss"] = "all"
    disable_passes: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.chunk_loss not in (None, "auto"):
            parse_count("chunk_loss", self.chunk_loss, 'a number of chunks, "auto" or None', least=1)
        _one_of("returns", self.returns, "all", "loss")
        _check("jit", self.jit, bool | Mapping, "True, False, or arguments of thunder.jit")
        _check("kernels", self.kernels, bool, "True or False")
        if self.prefetch is not None:
            parse_count("prefetch", self.prefetch, "a number of buckets, 0 or more")
        if self.max_inflight_bytes is not None:
            parse_count("max_inflight_bytes", self.max_inflight_bytes, "a number of bytes, or None")
        _check("cost_model", self.cost_model, CostModel | None, "a passes.CostModel, or None")
        names = self.disable_passes
        if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(n, str) for n in names):
            raise TypeError(f"disable_passes must be several names of passes, as in ('schedule',), not {names!r}")
        check_disabled(names)


@dataclass(frozen=True)
class ContextParallel:
    """Long sequences: each rank of a mesh dimension computes on its part of the sequence.

    Args:
        mesh_dim: the name of that dimension.
        sequence_dim: the dimension of the model's tensor arguments that is the sequence.
        attention: "gather" gathers keys and values; "ulysses" exchanges heads for positions, so that each rank computes
            some heads of the whole sequence, where heads divide by the ranks and there is no mask but a causal one;
            "auto" does what sends fewer bytes.
        arguments: what the model is given of a sequence: the "whole" on every rank, or this rank's "part", as
            :func:`shardtrace.shard_sequence` cuts it.
        returns: what the model returns of a sequence: "whole" on every rank, or this rank's "part", which saves the
            memory of whole logits. The loss of a part is this rank's share of a sum: divide by the positions of the
            whole sequence, not by those of the part. Values without a sequence, such as a loss, are whole.

    The ranks of the dimension must be given the same batch. The first batch of each shape is compared.

    Raises:
        ValueError, TypeError: the error names the field and the values that it accepts.

    Source: Llama 3 (2024, https://arxiv.org/abs/2407.21783), section 3.3.2: keys and values are gathered, and each rank
    has two chunks of the sequence, which makes the work of causal attention equal.
    """

    option: ClassVar[str] = "context_parallel"  # of fsdp
    pieces: ClassVar[Literal[1, 2]] = 2  # chunks of a sequence that each rank has

    mesh_dim: str
    _: KW_ONLY
    sequence_dim: int = 1
    attention: Literal["auto", "gather", "ulysses"] = "auto"
    arguments: Literal["whole", "part"] = "whole"
    returns: Literal["whole", "part"] = "whole"

    def __post_init__(self) -> None:
        _check("mesh_dim", self.mesh_dim, str, "the name of a mesh dimension")
        if not isinstance(self.sequence_dim, int) or self.sequence_dim < 0:
            raise ValueError(f"sequence_dim must be the number of a dimension from the left, not {self.sequence_dim!r}")
        _one_of("attention", self.attention, "auto", "gather", "ulysses")
        _one_of("arguments", self.arguments, "whole", "part")
        _one_of("returns", self.returns, "whole", "part")


@dataclass(frozen=True)
class ExpertParallel(ContextParallel):
    """Ranks that compute the experts of a mixture together, and have batches of their own: ``expert_parallel``.

    They are the rows of one batch, which is split along its first dimension. All tokens are gathered where routing
    mixes them, and each rank computes with its part of every expert.
    """

    option = "expert_parallel"
    pieces = 1

    sequence_dim: int = field(default=0, kw_only=True)
    arguments: Literal["whole", "part"] = field(default="part", kw_only=True)
    returns: Literal["whole", "part"] = field(default="part", kw_only=True)


@dataclass(frozen=True)
class TensorParallel:
    """Products in parts: each rank of a mesh dimension computes with its part of the parameters.

    Args:
        mesh_dim: the name of that dimension.
        parameters: how some parameters are cut, by patterns of their names, of which the first that matches counts:
            "colwise" (each rank computes some columns of a product), "rowwise" (each rank computes a part of its sum,
            which ranks add up), or "whole". The others are chosen: a product whose input comes, element by element or
            by attention, from other products is rowwise, and those are colwise.

    The ranks of the dimension must be given the same batch. The first batch of each shape is compared.

    Raises:
        ValueError, TypeError: the error names the field and the values that it accepts.

    Source: Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053), section 3.
    """

    mesh_dim: str
    parameters: Mapping[str, Literal["colwise", "rowwise", "whole"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("mesh_dim", self.mesh_dim, str, "the name of a mesh dimension")
        if not isinstance(self.parameters, Mapping) or not all(isinstance(p, str) for p in self.parameters):
            raise TypeError(f"parameters must be a mapping of patterns of names, not {self.parameters!r}")
        for pattern, how in self.parameters.items():
            _one_of(f"parameters[{pattern!r}]", how, "colwise", "rowwise", "whole")

    def hows(self, names: Iterable[str]) -> dict[str, Any]:
        """How parameters of these names are cut, by name, without those that are chosen.

        Raises ValueError for a pattern that matches none.
        """
        names, unused = list(names), dict.fromkeys(self.parameters)
        found: dict[str, Any] = {}
        for name in names:
            pattern = next((p for p in self.parameters if fnmatchcase(name, p)), None)
            if pattern is not None:
                found[name] = self.parameters[pattern]
                unused.pop(pattern, None)
        if unused:
            raise ValueError(f"no parameter matches {next(iter(unused))!r} of tensor_parallel")
        return found


P = TypeVar("P", ContextParallel, TensorParallel)


def _over_ranks(option: str, given: Any, policy: type[P]) -> P | None:
    """A policy, also of the name of its mesh dimension."""
    if given is not None and not isinstance(given, (str, policy)):
        raise TypeError(f"{option} must be the name of a mesh dimension or {policy.__name__}(...), not {given!r}")
    return policy(given) if isinstance(given, str) else given


parse_context = partial(_over_ranks, "context_parallel", policy=ContextParallel)
parse_tensor = partial(_over_ranks, "tensor_parallel", policy=TensorParallel)


def with_experts(context: ContextParallel | str | None, experts: str | None) -> ContextParallel | str | None:
    """The ``context_parallel`` of ``fsdp`` that an ``expert_parallel`` stands for. Raises ValueError, TypeError."""
    if experts is None:
        return context
    _check("expert_parallel", experts, str, "the name of a mesh dimension")
    if context is not None:
        raise ValueError("expert_parallel and context_parallel both say which ranks have all tokens: choose one")
    return ExpertParallel(experts)


def whole_sequences(options: Mapping[str, Any]) -> dict[str, Any]:
    """The ``context_parallel`` among options of ``fsdp``, if it is there, for a model that takes and returns whole
    sequences."""
    context = parse_context(options.get("context_parallel"))
    return {"context_parallel": replace(context, arguments="whole", returns="whole")} if context is not None else {}


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a rank that training may take, see ``memory`` of :func:`shardtrace.fsdp`.

    Args:
        size: "80GB", "72GiB", or a number of bytes. On a GPU it includes what the driver, the process groups and the
            caching allocator take.
        optimizer: the class of the optimizer or its name in ``torch.optim``, whose state and temporary values count.
            None: nothing is counted, as for an evaluation.

    Raises:
        ValueError: for a size that is none, or an optimizer that does not exist.
    """

    size: str | float
    _: KW_ONLY
    optimizer: Callable[..., torch.optim.Optimizer] | str | None = "AdamW"

    def __post_init__(self) -> None:
        parse_bytes(self.size)
        optimizer_class(self.optimizer)

    @property
    def bytes(self) -> float:
        return parse_bytes(self.size)


def parallel_dims(options: Mapping[str, Any]) -> dict[str, str]:
    """The dimensions of the mesh whose ranks compute together, by option of ``fsdp``, of which these are some."""
    context = parse_context(with_experts(options.get("context_parallel"), options.get("expert_parallel")))
    tensor = parse_tensor(options.get("tensor_parallel"))
    found = {} if context is None else {context.option: context.mesh_dim}
    return found if tensor is None else found | {"tensor_parallel": tensor.mesh_dim}


def sharing_dims(options: Mapping[str, Any]) -> list[str]:
    """The dimensions of the mesh whose ranks share a batch, by options of ``fsdp``; none if each rank has its own."""
    return [dim for option, dim in parallel_dims(options).items() if option != ExpertParallel.option]


def optimizer_class(optimizer: Any) -> Any:
    """A class of optimizers or None, as it is given or of a text: "SGD", "SGD(momentum=0.9)". Raises ValueError if
    there is none of this name."""
    found = _named_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    if (found is not None and callable(found)) or optimizer is None:
        return found
    raise ValueError(f"torch.optim has no optimizer {optimizer!r}: pass its class")


def _named_optimizer(text: str) -> Any:
    try:
        call = ast.parse(text if text.endswith(")") else f"{text}()", mode="eval").body
        arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords}  # type: ignore[attr-defined]
        return partial(getattr(torch.optim, call.func.id), **arguments)  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, TypeError, AttributeError):
        return None


def parse_memory(given: MemoryBudget | str | float | None) -> MemoryBudget | None:
    """The checked ``memory`` of ``fsdp``. Raises ImportError if scipy is not installed, which chooses what fits."""
    if given is not None:
        needs("scipy", extra="plan", what="fsdp(memory=...)")
    return given if given is None or isinstance(given, MemoryBudget) else MemoryBudget(given)


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is checked while training, and how long ranks wait for each other.

    Args:
        steps: check that all ranks are about to send the same collectives: before every step (True), only when a step
            is compiled (False), or only before a step other than the one that followed the same predecessor last time
            (None, the default), such as an evaluation after training, or a forward after a skipped backward.
            SHARDTRACE_CHECK_STEPS=1 in the environment makes True the default.
        recording: record the forward again before steps 2, 4, 8, 16, ... (True), before each step whose number is a
            multiple of this one, or never (False). If it calls torch otherwise than when the step was compiled, it
            reads what no guard sees, and an error names the first call that differs.
        prove: prove each compiled step to be the unsharded program (:func:`shardtrace.prove`), and raise an error if it
            cannot be. SHARDTRACE_PROVE=1 in the environment makes True the default.
        timeout: seconds to wait for other ranks when models and compiled traces are compared, and in each collective
            of a step if it is set or ``fsdp`` makes the process group.

    Raises:
        ValueError, TypeError: the error names the field and the values that it accepts.
    """

    steps: bool | None = None
    recording: bool | int = True
    prove: bool | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        _check("steps", self.steps, bool | None, "True, False, or None")
        _check("prove", self.prove, bool | None, "True, False, or None")
        if not isinstance(self.recording, int) or self.recording < 0:
            raise ValueError(f"recording must be True, False or a number of steps, not {self.recording!r}")
        if not _is_number(self.timeout) or not self.timeout > 0:
            raise ValueError(f"timeout must be a number of seconds, not {self.timeout!r}")


def _check(name: str, value: Any, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, not {value!r}")


def _one_of(name: str, value: Any, *known: str) -> None:
    if value not in known:
        *first, last = (f'"{one}"' for one in known)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- fields by name ----

Policy = InitPolicy | CommPolicy | CompilePolicy | Checks
POLICIES: dict[str, type[Policy]] = {  # by the argument of fsdp
    "init_policy": InitPolicy,
    "comm_policy": CommPolicy,
    "compile_policy": CompilePolicy,
    "checks": Checks,
}
HOMES = {f.name: argument for argument, policy in POLICIES.items() for f in fields(policy)}  # unique over policies


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``fsdp`` with fields in place of their policies: those that have another value than their default."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Policy):
            found |= {f.name: own for f in fields(value) if _differs(own := getattr(value, f.name), f.default)}
        else:
            found[name] = value
    return found


def _differs(value: Any, default: Any) -> bool:
    return value is not default and (type(value) is not type(default) or value != default)


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``fsdp``: options with policies in place of their fields. The later of two values counts."""
    values = flat(options)
    found = {name: value for name, value in values.items() if name not in HOMES}
    for argument, policy in POLICIES.items():
        if own := {name: value for name, value in values.items() if HOMES.get(name) == argument}:
            found[argument] = policy(**own)
    return found
