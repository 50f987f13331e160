"""``plan``: reads its arguments, searches, and writes the result."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from passes.plan import CostModel
from passes.plan.cost import hardware
from passes.split import NoExpertsError
from shardtrace.inspector.step_data import duration, size
from shardtrace.model.state import states_in
from shardtrace.options.policies import NO_WIRES, flat, needs, parse_allowed, parse_bytes, parse_count
from shardtrace.options.strategy import WAYS
from shardtrace.planner.calibrate import Rates, rates_of
from shardtrace.planner.compose import ComposedStep
from shardtrace.planner.estimate import DEGREES, Estimate, Setting, Task, estimate, optimizer_cost
from shardtrace.planner.search import EXACT, NOT_WORTH_IT, Point, Search, fastest
from shardtrace.planner.training_plan import (
    NoPlanFitsError,
    Row,
    Rows,
    TrainingPlan,
    choices_of,
    fingerprint,
    options_of,
)
from shardtrace.ranks.progress import progress
from shardtrace.testing import count_ranks, fake_ranks, parse_arguments

import thunder
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

# ---- how many ranks share a batch ----


Ranks = int | Literal["auto"] | None


class Degree(NamedTuple):
    """The steps of one degree, and the fastest that fits. ``names``: of the degrees that are asked for."""

    names: tuple[str, ...]
    search: Search
    best: Point | None

    @property
    def ranks(self) -> int:
        """How many ranks share a batch."""
        return self.search.task.sharing

    @property
    def cost(self) -> float:
        """The seconds in which a rank does the work of a whole batch."""
        return self.ranks * self.best.estimate.seconds if self.best is not None else float("inf")

    def leaves_nothing(self, name: str) -> bool:
        """Whether nothing is left that more ranks could save: activations that are recomputed, the memory of the host,
        and for parameters the time in which compute waits."""
        if self.best is None or self.best.candidate.recomputed or self.best.estimate.host:
            return False
        return name == "context" or self.best.estimate.exposed < NOT_WORTH_IT * self.best.estimate.seconds

    def __str__(self) -> str:
        task = self.search.task
        said = " and ".join(f"{name} {getattr(task, name)}" for name in self.names)
        if self.best is None:
            return f"{said} does not fit: the least is {size(self.search.front[0].estimate.peak)}."
        found, whole = self.best.estimate, "sequence" if self.names == ("context",) else "batch"
        return f"{said} takes {self.cost:.4g} s a rank for each {whole}, and {size(found.peak)}."


def explore_degrees(task: Task, given: Mapping[str, Ranks], budget: float) -> list[Degree]:
    """Searches the steps of the given degrees, or of 1, 2, 4, ... as long as one may be faster: the last left something
    that more ranks could save, and took less time than the one before it. The fastest comes first, or if none fits the
    one that needs the least. Call it as a fake rank."""
    asked = {name: ranks for name, ranks in given.items() if ranks is not None}
    for name, option in DEGREES.items():
        if name not in asked and task.fixed.get(option) is not None:
            raise ValueError(f'{option} is fixed: say over how many ranks, with {name}=8 or {name}="auto"')
    if {"context", "experts"} <= asked.keys():
        raise ValueError("context and experts both say which ranks have all tokens: choose one")
    if asked and task.mesh_shape is not None:
        raise ValueError(
            f"mesh_shape is for hybrid strategies, and {' and '.join(asked)} makes the mesh: pass one of them"
        )
    return sorted(_explored(task, asked, (*asked,), budget), key=lambda d: (d.cost, d.search.front[0].estimate.peak))


def _explored(task: Task, left: Mapping[str, Ranks], names: tuple[str, ...], budget: float) -> list[Degree]:
    """The steps of all degrees that are ``left`` to choose: of parameters for each one of sequences."""
    if not left:
        search = Search(task, budget)
        return [Degree(names, search, fastest(search.points, budget))]
    found, before = list[Degree](), float("inf")
    (name, asked), *others = left.items()
    for ranks in degrees(task, name, asked):
        degree: dict[str, Any] = {name: ranks}
        try:
            some = _explored(task._replace(**degree), dict(others), names, budget)
        except NoExpertsError:
            if asked != "auto":
                raise
            break
        found += some
        best = min(some, key=lambda d: d.cost)
        if best.leaves_nothing(name) or (best.best is not None and best.cost > (1 - NOT_WORTH_IT) * before):
            break
        before = min(before, best.cost)
    return found


def degrees(task: Task, name: str, asked: Ranks) -> Iterator[int]:
    """The degrees of "context", "experts" or "tensor" to try. Parameters are split inside a machine.

    Raises:
        ValueError: if there is no such degree for these ranks and inputs.
    """
    world, positions = task.world_size // task.together, task.positions
    if asked != "auto":
        ranks = parse_count(name, asked, 'a number of ranks, 1 or more, or "auto"', least=1)
        if world % ranks:
            raise ValueError(f"{name}={ranks} does not divide the {world} ranks")
        if name == "context" and ranks > 1 and 2 * ranks > positions:
            raise ValueError(f"context={ranks} needs sequences of {2 * ranks} positions: the inputs have {positions}")
        yield ranks
        return
    ranks, most = 1, positions // 2 if name == "context" else min(world, task.setting.cost.node_ranks)
    while ranks == 1 or (world % ranks == 0 and ranks <= most):
        yield ranks
        ranks *= 2


# ---- plan ----


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
    context: Ranks = None,
    experts: Ranks = None,
    tensor: Ranks = None,
    fixed: Mapping[str, Any] | None = None,
    allowed: Mapping[str, str | Sequence[str]] | None = None,
    jit_options: Mapping[str, Any] | None = None,
) -> TrainingPlan:
    """Chooses the options of :func:`shardtrace.fsdp` for a model on a cluster, under a budget of memory.

    Records the model for fake ranks, compiles the record in several ways, composes the traces of many combinations, and
    predicts each with the schedule, the cost model and the prediction of memory that :func:`shardtrace.inspect` uses.
    Nothing runs, and neither a GPU nor other ranks are needed. The same arguments give the same plan on every machine.

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
        memory: of a rank, as in "80GB" or "72GiB", or as a number of bytes. Default: the memory of the device.
        device: "h100-sxm", "a100-80", "cpu", ...; another name raises an error that lists all. ``link`` connects
            machines, ``node_link`` the ``node_ranks`` ranks of one, by names such as "400gbit" and "nvlink4"; an
            unknown name raises an error that lists all. Default: what is usual for the device.
        cost_model: rates that were measured, in place of those that the names stand for. For ``device="cpu"`` the
            default is this machine's calibration, if there is one; a link that is named replaces the measured one.
        optimizer: a class of optimizers or the name of one of ``torch.optim``, whose state and work are counted.
        accumulation: forwards and backwards for each step of the optimizer. Each reduces its gradients, as with
            ``no_sync(reduce_each=True)``.
        context: over how many ranks each sequence is split (``context_parallel`` of ``fsdp``), or "auto" for the number
            with the most tokens/s. ``example_inputs`` are then the whole sequences that these ranks share. Parameters
            are sharded over all ranks, and no hybrid strategy is tried. Default: sequences are not split.
        experts: how many ranks share the experts of a mixture (``expert_parallel`` of ``fsdp``), or "auto" for the
            number, at most that of a machine's ranks, with the most tokens/s. Each has a batch of its own.
        tensor: how many ranks compute with parts of the parameters (``tensor_parallel`` of ``fsdp``), or "auto" for the
            number, at most that of a machine's ranks, with the most tokens/s. ``example_inputs`` are then the batch
            that these ranks share. Default: each rank computes with whole parameters.
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
        RuntimeError: if this process is in a process group already, or no experts can be computed in parts.
        ImportError: if scipy is not installed.
    """
    needs("scipy", extra="plan", what="shardtrace.plan")
    _check(model, fixed)
    if mesh_shape is not None:
        world_size = count_ranks(mesh_shape, world_size)
    if world_size is None:
        raise TypeError("plan needs world_size, or mesh_shape")
    parse_count("accumulation", accumulation, "a number of backwards, 1 or more", least=1)
    if node_ranks is not None:
        parse_count("node_ranks", node_ranks, "the number of ranks of a machine, 1 or more", least=1)
    fixed = flat(fixed or {})
    wires = parse_allowed(allowed, fixed) if allowed else NO_WIRES
    if wires.reductions:
        fixed.pop("error_feedback", None)  # exact steps have none
    found, names = hardware(device), {"inside": node_link, "between": link, "node_ranks": node_ranks}
    given = fixed.pop("cost_model", cost_model)
    rates = Rates(given, "given", "given rates") if given is not None else rates_of(found, names, world_size)
    budget = found.memory if memory is None else parse_bytes(memory)
    setting = Setting(rates.cost, found, optimizer_cost(optimizer, found.name), accumulation)
    task = Task(model, example_inputs, world_size, mesh_shape, setting, fixed, dict(jit_options or {}), {}, wires)
    with fake_ranks(world_size), progress(f"planning {type(model).__name__}"):
        given = {"context": context, "experts": experts, "tensor": tensor}
        chosen, *others = explore_degrees(task, given, budget)
        search = chosen.search
        result = replace(_write(search, chosen.best or search.front[0], rates, others), budget_given=_decimal(memory))
    task.records.clear()
    if chosen.best is None:
        lower = "" if "mp_policy" in fixed else ', or a lower precision (fixed={"mp_policy": "bf16"})'
        if context is None and tensor is None:
            lower += ', or split sequences over ranks (context="auto")' if task.positions > 1 else ""
            lower += ', or parameters (tensor="auto")'
        spelled = ", ".join(f"{name}={value!r}" for name, value in result.choices.items() if value is not None)
        raise NoPlanFitsError(
            f"no step of {type(model).__name__} on {world_size} ranks fits into {result.budget_given or size(budget)}: "
            f"the least is {size(result.peak)}, with {spelled}. Use more ranks, smaller inputs{lower}",
            result,
        )
    return result


# ---- the arguments ----


def _check(model: Any, fixed: Any) -> None:
    if not isinstance(model, nn.Module) or states_in(model) or thunder.compile_data(model) is not None:
        raise TypeError(f"plan takes a module that is not sharded or jitted, not {type(model).__name__}")
    if dist.is_initialized():
        raise RuntimeError(
            "plan compiles for fake ranks, and this process is in a process group already: plan before "
            "init_process_group, or once by `shardtrace plan ... --out plan.json`, and call fsdp(model, "
            'plan="plan.json") on all ranks'
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"there is nothing to train: no parameter of {type(model).__name__} requires a gradient")
    if fixed is not None and not isinstance(fixed, Mapping):
        raise TypeError(f'fixed must be options of fsdp, as in {{"mp_policy": "bf16"}}, not {fixed!r}')


def _decimal(memory: str | float | None) -> str:
    """An amount of memory as the user wrote it, if that is in GB and not in GiB."""
    is_decimal = isinstance(memory, str) and re.search(r"[kmgt]b\s*$", memory.lower()) is not None
    return str(memory).strip() if is_decimal else ""


# ---- the result ----


def _write(search: Search, point: Point, rates: Rates, others: Sequence[Degree]) -> TrainingPlan:
    task, family, found = search.task, search.families[point.candidate.family], point.estimate
    setting, choices = task.setting, task.options(family.options_of(point.candidate))
    of_peak = setting.accumulation / (found.seconds * setting.hardware.peak) if found.seconds else 0.0
    useful, all_scores = task.useful_flops
    return TrainingPlan(
        model=type(task.model).__name__,
        fingerprint=fingerprint(task.model),
        world_size=task.world_size,
        mesh_shape=task.mesh_of(choices["sharding_strategy"]),
        budget=search.budget,
        device=setting.hardware.name,
        links=rates.links,
        rates=rates.source,
        choices=choices_of(choices),
        seconds=found.seconds,
        forward=found.forward,
        backward=found.backward,
        optimizer=found.optimizer,
        exposed=found.exposed,
        tokens=setting.accumulation * _tokens(task.inputs) // task.sharing,
        memory={kind: nbytes for kind, nbytes in found.memory.items() if nbytes},
        mfu=of_peak * useful,
        mfu_all_scores=of_peak * all_scores,
        binding=_binding(search, found),
        helps=tuple(words for _, words in sorted(_helps(search, point))),
        update=_update(setting, found),
        pareto=Rows(_row(search, p) for p in search.front),
        cost=setting.cost,
        notes=(*_notes(search, point), *map(str, others)),
        allowed=task.allowed.values,
        again=lambda plan: _largest_batch(task, plan),
    )


def _notes(search: Search, point: Point) -> Iterator[str]:
    if there := point.estimate.host + point.estimate.away:
        yield f"The memory of the host holds {size(there)} of each rank."
    if point.candidate.rounding == EXACT:
        return
    exact = fastest(search.exact, search.budget)
    if exact is None:
        yield "No step that rounds nothing fits."
    else:
        row = _row(search, exact)
        yield f"The fastest step that rounds nothing takes {duration(row.seconds)}: {row.words}."


def _row(search: Search, point: Point) -> Row:
    c, e = point.candidate, point.estimate
    family = search.families[c.family]
    counts = {what: sum(w == what for _, w in c.recomputed) for what in reversed(WAYS)}
    return Row(
        memory=e.peak,
        seconds=e.seconds,
        exposed=e.exposed,
        strategy=family.words_of(c),
        kept=len(c.kept),
        recomputing=", ".join(f"{what} {n}" for what, n in counts.items() if n) or "nothing",
        prefetch=c.prefetch,
        options=choices_of(search.task.options(family.options_of(c))),
    )


def _update(setting: Setting, found: Estimate) -> str:
    """The optimizer and how torch runs it."""
    return f"{setting.optimizer.on_host} on the host" if found.host else str(setting.optimizer)


MOST = 0.25  # of a step, which an optimizer takes if it is no limit
WORTH_IT = 0.1  # of a step's seconds, for which one takes more ranks


def _helps(search: Search, point: Point) -> Iterator[tuple[float, str]]:
    """What would make a step faster, or let it fit: the seconds of the step, and words."""
    setting, budget, now = search.task.setting, search.budget, point.estimate
    fits, on_device = now.peak <= budget, [p for p in search.front if not p.estimate.host]
    faster = [p for p in on_device if p.estimate.seconds < (1 - WORTH_IT) * now.seconds]
    if (fused := setting.optimizer.fused) is not None:
        for p in (point, *faster[:1]):
            family = search.families[p.candidate.family]
            found = estimate(family.step(p.candidate), setting._replace(optimizer=fused), family.facts)
            saved, freed = now.seconds - found.seconds, now.peak - found.peak
            if found.peak <= budget and (
                not fits or saved > NOT_WORTH_IT * now.seconds or freed > NOT_WORTH_IT * now.peak
            ):
                yield found.seconds, f"{fused.name}(fused=True): {duration(found.seconds)} a step, {size(found.peak)}"
                break
    for p in faster[:1] if fits else on_device[:1]:
        ranks = _ranks_for(search, p)
        if ranks is not None:
            seconds = p.estimate.seconds - p.estimate.optimizer * (1 - search.task.world_size / ranks)
            yield seconds, f"{ranks} ranks: about {duration(seconds)} a step"
    if now.exposed > 0.05 * now.seconds:
        seconds = now.seconds - now.exposed
        yield seconds, f"faster links, or fewer bytes (allowed=): {duration(seconds)} a step or more"
    device = setting.cost.device
    products_in_fp32 = "mp_policy" not in search.task.fixed and any(
        p.dim() > 1 and p.dtype == torch.float32 for p in search.task.model.parameters()
    )
    if products_in_fp32 and device.half_flops > 2 * device.flops:
        yield 0.0, f'mp_policy="bf16": products are {device.half_flops / device.flops:.0f} times as fast'


def _ranks_for(search: Search, point: Point) -> int | None:
    """About how many ranks a step would fit on, if it is one that shards over all of them; a multiple of machines'."""
    task, setting = search.task, search.task.setting
    at_peak = sum(point.estimate.memory.get(kind, 0) for kind in ("inputs", "optimizer", "gradients"))
    at_rest = (8 + setting.optimizer.state) * task.trained / task.world_size / 4
    sharded = (1 + setting.hardware.allocator) * min(at_peak, at_rest)
    short = point.estimate.peak - search.budget
    if search.families[point.candidate.family].kind != "zero" or not 0 < short < sharded or point.estimate.host:
        return None
    ranks = math.ceil(task.world_size * sharded / (sharded - short))
    inside = setting.cost.node_ranks if ranks > setting.cost.node_ranks else 1
    return -(-ranks // inside) * inside


def _binding(search: Search, found: Estimate) -> str:
    if found.peak > search.budget:
        return f"memory: {size(found.peak - search.budget)} are missing"
    if found.optimizer > MOST * found.seconds:
        return (
            f"the optimizer: {found.optimizer / found.seconds:.0%} of the step is {_update(search.task.setting, found)}"
        )
    faster = [p for p in search.front if p.estimate.seconds < 0.999 * found.seconds]
    if faster:
        better = faster[0].estimate
        extra, gain = max(better.peak - found.peak, 1), found.seconds - better.seconds
        each = duration(gain * 2**30 / extra)
        return f"memory: {size(extra)} more would save {duration(gain)} a step, {each} for each GiB"
    if found.exposed > 0.05 * found.seconds:
        return f"communication: compute waits for it {found.exposed / found.seconds:.0%} of the step"
    return "compute"


# ---- other batches ----


def _largest_batch(task: Task, plan: TrainingPlan) -> int:
    """The largest size of dim 0 of the inputs that fits. Memory is close to linear in it."""
    start = _batch(task.inputs)
    peaks: dict[int, float] = {start: float(plan.peak)}

    def fits(batch: int) -> bool:
        if batch not in peaks:
            again = task._replace(inputs=_resized(task.inputs, start, batch))
            with fake_ranks(task.world_size):
                peaks[batch] = compiled_estimate(again.compile_function(options_of(plan.choices)), task.setting).peak
        return peaks[batch] <= plan.budget

    def crossing(low: int, high: int) -> int:
        """The batch at which a line through two sizes of memory reaches the budget."""
        slope = (peaks[high] - peaks[low]) / (high - low)
        return max(low + 1, int(low + (plan.budget - peaks[low]) / slope)) if slope > 0 else 2 * high

    if plan.peak > plan.budget:
        return 0
    low, high = start, 2 * start
    while fits(high):
        low, high = high, max(high, crossing(low, high)) + 1
    while high - low > 1:  # low fits, high does not
        middle = min(crossing(low, high), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def compiled_estimate(function: Any, setting: Setting) -> Estimate:
    """What the last step of a jitted function costs."""
    forward, backward = thunder.last_traces(function), thunder.last_backward_traces(function)
    return estimate(ComposedStep(forward[-1], backward[-1]), setting)


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
