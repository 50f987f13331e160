"""``plan``: chooses the options of ``fsdp`` for a model on a cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from passes.analysis.flops import work
from passes.analysis.recognise import is_unpack
from passes.plan import CostModel
from passes.plan.bucketing import MB
from passes.plan.hardware import HOST_MEMORY, cluster, hardware, links_of
from shardtrace.costs import find_cost_model
from shardtrace.inspector.fake import compile_sharded, count_ranks, fake_ranks, parse_arguments
from shardtrace.inspector.units import duration, size
from shardtrace.model.state import states_in
from shardtrace.options.blocks import RECOMPUTED, repeated_blocks
from shardtrace.options.counts import parse_count
from shardtrace.options.front import Row, Rows
from shardtrace.options.planned import NoPlanFitsError, TrainingPlan, choices_of, fingerprint, options_of
from shardtrace.options.policies import flat, grouped
from shardtrace.options.strategy import ShardingStrategy, parse_rules, parse_sharding_strategy
from shardtrace.options.wires import NO_WIRES, Allowed, parse_allowed
from shardtrace.planner.compose import Call, Compiled, Pair, Step, compiled
from shardtrace.planner.estimate import Estimate, Setting, estimate
from shardtrace.planner.optimizer import optimizer_cost
from shardtrace.planner.search import (
    EXACT,
    NOT_WORTH_IT,
    NOTHING,
    PREFETCHES,
    Candidate,
    Family,
    Point,
    fastest,
    front,
)

import thunder
import torch
from thunder.core.proxies import Proxy, TensorProxy
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._pytree import tree_leaves, tree_map

STRATEGIES = {  # of each family: what is kept gathered, and what is gathered again
    "zero": ("zero2", "zero3"),
    "hybrid": ("hybrid_zero2", "hybrid_zero3"),
    "secondary": ("zero3_secondary", "zero3_secondary"),  # what backward gathers again is in the node: nothing is kept
    "ddp": ("ddp", "ddp"),
}
OVER_MACHINES = ("hybrid", "secondary")  # which save only communication between machines
WAITS = 0.05  # of a step's seconds: if compute waits longer for what other buckets would save, they are tried
FEW = 8  # blocks that may have several buckets each
UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    world_size: int | None = None,
    mesh_shape: tuple[int, int] | None = None,
    memory: str | float | None = None,
    device: str = "h100-sxm",
    link: str | None = None,
    node_link: str | None = None,
    node_ranks: int | None = None,
    cost_model: CostModel | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | str = "AdamW",
    accumulation: int = 1,
    fixed: Mapping[str, Any] | None = None,
    allowed: Mapping[str, str | Sequence[str]] | None = None,
    jit_options: Mapping[str, Any] | None = None,
) -> TrainingPlan:
    """Chooses the options of :func:`shardtrace.fsdp` for a model on a cluster, under a budget of memory.

    Compiles the model for fake ranks, composes the traces of many combinations, and predicts each with the schedule,
    the cost model and the prediction of memory that :func:`shardtrace.inspect` uses. Nothing runs, and neither a GPU
    nor other ranks are needed. The same arguments give the same plan on every machine.

    It decides the strategy, which blocks' parameters stay gathered between forward and backward, what each block
    recomputes in backward (nothing, the cheap activations, all), the prefetch, and whether shards and the optimizer
    live in the memory of the host, if steps on the device need too much or are slower. Precision stays as ``fixed`` has
    it. What is sent is rounded only as ``allowed`` says, and only if that is faster, or all that fits.

    Args:
        model: a module, which may be on the meta device. It is not changed.
        example_inputs: a rank's inputs for one step: a tuple of arguments, a mapping of keyword arguments, or a single
            argument. Their values do not matter.
        world_size: number of ranks.
        mesh_shape: (replicas, shards), which allows hybrid strategies and "zero3_secondary". Default: machines of
            ``node_ranks`` ranks.
        memory: bytes of a rank, as a number or as in "80GB" or "72GiB". Default: the memory of the device.
        device: "h100-sxm", "a100-80", "cpu", ...; another name raises an error that lists all. ``link`` connects
            machines, ``node_link`` the ``node_ranks`` ranks of one, by names such as "400gbit" and "nvlink4"; an
            unknown name raises an error that lists all. Default: what is usual for the device.
        cost_model: rates that were measured, in place of those that the names stand for. For ``device="cpu"`` the
            default is this machine's calibration, if there is one; a link that is named replaces the measured one.
        optimizer: a class of optimizers or the name of one of ``torch.optim``, whose state and work are counted.
        accumulation: forwards and backwards for each step of the optimizer. Each reduces its gradients, as with
            ``no_sync(reduce_each=True)``.
        fixed: options of ``fsdp`` that are kept as they are, policies or fields of them by name: ``{"mp_policy":
            "bf16", "prefetch": 2}``.
        allowed: values of "gather_dtype" and "reduce_wire" that it may choose, such as ``{"gather_dtype": ["int8",
            "fp8"], "reduce_wire": "int8"}``. They round what is sent, and so change results. Exact steps are tried as
            well. ``error_feedback`` belongs to ``fixed``, and counts where gradients are rounded.
        jit_options: options of ``thunder.jit``.

    Raises:
        NoPlanFitsError: if nothing fits. It names the least memory that would do, and has the plan for it.
        ValueError: for a device, link, memory or mesh that does not exist, options that contradict each other or may
            not be ``allowed``, or a model without trainable parameters.
        TypeError: for a model that is sharded or jitted already, or an unknown option.
        RuntimeError: if this process is in a process group already.
    """
    if not isinstance(model, nn.Module) or states_in(model) or thunder.compile_data(model) is not None:
        raise TypeError(f"plan takes a module that is not sharded or jitted, not {type(model).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"there is nothing to train: no parameter of {type(model).__name__} requires a gradient")
    if mesh_shape is not None:
        world_size = count_ranks(mesh_shape, world_size)
    if world_size is None:
        raise TypeError("plan needs world_size, or mesh_shape")
    parse_count("accumulation", accumulation, "a number of backwards, 1 or more", least=1)
    if node_ranks is not None:
        parse_count("node_ranks", node_ranks, "the number of ranks of a machine, 1 or more", least=1)
    if fixed is not None and not isinstance(fixed, Mapping):
        raise TypeError(f'fixed must be options of fsdp, as in {{"mp_policy": "bf16"}}, not {fixed!r}')
    fixed = flat(fixed or {})
    wires = parse_allowed(allowed, fixed) if allowed else NO_WIRES
    if wires.reductions:
        fixed.pop("error_feedback", None)  # exact steps have none
    cost_model = fixed.pop("cost_model", cost_model)
    found = hardware(device)
    links = str(links_of(found, inside=node_link, between=link, node_ranks=node_ranks))
    cost, rates = cluster(found, inside=node_link, between=link, node_ranks=node_ranks), "modelled"
    if cost_model is not None:
        cost, rates, links = cost_model, "given", "given rates"
    elif found.name == "cpu" and (measured := find_cost_model(torch.device("cpu"), "gloo", world_size)):
        if (link, node_link, node_ranks) == (None, None, None):
            cost, rates, links = measured, "calibrated", "a measured link"
        else:
            cost, rates = replace(cost, device=measured.device), "partly calibrated"
    budget = found.memory if memory is None else _bytes(memory)
    setting = Setting(cost, found, optimizer_cost(optimizer), accumulation)
    task = _Task(model, example_inputs, world_size, mesh_shape, setting, fixed, dict(jit_options or {}), wires)
    with fake_ranks(world_size):
        search = _Search(task, budget, rates, links)
        best = search.best()
        least = search.plan(search.front[0]) if best is None else best
    if best is None:
        lower = "" if "mp_policy" in fixed else ', or a lower precision (fixed={"mp_policy": "bf16"})'
        raise NoPlanFitsError(
            f"no step of {type(model).__name__} on {world_size} ranks fits into {size(budget)}: the least is "
            f"{size(least.peak)}, with {_spelled(least.choices)}. Use more ranks, smaller inputs{lower}",
            least,
        )
    return best


def _bytes(memory: str | float) -> float:
    found = memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([a-zA-Z]*)\s*", memory)
        unit = UNITS.get(match[2].lower()) if match else None
        found = float(match[1]) * unit if match and unit else 0.0
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
        raise ValueError(f"memory={memory!r}: write it as 80GB or 72GiB, or as a number of bytes")
    return float(found)


# ---- compiling ----


class _Task(NamedTuple):
    """What is to be planned."""

    model: nn.Module
    inputs: Any
    world_size: int
    mesh_shape: tuple[int, int] | None
    setting: Setting
    fixed: dict[str, Any]
    jit_options: dict[str, Any]
    allowed: Allowed = NO_WIRES

    def may_be_better(self, name: str, points: Sequence[Point], budget: float) -> bool:
        """False for a family that cannot fit, or that only saves communication which the points so far hide. ZeRO,
        which takes the least memory, comes first."""
        if name == "ddp" and points:
            return self._at_rest() <= budget
        waiting = (p.estimate.exposed >= NOT_WORTH_IT * p.estimate.seconds for p in front(points))
        return name not in OVER_MACHINES or not points or any(waiting)

    def on_host(self, families: Sequence[Family], points: Sequence[Point], budget: float) -> list[Family]:
        """The families that shard, with shards and the optimizer in the memory of the host. None if they cannot be
        faster than the fastest step that fits: at best they are as fast as a step that has the memory which they free,
        with the optimizer of a host. So more memory never makes a plan slower."""
        if "offload_policy" in self.fixed or self.setting.hardware.name == "cpu":
            return []
        optimizer, best = self.setting.optimizer, fastest(points, budget)
        words = self._trained() / self.world_size / 4
        freed = (1 + self.setting.hardware.allocator) * (8 + optimizer.state) * words
        steps = front(points)
        bound = next((p for p in steps if p.estimate.peak > budget + freed), steps[-1]).estimate
        least = bound.seconds - bound.optimizer + optimizer.moved * words / HOST_MEMORY
        if best is not None and best.estimate.seconds <= least:
            return []
        found, there = self.strategies(), {"offload_policy": CPUOffloadPolicy()}
        shard = [family for family in families if family.kind in ("zero", "hybrid")]
        return [self.family(f.kind, found[f.kind], f, options=there, note=" on the host") for f in shard]

    def other_buckets(self, family: Family, points: Sequence[Point]) -> list[Family]:
        """The same strategies with other buckets, if their size is not given and communication is what some steps wait
        for. A bucket for each layer arrives earlier; one for two blocks has fewer latencies. Nothing is recomputed.

        Only for few blocks, which are then compiled one by one. With many, smaller buckets save little."""
        few = len(repeated_blocks(self.model)) <= FEW
        if "bucketing_strategy" in self.fixed or family.kind not in STRATEGIES or not few:
            return []
        found: list[Family] = []
        messages = family.messages
        steps = [point.estimate for point in front(points)]
        first_and_last = 2 * messages.longest  # the others travel behind compute, or not at all
        if any(min(step.exposed, first_and_last) > WAITS * step.seconds for step in steps):
            found.append(self._with_buckets(family, " by layer", "layer"))
        if messages.bytes and any(min(step.exposed, messages.latencies / 2) > WAITS * step.seconds for step in steps):
            megabytes = math.ceil(200 * messages.bytes / MB) / 100
            found.append(self._with_buckets(family, " by two blocks", megabytes))
        return found

    def _with_buckets(self, family: Family, note: str, bucketing: str | float) -> Family:
        options = {"bucketing_strategy": bucketing}
        base = self.compile(sharding_strategy=STRATEGIES[family.kind][1], **options)
        return Family(
            family.kind,
            base,
            {NOTHING: base.calls},
            self.setting,
            keeps=family.keeps,
            prefetches=family.prefetches,
            options=options,
            note=note,
            allowed=self.allowed,
        )

    def _at_rest(self) -> float:
        """The bytes of whole parameters, their gradients and their optimizer's state."""
        whole = sum(p.nbytes for p in self.model.parameters())
        return whole + self._trained() * (1 + self.setting.optimizer.state / 4)

    def _trained(self) -> int:
        """The bytes of whole parameters that are trained."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def strategies(self) -> dict[str, Any]:
        """The families to try, with the strategy that each is compiled with."""
        pinned = self.fixed.get("sharding_strategy")
        if pinned is not None:
            if isinstance(pinned, Mapping):
                for _, strategy in parse_rules(pinned):
                    self._check_mesh(strategy)
                return {"given": pinned}
            strategy = parse_sharding_strategy(pinned)
            self._check_mesh(strategy)
            return {_family_of(strategy) or "given": strategy.value}
        found = {"zero": "zero3"}
        if min(self.mesh() or (1, 1)) > 1:  # otherwise it is ddp or zero
            found |= {kind: STRATEGIES[kind][1] for kind in OVER_MACHINES}
        return found if self.fixed.get("gather_dtype") is not None else found | {"ddp": "ddp"}  # which gathers nothing

    def _check_mesh(self, strategy: ShardingStrategy) -> None:
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

    def family(
        self,
        kind: str,
        strategy: Any,
        first: Family | None,
        *,
        options: Mapping[str, Any] | None = None,
        note: str = "",
    ) -> Family:
        """A family of a ``kind``. Its blocks call the functions that were compiled for ``first``, if there is one.
        ``options`` and ``note`` are its own."""
        options = options or {}
        keeps: bool | None = False if kind == "secondary" else None
        if "sharding_strategy" in self.fixed:
            keeps = keeps is None and kind in STRATEGIES and strategy == STRATEGIES[kind][0]
            strategy = STRATEGIES[kind][1] if kind in STRATEGIES else strategy
        base: Compiled | None = None
        variants: Mapping[str, Mapping[Call, Pair]] = {}
        if first is not None:
            base = self.compile(sharding_strategy=strategy, **options)
            if base.calls.keys() <= first.variants[NOTHING].keys():
                variants = {v: {c: pairs[c] for c in base.calls} for v, pairs in first.variants.items()}
        if base is None or not variants:
            base, variants = self._variants(strategy, options)
        pinned = self.fixed.get("prefetch")
        prefetches = PREFETCHES if pinned is None else (pinned,)
        return Family(
            kind,
            base,
            variants,
            self.setting,
            keeps=keeps,
            prefetches=prefetches,
            options=options,
            note=note,
            allowed=self.allowed,
        )

    def _variants(
        self, strategy: Any, options: Mapping[str, Any]
    ) -> tuple[Compiled, Mapping[str, Mapping[Call, Pair]]]:
        """A compiled step, and the functions of its blocks by what they recompute."""
        blocks = repeated_blocks(self.model)
        if "activation_checkpointing" in self.fixed or not blocks:
            base = self.compile(sharding_strategy=strategy, **options)
            return base, {NOTHING: base.calls}
        whats = (NOTHING, *reversed(RECOMPUTED))
        if len(blocks) >= 2 * len(whats):  # each kind needs two to be called
            chosen = {name: whats[i % len(whats)] for i, name in enumerate(blocks)}
            mixed = {name: what for name, what in chosen.items() if what != NOTHING}
            base = self.compile(sharding_strategy=strategy, activation_checkpointing=mixed, **options)
            if (by_variant := _by_variant(base, chosen, whats)) is not None:
                return base, by_variant
        base = self.compile(sharding_strategy=strategy, **options)
        separate: dict[str, Mapping[Call, Pair]] = {NOTHING: base.calls}
        for what in whats[1:] if base.calls else ():
            calls = self.compile(sharding_strategy=strategy, activation_checkpointing=what, **options).calls
            separate[what] = {call: calls.get(call, pair) for call, pair in base.calls.items()}
        return base, separate

    def options(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Options of ``fsdp``: those ``chosen``, the fixed ones, and the buckets that all plans have."""
        return {"bucketing_strategy": "block", **self.fixed, **chosen}

    def compile(self, **chosen: Any) -> Compiled:
        return compiled(self.compile_function(chosen))

    def compile_function(self, chosen: Mapping[str, Any]) -> Any:
        """The jitted model, compiled with options of ``fsdp`` in place of or beside the fixed ones."""
        options = self.options(chosen) | {"cost_model": self.setting.cost}
        options["device"] = "cpu" if self.setting.hardware.name == "cpu" else "cuda"
        if _needs_mesh(options["sharding_strategy"]):
            shape = self.mesh() or ()
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        arguments = parse_arguments(self.inputs)
        return compile_sharded(self.model, arguments, fsdp_options=grouped(options), jit_options=self.jit_options)


