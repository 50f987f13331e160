"""The laws by which communication is erased from a step.

Let ``part(plan, owner, v)`` be this rank's part of a whole value ``v`` under a plan, and ``mean(plan, v)`` the mean of
``v`` over the plan's ranks (their sum, divided by the plan's divisor). Then

    all_gather(part(plan, v)) = v                     broadcast likewise, from the owner
    reduce_scatter(v) = part(plan, mean(plan, v))     reduce likewise, to the owner
    all_reduce(v) = part(plan, mean(plan, v))         the part of a replicated value is the value
    keep_shards(v) = part(secondary plan, v)
    offload(v) = v
    accumulated(v) = v + kept                         and ``accumulate`` adds v to what is kept

If a bucket's members are cut, its gather gives ``cut(v)``, and a gradient v of the part is ``widen(v)`` of the whole.

Each law has conditions: the bucket is as its plan says, and each value is a part under this very plan. A line that does
not meet them is an error. A value that travels with less precision than it had is noted as rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import fields
from typing import Any, NamedTuple

from passes.analysis.recognise import (
    FUTURES,
    GATHER_WAITS,
    GATHERS,
    OFFLOAD_WAITS,
    REDUCTION_WAITS,
    REDUCTIONS,
    TRIP_WAITS,
    TRIPS,
    bucket_of,
)
from passes.blocks import release
from passes.comm.sequence import PRODUCTS, cut, widen
from passes.comm.symbols import (
    accumulate,
    accumulated,
    check_ranks,
    keep_shards,
    note,
    replicated,
    wait_copies,
)
from passes.parameters import Uses, mark_unused, unless_unused
from passes.plan import Bucket, BucketPlan, Level, Member, ShardedParameter
from passes.plan.runtime import Sources
from passes.proof.program import HOLE, Arguments, Evaluation, Law, Numbers, UnprovenError, Values, name_results
from passes.schedule import not_in_pieces

import torch
from thunder.core import dtypes
from thunder.core.symbol import BoundSymbol


class InFlight(NamedTuple):
    """What a future stands for."""

    bucket: Bucket
    values: tuple[int, ...]


PART_OF_SUM = "part of sum"  # of a gradient and what was kept of it


# ---- the expressions that laws make ----


def whole(numbers: Numbers, parameter: ShardedParameter) -> int:
    """A whole parameter, in the dtype of its use."""
    return numbers.of("parameter", parameter)


def part(numbers: Numbers, parameter: ShardedParameter, value: int) -> int:
    """This rank's part of a value of a parameter's shape."""
    return numbers.of("part", (parameter.plan, parameter.owner), (value,))


def mean(numbers: Numbers, plan: BucketPlan, value: int) -> int:
    """The mean of a value over the ranks of a plan."""
    return numbers.of("mean", plan, (value,))


def with_kept(numbers: Numbers, parameter: ShardedParameter, plan: BucketPlan, value: int) -> int:
    """A gradient and what earlier steps have kept of the same parameter, before the reduction of this plan."""
    return numbers.of("with kept", (parameter.index, plan), (value,))


def unless_absent(numbers: Numbers, value: int, outputs: Sources) -> int:
    """A gradient that is None in a backward that comes from none of these outputs; always there if all are."""
    return value if outputs >= numbers.outputs else numbers.of("unless unused", outputs, (value,))


# ---- conditions ----


def as_planned(line: BoundSymbol, bucket: Bucket, *, gathers: bool) -> None:
    """Raises UnprovenError unless a bucket travels as its plan says."""
    plan, layout = bucket.plan, bucket.layout
    fresh = bucket.layout_of(bucket.members)
    if any(getattr(layout, name, None) != value for name, value in vars(fresh).items() if name not in CACHED):
        raise UnprovenError(f"bucket {bucket.label} has a layout that is not that of its members", line)
    if (other := next((m.parameter.plan for m in bucket.members if m.parameter.plan is not plan), None)) is not None:
        raise UnprovenError(f"bucket {bucket.label} {_another_plan(plan, other)}", line)
    planned = {(plan.unsharded_dtype if gathers else plan.reduced_dtype)(bucket.rest_dtype)}
    if not gathers and plan.reduce_dtype is None:  # as they are computed, also by the reduction before this one
        planned |= {g.dtype for g in line.args[0]}
    _check_seats(line, bucket)
    both_float = dtypes.is_float_dtype(bucket.dtype) and dtypes.is_float_dtype(bucket.rest_dtype)
    if bucket.dtype not in planned and not (gathers and both_float):  # a pass may send less, which is rounding
        says = " or ".join(sorted(str(d.shortname()) for d in planned))
        raise UnprovenError(f"bucket {bucket.label} travels as {bucket.dtype.shortname()}, its plan says {says}", line)
    if bucket.wire is not None and bucket.wire.reduces is gathers:
        raise UnprovenError(f"bucket {bucket.label} travels by a wire of the other direction", line)


def _check_seats(line: BoundSymbol, bucket: Bucket) -> None:
    """Raises UnprovenError unless each rank of a bucket that is cut has a seat, and this rank the one of its part."""
    plan = bucket.plan
    for m in bucket.members:
        part = m.parameter.cut
        if (part is not None) is not bucket.is_cut:
            raise UnprovenError(f"bucket {bucket.label} has whole members and such that are cut", line)
        if part is not None:
            seats = Counter(part.plan.seats)
            even = sorted(seats) == list(range(part.plan.ranks)) and len(set(seats.values())) == 1
            if not even or len(part.plan.seats) != plan.world_size or part.plan.seats[plan.rank] != part.plan.rank:
                raise UnprovenError(f"{m.parameter.name} is cut for the ranks {part.plan.seats}, not for these", line)


CACHED = frozenset({"unit", "permutation"})


def _another_plan(found: BucketPlan, planned: BucketPlan) -> str:
    """How the plan of a bucket is not that of its members."""
    if found.axis is not planned.axis:
        return f"is of the group {found.axis.value!r}, the plan of its members of {planned.axis.value!r}"
    if found.divisor != planned.divisor:
        return f"divides by {found.divisor:g}, the plan of its members by {planned.divisor:g}"
    for one in fields(found):
        a, b = getattr(found, one.name), getattr(planned, one.name)
        if a != b:
            return f"has {one.name} {a}, the plan of its members {b}"
    return "has members of another plan"


def _members(line: BoundSymbol, bucket: Bucket, values: tuple[Any, ...]) -> list[tuple[Member, int]]:
    if len(values) != len(bucket.members):
        raise UnprovenError(f"bucket {bucket.label} has {len(bucket.members)} members", line)
    return list(zip(bucket.members, values, strict=True))


def _rounds(evaluation: Evaluation, bucket: Bucket, before: dtypes.dtype, after: dtypes.dtype) -> None:
    """Notes that the values of a bucket, of dtype ``before``, arrive as others than cast to ``after``."""
    wire = bucket.dtype
    if bucket.wire is not None:
        evaluation.rounding[f"{bucket.label} travels by the wire {bucket.wire.name}"] = None
    elif wire != after and not fits(before, wire):
        evaluation.rounding[f"{bucket.label} of {before.shortname()} travels as {wire.shortname()}"] = None


def fits(values: dtypes.dtype, dtype: dtypes.dtype) -> bool:
    """Whether a dtype has every value of another one."""
    if values == dtype:
        return True
    if not dtypes.is_float_dtype(values) or not dtypes.is_float_dtype(dtype):
        return False
    one, other = (torch.finfo(dtypes.to_torch_dtype(d)) for d in (values, dtype))
    return other.eps <= one.eps and other.max >= one.max and other.smallest_normal <= one.smallest_normal


# ---- the laws ----


def _issue(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    given, bucket = line.args[0], bucket_of(line)
    found = evaluation.value(tuple(given), values)
    as_planned(line, bucket, gathers=line.sym.id in GATHERS)
    values[line.output.name] = InFlight(bucket, found)
    if line.sym.id in REDUCTIONS:
        for dtype in dict.fromkeys(g.dtype for g in given):
            _rounds(evaluation, bucket, dtype, dtype)


def _arrived(line: BoundSymbol, values: Values) -> InFlight:
    future = values[line.args[0].name]
    if not isinstance(future, InFlight) or future.bucket is not bucket_of(line):
        raise UnprovenError("a future is waited for as another bucket", line)
    return future


def _gathered(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    future = _arrived(line, values)
    _rounds(evaluation, future.bucket, future.bucket.rest_dtype, line.flat_proxy_outs[0].dtype)
    numbers = evaluation.numbers
    found = tuple(
        _used(numbers, m, _whole_of(numbers, m, v, line)) for m, v in _members(line, future.bucket, future.values)
    )
    name_results(tuple(line.flat_proxy_outs), found, values)


def _whole_of(numbers: Numbers, member: Member, value: int, line: BoundSymbol) -> int:
    """What a gather makes of the parts of one member. Raises UnprovenError if the value is not such a part."""
    operation, constants, operands = numbers.expressions[value]
    p = member.parameter
    if operation == "part" and constants == (p.plan, p.owner):
        kind, parameter, _ = numbers.expressions[operands[0]]
        if kind != "parameter" or (isinstance(parameter, ShardedParameter) and parameter.full_shape == p.full_shape):
            return operands[0]
    raise UnprovenError(f"{numbers.text(value)} is gathered as {p.name}", line)


def _used(numbers: Numbers, member: Member, whole: int) -> int:
    """What a gather gives of a whole parameter: itself, or this rank's part."""
    part = member.parameter.cut
    return whole if part is None else numbers.of(cut.id, Arguments((HOLE, part), ()), (whole,))


