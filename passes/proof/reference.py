"""The unsharded program: what Thunder makes of the recorded computation without any pass of ours.

Thunder's autodiff differentiates the record, and the same executors lower it. A block is differentiated by itself; a
call of it is a line whose gradient is one more line:

    x1, state = Block(x0, w, b)
    gx0, gw, gb = Block_vjp(state, gx1)

What each call needs, and the block's lines as autodiff gets them, are found here and not by :mod:`passes.blocks`, which
the proof judges.

Note [Parts]. Autodiff and executors may treat a composite symbol as a whole, by a rule or a kernel of its own. Passes
take some of these symbols apart. A symbol and its parts have the same value, so that the reference may take apart the
very same ones; which these are is read from the compiled traces.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from passes.analysis.calls import CallOf, block_of, call_tag
from passes.analysis.recognise import is_unpack, names
from passes.blocks import copy_of, executor
from passes.compat.jit import OwnLine, compile_data_and_stats, symbol_that_calls, with_operators_of
from passes.kernels.executors import fuses
from passes.plan import ShardedParameter, TracedParameters
from passes.proof.laws import whole
from passes.proof.program import Evaluation, Law, Numbers, UnprovenError, Values, name_results

from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import AnyProxy, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, get_tracectx, tracectx
from thunder.core.transform_common import dce
from thunder.core.transforms import get_grad, is_constant_for_vjp, put_grad
from thunder.extend import FusionExecutor, get_always_executors
from thunder.transforms.autodiff import grad_transform_on_trace


class Needs(NamedTuple):
    """The numbers of the inputs of a call that need a gradient, and of the outputs that get one."""

    gradients: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()


@dataclass(eq=False)
class Call(OwnLine):
    """A block as some calls need it. It is the id of the symbol of these lines."""

    block: Any
    needs: Needs
    joint: TraceCtx | None = None

    @cached_property
    def symbol(self) -> Symbol:
        return self._symbol("", self.block.symbol.meta, self)

    def _symbol(self, suffix: str, meta: Any, id: Hashable, **options: Any) -> Symbol:
        name = f"{self.block.name}{suffix}"
        return symbol_that_calls(name, meta, None, id=id, is_prim=True, tags=self.block.symbol.tags, **options)

    def execute(self, *args: Any) -> Any:
        return self._symbol("", self.block.symbol.meta, Plain(self), executor=executor)(*args)

    def differentiate(self, *args: Any) -> Any:
        inputs = self.differentiated

        def forward_meta(*args: Any) -> tuple[Any, ...]:
            results = tuple(TensorProxy(like=o, requires_grad=False, tags=set()) for o in self.block.outputs)
            return (*results, AnyProxy(None, prefix="state"))

        def vjp_meta(*values: Any) -> tuple[TensorProxy, ...]:
            return tuple(TensorProxy(like=args[i], requires_grad=False, tags=set()) for i in inputs)

        *outs, state = self._symbol("_forward", forward_meta, Forward(self), executor=executor)(*args)
        cotangents = tuple(get_grad(outs[i]) for i in sorted(self.needs.outputs))
        gradients = self._symbol("_vjp", vjp_meta, Vjp(self), executor=executor)(state, *cotangents)
        _put_grads([args[i] for i in inputs], gradients)
        return tuple(outs)

    @cached_property
    def lowered(self) -> TraceCtx:
        """The block's own forward and backward in one trace, or its forward if nothing needs a gradient."""
        variants = [v for needs, v in self.block.variants.items() if needs[:2] == self.needs]
        taken = next((v.differentiated for v in variants if v.differentiated is not None), None)
        first = taken_apart(self._as_autodiff_takes_it(), taken)
        return lowered(grad_transform_on_trace(first) if self.needs.gradients else first)

    @cached_property
    def differentiated(self) -> list[int]:
        """The inputs that get a gradient."""
        gradients = results_of(self.lowered)["output"]
        return [i for i in sorted(self.needs.gradients) if isinstance(gradients[i], TensorProxy)]

    def _as_autodiff_takes_it(self) -> TraceCtx:
        """The recorded lines, with inputs that say whether they need a gradient, and the outputs that get one."""
        block = self.block
        new = from_trace(block.trace)
        new.names = set(block.trace.names)
        with tracectx(TraceCtx()):
            args = {
                p.name: TensorProxy(like=p, name=p.name, requires_grad=i in self.needs.gradients, tags=set())
                for i, p in enumerate(block.inputs)
            }
        new.args = tuple(args.values())
        *lines, _ = block.trace.bound_symbols
        new.bound_symbols = [prims.unpack_trivial.bind(a, name=name, output=a) for name, a in args.items()]
        new.bound_symbols += [copy_of(line) for line in lines if not is_unpack(line)]
        results = tuple(o for i, o in enumerate(block.outputs) if i in self.needs.outputs)
        with tracectx(new):
            prims.python_return({"output": results, "flat_args": new.args, "outputs": block.outputs})
        return new