def _by_variant(
    base: Compiled, chosen: Mapping[str, str], whats: Sequence[str]
) -> Mapping[str, Mapping[Call, Pair]] | None:
    """The functions of each call by what they recompute, from a step in which blocks recompute different things. None
    if blocks of one signature are of several kinds, or not all of them are called."""
    if {name for name, _ in base.calls} != chosen.keys():
        return None
    kinds: dict[Any, dict[str, set[Pair]]] = {}
    signature = {call: _signature(pair) for call, pair in base.calls.items()}
    for call, pair in base.calls.items():
        kinds.setdefault(signature[call], {}).setdefault(chosen[call[0]], set()).add(pair)
    if any(len(found.get(what, ())) != 1 for found in kinds.values() for what in whats):
        return None
    return {what: {call: next(iter(kinds[signature[call]][what])) for call in base.calls} for what in whats}


def _signature(pair: Pair) -> Any:
    """The shapes and dtypes that a block takes and returns, and the lines that were traced, without names of values."""
    trace, traced = pair.forward.id.trace, pair.forward.id.traced
    tensors = [*trace.args, *trace.bound_symbols[-1].args[0]]
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors if isinstance(t, TensorProxy))
    lines = (b for b in traced.bound_symbols if not is_unpack(b))
    return shapes, tuple((b.sym.name, *(repr(a) for a in b.flat_args if not isinstance(a, Proxy))) for b in lines)


