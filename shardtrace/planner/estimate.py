"""What is to be planned, and the predicted cost of a step: its seconds by the cost model, its bytes by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from passes.analysis.flops import flops, useful_flops
from passes.analysis.liveness import KINDS, LineMemory, issues, on_host, step_liveness
from passes.analysis.recognise import (
    away_at,
    bucket_of,
    is_deletion,
    is_issue,
    is_return,
    is_sequence_issue,
    is_trip,
    is_unpack,
    names,
    nbytes,
    part_at,
)
from passes.compat.jit import Collections
from passes.pipeline import Compilation, Facts
from passes.plan import CostModel, TracedParameters
from passes.plan.cost import HOST_MEMORY, Hardware
from shardtrace.inspector.timeline import predicted
from shardtrace.model.state import ShardedState, states_in
from shardtrace.model.tracing import contexts_of
from shardtrace.options.policies import NO_WIRES, Allowed, grouped, optimizer_class, parse_context
from shardtrace.options.strategy import ShardingStrategy, checkpointed_blocks, parse_rules, parse_sharding_strategy
from shardtrace.planner.compose import Compiled, ComposedStep, compiled, compiled_step
from shardtrace.planner.training_plan import mesh_dim_names
from shardtrace.testing import Arguments, compile_only, parse_arguments, sharded_copy

import thunder
import torch
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce
from torch import nn
from torch.distributed import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---- the optimizer ----


SIDE = 64  # of the matrix on which an optimizer is tried
DISPATCH = 40e-6  # seconds in which torch 2.13 brings an operator to the memory of a DTensor, on a core of an EPYC


class OptimizerCost(NamedTuple):
    """For each element of a parameter: ``state`` bytes that are kept between steps, ``moved`` bytes that a step reads
    and writes, and ``temporary`` bytes that it makes. ``calls``: operators for each parameter.

    ``way`` is how torch runs it: "fused" in one kernel, "foreach" with a kernel for each operation on all parameters,
    or "for-loop" over the parameters. ``host``: the cost in the memory of the host, if it is another one; ``fused``:
    with ``fused=True``, if torch has that and it was not asked for."""

    name: str
    state: float
    moved: float
    temporary: float
    calls: int = 0
    way: str = "for-loop"
    host: OptimizerCost | None = None
    fused: OptimizerCost | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.way})"

    @property
    def on_host(self) -> OptimizerCost:
        """The cost in the memory of the host."""
        return self.host or self


NO_OPTIMIZER = OptimizerCost("no optimizer", 0.0, 0.0, 0.0)
FUSED = ("AdamW", "Adam", "SGD")  # by torch, on a GPU


class _Moved(TorchDispatchMode):
    """Adds up the bytes that operators read and write, apart from writes into ``grad``: fused kernels name it as
    written, and write it only to undo the scale of a loss."""

    def __init__(self, grad: torch.Tensor) -> None:
        super().__init__()
        self.grad, self.bytes, self.made, self.calls = grad, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        specs = func._schema.arguments
        given = {**dict(zip((s.name for s in specs), args, strict=False)), **(kwargs or {})}
        read = {t.data_ptr(): t.nbytes for t in _tensors(given)}  # once, however often it is named
        written = [given[s.name] for s in specs if s.alias_info is not None and s.alias_info.is_write]
        made = sum(t.nbytes for t in _tensors(result) if t.data_ptr() not in read)
        self.bytes += sum(read.values()) + made
        self.bytes += sum(t.nbytes for t in _tensors(written) if t.data_ptr() != self.grad.data_ptr())
        self.made += made
        self.calls += 1
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.numel() >= SIDE]


def optimizer_cost(optimizer: Callable[..., torch.optim.Optimizer] | str, device: str = "cpu") -> OptimizerCost:
    """Tries an optimizer on a small fp32 matrix, in the way in which torch runs it.

    Args:
        optimizer: a class of optimizers, a partial one such as ``functools.partial(torch.optim.SGD, momentum=0.9)``, or
            the name of one of ``torch.optim``, with arguments or without: "AdamW(fused=True)".
        device: "cpu", or another one, on which torch chooses "foreach" for most optimizers.

    Raises:
        ValueError: if there is no optimizer of this name.
    """
    make = partial(optimizer_class(optimizer), lr=1e-3)
    found = make([torch.nn.Parameter(torch.ones(SIDE, SIDE))])
    name, own = type(found).__name__, found.defaults
    way = "fused" if own.get("fused") else "foreach" if own.get("foreach") else "for-loop"
    fused = (
        optimizer_cost(partial(make, fused=True, foreach=None), device) if way != "fused" and name in FUSED else None
    )
    cost = OptimizerCost(name, *_tried(make), way, None, fused)
    if device == "cpu" or way != "for-loop" or own.get("foreach", False) is not None or name == "Adafactor":
        return cost
    return OptimizerCost(name, *_tried(partial(make, foreach=True)), "foreach", cost, fused)


def _tried(make: Callable[..., torch.optim.Optimizer]) -> tuple[float, float, float, int]:
    """The bytes of an element that are kept, moved and made, and the number of operators."""
    parameter = torch.nn.Parameter(torch.ones(SIDE, SIDE))
    parameter.grad = torch.ones_like(parameter)
    found = make([parameter])
    found.step()  # makes its state
    with _Moved(parameter.grad) as moved:
        found.step()
    state = sum(t.nbytes for t in _tensors(list(found.state.values())))
    numel = parameter.numel()
    return state / numel, moved.bytes / numel, moved.made / numel, moved.calls


# ---- a step ----


class Estimate(NamedTuple):
    """A training step of one rank.

    ``seconds`` is the sum of ``forward``, ``backward`` and ``optimizer``, the first two of which include the
    ``exposed`` seconds in which compute waits for communication, ``gathering`` of them for parameters. ``memory`` has
    the bytes at the peak by kind, and ``peak`` is their sum; ``tensors`` are those that PyTorch would count. ``host``:
    bytes of parameters, gradients and the optimizer in the memory of the host; ``away``: of activations there.
    """

    seconds: float
    forward: float
    backward: float
    optimizer: float
    exposed: float
    gathering: float
    peak: int
    tensors: int
    memory: Mapping[str, int]
    host: int
    away: int


class Setting(NamedTuple):
    """The machine and the training on it, apart from what a plan decides. ``others``: bytes that are there beside the
    step, such as parameters that it does not use. ``losses``: count the memory of a loss that the script computes of
    the results, if none is a loss: it saves as much again as the results that get a gradient."""

    cost: CostModel
    hardware: Hardware
    optimizer: OptimizerCost
    accumulation: int = 1
    others: int = 0
    losses: bool = False


def estimate(step: ComposedStep, setting: Setting, facts: dict[Any, Any] | None = None) -> Estimate:
    """Predicts a step from its executed traces. ``facts``: as in ``step_liveness``."""
    cost, optimizer, count = setting.cost, setting.optimizer, setting.accumulation
    forward, backward = predicted(step, cost)
    words, elsewhere, largest, sharded = _trained_words(step.forward)
    state = int(optimizer.state * words)
    sums = 4 * words if count > 1 else 0  # gradients of earlier calls
    memory = step_liveness(*step, persistent=state + sums + setting.others, facts=facts)
    parts = [part.peak for part in memory if part is not None]
    at = max(parts, key=lambda row: row.during)
    kinds = {kind: getattr(at, kind) for kind in KINDS} | {"optimizer": state}
    kinds["gradients"] += sums
    if setting.others:
        kinds["others"] = setting.others
    kinds["activations"] += at.during - at.total
    updating = setting.others + while_updating((memory.backward or memory.forward).lines[-1], words, largest, setting)
    if updating > at.during:
        kinds |= {"activations": 0, "saved": 0, "unsharded": 0, "in_flight": 0}
        kinds["gradients"] = 4 * words
        kinds["temporary"] = updating - sum(kinds.values())
    if setting.losses and memory.backward is not None:
        given, start = _cotangents(step.backward), memory.backward.lines[0]
        if (more := start.total + given - sum(kinds.values())) > 0:
            kinds["losses"] = more
    tensors = sum(kinds.values())
    reserved = memory_reserved(step, tensors, setting.hardware)
    update = optimizer.moved * words / cost.device.bandwidth + optimizer.on_host.moved * elsewhere / HOST_MEMORY
    if setting.hardware.name == "cpu" and optimizer.way == "for-loop":
        update += DISPATCH * optimizer.calls * sharded
    last = backward.end
    return Estimate(
        seconds=count * last + update,
        forward=count * forward.end,
        backward=count * (last - forward.end),
        optimizer=update,
        exposed=count * (forward.exposed + backward.exposed),
        gathering=count * sum(span.exposed for part in (forward, backward) for span in part.spans if span.gathers),
        peak=tensors + sum(reserved.values()),
        tensors=tensors,
        memory=kinds | reserved,
        host=int((8 + optimizer.state) * elsewhere),  # shards and gradients too
        away=sum(away_at(b).nbytes for b in step.forward.bound_symbols if is_trip(b)),
    )


def while_updating(last: LineMemory, words: int, largest: int, setting: Setting) -> int:
    """Bytes while the optimizer works, on all parameters at once or on one after another."""
    at_once = words if setting.optimizer.way == "foreach" else largest
    return last.inputs + int((setting.optimizer.state + 4) * words + setting.optimizer.temporary * at_once)


def _cotangents(backward: TraceCtx) -> int:
    """The bytes of the gradients that a backward is given; none if one is a loss, which is then all that is used."""
    unpacked = (b for b in backward.bound_symbols if is_unpack(b) and names(b.args) == {"cotangents"})
    found = [o for b in unpacked for o in b.flat_proxy_outs]
    return 0 if any(isinstance(o, TensorProxy) and o.numel == 1 for o in found) else nbytes(found)


def memory_reserved(step: Sequence[TraceCtx], tensors: int, hardware: Hardware) -> dict[str, int]:
    """The bytes that a device needs beside those of tensors, by kind."""
    groups = {bucket_of(b).plan.axis for t in step for b in t.bound_symbols if is_issue(b)}
    groups |= {part_at(b).plan.axis for t in step for b in issues(t, once=True) if is_sequence_issue(b)}
    found = {
        "context": hardware.context,
        "communicators": len(groups) * hardware.communicator,
        "allocator": hardware.allocator * tensors,
    }
    return {name: int(nbytes) for name, nbytes in found.items()}


def _trained_words(forward: TraceCtx) -> tuple[int, int, int, int]:
    """The 4-byte words of this rank's trained parameters, to whose dtype an optimizer's state keeps: those on the
    device, those in host memory, and those of the largest parameter on the device. Last, how many are gathered."""
    lines = [b for b in forward.bound_symbols if not (is_unpack(b) or is_return(b) or is_deletion(b))]
    read = names([b.flat_proxy_args for b in lines])  # of a parameter's several names only one is
    given = [a for a in forward.args if isinstance(a, TensorProxy) and a.name in read]
    trained = [a for a in given if a.requires_grad and ProxyTag.STATIC_MEMORY_LOCATION in a.tags]
    away = on_host(forward)
    there = nbytes(a for a in trained if a.name in away)
    largest = max((nbytes([a]) for a in trained if a.name not in away), default=0)
    gathered = names([b.flat_proxy_args for b in lines if is_issue(b)])
    return nbytes(trained) // 4 - there // 4, there // 4, largest // 4, sum(a.name in gathered for a in trained)


# ---- the task ----


@dataclass(frozen=True)
class Recorded:
    """The forward of a model as it was recorded, of which steps with other options are compiled. ``variables``: those
    of the context in which passes run."""

    rehearse: Callable[..., list[TraceCtx]]
    facts: Facts
    computation: TraceCtx
    variables: Context

    def compile(self, state: ShardedState, recomputed: Mapping[str, str]) -> list[TraceCtx]:
        """The forward and the backward before their collectives are placed, with the shards of ``state``."""
        by_name = {p.name: p for p in state.by_stand_in.values()}
        known = self.facts.parameters.by_history
        parameters = TracedParameters({i: (history, by_name[p.name]) for i, (history, p) in known.items()})
        parameters.steps[state.runtime] = state.runtime.step()
        tensors, context = contexts_of([state], Facts())
        if context is not None and self.facts.context is not None:
            context.kept = self.facts.context.kept
        facts = replace(self.facts, parameters=parameters, tensors=tensors, context=context)
        return self.variables.copy().run(self.rehearse, self.computation, facts, recomputed)

    @cached_property
    def flops(self) -> tuple[int, int]:
        """FLOPs of the products, with half of the scores of causal attention, and with all of them."""
        lines = dce(self.computation).bound_symbols
        return sum(map(useful_flops, lines)), sum(map(flops, lines))


class _IsRecorded(BaseException):
    """Ends the compilation of a model that is only to be recorded."""


class _Recording:
    """Stands for the limit of memory of a model: it is asked once the forward is recorded."""

    def __init__(self, compilation: Compilation, facts: Facts, states: Sequence[ShardedState]) -> None:
        assert compilation.rehearse is not None
        self._rehearse, self._facts = compilation.rehearse, facts

    def choose(self, computation: TraceCtx) -> Mapping[str, str]:
        raise _IsRecorded(Recorded(self._rehearse, self._facts, computation, copy_context()))

    def check(self, trace: TraceCtx) -> None: ...


def record(model: nn.Module, arguments: Arguments, jit_options: Mapping[str, Any]) -> Recorded:
    """Records the call of a sharded model, and compiles nothing."""
    [state] = states_in(model)
    state.contract = _Recording
    try:
        compile_only(thunder.jit(model, **jit_options), arguments)
    except _IsRecorded as ended:
        recorded: Recorded = ended.args[0]
        return recorded
    finally:
        state.contract = None
        Collections.become_usual()
    raise AssertionError("the passes did not run")


STRATEGIES = {  # of each family: what is kept gathered, and what is gathered again
    "zero": ("zero2", "zero3"),
    "hybrid": ("hybrid_zero2", "hybrid_zero3"),
    "secondary": ("zero3_secondary", "zero3_secondary"),  # what backward gathers again is in the node: nothing is kept
    "ddp": ("ddp", "ddp"),
}
DEGREES = {  # the options of fsdp by what is split over ranks
    "context": "context_parallel",
    "experts": "expert_parallel",
    "tensor": "tensor_parallel",
}
OVER_MACHINES = ("hybrid", "secondary")  # which save only communication between machines


class Task(NamedTuple):
    """What is to be planned: a model, a rank's inputs, the ranks, options of ``fsdp`` that are ``fixed``, the wires
    that are ``allowed``, and the numbers of ranks over which each sequence is split, the experts of these ranks' own
    batches, and parameters with which ranks compute. ``records`` has the forwards that were recorded, by what is split:
    it is filled."""

    model: nn.Module
    inputs: Any
    world_size: int
    mesh_shape: tuple[int, int] | None
    setting: Setting
    fixed: Mapping[str, Any]
    jit_options: Mapping[str, Any]
    records: dict[tuple[bool, int, bool], Recorded]
    allowed: Allowed = NO_WIRES
    context: int = 1
    experts: int = 1
    tensor: int = 1

    @property
    def sharing(self) -> int:
        """How many ranks share a batch."""
        return self.context * self.tensor

    @property
    def degrees(self) -> dict[str, int]:
        """The numbers of ranks over which anything is split, as :func:`shardtrace.plan` names them."""
        return {name: ranks for name in DEGREES if (ranks := getattr(self, name)) > 1}

    @property
    def together(self) -> int:
        """How many ranks compute together."""
        return self.sharing * self.experts

    def strategies(self) -> dict[str, Any]:
        """The families to try, with the strategy that each is compiled with."""
        pinned = self.fixed.get("sharding_strategy")
        if pinned is not None:
            for _, rule in parse_rules(pinned):
                self._check_mesh(rule)
            if isinstance(pinned, Mapping):
                return {"given": pinned}
            strategy = parse_sharding_strategy(pinned).value
            return {next((kind for kind, own in STRATEGIES.items() if strategy in own), "given"): strategy}
        found = {"zero": "zero3"}
        if self.together == 1 and min(self.mesh() or (1, 1)) > 1:  # otherwise it is ddp or zero
            found |= {kind: STRATEGIES[kind][1] for kind in OVER_MACHINES}
        return found if self.fixed.get("gather_dtype") is not None else found | {"ddp": "ddp"}  # which gathers nothing

    def _check_mesh(self, strategy: ShardingStrategy) -> None:
        if strategy.needs_mesh and self.together > 1:
            ranks = " and ".join(f"{name}={ranks}" for name, ranks in self.degrees.items())
            raise ValueError(
                f'sharding_strategy="{strategy.value}" cannot be combined with {ranks}, which shards '
                'parameters over all ranks: choose "zero3", "zero2" or "ddp"'
            )
        if strategy.needs_mesh and self.mesh() is None:
            raise ValueError(
                f'sharding_strategy="{strategy.value}" needs mesh_shape=(replicas, shards): {self.world_size} ranks do '
                f"not fill several machines of {self.setting.cost.node_ranks}"
            )

    def mesh(self) -> tuple[int, int] | None:
        """(replicas, shards) of a strategy over machines: as given, or one replica for each machine."""
        inside = self.setting.cost.node_ranks
        if self.mesh_shape is not None:
            return self.mesh_shape
        several = 1 < inside < self.world_size and self.world_size % inside == 0
        return (self.world_size // inside, inside) if several else None

    def mesh_of(self, strategy: Any) -> tuple[int, ...] | None:
        """The mesh of a strategy: (replicas, shards), or (data, context or expert, tensor) without the last ones that
        are 1; None if it needs none."""
        if self.together > 1:
            return self.world_size // self.together, *self.degrees.values()
        return self.mesh() if any(rule.needs_mesh for _, rule in parse_rules(strategy)) else None

    @property
    def positions(self) -> int:
        """The length of the inputs' sequences."""
        context = parse_context(self.fixed.get("context_parallel", "context"))
        dim, leaves = context.sequence_dim if context is not None else 1, tree_leaves(self.inputs)
        return next((t.shape[dim] for t in leaves if isinstance(t, torch.Tensor) and t.dim() > dim), 0)

    @property
    def trained(self) -> int:
        """The bytes of whole parameters that are trained."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    @property
    def at_rest(self) -> float:
        """The bytes of whole parameters, their gradients and their optimizer's state."""
        whole = sum(p.nbytes for p in self.model.parameters())
        return whole + self.trained * (1 + self.setting.optimizer.state / 4)

    def options(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Options of ``fsdp``: those ``chosen``, the fixed ones, and the buckets that all plans have."""
        options = [DEGREES[name] for name in self.degrees]
        split = {option: self.fixed.get(option, option.removesuffix("_parallel")) for option in options}
        return {"bucketing_strategy": "block", **self.fixed, **split, **chosen}

    def compile(self, **chosen: Any) -> Compiled:
        """A step with options of ``fsdp`` in place of or beside the fixed ones, of the forward that is recorded once.
        Call it as a fake rank."""
        if "bucketing_strategy" in chosen:  # other blocks are functions
            return compiled(self.compile_function(chosen))
        marks = chosen.pop("activation_checkpointing", None)
        with self._sharded(chosen) as (model, arguments):
            key = self._recorded
            if (recorded := self.records.get(key)) is None:
                recorded = self.records[key] = record(model, arguments, self.jit_options)
            [state] = states_in(model)
            blocks = checkpointed_blocks(model, marks)
            traces = recorded.compile(state, {name: what for name, (_, what) in blocks.items()})
        if len(traces) == 1:
            raise ValueError("there is nothing to train: no parameter requires a gradient")
        return compiled_step(*traces)

    @property
    def useful_flops(self) -> tuple[float, float]:
        """A rank's share of the FLOPs of a forward and a backward that recompute nothing: a backward has twice the
        products of its forward. With half of the scores of causal attention, and with all of them."""
        half, all_scores = self.records.get(self._recorded, next(iter(self.records.values()))).flops
        return 3 * half / self.together, 3 * all_scores / self.together

    @property
    def _recorded(self) -> tuple[bool, int, bool]:
        """Which of the ``records`` it is: of ranks that share experts, the batches of all are recorded."""
        return self.context > 1, self.experts, self.tensor > 1

    def compile_function(self, chosen: Mapping[str, Any]) -> Any:
        """The jitted model, recorded and compiled to the end."""
        with self._sharded(chosen) as (model, arguments):
            ours = thunder.jit(model, **self.jit_options)
            compile_only(ours, arguments)
        return ours

    def _sharded(self, chosen: Mapping[str, Any]) -> AbstractContextManager[tuple[nn.Module, Arguments]]:
        """A sharded copy of the model, and its arguments."""
        options = self.options(chosen) | {"cost_model": self.setting.cost}
        if (context := parse_context(options.get("context_parallel"))) is not None:
            options["context_parallel"] = replace(context, arguments="whole")  # as the inputs are
        options["device"] = "cpu" if self.setting.hardware.name == "cpu" else "cuda"
        if shape := self.mesh_of(options["sharding_strategy"]):
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=mesh_dim_names(options))
        return sharded_copy(self.model, parse_arguments(self.inputs), grouped(options))
