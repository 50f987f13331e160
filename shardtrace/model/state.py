"""What a sharded model remembers of its parameters, and where shards and their full-shape stand-ins change places."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from passes.comm.kept_gradients import Sums
from passes.compat import jitted_module, set_traced_device, traced_device
from passes.plan import CostModel, Gradients, Placement, Plan, Progress, Shape, ShardedParameter, Step
from shardtrace.model.flat import lay_out_flat
from shardtrace.model.home import Home
from shardtrace.options.strategy import Rules, ShardingStrategy
from shardtrace.ranks.consensus import announce, compare
from shardtrace.ranks.failure import blame
from shardtrace.ranks.mesh import Groups, is_alone, transport

import torch
import torch.distributed as dist
from thunder.core.dtypes import to_dtype
from thunder.core.module import ThunderModule
from thunder.distributed import get_skip_data_parallel_grad_sync
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

# Thunder goes through named_parameters() in the order of a set of strings, which Python hashes anew in each process.
ORDER_HINT = "if its forward iterates over named_parameters(), set PYTHONHASHSEED to the same number on all ranks"
ATTRIBUTE = "_shardtrace"  # of a sharded module: its ShardedState
PART_ATTRIBUTE = "_shardtrace_part_of"  # of a module inside that owns shards: the same
SHARD_ATTRIBUTE = "_shardtrace_link"  # of a shard: its Link


Came = tuple[str, str]  # what a step sends, and where it begins


@dataclass(frozen=True)
class Options:
    """The arguments of ``fsdp`` that the compiler needs, in their canonical form."""

    rules: Rules
    bucketing: str | float
    precision: MixedPrecisionPolicy | None
    evenness: float
    prefetch: int | None
    max_inflight_bytes: int | None
    timeout: float
    accumulation_dtype: torch.dtype | None
    check_steps: bool | None
    offload: CPUOffloadPolicy | None


@dataclass(frozen=True, eq=False)
class Entry:
    """One sharded parameter: the same ``nn.Parameter`` object as before sharding, now holding this rank's shard.

    ``owners`` are all the places where the model holds it: (module, attribute), more than one if it is tied.
    ``stand_in`` is a meta tensor of the full shape, in the dtype of its use, which Thunder traces in its place.
    """

    name: str
    full_shape: Shape
    layer: str
    block: str | None
    shard: nn.Parameter
    shard_shape: Shape
    dtype: torch.dtype
    strategy: ShardingStrategy
    home: Home
    stand_in: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def device(self) -> torch.device:
        """Where the parameter is computed with."""
        return traced_device(self.stand_in)

    @property
    def rest_device(self) -> torch.device:
        """Where its shard is."""
        return self.device if self.home.host is None else torch.device("cpu")

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the parameter was replaced, re-typed, moved or resized since it was sharded."""
        for module, attribute in self.owners:
            if module._parameters.get(attribute) is not self.shard:
                raise RuntimeError(
                    f"parameter {self.name!r} was replaced after fsdp(): change its values in place "
                    "(for example in shardtrace.full_params), or replace it before fsdp()"
                )
        for what, now, then in (
            ("dtype", self.shard.dtype, self.dtype),
            ("device", self.shard.device, self.rest_device),
            ("shape of the shard", tuple(self.shard.shape), self.shard_shape),
        ):
            if now != then:
                raise RuntimeError(
                    f"the {what} of parameter {self.name!r} was {then} when fsdp() sharded it and is {now} now: "
                    "convert or move the model before fsdp()"
                )