def _needs_mesh(strategy: Any) -> bool:
    return any(rule.needs_mesh for _, rule in parse_rules(strategy))


def _family_of(strategy: ShardingStrategy) -> str | None:
    return next((name for name, found in STRATEGIES.items() if strategy.value in found), None)


# ---- the result ----


class _Search:
    """The points of all families, and the plan that one of them makes. Call it as a fake rank."""

    def __init__(self, task: _Task, budget: float, rates: str, links: str) -> None:
        self.task, self.budget, self.rates, self.links = task, budget, rates, links
        self.families: dict[str, Family] = {}
        self.points: list[Point] = []
        families: list[Family] = []
        for name, strategy in task.strategies().items():
            if task.may_be_better(name, self.points, budget):
                family = task.family(name, strategy, families[0] if families else None)
                families.append(family)
                points = self._add(family)
                for other in task.other_buckets(family, points):
                    self._add(other)
        self.exact = list(self.points)
        for family in list(self.families.values()):
            self._round(family)
        for family in task.on_host(families, self.points, budget):
            self.exact += self._add(family)
            self._round(family)
        self.front = front(self.points)

    def _add(self, family: Family) -> list[Point]:
        points = family.points()
        self.families[family.name] = family
        self.points += points
        return points

    def _round(self, family: Family) -> None:
        self.points += [p for p in family.rounded_points() if p.candidate.rounding != EXACT]

    def best(self) -> TrainingPlan | None:
        """The plan for the fastest point that fits; None if none does."""
        point = fastest(self.points, self.budget)
        return self.plan(point) if point is not None else None

    def plan(self, point: Point) -> TrainingPlan:
        task, options = self.task, self.options(point.candidate)
        found, setting = point.estimate, task.setting
        once = useful_flops(self.families[point.candidate.family])
        seconds, peak = found.seconds, setting.hardware.peak
        choices = task.options(options)
        shape = task.mesh() if _needs_mesh(choices["sharding_strategy"]) else None
        return TrainingPlan(
            model=type(task.model).__name__,
            fingerprint=fingerprint(task.model),
            world_size=task.world_size,
            mesh_shape=shape,
            budget=self.budget,
            device=setting.hardware.name,
            links=self.links,
            rates=self.rates,
            choices=choices_of(choices),
            seconds=seconds,
            forward=found.forward,
            backward=found.backward,
            optimizer=found.optimizer,
            exposed=found.exposed,
            tokens=setting.accumulation * _tokens(task.inputs),
            memory={kind: nbytes for kind, nbytes in found.memory.items() if nbytes},
            mfu=setting.accumulation * once / (seconds * peak) if seconds else 0.0,
            binding=self._binding(found),
            pareto=Rows(self._row(p) for p in self.front),
            cost=setting.cost,
            notes=tuple(self._notes(point)),
            allowed=task.allowed.values,
            again=self._largest_batch,
        )

    def _notes(self, point: Point) -> Iterator[str]:
        if point.estimate.host:
            yield f"The memory of the host holds {size(point.estimate.host)} of each rank."
        if point.candidate.rounding == EXACT:
            return
        exact = fastest(self.exact, self.budget)
        if exact is None:
            yield "No step that rounds nothing fits."
        else:
            row = self._row(exact)
            yield f"The fastest step that rounds nothing takes {duration(row.seconds)}: {row.words}."

    def options(self, candidate: Candidate) -> dict[str, Any]:
        """The options of ``fsdp`` that the planner decides."""
        fixed, family = self.task.fixed, self.families[candidate.family]
        found = dict(family.options)
        if "sharding_strategy" not in fixed:
            found["sharding_strategy"] = _strategy(family, candidate)
        if "activation_checkpointing" not in fixed:
            found["activation_checkpointing"] = _checkpointing(family, candidate)
        if fixed.get("prefetch") is None and family.buckets:
            found["prefetch"] = candidate.prefetch
        rounding = candidate.rounding
        chosen = {"gather_dtype": rounding.gather, "reduce_wire": rounding.reduction}
        found |= {name: value for name, value in chosen.items() if value}
        return found | ({"error_feedback": True} if rounding.reduction and self.task.allowed.error_feedback else {})

    def _row(self, point: Point) -> Row:
        c, e = point.candidate, point.estimate
        counts = {what: sum(w == what for _, w in c.recomputed) for what in reversed(RECOMPUTED)}
        return Row(
            memory=e.peak,
            seconds=e.seconds,
            exposed=e.exposed,
            strategy=_name(self.families[c.family], c),
            kept=len(c.kept),
            recomputing=", ".join(f"{what} {n}" for what, n in counts.items() if n) or "nothing",
            prefetch=c.prefetch,
            options=choices_of(self.task.options(self.options(c))),
        )

    def _binding(self, found: Estimate) -> str:
        faster = [p for p in self.front if p.estimate.seconds < 0.999 * found.seconds]
        if faster:
            better = faster[0].estimate
            extra, gain = max(better.peak - found.peak, 1), found.seconds - better.seconds
            each = duration(gain * 2**30 / extra)
            return f"memory: {size(extra)} more would save {duration(gain)} a step, {each} for each GiB"
        if found.exposed > 0.05 * found.seconds:
            return f"communication: compute waits for it {found.exposed / found.seconds:.0%} of the step"
        return "compute"

    def _largest_batch(self, plan: TrainingPlan) -> int:
        """The largest size of dim 0 of the inputs that fits. Memory is close to linear in it."""
        task = self.task
        start = _batch(task.inputs)
        sizes: dict[int, float] = {start: float(plan.peak)}

        def peak(batch: int) -> float:
            if batch not in sizes:
                again = task._replace(inputs=_resized(task.inputs, start, batch))
                with fake_ranks(task.world_size):
                    sizes[batch] = compiled_estimate(
                        again.compile_function(options_of(plan.choices)), task.setting
                    ).peak
            return sizes[batch]

        if plan.peak > self.budget:
            return 0
        low, high = start, 2 * start
        while peak(high) <= self.budget:
            low, high = high, _crossing(low, peak(low), high, peak(high), self.budget, least=high + 1) + 1
        while high - low > 1:  # low fits, high does not
            middle = _crossing(low, peak(low), high, peak(high), self.budget, least=low + 1)
            middle = min(middle, high - 1)
            low, high = (middle, high) if peak(middle) <= self.budget else (low, middle)
        return low


