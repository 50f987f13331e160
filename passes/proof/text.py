"""Whether the function that Python runs is the trace that was proven.

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
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from passes.analysis.calls import block_functions
from passes.analysis.recognise import is_return
from passes.compat.jit import function_of
from passes.proof.program import signature, text_of

import torch
from thunder.core import devices, dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

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
        """What the function gets for one of its parameters."""
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
