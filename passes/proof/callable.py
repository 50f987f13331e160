"""Whether the callable that runs is the program that was proven: its borders and its text.

The prologue fetches the arguments of the computation: from those of the call, and from modules by name. The epilogue
gets the results, sets what forward sets on modules, and returns. Both are evaluated to numbers as they were traced and
as they run (:mod:`passes.proof.program`). What they return, and each write, must have the same number:

    (t_a_weight, t_b_weight) = fetch_parameters(module, names)      module.get_parameter("a.weight"), ...
    set_state(state_0, (t10, t13))                                  the line that packed these tensors as state_0
    result = rebuild(model_output, (t3, t4))                        the tensors

Thunder prints a trace and compiles the text. Here the compiled code runs once more: its arguments are the trace's own
proxies, and each name stands for an object without being it.

    t9 = linear(input, t5, None)

``linear`` records the call and its arguments, and returns the results of the trace's line. Python itself thus shows in
which order lines run, which object each name stands for, which value each argument is, what is deleted and what is
returned. All of it must agree with the trace's next line. This finds two lines that mean different objects by one name,
a printer that writes something else, and a function of an earlier trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from passes.analysis.calls import block_functions
from passes.analysis.recognise import identity, is_deletion, is_return
from passes.borders import Setter, fetch, keeping, run_rebuild, run_setter, watch
from passes.compat.jit import function_of
from passes.parameters import rows_of
from passes.proof.program import Numbers, UnprovenError, arguments_of, name_results, signature, text_of

import torch
from thunder.core import devices, dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

# ---- borders: the right tensors enter a step, and its results go where the forward puts them ----


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


# ---- text: the function that Python runs is the trace ----


CONSTANTS = (torch.device,)  # constructors that a trace prints inside the arguments of a line
STATEMENTS = {PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.DEL, PrimIDs.COMMENT}  # they call nothing


class _OtherText(Exception):
    """The text is not that of the trace."""


def other_text(trace: TraceCtx, function: Callable[..., Any] | None) -> Iterator[str]:
    """How the function that runs differs from a trace, including the functions of its blocks; nothing if it does not.
    ``function``: None if it will be compiled later."""
    try:
        _read(trace, trace.python_callable() if function is None else function)
        for called in block_functions(trace):
            _read(called.trace, called.function)
    except _OtherText as error:
        yield f"Python runs something else than the trace: {error}"


def _read(trace: TraceCtx, function: Callable[..., Any]) -> None:
    function = inspect.unwrap(function)
    reading = _Reading(trace)
    names = {name: _Named(value, reading) for name, value in function.__globals__.items() if name != "__builtins__"}
    try:
        returned = FunctionType(function.__code__, names)(*(reading.argument(name) for name in signature(trace)))
    except (NameError, TypeError, ValueError) as error:
        raise _OtherText(f"{type(error).__name__}: {error}") from None
    reading.end(returned)


class _Named:
    """Stands for an object that the code names, or for an attribute of one. Reports each call to the reading."""

    def __init__(self, value: Any, reading: _Reading) -> None:
        self.named_value, self.reading = value, reading

    def __getattr__(self, name: str) -> _Named:
        return _Named(getattr(self.named_value, name), self.reading)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reading.called(self.named_value, *args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.named_value)


class _Collection(list[Any]):
    """The values that a function unpacks from one of its arguments, which has this name."""

    def __init__(self, name: str, values: list[Any]) -> None:
        super().__init__(values)
        self.name = name


class _Reading:
    """The lines of a trace while its code runs."""

    def __init__(self, trace: TraceCtx) -> None:
        self._lines = [b for b in trace.bound_symbols if b.sym.id not in STATEMENTS]
        self._at = 0
        self._values: dict[str, Any] = {p.name: p for p in trace.args or () if isinstance(p, Proxy)}
        unpacked = [b for b in trace.bound_symbols if b.sym.id == PrimIDs.UNPACK_SEQUENCE]
        for b in reversed(unpacked):  # what is taken out of another one comes later
            self._values[b.args[0].name] = _Collection(b.args[0].name, [self._of(o) for o in b.output])

    def argument(self, name: str) -> Any:
        """The argument that the function gets for one of its parameters."""
        return self._values.get(name, name)

    def _of(self, value: Any) -> Any:
        return self._values.get(value.name, value) if isinstance(value, Proxy) else value

    def called(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if function in CONSTANTS:
            return function(*args, **kwargs)
        line = self._next()
        if is_return(line):
            raise _OtherText(f"{function} is called behind the last line")
        meant = _meant(line)
        if meant is not None and function != meant:
            raise _OtherText(f"{line.sym.name} is {function}, not {meant}, in {text_of(line)}")
        if not _same((args, kwargs), (tuple(line.args), line.kwargs)):
            raise _OtherText(f"{line.sym.name} is called with {args} {kwargs or ''}, not as in {text_of(line)}")
        return line.output

    def end(self, returned: Any) -> None:
        line = self._next()
        expected = line.args[0] if len(line.args) == 1 else line.args
        if not is_return(line) or not _same(returned, expected):
            raise _OtherText(f"it returns {returned}, not what the trace does")

    def _next(self) -> BoundSymbol:
        self._at += 1
        return self._lines[self._at - 1]


def _meant(line: BoundSymbol) -> Any:
    """The function that a line means; None if only its printer knows."""
    function = function_of(line)
    if function is None and line.sym.module is not None:
        function = getattr(line.sym.module, line.sym.name, None)
    return function


def _same(found: Any, expected: Any) -> bool:
    """Whether Python's arguments are those of a line."""
    if isinstance(found, _Named):
        found = found.named_value
    if isinstance(expected, NumberProxy) and not isinstance(found, Proxy):
        expected = expected.value
    if isinstance(expected, Proxy):
        return isinstance(found, (Proxy, _Collection)) and found.name == expected.name
    if isinstance(expected, (tuple, list)):
        return isinstance(found, (tuple, list)) and len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(_same(found[k], v) for k, v in expected.items())
        )
    if isinstance(expected, dtypes.dtype):
        expected = expected if isinstance(found, dtypes.dtype) else dtypes.to_torch_dtype(expected)
    if isinstance(expected, devices.Device):
        expected = expected if isinstance(found, devices.Device) else devices.to_torch_device(expected)
    return found is expected or (type(found) is type(expected) and bool(found == expected or found != found))
