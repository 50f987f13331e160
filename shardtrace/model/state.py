"""The state of a sharded model, and the runtime that its compiled steps call.

Its parameters are exchanged for full-shape stand-ins during tracing. The runtime implements
:class:`passes.plan.Runtime`.

The memory of shards: contiguous for a bucket, so that a gather needs no packing; and what parameters leave when they
are sharded, in which whatever else lies there keeps the values of then.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from itertools import accumulate
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

from passes.comm.symbols import KeptGradients
from passes.compat.jit import set_traced_device, unjitted
from passes.plan import (
    Axis,
    BucketPlan,
    CostModel,
    Gradients,
    Keep,
    Member,
    Placement,
    Progress,
    ShardedParameter,
    Step,
)
from passes.plan.bucket import Use, choose_pieces, group_uses
from shardtrace.model.operators import laid_out_like, whole_of
from shardtrace.model.shards import Entry, ParameterMemory, PlanKey, was_replaced
from shardtrace.options.options import Options
from shardtrace.options.policies import Checks, ExpertParallel
from shardtrace.options.strategy import ShardingStrategy
from shardtrace.ranks.consensus import announce, compare
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import Groups, is_alone, transport
from shardtrace.record.watcher import ATTRIBUTE, EAGER, PART_ATTRIBUTE

import torch
from thunder.core import dtypes
from thunder.core.dtypes import to_dtype
from thunder.distributed import get_skip_data_parallel_grad_sync
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

SHARD_ATTRIBUTE = "_shardtrace_link"  # of a parameter: its Link


class ShardedState:
    """The sharding of one model: its parameters, their plans and their stand-ins. A deep copy of the model copies it
    too. Copies share the process groups."""

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        options: Options,
        entries: tuple[Entry, ...],
        cost: CostModel,
        *,
        ignored: tuple[nn.Parameter, ...] = (),
        known: WeakSet[ShardedState] | None = None,
        left: ParameterMemory | None = None,
    ) -> None:
        self.known = WeakSet() if known is None else known  # the states of this process, for functions of torch
        self.known.add(self)
        self.model, self.model_name = model, type(model).__name__
        self.groups, self.group = groups, groups.everyone
        self.options, self.cost = options, cost
        # what chooses a step that fits, of the planner, which is a room above and therefore found by its name
        self.contract = import_module("shardtrace.planner.contract").Contract if options.memory is not None else None
        self.left = left or ParameterMemory()  # the memory in which parameters were whole
        self.ignored = ignored  # parameters that a step may use although they are not sharded
        self.difference = ""  # of a forward that was recorded again, if it was another one
        # the values that forwards have read of their inputs; None: they read none, for which ranks would send others
        self.variants: dict[Hashable, set[Hashable]] | None = {}
        self._children: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of each module: now, and when last traced
        self.unsharded = False  # inside full_params
        self.compared: set[Hashable] = set()  # the shapes of batches that the ranks of a sequence have compared
        self.whole: AbstractContextManager[None] | None = None  # that full_params, if it ends at the next training step
        self.opened: dict[int, Callable[[], torch.Tensor]] = {}  # parameters of parts that are whole: what undoes it
        self.tracing = False  # stand-ins are in place
        self._casting = False  # the forward is running, with its inputs cast
        self._running = 0  # submodules that PyTorch runs with whole parameters in place
        self._replaced = WeakIdKeyDictionary()  # shards that the script has replaced since fsdp(): their numbers
        self.compiled: dict[Hashable, Callable[..., Any]] = {}  # jitted: the model, parts of it and methods, if called
        self._take(entries)

    def _take(self, entries: tuple[Entry, ...]) -> None:
        """Plans the steps for ``entries``."""
        self.entries = entries
        self.runtime = ModelRuntime(
            self.model_name, self.groups, self._check_in_place, _entry_of, self.options.checks,
            self._divisor(), EXPERTS_HINT if isinstance(self.options.context, ExpertParallel) else ORDER_HINT,
        )  # fmt: skip
        self.plans = {key: self._plan(key) for key in dict.fromkeys(e.plan_key for e in entries)}
        self.by_stand_in = {
            id(e.stand_in): ShardedParameter(
                self.plans[e.plan_key], e.name, e.full_shape, e.layer, block=e.block, index=index,
                dtype=to_dtype(e.dtype), owner=e.home.owner, rest_device=str(e.rest_device),
                is_distributed=e.home.mesh is not None,
            )
            for index, e in enumerate(entries)
        }  # fmt: skip

    def claim_shards(self) -> None:
        """Links each parameter to this state, and moves the rows of each bucket into one buffer."""
        rows = {self.by_stand_in[id(e.stand_in)]: e.rows for e in self.entries}
        trainable = [p for p, e in zip(rows, self.entries, strict=True) if e.shard.requires_grad]
        laid = lay_out_flat(rows, trainable)
        self.entries = tuple(e.on(laid.get(p, t)) for e, (p, t) in zip(self.entries, rows.items(), strict=True))
        for cached in ("places", "_held"):
            self.__dict__.pop(cached, None)
        for e in self.entries:
            link = Link(self, e)
            for p in (e.shard, *e.earlier):
                setattr(p, SHARD_ATTRIBUTE, link)

    def adopt(self) -> None:
        """Takes over parameters that were replaced or converted. Raises RuntimeError for one that does not fit."""
        with torch.no_grad():
            entries = tuple(entry.adopted() for entry in self.entries)
        changed = [(old, new) for old, new in zip(self.entries, entries, strict=True) if new is not old]
        if changed:
            known: dict[int, Entry] = {}
            for entry in entries:
                if (other := known.setdefault(id(entry.shard), entry)) is not entry:
                    raise RuntimeError(
                        f"parameters {other.name!r} and {entry.name!r} are one Parameter now: tie them before fsdp()"
                    )
            self._replaced.update({e.shard: i for i, e in enumerate(self.entries) if entries[i].shard is not e.shard})
            before = self.runtime
            if before.kept.by_place:
                raise RuntimeError(
                    f"parameter {changed[0][0].name!r} was replaced or converted before the gradients that no_sync has "
                    "added up were reduced: do that after the step that reduces them"
                )
            if all(new.stand_in is old.stand_in for old, new in changed):
                self.entries = entries  # compiled steps read what the modules hold
            else:
                before.generation += 1  # no compiled step fits any more
                self._take(entries)
                self.runtime.keep = before.keep
            self.claim_shards()

    def now(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that the modules hold in the place of one that they held before, or ``parameter``."""
        number = self._replaced.get(parameter)
        return parameter if number is None else self.entries[number].shard

    def _divisor(self) -> float | None:
        """The user's divisor of the sum of what ranks contribute. Those that share experts have their mean already."""
        factor, sharing = self.options.comm.gradient_divide_factor, self.groups.sharing
        if factor is None or sharing is None or not isinstance(self.options.context, ExpertParallel):
            return factor
        return factor / sharing.size()

    def _plan(self, key: PlanKey) -> BucketPlan:
        strategy, _, precision, gather = key
        entries = [e for e in self.entries if e.plan_key == key]
        home, factor = entries[0].home, self._divisor()
        if factor is None and self.groups.sharing is not None:  # ranks of one batch add up what they contribute
            factor = self.group.size() / self.groups.sharing.size()
        common = self._common(strategy, entries)
        devices = {e.device.type for e in entries}
        param_dtype, reduce_dtype = (precision.param_dtype, precision.reduce_dtype) if precision else (None, None)

        def over(axis: Axis, placement: Placement, **others: Any) -> BucketPlan:
            group, sums = self.runtime.group(axis), self.options.comm.sum_reductions
            travel = transport(group, devices)
            return BucketPlan(
                axis=axis, world_size=group.size(), rank=group.rank(), placement=placement, direct=travel.direct,
                averages=travel.averages and not sums, sums=sums, **common, **others,
            )  # fmt: skip

        outer = self.groups.outer if strategy.is_hybrid and home.placement is Placement.SHARD else None
        replicas = outer is not None and outer.size() > 1
        second = strategy is ShardingStrategy.ZERO3_SECONDARY and home.placement is Placement.SHARD
        dtype = _dtype(param_dtype)
        return over(
            Axis.ALL if home.group is self.group else Axis.SHARD,
            home.placement,
            host=home.host,
            # replicas take their mean
            divide_by=None if factor is None else factor * home.group.size() / self.group.size(),
            regather=strategy.regathers and home.placement is not Placement.REPLICATE,
            outer=over(Axis.REPLICATE, Placement.REPLICATE, regather=False) if replicas else None,
            secondary=over(Axis.SHARD, Placement.SHARD, regather=True, param_dtype=dtype) if second else None,
            param_dtype=dtype,
            reduce_dtype=_dtype(reduce_dtype),
            gather=gather,
        )

    def _common(self, strategy: ShardingStrategy, entries: list[Entry]) -> dict[str, Any]:
        """What a plan and the plans within it have in common."""
        options, pieces = self.options, self._pieces(entries)
        nested = _are_nested({e.block for e in entries if e.block is not None})  # each needs its outer one beside it
        default_prefetch = 3 if not strategy.regathers or pieces > 1 else 2 if nested else 1
        return {
            "model": self.model_name,
            "strategy": strategy.value,
            "bucketing": "block" if options.bucketing == "auto" else options.bucketing,
            "pieces": pieces,
            "prefetch": default_prefetch if options.compile.prefetch is None else options.compile.prefetch,
            "max_inflight_bytes": options.compile.max_inflight_bytes,
            "cost": self.cost,
            "sum_dtype": _dtype(options.comm.accumulation_dtype),
            "reduction": options.reduction,
            "runtime": self.runtime,
        }

    def _pieces(self, entries: list[Entry]) -> int:
        """The number of buckets for each block of the parameters that have one plan."""
        if self.options.bucketing != "auto":
            return 1
        blocks: dict[str | None, list[Entry]] = {}
        for e in entries:
            blocks.setdefault(e.block, []).append(e)
        blocks.pop(None, None)
        sizes = [sum(e.stand_in.nbytes for e in block) for block in blocks.values()]  # in the dtype of use
        return choose_pieces(max(sizes, default=0), len(sizes), entries[0].home.group.size(), self.cost.link)

    @cached_property
    def places(self) -> list[tuple[dict[str, nn.Parameter | None], str, Entry]]:
        """Each place that holds a parameter: the ``_parameters`` of the module, the attribute, and the entry."""
        return [(module._parameters, attribute, e) for e in self.entries for _, module, attribute in e.owners]

    @cached_property
    def _held(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """What each place holds, and the memory of its rows, for the check before each step."""
        return [(parameters, attribute, e.shard, e.local) for parameters, attribute, e in self.places]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        new = memo[id(self)] = object.__new__(ShardedState)  # the modules to be copied refer to it
        entries = []
        for e in self.entries:
            stand_in = copy.deepcopy(e.stand_in, memo)
            set_traced_device(stand_in, e.device)
            shard, owners = copy.deepcopy((e.shard, e.owners), memo)
            shard.grad = None  # as in a copy of a plain Parameter
            rows = e.rows_like(shard)
            before = tuple(ref(copy.deepcopy(old, memo)) for old in e.earlier)
            entries.append(replace(e, shard=shard, rows=rows, stand_in=stand_in, owners=owners, before=before))
        model, ignored = copy.deepcopy((self.model, self.ignored), memo)
        new.__init__(  # type: ignore[misc]
            model, self.groups, self.options, tuple(entries), self.cost, ignored=ignored, known=self.known
        )
        new.claim_shards()
        return new

    def _check_in_place(self) -> None:
        """Raises RuntimeError if a parameter is not this rank's shard, nor one that can take its place, or was frozen
        before its sum was reduced, or if modules have changed."""
        if self.is_open or not self.holds_shards:
            raise RuntimeError("whole parameters are in place")
        self._check_not_frozen()
        for held, key, parameter, local in self._held:
            p: Any = held.get(key)
            if p is not parameter or (local is not None and p._local_tensor is not local):
                runtime = self.runtime
                self.adopt()
                if self.runtime is not runtime:
                    raise RuntimeError("parameters have other dtypes")
                break
        if any(children != known for children, known in self._children):
            raise RuntimeError("a module was added, replaced or removed")

    @property
    def owns(self) -> bool:
        """Whether there are parameters that only one rank owns."""
        return any(e.home.placement is Placement.OWNER for e in self.entries)

    @property
    def holds_shards(self) -> bool:
        """Whether the modules have shards now."""
        return not (self.unsharded or self.tracing or self._running)

    def is_to_run(self, module: nn.Module) -> bool:
        """Whether a call of ``module`` that begins now is to run a compiled step, which ends ``unshard``: it gathers by
        itself. Without gradients, PyTorch runs modules whose parameters are all whole."""
        if torch.is_grad_enabled():
            self.reshard()
        elif self.opened:
            if self.numbers_in(module) <= self.opened.keys():
                return False
            self.reshard()
        return self.holds_shards

    @property
    def is_open(self) -> bool:
        """Whether ``unshard`` has made parameters whole."""
        return self.whole is not None or bool(self.opened)

    def unshard(self, module: nn.Module) -> None:
        """Makes the parameters of a part of the model whole. A collective."""
        if not self.opened:
            self.adopt()
        for number in sorted(self.numbers_in(module) - self.opened.keys()):
            self.opened[number] = self.entries[number].unshard()

    def reshard(self, module: nn.Module | None = None) -> None:
        """Ends ``unshard``, if it was called; with ``module``, for the parameters of this part."""
        if module is None and self.whole is not None:
            self.whole.__exit__(None, None, None)
            self.whole = None
        for number in [*self.opened] if module is None else sorted(self.numbers_in(module) & self.opened.keys()):
            self.opened.pop(number)()

    def numbers_in(self, module: nn.Module, *, recurse: bool = True) -> frozenset[int]:
        """The numbers of the parameters that a module of the model holds; without ``recurse``, of those that are in no
        block inside it."""
        inside = {*module.modules()}
        blocks = set() if recurse else {name for name, m in self.model.named_modules() if m in inside - {module}}
        held = (any(owner in inside for _, owner, _ in e.owners) and e.block not in blocks for e in self.entries)
        return frozenset(number for number, is_held in enumerate(held) if is_held)

    def jit_options(self, name: str) -> Mapping[str, Any]:
        """The arguments of ``thunder.jit`` for the call of ``name``. Raises RuntimeError if it may not compile
        itself."""
        jit = self.options.compile.jit
        if jit is False:
            raise RuntimeError(
                f"{name} is sharded with compile=False and was called without Thunder: wrap it in thunder.jit, "
                "or call it inside shardtrace.full_params(model)"
            )
        return {} if jit is True else jit

    def check_traceable(self) -> None:
        """Ends ``unshard``. Raises RuntimeError if the model cannot be traced as it is now."""
        self.reshard()
        if self.unsharded:
            raise RuntimeError(
                f"a jitted {self.model_name} was called inside full_params: call the model itself, or leave the context"
            )
        if self.difference:
            difference, self.difference = self.difference, ""
            raise RuntimeError(
                f"the forward of {self.model_name} is not what was compiled ({difference}): it reads something that is "
                "not compared before each step, such as an object that a call returns. Steps since it was compared "
                "last may have been wrong. Keep what it reads on a module, pass it as an argument, or leave the module "
                "to PyTorch with fsdp(compile_policy=CompilePolicy(eager=[...]))"
            )
        if left := self.runtime.kept.left_behind():
            self.runtime.kept.clear()
            raise RuntimeError(
                f"parameter {left[0]!r} has gradients from no_sync that the step after it did not reduce, as it did "
                "not use the parameter: use it there too, or call no_sync(model, reduce_each=True)"
            )
        self._check_not_frozen()
        self._check_hooks()
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name, module, _ in (owner for entry in self.entries for owner in entry.owners):
            if modules.get(name) is not module:
                raise RuntimeError(
                    f"module {name!r} of {self.model_name} was replaced, moved or removed after fsdp(): "
                    "do that before fsdp()"
                )
        for name, module in modules.items():
            for key, p in module._parameters.items() if not self.entries else ():
                if p is not None and not isinstance(p, nn.Parameter):
                    raise was_replaced(f"{name}.{key}".strip("."), f"by a {type(p).__name__}")
        if any(children != known for children, known in self._children):
            self.runtime.generation += 1
        self._children = [(module._modules, dict(module._modules)) for module in modules.values()]
        self.adopt()

    def _check_not_frozen(self) -> None:
        """Raises RuntimeError if a parameter was frozen after no_sync had added up gradients for it, which this step
        would then not reduce. The sums are kept."""
        kept = [kept.parameter for kept in self.runtime.kept.by_place.values()]
        if not kept or self.runtime.gradients() is not Gradients.ADDED:
            return
        for parameter in kept:
            if not self.entries[parameter.index].shard.requires_grad:
                raise RuntimeError(
                    f"parameter {parameter.name!r} was frozen before the gradients that no_sync has added up for it "
                    "were reduced: set requires_grad to False after the step that reduces them"
                )

    def _check_hooks(self) -> None:
        """Raises RuntimeError if a module has a hook on its backward, which the compiled backward would not call."""
        if not torch.is_grad_enabled():
            return
        every, why = torch.nn.modules.module, "which the compiled backward does not call"
        if every._global_backward_hooks or every._global_backward_pre_hooks:
            raise RuntimeError(
                f"torch has a hook for the backward of every module, {why}: remove it, or register a hook on the "
                f"result of thunder.jit({self.model_name})"
            )
        run_by_torch = {part for m in self.model.modules() if EAGER in m.__dict__ for part in m.modules()}
        for name, module in self.model.named_modules():
            if module not in run_by_torch and (module._backward_hooks or module._backward_pre_hooks):
                what = f"module {name!r} of {self.model_name}" if name else self.model_name
                remedy = f"let PyTorch run the module, by fsdp(compile_policy=CompilePolicy(eager=[{name!r}]))"
                remedy = remedy if name else "register it on the result of thunder.jit"
                raise RuntimeError(f"{what} has a hook on its backward, {why}: {remedy}")

    @contextmanager
    def casting(self) -> Iterator[MixedPrecisionPolicy | None]:
        """Gives the precision to which the forward that runs inside casts its inputs and outputs; None if it does not:
        without Thunder, or within a forward of the same model."""
        outermost = self.tracing and not self._casting
        self._casting = self._casting or outermost
        try:
            yield self.options.precision if outermost else None
        finally:
            self._casting = self._casting and not outermost

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets a submodule run that has whole parameters in place."""
        self._running += 1
        try:
            with RefuseShards() if self.tracing else nullcontext():
                yield
        finally:
            self._running -= 1

    def stop_reading(self) -> None:
        """Leaves what depends on the values of inputs to PyTorch from here on."""
        self.variants = None
        self.compiled.clear()

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Puts full-shape stand-ins into the modules while the forward is traced, and then the shards back."""
        for parameters, attribute, entry in self.places:
            entry.stand_in.requires_grad_(entry.shard.requires_grad)
            parameters[attribute] = entry.stand_in
        self.tracing = True
        try:
            yield
        finally:
            self.tracing = False
            for parameters, attribute, entry in self.places:
                parameters[attribute] = entry.shard


def _are_nested(blocks: Set[str]) -> bool:
    """Whether there is a block in a block, by their qualified names."""
    return any(outer in blocks for b in blocks for outer in list(accumulate(b.split("."), "{}.{}".format))[:-1])


def _dtype(dtype: torch.dtype | None) -> Any:
    return None if dtype is None else to_dtype(dtype)


def _entry_of(parameter: torch.Tensor) -> Entry:
    link = link_of(parameter)
    assert link is not None
    return link.entry


class RefuseShards(TorchFunctionMode):
    """Raises RuntimeError if a function of torch is given a shard, by a module that PyTorch runs."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in pytree.tree_leaves((args, kwargs)):
            refuse_shard("a module that PyTorch runs", t)
        return function(*args, **(kwargs or {}))


def refuse_shard(place: str, t: Any) -> None:
    """Raises RuntimeError for a parameter that forward uses, at a place, although it has no stand-in there."""
    if (link := link_of(t)) is not None and link.entry.home.is_spread:
        raise RuntimeError(
            f"{place}: parameter {link.entry.name!r} of {link.state.model_name} is used through a list or an "
            "attribute, where it is this rank's shard: read it from its module in forward, as module.weight"
        )


class Link:
    """A parameter's reference to its model and entry. ``shared`` are tensors on its memory that a script may keep: what
    ``p.data`` was, or was set to. Pickled as None, so that a saved parameter is an ordinary one."""

    def __init__(self, state: ShardedState, entry: Entry) -> None:
        self.state, self.entry = state, entry
        self.shared: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def __reduce__(self) -> Any:
        return type(None), ()


def link_of(value: Any) -> Link | None:
    """The link of a sharded parameter. None for anything else."""
    return getattr(value, SHARD_ATTRIBUTE, None) if isinstance(value, torch.Tensor) else None


@functools.cache  # once for each process
def keep_data() -> None:
    """Makes ``t.data = values`` give a DTensor these values, which may be whole. torch changes its shape and dtype
    then, and leaves its values as they are.

    A sharded parameter stays in the memory that compiled steps read. Therefore its earlier ``data`` move out of it,
    with their values, and ``values`` into it.
    """
    data = torch.Tensor.data

    def take(self: DTensor) -> torch.Tensor:
        found: torch.Tensor = data.__get__(self)  # type: ignore[attr-defined]
        if (link := link_of(self)) is not None:
            link.shared[id(found)] = found
        return found

    def give(self: DTensor, values: Any) -> None:
        link = link_of(self)
        if link is not None and tuple(values.shape) != link.entry.full_shape:
            raise RuntimeError(
                f"the data of parameter {link.entry.name!r} has shape {tuple(values.shape)}, the parameter has "
                f"{link.entry.full_shape}: give it a DTensor like the parameter, or whole values"
            )
        with torch.no_grad():
            alike = isinstance(values, DTensor) and values.device_mesh == self.device_mesh
            if alike:
                new: Any = values if link is None else values.redistribute(placements=self.placements)
            else:
                whole = whole_of(values)
                new = laid_out_like(self, whole) if link is None else link.entry.part(whole)
        if link is None or new.dtype != self.dtype:
            data.__set__(self, new)  # type: ignore[attr-defined]
            self._local_tensor, self._spec = new._local_tensor, new._spec
            return
        if new._local_tensor.is_set_to(self._local_tensor):  # as in p.data = p.data
            return
        mine: Any
        for mine in [*link.shared.values()]:
            if mine is not values and mine._local_tensor.data_ptr() == self._local_tensor.data_ptr():
                mine._local_tensor = mine._local_tensor.clone()
        self._local_tensor.copy_(new._local_tensor)
        link.shared.clear()
        if alike and values.placements == self.placements:
            values._local_tensor = self._local_tensor
            link.shared[id(values)] = values

    DTensor.data = property(take, give)  # type: ignore[assignment]


def state_of(module: nn.Module) -> ShardedState | None:
    """The state of a module that was itself passed to ``fsdp``. None for other modules."""
    return module.__dict__.get(ATTRIBUTE)


def state_around(module: nn.Module) -> ShardedState | None:
    """The state of the sharded module around ``module``, if ``module`` is a part of one."""
    return module.__dict__.get(PART_ATTRIBUTE)


def own_state(module: nn.Module) -> ShardedState:
    """The state of a sharded module, or of the one that ``module`` is a part of."""
    state: ShardedState = module.__dict__.get(ATTRIBUTE) or module.__dict__[PART_ATTRIBUTE]
    return state


def reshard_in(module: nn.Module) -> None:
    """Ends ``unshard`` of a sharded module or of the one around it, and of all sharded modules in it."""
    state = own_state(module)
    if any(other.is_open for other in state.known):
        for each in (state, *states_in(module)):
            each.reshard()


def states_in(module: nn.Module) -> list[ShardedState]:
    """The states of all sharded modules in ``module``, including its own."""
    return [state for m in module.modules() if (state := state_of(m)) is not None]


def sharded_states(model: nn.Module) -> tuple[nn.Module, list[ShardedState]]:
    """The module (of a jitted model, the original one) and the states of the sharded modules in it.

    Raises ValueError if there are none.
    """
    module = unjitted(model)
    states = states_in(module)
    if not states:
        raise ValueError(f"{type(module).__name__} is not sharded: call shardtrace.fsdp(model) first")
    return module, states


# ---- the runtime ----


REMEDY = "read the parameter itself in forward, or keep a clone() where the values before training are meant"


def lay_out_flat(
    rows: Mapping[ShardedParameter, torch.Tensor], trainable: Iterable[ShardedParameter]
) -> dict[ShardedParameter, torch.Tensor]:
    """The rows of each bucket as views of one buffer. Rows that may stay where they are are left out.

    The buckets are those of a model that uses its parameters in the order in which it holds them. The gather packs the
    rows if a trace has other buckets, or if a parameter has been given other memory since.
    """
    rows = {parameter: t for parameter, t in rows.items() if not t.is_meta}
    owned = [p for p in rows if p.plan.placement is Placement.OWNER and p.plan.host is not None]
    laid = {p: p.plan.host.keep(rows[p]) for p in owned if p.plan.host is not None}
    held = {p: t for p, t in rows.items() if p.plan.placement is Placement.SHARD}
    trainable = set(trainable)
    uses = [Use(Member(p, p in trainable), dtypes.to_dtype(t.dtype), str(t.device)) for p, t in held.items()]
    for group in group_uses(uses):
        members = [u.parameter for u in group.uses]
        host = group.uses[0].parameter.plan.host
        if len(members) == 1 and host is None:
            continue
        flat = torch.cat([held[m].reshape(-1) for m in members])
        flat = flat if host is None else host.keep(flat)
        for m, piece in zip(members, flat.split([held[m].numel() for m in members]), strict=True):
            laid[m] = piece.view(held[m].shape).data  # with a version of its own
    return laid


# Thunder iterates over named_parameters() in the order of a set of strings, whose hashes differ between processes.
ORDER_HINT = "if its forward iterates over named_parameters(), set PYTHONHASHSEED to the same number on all ranks"

EXPERTS_HINT = (
    "ranks of expert_parallel compute the tokens of all of them and need batches of one shape: pad them to one length, "
    f"and let all of them train, or evaluate, at a time; else, {ORDER_HINT}"
)
Arrival = tuple[str, str]  # the collectives of a step, and the place of the rank before it


class ModelRuntime:
    """One model on this rank: its groups, its unreduced gradients, and the comparison of its steps with other ranks.

    Args:
        model_name: for messages.
        groups: its process groups.
        check_unchanged: raises RuntimeError if a parameter is not the one that was sharded. It runs before every step
            and must be cheap.
        entry_of: finds the entry of a sharded parameter.
        checks: whether to compare every step, or only unusual ones (None: see :meth:`compare_step`).
        divisor: the number by which the sum of the ranks' gradients is divided; None: the ranks that have batches of
            their own.
        hint: what to do if ranks differ in their collectives.
    """

    def __init__(
        self,
        model_name: str,
        groups: Groups,
        check_unchanged: Callable[[], None],
        entry_of: Callable[[torch.Tensor], Entry],
        checks: Checks,
        divisor: float | None = None,
        hint: str = ORDER_HINT,
    ) -> None:
        self.groups = groups
        ranks = groups.everyone.size() / (groups.sharing.size() if groups.sharing is not None else 1)
        self.divisor: float | None = ranks if divisor is None else divisor
        self._by_axis = {
            Axis.ALL: groups.everyone, Axis.SHARD: groups.inner, Axis.REPLICATE: groups.outer,
            Axis.CONTEXT: groups.context, Axis.TENSOR: groups.tensor,
        }  # fmt: skip
        self.kept = KeptGradients()
        self.errors: dict[tuple[Axis, int], torch.Tensor] = {}  # what rounded reductions have lost
        self.keep: Keep | None = None  # inside no_sync
        self.generation = 0  # incremented when the model's modules have changed
        self.progress = None if is_alone(groups.everyone) else Progress()
        self.compares = checks.steps is not False and self.progress is not None
        self._what, self._hint = f"the collectives of {model_name}", hint
        self._check_unchanged, self._entry_of = check_unchanged, entry_of
        self._checks = checks
        self._agreed: set[tuple[str, ...]] = set()
        self._switches = False  # gradients were treated otherwise than a forward had foreseen
        self._last: Arrival | None = None  # the step that ran last
        self._backwards = 0  # which are running
        self._usual: dict[Arrival | None, Arrival] = {}  # the step that followed each one the last time

    def group(self, axis: Axis) -> Any:
        return self._by_axis[axis]

    def rows_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._entry_of(parameter).rows

    def like(self, parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._entry_of(parameter).like(rows)

    def gradients(self) -> Gradients | None:
        """How a step that begins now treats gradients. None if it computes none."""
        return self._treatment(self._keep()) if torch.is_grad_enabled() else None

    def _treatment(self, keep: Keep | None) -> Gradients:
        if keep is not None:
            return Gradients.KEPT
        return Gradients.ADDED if self.kept.used else Gradients.REDUCED

    def step(self) -> Step:
        """The step to compile now."""
        adds = frozenset(self.kept.used)
        return Step(self.gradients(), generation=self.generation, keep=self._keep(), adds=adds)

    def _keep(self) -> Keep | None:
        if self.keep is None and get_skip_data_parallel_grad_sync():  # set by Thunder's own no_sync
            return Keep(by_forward=True)
        return self.keep

    def begin_backward(self, step: Step) -> Step:
        """``step``, or another one if the reduction of gradients was switched on or off since its forward. A parameter
        that is kept from here on is added by the next backward that reduces."""
        keep = step.keep if self.keep is None and step.keep is not None and step.keep.by_forward else self.keep
        now = replace(step, gradients=self._treatment(keep), keep=keep, adds=frozenset(self.kept.used))
        now.collectives = [line for line in step.collectives if line.startswith("forward: ")]
        if keep is not None:
            self.kept.used.add(keep.level)
        return step if step.treats_as(now) else now

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        self._backwards += 1
        try:
            yield
        finally:
            self._backwards -= 1

    def check_call(self, name: str) -> None:
        """Raises RuntimeError if a backward that is running calls ``name``, and ranks have parts of its gradients."""
        if self._backwards and self.groups.sharing is not None and self.groups.sharing.size() > 1:
            raise RuntimeError(
                f"{name} is called in backward, by a function that computes its own gradient: ranks of "
                "context_parallel or tensor_parallel have parts of gradients there. Leave that function out, such as "
                "reversible layers, or these options"
            )

    def check_step(self, step: Step) -> None:
        """Raises RuntimeError unless the compiled step fits the model now. Its messages are short, because Thunder then
        traces again: tracing reports the fault, or another step is compiled."""
        if not step.treats_as(self.step()):
            raise RuntimeError("compiled for another use of gradients")
        if step.generation != self.generation:
            raise RuntimeError("compiled for other modules")
        if self.kept.left_behind():
            raise RuntimeError("gradients were left behind")
        self._check_unchanged()
        if self.progress is not None and not self.compares:
            self.progress.drain()  # otherwise once the ranks have been compared

    def compare_trace(self, collectives: list[str]) -> None:
        """Compares ``collectives`` unless the ranks have agreed on them before. Thus a rank does not wait for the
        others if only that rank sees a new shape, such as an uneven last batch."""
        known = tuple(collectives)
        if known not in self._agreed:
            self._compare(collectives)
            self._agreed.add(known)

    def compare_step(self, step: Step, *, changed: bool | None = None) -> None:
        """Compares each step if ``Checks.steps`` is True. By default compares a step only if it differs from the one
        that followed the same predecessor the last time, or if it begins elsewhere, such as after a forward instead of
        a backward. If only one rank changes its course, it thus sends nothing, and raises if the others do not come in
        time. A step that neither sends nor keeps anything is not compared.

        ``changed`` is a bool before a backward. Backwards are compared likewise, from the first changed one on.
        """
        self._switches |= bool(changed)
        compares = bool(step.collectives) or step.gradients is Gradients.KEPT
        if changed is not None:
            compares = self.compares and (self._switches or self._checks.steps is True)
        if self.progress is None or not compares:
            return
        phase = "forward" if changed is None else "backward"
        place = f"a {'step' if changed is None else phase} begins {self.progress}"
        last, now = self._last, (step.sends, place)
        unusual = last is not None and (self.progress.under_way or self._usual.get(last) != now)
        if self._checks.steps or unusual:
            first, *rest = step.collectives or ["nothing"]
            self._compare([f"{first}, where {place}", *rest], likely=True, here=place)
            self.progress.drain()
        self._last = self._usual[last] = now
        self.progress.begin(step, phase)

    def _compare(self, lines: list[str], **options: Any) -> None:
        compare(self.groups.everyone, self._what, lines, timeout=self._checks.timeout, hint=self._hint, **options)

    def announce(self, error: str) -> None:
        announce(self.groups.everyone, self._what, error)

    def communicating(self, bucket: str) -> communicating:
        timeout = self._checks.timeout
        limit = None if timeout == Checks.timeout else timeout  # by default that of the process group
        return communicating(f"a collective of {bucket or 'the model'}", self.groups.everyone, limit=limit)