def _of_whole(numbers: Numbers, member: Member, gradient: int) -> int:
    """The gradient of a whole parameter, of which a step has this: that of the whole, or of this rank's part."""
    part = member.parameter.cut
    if part is None:
        return gradient
    operation, constants, operands = numbers.expressions[gradient]
    if operation == PART_OF_SUM and constants == part:
        return operands[0]
    return numbers.of(widen.id, Arguments((HOLE, part), ()), (gradient,))


def _with_kept(numbers: Numbers, member: Member, plan: BucketPlan, gradient: int) -> int:
    """A gradient, of the whole or of this rank's part, and what earlier steps have kept of it."""
    total = with_kept(numbers, member.parameter, plan, _of_whole(numbers, member, gradient))
    part = member.parameter.cut
    return total if part is None else numbers.of(PART_OF_SUM, part, (total,))


def _reduced(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    future, numbers = _arrived(line, values), evaluation.numbers
    found = tuple(
        part(numbers, m.parameter, mean(numbers, future.bucket.plan, _of_whole(numbers, m, v)))
        for m, v in _members(line, future.bucket, future.values)
    )
    name_results(tuple(line.flat_proxy_outs), found, values)


def _offloaded(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    name_results(tuple(line.flat_proxy_outs), _arrived(line, values).values, values)


def _departed(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    """What travels arrives as it was, and so does the rest."""
    values[line.output.name] = evaluation.value(line.args[0], values)


def _returned(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    name_results(line.output, values[line.args[0].name], values)


def _replicated(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    given, bucket = line.args
    as_planned(line, bucket, gathers=True)
    pairs = zip(given, bucket.members, strict=True)
    found = [_whole_of(evaluation.numbers, m, values[p.name], line) for p, m in pairs]
    name_results(tuple(line.flat_proxy_outs), found, values)


def _kept_second(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    given, bucket = line.args
    as_planned(line, bucket, gathers=True)
    found = [part(evaluation.numbers, m.parameter, values[p.name]) for p, m in zip(given, bucket.members, strict=True)]
    name_results(tuple(line.flat_proxy_outs), found, values)


def _accumulated(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    given, bucket = line.args
    pairs = _members(line, bucket, evaluation.value(tuple(given), values))
    found = tuple(_with_kept(evaluation.numbers, m, bucket.plan, v) for m, v in pairs)
    name_results(tuple(line.flat_proxy_outs), found, values)


def _accumulate(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    given, bucket = line.args
    for m, v in _members(line, bucket, evaluation.value(tuple(given), values)):
        kept = _of_whole(evaluation.numbers, m, v)
        evaluation.effects.append(("keep", m.parameter.index, bucket.plan, kept))


def _marked(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    gradient, numbers = values[line.args[0].name], evaluation.numbers
    _outputs_marked(numbers, gradient, line)
    name_results(line.output, gradient, values)


def _unless_unused(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    numbers, gradient = evaluation.numbers, values[line.args[0].name]
    outputs = _outputs_marked(numbers, gradient, line)
    name_results(line.output, unless_absent(numbers, gradient, outputs), values)


def _outputs_marked(numbers: Numbers, gradient: int, line: BoundSymbol) -> Sources:
    """The outputs from which a line says that a gradient comes: those from which it does, or all if other ranks have a
    part in it, which may have a gradient where torch gives this one none."""
    origin, marked = numbers.origin(gradient), _outputs_of(numbers, line.args[1].obj)
    if marked != origin.outputs and not (origin.is_shared and marked == numbers.outputs):
        raise UnprovenError(
            f"a gradient that comes from outputs {sorted(origin.outputs)} is taken for one from {sorted(marked)}", line
        )
    return marked


def _outputs_of(numbers: Numbers, uses: Uses) -> Sources:
    """The outputs from which the sources of a gradient come, also through what torch's backward of a line returns."""
    found: set[int] = set()
    seen, left = set[int](), list(uses.sources)
    while left:
        if (i := left.pop()) in seen:
            continue
        seen.add(i)
        if i < 0:
            found |= numbers.outputs
        elif i in numbers.outputs:
            found.add(i)
        else:
            given, _ = max((call for call in uses.unused.calls if call[1] <= i), key=lambda call: call[1])
            left += frozenset[int]().union(*given)
    return frozenset(found)


def _in_pieces(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    """Products beside the collective of their rows have the values of their lines."""
    inside = {a.name: values[a.name] for a in line.flat_proxy_args}
    evaluation.run(evaluation.program(line, line.subsymbols).steps, inside)
    if text := not_in_pieces(line):
        raise UnprovenError(f"products are not those of their lines: {text}", line)
    name_results(line.output, evaluation.value(line.output, inside), values)


def _nothing(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    pass


LAWS: dict[Hashable, Law] = {
    **dict.fromkeys(FUTURES, _issue),
    **dict.fromkeys(GATHER_WAITS, _gathered),
    **dict.fromkeys(REDUCTION_WAITS, _reduced),
    **dict.fromkeys(OFFLOAD_WAITS, _offloaded),
    **dict.fromkeys(TRIPS, _departed),
    **dict.fromkeys(TRIP_WAITS, _returned),
    replicated.id: _replicated,
    keep_shards.id: _kept_second,
    accumulated.id: _accumulated,
    accumulate.id: _accumulate,
    mark_unused.id: _marked,
    unless_unused.id: _unless_unused,
    **dict.fromkeys(PRODUCTS, _in_pieces),
    **dict.fromkeys((check_ranks.id, note.id, wait_copies.id, release.id), _nothing),
}


def expected_gradient(
    numbers: Numbers, parameter: ShardedParameter, gradient: int, adds: frozenset[Level] = frozenset()
) -> int:
    """What a step must return for a parameter whose whole gradient, on this rank's batch, is ``gradient``."""
    plan = parameter.plan
    if Level.WHOLE in adds:
        gradient = with_kept(numbers, parameter, plan, gradient)
    found = part(numbers, parameter, mean(numbers, plan, gradient))
    if plan.outer is not None:
        if Level.REPLICAS in adds:
            found = with_kept(numbers, parameter, plan.outer, found)
        found = numbers.of("part", (plan.outer, parameter.owner), (mean(numbers, plan.outer, found),))
    return found
