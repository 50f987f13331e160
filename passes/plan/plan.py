"""The sharding plan: plain data that the passes read. Nothing here touches a module or a process.

Each parameter has a place at rest (:class:`Placement`): split into a shard on each rank, whole on one owner rank, or
whole on every rank. Parameters without elements are not part of a plan.

Context parallelism. A whole sequence of ``length`` positions is cut into ``2 * ranks`` chunks of equal size (the last
ones may be shorter, and are padded). Rank r holds chunks r and ``2 * ranks - 1 - r``: with a causal mask, all ranks
then have the same work. In tensor parallelism, a dimension is cut into ``ranks`` chunks, of which rank r holds chunk r.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal, NamedTuple

from passes.plan.cost import CostModel, Kernels, default_cost_model
from passes.plan.runtime import Axis, Gradients, HostMemory, PlainRuntime, Runtime, Step

import torch
from thunder.core import dtypes

# ---- wires ----


Bucket = Any  # passes.plan.Bucket, whose file refers to this one


def _always(bucket: Bucket) -> bool:
    return True


def _nothing(bucket: Bucket) -> None:
    return None


def _no_state(bucket: Bucket, device: torch.device) -> Sequence[torch.Tensor]:
    return ()


class Ends(NamedTuple):
    """The work of a wire on the device, besides sending: what ``issue`` does before the message leaves, and ``finish``
    after it has arrived. ``late``: those of the bucket's bytes that ``finish`` sends, and waits for."""

    issue: Kernels = Kernels()
    finish: Kernels = Kernels()
    late: int = 0


def _no_work(bucket: Bucket) -> Ends:
    return Ends()


@dataclass(frozen=True)
class Wire:
    """A custom way to gather a bucket's shards, or to reduce its gradients: compressed for example.

    A plan has one for its gathers and one for its reductions (``CommPolicy.gather_dtype`` and ``reduce_wire``),
    and a pass may put one on any bucket of a gather.

    Args:
        issue: ``issue(tensors, bucket)`` starts to send this rank's shards, or its gradients of the unsharded
            parameters. Returns a future of any type.
        finish: ``finish(future, bucket)`` waits. Returns the unsharded parameters in their compute dtype, equal on all
            ranks, or this rank's shards of the averaged gradients.
        bytes: ``bytes(bucket)`` is the number of bytes that travel for the whole group: each of N ranks sends, and
            receives, ``(N - 1) / N`` of them.
        name: an identifier for traces and tables, which stands in the place of a dtype. Empty: the bucket's dtype.
        takes: whether it carries a bucket. Others travel as they are.
        prepare: what ``issue`` and ``finish`` need to know of a bucket, computed once: ``bucket.prepared``.
        state: ``state(bucket, device)`` are the tensors that the wire keeps from step to step, in the runtime's
            ``errors``. Makes those that are missing.
        reduces: it carries gradients, not parameters.
        work: ``work(bucket)`` is what the cost model counts for it beside the bytes. Default: nothing. Must be equal on
            all ranks, because the order of collectives depends on it.
    """

    issue: Callable[[tuple[torch.Tensor, ...], Bucket], Any]
    finish: Callable[[Any, Bucket], tuple[torch.Tensor, ...]]
    bytes: Callable[[Bucket], int]
    name: str = ""
    takes: Callable[[Bucket], bool] = _always
    prepare: Callable[[Bucket], Any] = _nothing
    state: Callable[[Bucket, torch.device], Sequence[torch.Tensor]] = _no_state
    reduces: bool = False
    work: Callable[[Bucket], Ends] = _no_work


# ---- sequences in parts ----


