"""Whether the function that Python runs is the trace that was proven.

Thunder prints a trace and compiles the text. Here that text, as the compiled function has it, runs once more with the
names that it refers to, except that each line notes what it calls and with what, and returns the trace's own proxies:

    t9 = linear(input, t5, None)        becomes        t9 = called(linear, input, t5, None)

So Python itself says in which order lines run, which object each name stands for, which value each argument is, what
is deleted and what is returned. Each must be what the trace's next line says. Two lines that mean other objects by one
name, a printer that writes something else, or a function of an earlier trace are found.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from typing import Any

from passes.analysis.calls import block_functions
from passes.analysis.recognise import is_return
from passes.compat.jit import function_of
from passes.proof.program import signature, text_of

from thunder.core import devices, dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

STATEMENTS = {PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.DEL, PrimIDs.COMMENT}  # they call nothing


class _OtherText(Exception):
    """The text is not that of the trace."""


def other_text(trace: TraceCtx, function: Callable[..., Any] | None) -> Iterator[str]:
    """How the function that runs differs from a trace; nothing if it does not. Those of its blocks are read, too.
    ``function``: None if it will be compiled later."""
    try:
        _read(trace, trace.python_callable() if function is None else function)
        for called in block_functions(trace):
            _read(called.trace, called.function)
    except _OtherText as error:
        yield f"Python runs something else than the trace: {error}"


def _read(trace: TraceCtx, function: Callable[..., Any]) -> None:
    function = inspect.unwrap(function)
    code = function.__code__
    text = ast.parse("".join(linecache.getlines(code.co_filename)))
    body = next(n for n in text.body if isinstance(n, ast.FunctionDef) and n.name == code.co_name)
    body.decorator_list = []
    body.body = [ast.fix_missing_locations(_Noting().visit(statement)) for statement in body.body]
    reading = _Reading(trace)
    context = {**function.__globals__, CALLED: reading.called}
    exec(compile(ast.Module([body], []), code.co_filename, "exec"), context)
    try:
        returned = context[code.co_name](*(reading.argument(name) for name in signature(trace)))
    except (NameError, TypeError, ValueError) as error:
        raise _OtherText(f"{type(error).__name__}: {error}") from None
    reading.end(returned)


CALLED = "__called"


class _Noting(ast.NodeTransformer):
    """Makes the call of a statement one of ``called``, with the function before its arguments."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        return ast.Call(ast.Name(CALLED, ast.Load()), [node.func, *node.args], node.keywords)

    def visit_Return(self, node: ast.Return) -> ast.Return:
        return node


class _Collection(list[Any]):
    """The values that a function unpacks from one of its arguments, which has this name."""

    def __init__(self, name: str, values: list[Any]) -> None:
        super().__init__(values)
        self.name = name


class _Reading:
    """The lines of a trace while its text runs."""

    def __init__(self, trace: TraceCtx) -> None:
        self._lines = [b for b in trace.bound_symbols if b.sym.id not in STATEMENTS]
        self._at = 0
        self._values: dict[str, Any] = {p.name: p for p in trace.args or () if isinstance(p, Proxy)}
        unpacked = [b for b in trace.bound_symbols if b.sym.id == PrimIDs.UNPACK_SEQUENCE]
        for b in reversed(unpacked):  # what is taken out of another one comes later
            self._values[b.args[0].name] = _Collection(b.args[0].name, [self._of(o) for o in b.output])

    def argument(self, name: str) -> Any:
        """What the function gets for one of its parameters."""
        return self._values.get(name, name)

    def _of(self, value: Any) -> Any:
        return self._values.get(value.name, value) if isinstance(value, Proxy) else value

    def called(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
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
