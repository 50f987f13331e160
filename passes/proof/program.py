"""A trace as a list of steps that compute numbers, and its evaluation.

Value numbering: equal numbers are equal values. A number stands for an expression: an operation, its constants, and the
numbers of its operands. The same expression always has the same number, whatever the trace and the names in it.

Source: Alpern, Wegman and Zadeck, Detecting equality of variables in programs (1988).

Lines are taken apart where they stand for others: calls of blocks, fusions, and the composite symbols of Thunder if the
step has fusions (which consist of their parts). What a line does besides is a law (:mod:`passes.proof.laws`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from passes.analysis.calls import block_function, region_of
from passes.analysis.recognise import (
    SEQUENCE_WAITS,
    changes_values,
    identity,
    is_deletion,
    is_foreign,
    is_random,
    is_return,
    is_unpack,
)
from passes.borders import snapshot
from passes.kernels.executors import kernel_id

from thunder.core import dtypes
from thunder.core.codeutils import ContextObject
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

# ---- numbers ----


HOLE = ("a value",)  # the place of an operand among the constants of an operation
Expression = tuple[Hashable, Hashable, tuple[int, ...]]  # operation, constants, operands
Type = tuple[tuple[int, ...], dtypes.dtype]  # shape, dtype


class Origin(NamedTuple):
    """The outputs of forward from whose gradients a gradient is computed, and whether other ranks, which hold other
    parts of the same sequences or products, have a part in it."""

    outputs: frozenset[int]
    is_shared: bool


class Numbers:
    """The table of expressions. ``lines`` has the first line that computed each, ``types`` its shape and dtype,
    ``composites`` the results of composite lines that were taken apart. ``synonyms`` are expressions that have the
    value of another one.
    """

    def __init__(self) -> None:
        self.expressions: list[Expression] = []
        self.lines: dict[int, BoundSymbol] = {}
        self.types: dict[int, Type] = {}
        self.composites: dict[int, tuple[int, ...]] = {}
        self.synonyms: dict[int, int] = {}
        self.outputs = frozenset[int]()  # those of forward, by their number
        self._table: dict[Expression, int] = {}
        self._origins: list[Origin] = []  # of each number

    def of(self, operation: Hashable, constants: Hashable = (), operands: tuple[int, ...] = ()) -> int:
        """The number of an expression."""
        expression = operation, constants, operands
        number = self._table.setdefault(expression, len(self.expressions))
        if number == len(self.expressions):
            self.expressions.append(expression)
        return self.synonyms.get(number, number)

    def origin(self, number: int) -> Origin:
        known = self._origins
        for operation, constants, operands in self.expressions[len(known) : number + 1]:
            own = frozenset([cast(int, constants)]) if operation == "cotangent" else frozenset[int]()
            of_operands = [known[i] for i in operands]
            is_shared = operation in SEQUENCE_WAITS or any(o.is_shared for o in of_operands)
            known.append(Origin(own.union(*(o.outputs for o in of_operands)), is_shared))
        return known[number]

    def difference(self, a: int, b: int) -> tuple[int, int]:
        """The smallest expressions in which two values differ: followed from the results to the first operation, or to
        the first operand, that is not the same."""
        while True:
            one, other = self.expressions[a], self.expressions[b]
            if one[:2] != other[:2] or len(one[2]) != len(other[2]):
                return a, b
            differing = [pair for pair in zip(one[2], other[2], strict=True) if pair[0] != pair[1]]
            if not differing:
                return a, b
            a, b = differing[0]

    def text(self, number: int, depth: int = 2) -> str:
        """An expression as a reader sees it, ``depth`` operations deep, with the constants that tell it from others."""
        operation, constants, operands = self.expressions[number]
        if operation == "result":
            return f"{self.text(operands[0], depth)}[{constants}]"
        draw = ""
        if operation == "draw":
            count, operation, constants = cast(tuple[int, Hashable, Hashable], constants)
            draw = f" (draw {count})"
        if operation == "unless unused" and depth:
            return (
                f"{self.text(operands[0], depth)} unless outputs {sorted(cast(frozenset[int], constants))} are unused"
            )
        named = operation if isinstance(operation, str) else getattr(operation, "name", None)
        name = named if isinstance(named, str) else str(operation)
        inside = [self.text(n, depth - 1) for n in operands] if depth else ["..."] * bool(operands)
        if isinstance(constants, Arguments) and depth:
            inside = constants.texts(iter(inside))
        elif not operands:
            inside = [str(getattr(c, "name", c)) for c in (constants if isinstance(constants, tuple) else (constants,))]
        return f"{name.removeprefix('kernels.')}({', '.join(inside)}){draw}" if inside else name

    def place(self, number: int) -> str:
        """The line of the model's source that computes a value; empty if none is known."""
        line = self.lines.get(number)
        if line is None or line.source_filename is None:
            return ""
        where = line.source_positions
        return f"{line.source_filename}:{where.lineno}" if where is not None else line.source_filename


