"""Whether the right tensors enter a step, and whether its results go where the model's forward puts them.

The prologue fetches the arguments of the computation: from those of the call, and from modules by name. The epilogue
gets the results, sets what forward sets on modules, and returns. Both are evaluated to numbers as they were traced and
as they run (:mod:`passes.proof.program`). What they return, and each write, must have the same number:

    (t_a_weight, t_b_weight) = fetch_parameters(module, names)      module.get_parameter("a.weight"), ...
    set_state(state_0, (t10, t13))                                  the line that packed these tensors as state_0
    result = rebuild(model_output, (t3, t4))                        the tensors
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from passes.analysis.recognise import identity, is_deletion, is_return
from passes.epilogue import Setter, keeping, run_rebuild, run_setter, watch
from passes.guards import fetch
from passes.proof.program import Numbers, UnprovenError, arguments_of, name_results, signature
from passes.shard_parameters import rows_of

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class Border(NamedTuple):
    """The prologue and the epilogue of a step, as traced and as run. A step may have no epilogue.

    ``setters`` are the functions that set what forward sets on modules, by the names of the lines that call them.
    """

    traced: tuple[TraceCtx, TraceCtx | None]
    runs: tuple[TraceCtx, TraceCtx | None]
    setters: Mapping[str, Setter]


def other_borders(border: Border) -> Iterator[str]:
    """How the step gets other arguments, or does something else with its results, than the call that was traced."""
    try:
        for what, traced, runs in zip(("prologue", "epilogue"), border.traced, border.runs, strict=True):
            if traced is not None and runs is not None:
                yield from _compared(what, traced, runs, border.setters)
    except UnprovenError as error:
        yield str(error)


def _compared(what: str, first: TraceCtx, last: TraceCtx, setters: Mapping[str, Setter]) -> Iterator[str]:
    numbers = Numbers()
    (traced, results), (runs, found) = (_Evaluation(numbers, trace, setters).run() for trace in (first, last))
    given = tree_flatten(first.bound_symbols[-1].args)[0]
    if len(results) != len(found):
        yield f"the {what} returns {len(found)} values, and {len(results)} as it was traced"
    for proxy, expected, actual in zip(given, results, found, strict=False):
        if expected != actual:
            name = getattr(proxy, "name", proxy)
            yield f"the {what} returns {_text(numbers, actual)} for {name}, which is {_text(numbers, expected)}"
    for some, others, does in ((runs, traced, "does"), (traced, runs, "does not do")):
        yield from (f"the {what} {does} {_text(numbers, n)}, unlike as it was traced" for n in some if n not in others)


def _text(numbers: Numbers, value: Any) -> str:
    return numbers.text(value) if isinstance(value, int) else str(value)


class _Evaluation:
    """The evaluation of a prologue or epilogue."""

    def __init__(self, numbers: Numbers, trace: TraceCtx, setters: Mapping[str, Setter]) -> None:
        self.numbers, self.trace, self.setters = numbers, trace, setters
        self.values: dict[str, Any] = {}
        self.writes: list[int] = []

    def run(self) -> tuple[list[int], list[Any]]:
        """The numbers of what it writes, and of what it returns."""
        if self.trace.args is not None:
            for i, name in enumerate(signature(self.trace)):
                self.values[name] = self.numbers.of("argument", i)
        for line in self.trace.bound_symbols:
            if is_return(line):
                return self.writes, tree_flatten(tree_map(self.value, line.args))[0]
            law = LAWS.get(line.sym.id)
            if law is not None:
                law(self, line)
            elif not (is_deletion(line) or line.sym.name.startswith("check_")):
                self.plain(line)
        raise UnprovenError(f"{self.trace.siginfo().name} does not return")

    def value(self, x: Any) -> Any:
        if not isinstance(x, Proxy):
            return x
        if x.name not in self.values:
            raise UnprovenError(f"{x.name} is used before it exists")
        return self.values[x.name]

    def plain(self, line: BoundSymbol) -> None:
        """A line whose results are an expression of its arguments. One without results writes."""
        operands: list[str] = []
        constants = arguments_of(line.args, line.kwargs, operands)
        own = {p.name for p in line.flat_proxy_outs}  # what is given, and only named here, is an argument of its line
        for name in (own & set(operands)) - self.values.keys():
            self.values[name] = self.numbers.of("given", name)
        self.assign(line, identity(line.sym), constants, tuple(self.values[name] for name in operands))

    def assign(self, line: BoundSymbol, operation: Hashable, constants: Hashable, operands: tuple[int, ...]) -> None:
        number = self.numbers.of(operation, constants, operands)
        outs = line.flat_proxy_outs
        if not outs:
            self.writes.append(number)
        elif isinstance(line.output, Proxy):
            self.values[line.output.name] = number
        else:
            self.values |= {o.name: self.numbers.of("result", i, (number,)) for i, o in enumerate(outs)}


# ---- laws ----


def _argument(evaluation: _Evaluation, line: BoundSymbol) -> None:
    name = line.output.name
    evaluation.values.setdefault(name, evaluation.numbers.of("given", name))


def _fetched(evaluation: _Evaluation, line: BoundSymbol) -> None:
    module, names = line.args
    operands = (evaluation.value(module),)
    for name, proxy in zip(names.obj, line.output, strict=True):
        constants = arguments_of((module, name), {}, [])
        evaluation.values[proxy.name] = evaluation.numbers.of(PrimIDs.UNPACK_PARAMETER, constants, operands)


def _rows(evaluation: _Evaluation, line: BoundSymbol) -> None:
    _, *given = line.args
    name_results(tuple(line.output), tuple(evaluation.value(p) for p in given), evaluation.values)


def _packed(evaluation: _Evaluation, line: BoundSymbol) -> None:
    name = str(line.args[1]).lstrip(".")
    if name in evaluation.setters:
        _written_state(evaluation, name, line.args[2])
    else:
        evaluation.plain(line)


def _set(evaluation: _Evaluation, line: BoundSymbol) -> None:
    setter, tensors = line.args
    if evaluation.setters.get(setter.name) is not setter.obj:
        raise UnprovenError("the epilogue sets something that the model's forward does not set", line)
    _written_state(evaluation, setter.name, tensors)


def _written_state(evaluation: _Evaluation, name: str, tensors: Sequence[Any]) -> None:
    values = tuple(evaluation.value(t) for t in tensors)
    evaluation.writes.append(evaluation.numbers.of("set_state", (name,), values))


def _rebuilt(evaluation: _Evaluation, line: BoundSymbol) -> None:
    evaluation.values[line.output.name] = tree_map(evaluation.value, tuple(line.args[1]))


def _nothing(evaluation: _Evaluation, line: BoundSymbol) -> None:
    pass


LAWS: dict[Hashable, Callable[[_Evaluation, BoundSymbol], None]] = {
    PrimIDs.UNPACK_TRIVIAL: _argument,
    fetch.id: _fetched,
    rows_of.id: _rows,
    PrimIDs.PACK_BUFFER: _packed,
    run_setter.id: _set,
    run_rebuild.id: _rebuilt,
    watch.id: _nothing,
    keeping.id: _nothing,
}