def _crossing(low: int, at_low: float, high: int, at_high: float, budget: float, *, least: int) -> int:
    """The batch at which a line through two sizes of memory reaches the budget."""
    slope = (at_high - at_low) / (high - low)
    return max(least, int(low + (budget - at_low) / slope)) if slope > 0 else 2 * high


def compiled_estimate(function: Any, setting: Setting) -> Estimate:
    """What the last step of a jitted function costs."""
    forward, backward = thunder.last_traces(function), thunder.last_backward_traces(function)
    return estimate(Step(forward[-1], backward[-1]), setting)


def useful_flops(family: Family) -> float:
    """FLOPs of a forward and a backward that recomputes nothing: a backward has twice the products of its forward."""
    return 3.0 * sum(work(b).flops for b in family.base.step.forward.bound_symbols)


def _strategy(family: Family, candidate: Candidate) -> Any:
    keeping, again = STRATEGIES[family.kind]
    if not candidate.kept:
        return again
    if candidate.kept == family.buckets.keys():
        return keeping
    rules: dict[str, str] = {}
    for label in family.buckets:
        if label in candidate.kept:
            members = [m.parameter for m in family.buckets[label].members]
            whole_block = all(p.block == label for p in members)
            rules |= {f"{label}.*": keeping} if whole_block else {p.name: keeping for p in members}
    return rules | {"*": again}