class ShardedState:
    """The sharding of one model. Copies deeply along with it; the process group is shared."""

    def __init__(
        self,
        model_name: str,
        groups: Groups,
        options: Options,
        entries: tuple[Entry, ...],
        cost: CostModel,
    ) -> None:
        self.model_name = model_name
        self.groups = groups
        self.group = groups.everyone
        self.options = options
        self.entries = entries
        self.unsharded = False  # inside full_params
        self.tracing = False  # stand-ins are in place
        self.keeps_gradients = False  # inside no_sync
        self.sums = Sums()
        self._agreed: set[tuple[str, ...]] = set()
        self.progress = Progress()
        self._came: Came | None = None  # of the step that was run last
        self._usual: dict[Came | None, Came] = {}  # what followed each, the last time
        self.cost = cost
        self.plans = {strategy: self._plan(strategy) for strategy in dict.fromkeys(e.strategy for e in entries)}
        self.by_stand_in = {
            id(e.stand_in): ShardedParameter(
                self.plans[e.strategy], e.name, e.full_shape, e.layer, e.block, index, to_dtype(e.dtype), e.home.owner
            )
            for index, e in enumerate(entries)
        }
        for e in entries:
            setattr(e.shard, SHARD_ATTRIBUTE, Link(self, e))
        lay_out_flat((e.shard, self.by_stand_in[id(e.stand_in)]) for e in entries)

    def _plan(self, strategy: ShardingStrategy) -> Plan:
        entries = [e for e in self.entries if e.strategy is strategy]
        home = entries[0].home
        devices = {e.device.type for e in entries}
        precision = self.options.precision
        meets = self.options.check_steps is not False and not is_alone(self.group)
        common: dict[str, Any] = {
            "model": self.model_name,
            "strategy": strategy.value,
            "everyone": self.group,
            "bucketing": self.options.bucketing,
            "prefetch": self.options.prefetch if self.options.prefetch is not None else 1 if strategy.regathers else 3,
            "max_inflight_bytes": self.options.max_inflight_bytes,
            "cost": self.cost,
            "sum_dtype": to_dtype(self.options.accumulation_dtype) if self.options.accumulation_dtype else None,
            "sums": self.sums,
            "guard": self.check_step,
            "meet": self.meet if meets else None,
            "progress": self.progress if meets else None,
            "blame": blame,
            "agree": self.agree,
            "announce": self.announce,
        }

        def over(group: dist.ProcessGroup, placement: Placement, **others: Any) -> Plan:
            sent = transport(group, devices)._asdict()
            return Plan(
                group=group, world_size=group.size(), rank=group.rank(), placement=placement, **sent, **common, **others
            )

        outer = self.groups.outer if strategy.is_hybrid and home.placement is Placement.SHARD else None
        return over(
            home.group,
            home.placement,
            host=home.host,
            regather=strategy.regathers and home.placement is not Placement.REPLICATE,
            outer=over(outer, Placement.REPLICATE, regather=False) if outer is not None and outer.size() > 1 else None,
            param_dtype=to_dtype(precision.param_dtype) if precision and precision.param_dtype else None,
            reduce_dtype=to_dtype(precision.reduce_dtype) if precision and precision.reduce_dtype else None,
        )

    @cached_property
    def _places(self) -> list[tuple[dict[str, nn.Parameter | None], str, Entry]]:
        return [(module._parameters, attribute, e) for e in self.entries for module, attribute in e.owners]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        new = memo[id(self)] = object.__new__(ShardedState)  # the modules to be copied refer to it
        entries = []
        for e in self.entries:
            stand_in = copy.deepcopy(e.stand_in, memo)
            set_traced_device(stand_in, e.device)
            shard, owners = copy.deepcopy((e.shard, e.owners), memo)
            entries.append(replace(e, shard=shard, stand_in=stand_in, owners=owners))
        new.__init__(self.model_name, self.groups, self.options, tuple(entries), self.cost)  # type: ignore[misc]
        return new

    def gradients(self) -> Gradients | None:
        """What a step that begins now is to do with gradients; None if it computes none."""
        if not torch.is_grad_enabled():
            return None
        if self.keeps_gradients or get_skip_data_parallel_grad_sync():  # which Thunder's own no_sync sets
            return Gradients.KEPT
        return Gradients.ADDED if self.sums.used else Gradients.REDUCED

    def check_step(self, step: Step) -> None:
        """The check of every step, as cheap as can be: tracing anew says what is wrong, or compiles another step."""
        if step.gradients is not self.gradients():
            raise RuntimeError("compiled for another use of gradients")
        if self.unsharded:
            raise RuntimeError("inside full_params")
        if self.sums.left_behind():
            raise RuntimeError("gradients were left behind")
        for parameters, attribute, entry in self._places:
            if parameters.get(attribute) is not entry.shard:
                raise RuntimeError(f"parameter {entry.name!r} was replaced")

    def agree(self, lines: list[str]) -> None:
        """Compares a compiled trace's collectives with other ranks'; what was agreed on before needs no second time.

        So a rank that alone sees a new shape, as with an uneven last batch, does not wait for the others.
        """
        known = tuple(lines)
        if known not in self._agreed:
            compare(self.group, self.what, lines, timeout=self.options.timeout, hint=ORDER_HINT)
            self._agreed.add(known)

    def meet(self, step: Step) -> None:
        """Raises on every rank if the ranks are about to run different steps, or come from different places.

        With ``check_steps`` each step is compared. Else one that sends other things than what followed the step before
        it the last time, or that begins elsewhere, such as after a forward instead of after a backward: a rank that
        changes alone so sends nothing, and gives up when the others have not come in time. A step that sends nothing is
        not compared.
        """
        if not step.collectives:
            return
        before, now = self._came, (step.sends, str(self.progress))
        unusual = before is not None and (self.progress.under_way or self._usual.get(before) != now)
        if self.options.check_steps or unusual:
            place, (first, *rest) = f"a step begins {now[1]}", step.collectives
            timeout, lines = self.options.timeout, [f"{first}, where {place}", *rest]
            compare(self.group, self.what, lines, timeout=timeout, hint=ORDER_HINT, likely=True, here=place)
            self.progress.drain()
        self._came = self._usual[before] = now
        self.progress.begin(step, "forward")

    def announce(self, error: str) -> None:
        """Makes the other ranks raise ``error`` too, where they compare the trace that this one fails to compile."""
        announce(self.group, self.what, error)

    @property
    def what(self) -> str:
        return f"the collectives of {self.model_name}"

    def check_callable(self, name: str) -> None:
        """Raises RuntimeError if the model is called without Thunder, unless its parameters are whole."""
        if not self.unsharded:
            raise RuntimeError(
                f"{name} is sharded and was called without Thunder: wrap it in thunder.jit, "
                "or call it inside shardtrace.full_params(model)"
            )

    def check_traceable(self) -> None:
        """Raises RuntimeError if the model cannot be traced as it is now."""
        if self.unsharded:
            raise RuntimeError(
                f"a jitted {self.model_name} was called inside full_params: call the model itself, or leave the context"
            )
        if left := self.sums.left_behind():
            self.sums.clear()
            raise RuntimeError(
                f"parameter {left[0]!r} has gradients from no_sync that the step after it did not reduce, as it did "
                "not use the parameter: use it there too, or call no_sync(model, reduce_each=True)"
            )
        for entry in self.entries:
            entry.check_unchanged()

    def check_part(self, module: nn.Module) -> None:
        """Raises RuntimeError if a module inside is called by itself, where its parameters are shards."""
        if not (self.unsharded or self.tracing):
            raise RuntimeError(
                f"a {type(module).__name__} inside the sharded {self.model_name} was called by itself, and holds only "
                f"this rank's shards: call the {self.model_name} through thunder.jit, or apply fsdp() to that module, "
                "or call it inside shardtrace.full_params"
            )

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """While the forward is traced, the modules hold full-shape stand-ins; everywhere else they hold the shards."""
        for parameters, attribute, entry in self._places:
            entry.stand_in.requires_grad_(entry.shard.requires_grad)
            parameters[attribute] = entry.stand_in
        self.tracing = True
        try:
            yield
        finally:
            self.tracing = False
            for parameters, attribute, entry in self._places:
                parameters[attribute] = entry.shard