class Split(NamedTuple):
    """How one dimension of a value is split over ranks.

    The whole dimension has ``outer * length * inner`` elements, as if it had been reshaped from ``(outer, length,
    inner)``. Ranks hold parts of the middle one: (batch, sequence) flattened to rows is ``Split(0, batch, length, 1)``.

    Several values one behind the other may differ in size, each of which is split: of ``sections`` (2, 1, 1), with an
    outer of 4, the first one has ``length * 2 * inner`` elements. Queries that share keys with others are such values.
    """

    dim: int
    outer: int
    length: int
    inner: int
    sections: tuple[int, ...] = ()

    @classmethod
    def along(cls, dim: int, length: int) -> Split:
        """A dimension that is the sequence itself."""
        return cls(dim, 1, length, 1)

    @property
    def size(self) -> int:
        """Elements of the whole dimension."""
        return self.outer * self.length * self.inner

    def blocks(self) -> Iterator[tuple[int, int]]:
        """For each block, of which every rank has a part: where it begins, and its elements for one of ``length``."""
        start = 0
        for count in self.sections or (1,) * self.outer:
            yield start, count * self.inner
            start += count * self.inner * self.length


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """The ranks that hold the parts of a sequence, or of parameters.

    Args:
        ranks: how many they are.
        rank: this rank's number among them.
        pieces: the chunks of each rank: 2 of a sequence, 1 of a parameter.
        seats: for each rank over which parameters are sharded, in order, its number among those that share them.
        attention: how queries of one rank see the keys of others: "gather" gathers keys and values, "ulysses" exchanges
            heads for positions where heads divide, "auto" does what sends less.
        axis: their process group in ``runtime``.
        direct: whether ranks exchange messages, because the group's own reduce_scatter sends all to all (gloo).
        cost: what compute and messages take, for their order.
        within: the chunks of sequences of which other ranks hold parts; 1: none. Rows of these ranks are those of each
            chunk, so that a part of a sequence has a part of the rows.
    """

    ranks: int
    rank: int = 0
    _: KW_ONLY
    pieces: Literal[1, 2] = 2
    attention: Literal["auto", "gather", "ulysses"] = "auto"
    axis: Axis = Axis.CONTEXT
    direct: bool = False
    runtime: Runtime = field(default_factory=PlainRuntime)
    seats: tuple[int, ...] = ()
    cost: CostModel = default_cost_model("cpu", "gloo")  # noqa: RUF009  frozen
    within: int = 1

    def chunk(self, length: int) -> int:
        """Positions of one chunk of a sequence, padding included."""
        return -(-length // (self.pieces * self.ranks))

    def local(self, length: int) -> int:
        """Positions that each rank holds of a sequence, padding included."""
        return self.pieces * self.chunk(length)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of the chunks that a rank holds, in this order."""
        return (rank, 2 * self.ranks - 1 - rank)[: self.pieces]

    def part_of(self, split: Split) -> int:
        """Elements that each rank holds of a split dimension."""
        return split.outer * self.local(split.length) * split.inner


# ---- the plan ----


Shape = tuple[int, ...]


class Placement(Enum):
    """The place of a parameter at rest, that is between uses. It determines how the parameter is gathered and how its
    gradient is reduced.

    SHARD: dim 0 of ``(rows, *rest)`` is split into equal shards of ``ceil(rows / world_size)`` rows; the last ones are
    padded with zeros. all_gather, reduce_scatter.
    OWNER: whole on the rank that owns it, ``(0, *rest)`` on the others. broadcast, reduce.
    REPLICATE: whole on every rank. No gather, all_reduce.
    """

    SHARD = "shard"
    OWNER = "owner"
    REPLICATE = "replicate"


STRATEGY_NAMES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "hybrid_zero2": "hybrid ZeRO-2",
    "hybrid_zero3": "hybrid ZeRO-3",
    "zero3_secondary": "ZeRO-3 with second shards",
    "owner": "ZeRO-3 by owners",
}


def shard_shape(full_shape: Shape, world_size: int) -> Shape:
    """The shape of each rank's (padded) shard of a parameter of shape ``full_shape``."""
    rows, *rest = full_shape or (1,)
    return (-(-rows // world_size), *rest)


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """The sharding of a model, or of the part of it that has one strategy.

    Args:
        model: name of the model's class, for messages.
        world_size: ranks over which parameters are sharded.
        rank: this rank's number among them.
        strategy: its name, for messages.
        placement: the place of parameters at rest.
        axis: the process group of those ranks in ``runtime``.
        outer: the plan of the shards themselves in another group (hybrid strategies: replicated).
        secondary: the plan of second shards over fewer ranks, from which backward gathers; None: there are none.
        host: host memory, if parameters are at rest there; None: they are on the device that computes.
        param_dtype: dtype of floating-point parameters from gather to use; None: their dtype at rest.
        reduce_dtype: dtype in which their gradients are averaged; None: the one in which they are computed.
        sum_dtype: dtype in which gradients of lower precision are added up over steps; None: their own dtype.
        regather: gather parameters again in backward (ZeRO-3) instead of keeping them (ZeRO-2).
        bucketing: "none", "layer", "block", "model", or a size in MB (of unsharded parameters).
        pieces: how many buckets of about the same size a block's parameters make, if buckets are blocks.
        prefetch: how many buckets may be gathered ahead of use.
        max_inflight_bytes: limit of the bytes of buckets in flight; None: ``prefetch + 1`` times the trace's largest
            bucket.
        cost: the cost model of collectives and compute.
        divide_by: the number by which the sum of the ranks' gradients is divided; None: that of ranks, for their mean.
        direct: whether ranks exchange messages (passes/comm/direct.py) instead of calling the backend's collectives.
        averages: whether the backend's reduce_scatter can average, and is asked to.
        sums: whether gradients are added up before they are divided, except for what fp16 needs; else divided first, or
            averaged by the backend.
        gather: the wire of gathered parameters; None: they travel in ``param_dtype``.
        reduction: the wire of gradients; None: they travel in ``reduce_dtype``.
        runtime: the rank on which the model's steps run, the same object for all plans of a model.
    """

    model: str
    world_size: int
    rank: int = 0
    _: KW_ONLY
    strategy: str = "zero3"
    placement: Placement = Placement.SHARD
    axis: Axis = Axis.ALL
    outer: BucketPlan | None = None
    secondary: BucketPlan | None = None
    host: HostMemory | None = None
    param_dtype: dtypes.dtype | None = None
    reduce_dtype: dtypes.dtype | None = None
    sum_dtype: dtypes.dtype | None = dtypes.float32
    regather: bool = True
    bucketing: str | float = "block"
    pieces: int = 1
    prefetch: int = 1
    max_inflight_bytes: int | None = None
    cost: CostModel = default_cost_model("cpu", "gloo")  # noqa: RUF009  frozen
    divide_by: float | None = None
    direct: bool = False
    averages: bool = False
    sums: bool = False
    gather: Wire | None = None
    reduction: Wire | None = None
    runtime: Runtime = field(default_factory=PlainRuntime)

    @property
    def group(self) -> Any:
        """The process group of the plan's collectives."""
        return self.runtime.group(self.axis)

    @property
    def divisor(self) -> float:
        """The number by which the sum of the ranks' gradients is divided."""
        return self.world_size if self.divide_by is None else self.divide_by

    @property
    def is_averaged(self) -> bool:
        """True if the backend averages gradients. It can only divide by the number of ranks."""
        return self.averages and self.divisor == self.world_size

    def divisors(self, dtype: dtypes.dtype) -> tuple[float, float]:
        """The numbers by which the backend's reductions in ``dtype`` divide gradients before and after they add them.

        With ``sums``, fp16 divides by a power of two near the root of the number of ranks before, as FSDP2 does: small
        gradients of many ranks do not vanish, large ones do not overflow.
        """
        if self.is_averaged:
            return 1, 1
        if not self.sums:
            return self.divisor, 1
        before = 2 ** (self.world_size.bit_length() // 2) if dtype == dtypes.float16 else 1
        return before, self.divisor / before

    def unsharded_dtype(self, dtype: dtypes.dtype) -> dtypes.dtype:
        """The dtype in which a parameter of ``dtype`` at rest is gathered and used."""
        return self.param_dtype if self.param_dtype is not None and dtypes.is_float_dtype(dtype) else dtype

    def reduced_dtype(self, dtype: dtypes.dtype) -> dtypes.dtype:
        """The dtype in which the gradient of a parameter of ``dtype`` at rest is averaged."""
        return self.reduce_dtype if self.reduce_dtype is not None else self.unsharded_dtype(dtype)

    def summed_dtype(self, dtype: dtypes.dtype) -> dtypes.dtype:
        """The dtype in which gradients of a parameter of ``dtype`` at rest are added up over steps."""
        computed = self.unsharded_dtype(dtype)
        return self.sum_dtype if self.sum_dtype is not None and computed.bytes < self.sum_dtype.bytes else computed


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter of a plan.

    ``name``, ``layer`` and ``block`` are the qualified names of the parameter, its module and its repeated block (None
    outside). ``index`` is its position among the model's parameters, ``dtype`` its dtype at rest (None: that of its
    bucket), ``owner`` the rank of the group that holds it if only one does, ``rest_device`` the device of its shard as
    torch prints it (empty: the one on which the parameter is used). ``is_distributed`` tells that it is a DTensor, of
    the whole shape, at rest. If it is ``cut``, a gather gives each rank its part only.
    """

    plan: BucketPlan
    name: str
    full_shape: Shape
    layer: str
    _: KW_ONLY
    block: str | None = None
    index: int = 0
    dtype: dtypes.dtype | None = None
    owner: int = 0
    rest_device: str = ""
    is_distributed: bool = False
    cut: Any = None  # the Part (passes.comm.sequence) with which this rank computes; None: the whole

    @cached_property
    def shard_shape(self) -> Shape:
        """The shape of the part that this rank holds at rest."""
        if self.plan.placement is Placement.SHARD:
            return shard_shape(self.full_shape, self.plan.world_size)
        if self.plan.placement is Placement.REPLICATE or self.owner == self.plan.rank:
            return self.full_shape
        return (0, *self.full_shape[1:])

    @cached_property
    def used_shape(self) -> Shape:
        """The shape of what a gather gives."""
        found: Shape = self.full_shape if self.cut is None else self.cut.local_shape(self.full_shape)
        return found

    @cached_property
    def full_numel(self) -> int:
        """Elements of the parameter, or of the part of it, while it is unsharded, padding included."""
        if self.cut is not None:
            return math.prod(self.used_shape)
        sharded = self.plan.placement is Placement.SHARD
        return self.plan.world_size * math.prod(self.shard_shape) if sharded else math.prod(self.full_shape)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """For each rank, the start and stop of its part of the flattened parameter, without padding."""
        end, ranks = math.prod(self.full_shape), range(self.plan.world_size)
        if self.plan.placement is Placement.OWNER:
            return tuple((0, end if r == self.owner else 0) for r in ranks)
        size = math.prod(self.shard_shape)
        return tuple((min(r * size, end), min((r + 1) * size, end)) for r in ranks)


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter in a bucket. Gradients of ``trainable`` members are reduced."""

    parameter: ShardedParameter
    trainable: bool

    @cached_property
    def numel(self) -> int:
        """Elements of one shard."""
        return math.prod(self.parameter.shard_shape)


# ---- what tracing finds ----


@dataclass
class TracedParameters:
    """The sharded parameters among a trace's inputs, and the step that is being compiled for each model.

    A proxy is identified by its ``history`` (Thunder's record of where the value came from), which survives renaming.
    """

    by_history: dict[int, tuple[Any, ShardedParameter]] = field(default_factory=dict)
    steps: dict[Runtime, Step] = field(default_factory=dict)

    def add(self, history: Any, parameter: ShardedParameter) -> None:
        self.by_history[id(history)] = (history, parameter)  # holding it keeps the id from being reused

    def get(self, proxy: Any) -> ShardedParameter | None:
        found = self.by_history.get(id(getattr(proxy, "history", None)))
        return found[1] if found else None

    def step_of(self, runtime: Runtime) -> Step:
        return self.steps.setdefault(runtime, Step(Gradients.REDUCED))

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        """The runtimes of the models whose parameters were found."""
        return tuple(dict.fromkeys(parameter.plan.runtime for _, parameter in self.by_history.values()))