def _checkpointing(family: Family, candidate: Candidate) -> Any:
    if not candidate.recomputed:
        return None
    whats = {what for _, what in candidate.recomputed}
    blocks = {name for c in family.classes for name, _ in c.calls}
    if len(whats) == 1 and {name for name, _ in candidate.recomputed} == blocks:
        return next(iter(whats))
    return dict(candidate.recomputed)


def _name(family: Family, candidate: Candidate) -> str:
    if family.kind not in STRATEGIES:
        return ", ".join(filter(None, ["given", str(candidate.rounding)]))
    keeping, again = STRATEGIES[family.kind]
    mixed = f"{again} and {keeping}"
    name = again if not candidate.kept else keeping if candidate.kept == family.buckets.keys() else mixed
    return ", ".join(filter(None, [name + family.note, str(candidate.rounding)]))


def _spelled(choices: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in choices.items() if value is not None)


# ---- inputs ----


def _leaves(inputs: Any) -> list[torch.Tensor]:
    args, kwargs = parse_arguments(inputs)
    return [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]


def _tokens(inputs: Any) -> int:
    """The elements of the first input of integers, as tokens are."""
    return next((t.numel() for t in _leaves(inputs) if not t.is_floating_point() and t.dim() > 1), 0)


def _batch(inputs: Any) -> int:
    """The size of dim 0 of the inputs. Raises ValueError if there is none."""
    found = next((t.shape[0] for t in _leaves(inputs) if t.dim()), None)
    if found is None:
        raise ValueError("largest_batch needs an input with a batch in dim 0")
    return found


def _resized(inputs: Any, old: int, new: int) -> Any:
    """The inputs with ``new`` in place of ``old`` as the size of dim 0. Values do not matter."""

    def resize(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.dim() or t.shape[0] != old:
            return t
        return torch.zeros(new, *t.shape[1:], dtype=t.dtype, device=t.device)

    return tree_map(resize, inputs)