class Link:
    """What a shard knows of the model it is of. Pickled as None: who saves a shard saves a tensor."""

    def __init__(self, state: ShardedState, entry: Entry) -> None:
        self.state, self.entry = state, entry

    def __reduce__(self) -> Any:
        return type(None), ()


def link_of(value: Any) -> Link | None:
    """The model and the entry of a shard; None for anything else."""
    return getattr(value, SHARD_ATTRIBUTE, None) if isinstance(value, torch.Tensor) else None


def state_of(module: nn.Module) -> ShardedState | None:
    """The state of a module that was sharded itself."""
    return module.__dict__.get(ATTRIBUTE)


def states_in(module: nn.Module) -> list[ShardedState]:
    """The states of all sharded modules in ``module``, itself included."""
    return [state for m in module.modules() if (state := state_of(m)) is not None]


def sharded_states(model: nn.Module) -> tuple[nn.Module, list[ShardedState]]:
    """The module itself, if ``model`` is a jitted one, and the states of the sharded modules in it.

    Raises ValueError if there are none.
    """
    module = jitted_module(model) if isinstance(model, ThunderModule) else model
    states = states_in(module)
    if not states:
        raise ValueError(f"{type(module).__name__} is not sharded: call shardtrace.fsdp(model) first")
    return module, states