class Arguments(NamedTuple):
    """The arguments of a line without the names of its operands."""

    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]

    def texts(self, operands: Iterator[str]) -> list[str]:
        """The arguments as a reader sees them, with the operands' texts in their places."""

        def text(value: Any) -> str:
            if value == HOLE:
                return next(operands)
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
                return str(value[1]) if value[0] is float else repr(value[1])
            if isinstance(value, tuple):
                return f"({', '.join(map(text, value))}{',' * (len(value) == 1)})"
            return str(getattr(value, "name", value))

        return [*map(text, self.args), *(f"{name}={text(value)}" for name, value in self.kwargs)]


def arguments_of(args: Any, kwargs: Any, operands: list[str]) -> Arguments:
    """The arguments of a line as a part of its expression. The names of values are added to ``operands``."""
    return Arguments(
        tuple([constant(a, operands) for a in args]),
        tuple([(name, constant(value, operands)) for name, value in sorted(kwargs.items())]),
    )


def constant(value: Any, operands: list[str]) -> Hashable:
    """An argument of a line as a part of its expression. The names of values are added to ``operands``."""
    if isinstance(value, NumberProxy) and value.value is not None:
        value = value.value
    if isinstance(value, Proxy):
        operands.append(value.name)
        return HOLE
    if isinstance(value, float):
        return float, repr(value)  # 0. and -0., nan
    if isinstance(value, (bool, int, str, complex)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return tuple(constant(v, operands) for v in value)
    if isinstance(value, dict):
        return tuple((k, constant(v, operands)) for k, v in sorted(value.items(), key=str))
    if isinstance(value, slice):
        return "slice", constant((value.start, value.stop, value.step), operands)
    if isinstance(value, ContextObject):
        return value
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return value


# ---- programs ----


Values = dict[str, Any]  # numbers, tuples of numbers (collections), or what a law passes on, by name
Law = Callable[["Evaluation", BoundSymbol, Values], None]
Lowering = tuple[list["Step"], list[str], Any]  # steps, the names of their operands, and what they return


class UnprovenError(Exception):
    """A line for which no law holds. The message says why, ``line`` shows it."""

    def __init__(self, message: str, line: BoundSymbol | None = None) -> None:
        super().__init__(message if line is None else f"{message}: {text_of(line)}")


def text_of(line: BoundSymbol) -> str:
    """A line as a trace prints it, without the types of its results."""
    return str(line.from_bsym(header="")).splitlines()[0].strip().partition("  # ")[0]


class Step(NamedTuple):
    """One line: the operation, its constants and operands, the names of its results. ``law``: what it does instead."""

    line: BoundSymbol
    operation: Hashable
    constants: Hashable
    operands: tuple[str, ...]
    results: tuple[str | None, ...]
    law: Law | None


class Program:
    """The steps of a trace. ``opened``: whether composite symbols are taken apart. ``lowers``: whether lines that no
    executor runs have a second expression, as they are when they are lowered."""

    def __init__(
        self, lines: Iterable[BoundSymbol], laws: dict[Hashable, Law], *, opened: bool, lowers: bool = False
    ) -> None:
        self.steps: list[Step] = []
        for line in lines:
            steps = [*_steps(line, laws, opened)]
            self.steps += steps
            if lowers and line.sym.executor is None and any(s.law in (None, _agree) for s in steps):
                self.steps.append(Step(line, "lowered", (), (), (), _lower_too))


def has_fusions(*traces: TraceCtx) -> bool:
    """True if a line of the traces, or of the blocks that they call, is a fusion."""
    for trace in traces:
        for line in trace.bound_symbols:
            called = block_function(line)
            if line.sym.is_fusion or (called is not None and has_fusions(called.trace)):
                return True
    return False


WRITTEN = {kernel_id("batch_norm"): (3, 4)}  # the arguments that a kernel writes, by its id
IDENTITIES = (PrimIDs.SHALLOW_COPY, PrimIDs.UPDATE_ALIASES, snapshot.id)


def _steps(line: BoundSymbol, laws: dict[Hashable, Law], opened: bool) -> Iterable[Step]:
    operation = identity(line.sym)
    if line.sym.is_fusion and line.subsymbols:
        yield Step(line, operation, (), (), (), _fused)
        return
    law = laws.get(operation) or laws.get(type(operation)) or _own_law(line, operation)
    if law is None and line.subsymbols and opened and not is_random(line):
        for part in line.subsymbols:
            yield from _steps(part, laws, opened)
        yield _plain_step(line)._replace(law=_agree)
        return
    yield Step(line, operation, (), (), (), law) if law is not None else _plain_step(line)


def _plain_step(line: BoundSymbol) -> Step:
    """The step of a line whose results are an expression of its arguments."""
    operands: list[str] = []
    operation = identity(line.sym)
    constants = arguments_of(line.args, line.kwargs, operands)
    if is_foreign(line.sym):
        operation = operation, line.sym.name
    return Step(line, operation, constants, tuple(operands), _results(line), None)


def _results(line: BoundSymbol) -> tuple[str | None, ...]:
    out = line.output if isinstance(line.output, (tuple, list)) else (line.output,)
    return tuple(o.name if isinstance(o, Proxy) else None for o in out)


def _own_law(line: BoundSymbol, operation: Hashable) -> Law | None:
    if is_unpack(line):
        return _unpack
    if is_deletion(line):
        return _delete
    if is_return(line) or operation in (PrimIDs.COMMENT, PrimIDs.SINK):
        return _nothing
    if operation in IDENTITIES:
        return _same
    if block_function(line) is not None:
        return _call
    if operation == PrimIDs.COPY_:
        return _write
    if line.sym.is_fusion or not changes_values(line):
        return _draw if not line.sym.is_fusion and is_random(line) else None
    return _update


class Evaluation:
    """The numbers of a step's values.

    ``trusted``: whether the parts of a composite line are known to be what the line says, as in the unsharded program;
    an executor may run either. ``lower`` makes the lines that run a line which is not fused (see :func:`_lower_too`).
    ``effects`` are what the step writes, ``rounding`` why values are only nearly those of the unsharded program.
    """

    def __init__(
        self,
        numbers: Numbers,
        laws: dict[Hashable, Law],
        *,
        opened: bool,
        trusted: bool = False,
        lower: Callable[[BoundSymbol], TraceCtx] | None = None,
    ) -> None:
        self.numbers, self.laws, self.opened, self.trusted, self.lower = numbers, laws, opened, trusted, lower
        self.effects: list[tuple[Hashable, ...]] = []
        self.rounding: dict[str, None] = {}
        self.draws: Counter[tuple[Hashable, ...]] = Counter()
        self._programs: dict[int, tuple[TraceCtx | BoundSymbol, Program]] = {}
        self._lowerings: dict[Hashable, Lowering] = {}

    def lowering(self, line: BoundSymbol) -> Lowering:
        """The lines that run a line which is not fused, made once for all that differ only in the names of values."""
        assert self.lower is not None
        step, given = _plain_step(line), line.flat_proxy_args
        places = {a.name: i for i, a in reversed([*enumerate(given)])}
        key = step.operation, step.constants, tuple([(places[a.name], _kind(a)) for a in given])
        if key not in self._lowerings:
            lowered = self.lower(line)
            steps = [s for b in lowered.bound_symbols for s in _steps(b, self.laws, self.opened)]
            self._lowerings[key] = steps, [a.name for a in given], returned(lowered)
        return self._lowerings[key]

    def program(self, owner: TraceCtx | BoundSymbol, lines: Sequence[BoundSymbol] | None = None) -> Program:
        """The program of a trace, or of the ``lines`` of something else, made once."""
        known = self._programs.get(id(owner))
        if known is None:
            lines = owner.bound_symbols if isinstance(owner, TraceCtx) else lines or ()
            made = Program(lines, self.laws, opened=self.opened, lowers=self.lower is not None)
            known = self._programs[id(owner)] = (owner, made)
        return known[1]

    def run(self, steps: Sequence[Step], values: Values) -> None:
        """Adds the results of the steps to ``values``."""
        numbers = self.numbers
        for step in steps:
            try:
                if step.law is not None:
                    step.law(self, step.line, values)
                else:
                    operands = tuple([values[name] for name in step.operands])
                    self.assign(step, numbers.of(step.operation, step.constants, operands), values)
            except UnprovenError:
                raise
            except KeyError as error:
                raise UnprovenError(f"{error.args[0]} is used before it exists or after its del", step.line) from None
            except Exception as error:  # whatever a law or Thunder raises about odd arguments
                raise UnprovenError(
                    f"a line cannot be evaluated ({type(error).__name__}: {error})", step.line
                ) from None
            for result in step.line.flat_proxy_outs:
                if isinstance(result, TensorProxy):
                    self.check_type(result, values.get(result.name), step.line)

    def check_type(self, proxy: TensorProxy, number: Any, line: BoundSymbol | None = None) -> None:
        """Raises UnprovenError if a value has another shape or dtype than the same value elsewhere."""
        if not isinstance(number, int):
            return
        found = type_of(proxy)
        known = self.numbers.types.setdefault(number, found)
        if known != found:
            what = f"{proxy.name} is {shape_text(found)}, elsewhere the same value is {shape_text(known)}"
            raise UnprovenError(what, line)

    def assign(self, step: Step, number: int, values: Values) -> None:
        """Names the results of a step whose expression has this number."""
        self.numbers.lines.setdefault(number, step.line)
        if not isinstance(step.line.output, (tuple, list)):
            if step.results[0] is not None:
                values[step.results[0]] = number
            return
        for i, name in enumerate(step.results):
            if name is not None:
                values[name] = result = self.numbers.of("result", i, (number,))
                self.numbers.lines.setdefault(result, step.line)

    def value(self, structure: Any, values: Values) -> Any:
        """The values of a nested structure of proxies."""
        if isinstance(structure, Proxy):
            if structure.name in values:
                return values[structure.name]
            if isinstance(structure, NumberProxy) and structure.value is not None:
                return constant(structure, [])
            raise UnprovenError(f"{structure.name} is used before it exists or after its del")
        if isinstance(structure, (tuple, list)):
            return tuple(self.value(x, values) for x in structure)
        return structure


def type_of(proxy: TensorProxy) -> Type:
    return tuple(proxy.shape), proxy.dtype


def shape_text(type: Type) -> str:
    """A shape and a dtype as traces print them: "f32[2, 4]"."""
    shape, dtype = type
    return f"{dtype.shortname()}{list(shape)}"


def signature(trace: TraceCtx) -> list[str]:
    """The names of the parameters of the function that a trace runs as. They need not be those of ``trace.args``."""
    described = trace.siginfo()
    if described.varargs is not None or described.varkwargs is not None or described.kwargs:
        raise UnprovenError(f"{described.name} takes more than positional arguments")
    return [name for name, _ in described.args]


def name_results(results: Any, found: Any, values: Values) -> None:
    """Gives the proxies in a nested structure the values at the same places."""
    if isinstance(results, Proxy):
        values[results.name] = found
    elif isinstance(results, (tuple, list)):
        for result, value in zip(results, found, strict=True):
            name_results(result, value, values)


def returned(trace: TraceCtx) -> Any:
    """What a trace returns."""
    last = trace.bound_symbols[-1]
    return last.args[0] if len(last.args) == 1 else last.args


# ---- laws of lines that are not communication ----


def _nothing(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    pass


def _unpack(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    if line.sym.id == PrimIDs.UNPACK_SEQUENCE:
        name_results(tuple(line.output), evaluation.value(line.args[0], values), values)


def _delete(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    if line.sym.id == PrimIDs.DEL:
        for a in line.flat_proxy_args:
            if values.pop(a.name, None) is None:
                raise UnprovenError(f"{a.name} is deleted before it exists, or twice", line)


def _same(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    name_results(line.output, evaluation.value(line.args[0], values), values)


def _write(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    source, target = line.args[:2]
    evaluation.effects.append(("write", values[target.name], values[source.name]))
    values[target.name] = values[source.name]
    name_results(line.output, values[source.name], values)


def _update(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    """A line that computes its results and new contents of some of its arguments."""
    places = WRITTEN.get(line.sym.id)
    if places is None:
        raise UnprovenError("no law tells what a line writes", line)
    step = _plain_step(line)
    number = evaluation.numbers.of(step.operation, step.constants, tuple([values[name] for name in step.operands]))
    evaluation.assign(step, number, values)
    for i in places:
        if (target := line.args[i]) is not None:
            new = evaluation.numbers.of("written", i, (number,))
            evaluation.effects.append(("write", values[target.name], new))
            values[target.name] = new


def _draw(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    step = _plain_step(line)
    operands = tuple([values[name] for name in step.operands])
    key = step.operation, step.constants, operands
    evaluation.draws[key] += 1
    drawn = evaluation.numbers.of("draw", (evaluation.draws[key], step.operation, step.constants), operands)
    evaluation.assign(step, drawn, values)


def _agree(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    """Checks a composite line that was taken apart: its parts do what the line says, because the unsharded program has
    the same line with the same results, or because Thunder takes it apart likewise."""
    step = _plain_step(line)
    operands = tuple([values[name] for name in step.operands])
    composite = evaluation.numbers.of(("composite", step.operation), step.constants, operands)
    results = tuple([values[name] for name in step.results if name is not None])
    known = evaluation.numbers.composites
    if evaluation.trusted:
        known[composite] = results
    elif known.get(composite) != results and _parts_results(evaluation, line, values) != results:
        raise UnprovenError("a line in a fusion does not do what its parts do", line)


def _lower_too(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    """An executor that fuses leaves some lines alone, which other executors run. Both forms have the same value."""
    steps, names, result = evaluation.lowering(line)
    inside = {name: values[a.name] for name, a in zip(names, line.flat_proxy_args, strict=True) if a.name in values}
    evaluation.run(steps, inside)
    for out, found in zip(_results(line), evaluation.value(result, inside), strict=True):
        if out is not None and found != values[out]:
            evaluation.numbers.synonyms[found] = values[out]


def _parts_results(evaluation: Evaluation, line: BoundSymbol, values: Values) -> tuple[int, ...]:
    """The results of a composite line by the parts that Thunder gives it now."""
    trace = TraceCtx()
    trace.names = set(values)
    try:
        with tracectx(trace):
            line.sym(*line.args, **line.kwargs)
    except Exception as error:  # whatever Thunder raises about its arguments
        raise UnprovenError(f"Thunder does not accept a line ({error})", line) from None
    (fresh,) = trace.bound_symbols
    inside = dict(values)
    evaluation.run([step for part in fresh.subsymbols for step in _steps(part, evaluation.laws, True)], inside)
    return tuple([inside[name] for name in _results(fresh) if name is not None])


def _kind(proxy: Proxy) -> Hashable:
    """The properties of a value by which an executor may choose."""
    if isinstance(proxy, TensorProxy):
        return tuple(proxy.shape), proxy.dtype, proxy.device, proxy.requires_grad
    return repr(proxy)


def _fused(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    """A fusion computes what its function was compiled from, or its own lines if that is not known."""
    region = region_of(line) or line
    ends = [(b.flat_proxy_args, b.flat_proxy_outs) for b in (region, line)]
    if [len(part) for part in ends[0]] != [len(part) for part in ends[1]]:
        raise UnprovenError(f"a fusion calls the function of {region.sym.name}, which has other arguments", line)
    (given, made), (args, outs) = ends
    inside: Values = {a.name: values[b.name] for a, b in zip(given, args, strict=True)}
    evaluation.run(evaluation.program(region, region.subsymbols).steps, inside)
    name_results(tuple(outs), evaluation.value(tuple(made), inside), values)


def _call(evaluation: Evaluation, line: BoundSymbol, values: Values) -> None:
    called = block_function(line)
    assert called is not None
    inside: Values = {name: values[a.name] for name, a in zip(signature(called.trace), line.args, strict=True)}
    evaluation.run(evaluation.program(called.trace).steps, inside)
    name_results(line.output, evaluation.value(returned(called.trace), inside), values)