def _put_grads(inputs: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Adds the lines that give each input its gradient. Thunder makes the first, at length; the others are like it."""
    lines = get_tracectx().peek_scope()
    for i, pair in enumerate(zip(inputs, gradients, strict=True)):
        if i == 0:
            put_grad(*pair)
        else:
            lines.append(lines[-1].from_bsym(args=pair))


@dataclass(frozen=True)
class Plain:
    """The id of a call where nothing is differentiated."""

    call: Call


class Forward(Plain):
    """The id of a call that is differentiated."""


class Vjp(Plain):
    """The id of the gradient of a call."""


def lowered(trace: TraceCtx) -> TraceCtx:
    """A trace as the executors of the current compilation run it, with nothing fused."""
    executors = compile_data_and_stats()[0].executors_list
    new = with_operators_of(executors, trace)
    takes_lines = any(isinstance(e, FusionExecutor) for e in executors)  # and may not fuse them
    return with_operators_of(get_always_executors(), new) if takes_lines and not leaves_lines() else new


def lowered_line(line: BoundSymbol) -> TraceCtx:
    """The lines that run a line which no executor has fused."""
    trace = TraceCtx()
    trace.names = {*names(line.flat_proxy_args), *names(line.flat_proxy_outs)}
    outputs = line.output if isinstance(line.output, (tuple, list)) else (line.output,)
    with tracectx(trace):
        trace.bound_symbols.append(copy_of(line))
        prims.python_return(tuple(outputs))
    return with_operators_of(get_always_executors(), trace)


def leaves_lines() -> bool:
    """True if an executor of the current compilation fuses: it leaves lines alone that others run."""
    return any(map(fuses, compile_data_and_stats()[0].executors_list))


@dataclass
class Reference:
    """The unsharded program of a compiled step, lowered. ``joint``: forward and backward, if it is differentiated.

    ``inputs`` are the names of its inputs with the sharded parameters among them.
    """

    trace: TraceCtx
    joint: bool
    inputs: dict[str, ShardedParameter | None]
    calls: list[Call] = field(default_factory=list)


def reference(record: TraceCtx, parameters: TracedParameters, compiled: TraceCtx, *, differentiated: bool) -> Reference:
    """The unsharded program of a recorded computation. Runs inside Thunder's compilation, whose executors it takes.
    ``compiled`` is what the passes gave to autodiff (see Note [Parts])."""
    inputs = {p.name: parameters.get(p) for p in record.args}
    _check_equal_calls(record)
    calls: dict[tuple[int, Needs], Call] = {}
    new = from_trace(record)
    # one line for all inputs, of which each parameter is one
    new.bound_symbols.append(prims.unpack_trivial.bind(record.args, name="inputs", output=record.args))
    lines = taken_apart(_with_one_name_each(dce(record), parameters), compiled)
    for line, needs in _with_needs(lines.bound_symbols, lines.args):
        bsym = copy_of(line, tags=False)
        block = block_of(line)
        if block is not None:
            bsym = bsym.from_bsym(sym=calls.setdefault((id(block), needs), Call(block, needs)).symbol)
        if line.sym.id == PrimIDs.RETURN:
            _copy_returned_inputs(new, bsym)
        elif line.sym.id != PrimIDs.UNPACK_TRIVIAL:
            new.bound_symbols.append(bsym)
    trace = lowered(grad_transform_on_trace(new) if differentiated else dce(new))
    for call in calls.values():
        call.lowered  # noqa: B018  while the executors are known
    return Reference(trace, differentiated, inputs, list(calls.values()))


def _with_needs(lines: Sequence[BoundSymbol], args: Sequence[Any]) -> Iterator[tuple[BoundSymbol, Needs]]:
    """The lines, with what each one needs if it calls a block."""
    flows = {a.name for a in args if isinstance(a, TensorProxy) and a.requires_grad}
    for line in lines:
        if not _stops(line) and not flows.isdisjoint(names(line.flat_proxy_args)):
            flows |= names(line.flat_proxy_outs)
    read = names(lines[-1].args[0]["output"])
    for line in reversed(lines[:-1]):
        if not _stops(line) and not read.isdisjoint(names(line.flat_proxy_outs)):
            read |= names(line.flat_proxy_args)
    for line in lines:
        if block_of(line) is None or _stops(line):
            yield line, Needs()
            continue
        gradients = (i for i, a in enumerate(line.args) if a.name in flows and dtypes.is_inexact_dtype(a.dtype))
        yield line, Needs(frozenset(gradients), frozenset(i for i, o in enumerate(line.output) if o.name in read))


def _stops(line: BoundSymbol) -> bool:
    """Whether no gradient flows through a line."""
    return is_constant_for_vjp(line) or (bool(line.subsymbols) and all(map(_stops, line.subsymbols)))


def _check_equal_calls(record: TraceCtx) -> None:
    """Raises UnprovenError if calls of one block have not recorded the same calls of torch."""
    first: dict[int, CallOf] = {}
    for line in record.bound_symbols:
        called = call_tag(line)
        if called is not None and (known := first.setdefault(id(line.sym.id), called)).digest != called.digest:
            raise UnprovenError(f"{called.module} and {known.module} are taken for one block, and compute other things")


def _with_one_name_each(trace: TraceCtx, parameters: TracedParameters) -> TraceCtx:
    """The trace with one name for a parameter that has several (tied weights)."""
    first: dict[ShardedParameter, Any] = {}
    swap: dict[Variable, Any] = {}
    for p in trace.args:
        parameter = parameters.get(p)
        if parameter is not None and first.setdefault(parameter, p) is not p:
            swap[variableify(p)] = first[parameter]
    if not swap:
        return trace
    new = from_trace(trace)
    for line in trace.bound_symbols:
        if is_unpack(line):
            new.bound_symbols.append(line)
        elif line.sym.id == PrimIDs.RETURN:
            results = line.args[0]
            output = line.from_bsym(args=(results["output"],)).from_bsym_swap_proxies(swap).args[0]
            new.bound_symbols.append(line.from_bsym(args=({**results, "output": output},)))
        else:
            new.bound_symbols.append(line.from_bsym_swap_proxies(swap))
    return new


def taken_apart(trace: TraceCtx, compiled: TraceCtx | None) -> TraceCtx:
    """A trace with the parts of each composite line that is not whole in the trace that autodiff has got."""
    if compiled is None:
        return trace
    top = {_identity(b) for b in compiled.bound_symbols}

    def parts(line: BoundSymbol) -> Iterator[BoundSymbol]:
        apart = _identity(line) not in top and any(_has_part(part, top) for part in line.subsymbols)
        for part in line.subsymbols if apart else ():
            yield from parts(part)
        if not apart:
            yield line

    new = from_trace(trace)
    new.bound_symbols = [part for line in trace.bound_symbols for part in parts(line)]
    return new


def _identity(line: BoundSymbol) -> Hashable:
    return (line.sym.id, *sorted(names(line.flat_proxy_outs)))


def _has_part(line: BoundSymbol, top: set[Hashable]) -> bool:
    return _identity(line) in top or any(_has_part(part, top) for part in line.subsymbols)


def _copy_returned_inputs(trace: TraceCtx, last: BoundSymbol) -> None:
    """Adds the last line, with copies of the inputs that it returns: Thunder's autodiff gives them no gradient."""
    inputs = {p.name for p in trace.args}

    def copied(x: Any) -> Any:
        return prims.shallow_copy(x) if isinstance(x, TensorProxy) and x.name in inputs else x

    with tracectx(trace):
        output = tree_map(copied, last.args[0]["output"])
    trace.bound_symbols.append(last.from_bsym(args=({**last.args[0], "output": output},)))


# ---- its numbers ----


def first_values(numbers: Numbers, inputs: dict[str, ShardedParameter | None]) -> Values:
    """The numbers of the inputs, in their order."""
    return {
        name: numbers.of("input", i) if parameter is None else whole(numbers, parameter)
        for i, (name, parameter) in enumerate(inputs.items())
    }


def _cotangent(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    places = values["cotangents of"].get(line.args[0].name)
    values[line.output.name] = places.pop(0)


def cotangents(results: Any, found: Any) -> dict[str, list[Any]]:
    """For each name among the results, the cotangents at its places."""
    places: dict[str, list[Any]] = {}
    for result, cotangent in zip(results, found, strict=True):
        if isinstance(result, TensorProxy):
            places.setdefault(result.name, []).append(cotangent)
    return places


def results_of(trace: TraceCtx) -> dict[str, Any]:
    """The structure that the last line of a trace returns."""
    found: dict[str, Any] = trace.bound_symbols[-1].args[0]
    return found


def _inside(call: Call, given: Any) -> Values:
    args = call.lowered.args
    return {p.name: v for p, v in zip(args, given, strict=True)}


def _run_plain(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    call = line.sym.id.call
    inside = _inside(call, evaluation.value(tuple(line.args), values))
    evaluation.run(evaluation.program(call.lowered).steps, inside)
    name_results(tuple(line.output), evaluation.value(tuple(results_of(call.lowered)["outputs"]), inside), values)


def _run_forward(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    call = line.sym.id.call
    inside = _inside(call, evaluation.value(tuple(line.args), values))
    steps = evaluation.program(call.lowered).steps
    cut = next((i for i, s in enumerate(steps) if s.operation == PrimIDs.GET_GRAD), len(steps))
    evaluation.run(steps[:cut], inside)
    outs = evaluation.value(tuple(results_of(call.lowered)["outputs"]), inside)
    name_results(tuple(line.output), (*outs, (inside, steps[cut:])), values)


def _run_vjp(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    call = line.sym.id.call
    state, *given = (values[a.name] for a in line.args)
    inside, steps = state
    results = results_of(call.lowered)
    inside["cotangents of"] = cotangents(results["fw_flat_out"], given)
    evaluation.run(steps, inside)
    found = [results["output"][i] for i in call.differentiated]
    name_results(tuple(line.output), evaluation.value(tuple(found), inside), values)


REFERENCE_LAWS: dict[Hashable, Law] = {
    PrimIDs.GET_GRAD: _cotangent,
    Plain: _run_plain,
    Forward: _run_forward,
    Vjp: _run_vjp,
}
