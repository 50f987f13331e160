"""What Thunder keeps private of traces: symbols, proxies and lines, and errors while it traces."""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from thunder.core.codeutils import SigInfo
from thunder.core.interpreter import InterpreterError, do_raise
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, get_tracectx
from thunder.core.transforms import _get_gradfn_and_executor
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.extend import Executor
from thunder.torch import _get_fake_arg, _torch_to_thunder_function_map


def raised(error: BaseException) -> Any:
    """What a lookaside returns to raise ``error`` in the program that is traced. An exception that a lookaside itself
    raises becomes an InterpreterError."""
    return do_raise(error)


def interrupt_of(error: BaseException) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that an exception is, or that Thunder's interpreter has made an InterpreterError."""
    cause: BaseException | None = error
    while isinstance(cause, InterpreterError):
        cause = cause.__cause__
    return cause if isinstance(cause, KeyboardInterrupt) else None


def add_note(error: BaseException, note: str) -> None:
    """Python's ``error.add_note``. Python 3.10 prints no notes: there the message gets it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def notes_of(error: BaseException) -> str:
    """The notes of an exception and of its causes, each on lines of its own, after a line break."""
    notes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        notes += getattr(cause, "__notes__", ())
        cause = cause.__cause__
    return "".join(f"\n{note}" for note in notes)


@contextmanager
def deeper_recursion() -> Iterator[None]:
    """Raises Python's limit of recursion. Recording a call of nested modules takes more frames than the call itself."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@contextmanager
def without_log_of_fakes() -> Iterator[None]:
    """Keeps torch from logging each error of a fake tensor with 20 lines of traceback. The error is raised as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_drop)
    try:
        yield
    finally:
        log.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False


def symbol_that_calls(name: str, meta: Callable[..., Any], fn: Callable[..., Any] | None, **options: Any) -> Symbol:
    """A symbol whose lines call ``fn``. ``options`` are those of Thunder's ``Symbol``."""

    def bind(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: fn}

    return Symbol(name=name, meta=meta, _bind_postprocess=bind, **options)


def set_signature(trace: TraceCtx, name: str) -> None:
    """Makes a trace print, and run, as a function of this name with the trace's arguments."""
    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(a.name, None) for a in trace.args]


def function_of(bsym: BoundSymbol) -> Any:
    """The function stored in a line; None if the line calls the function of that name in the symbol's module."""
    return (bsym._call_ctx or {}).get(bsym.sym.name)


def calling_function_of(other: BoundSymbol, bsym: BoundSymbol, **changes: Any) -> BoundSymbol:
    """The line ``bsym`` as a call of the function that the line ``other`` calls. ``changes``: its args and output."""
    return bsym.from_bsym(sym=other.sym, _call_ctx=other._call_ctx, **changes)


def renamed(proxy: Proxy, name: str) -> Proxy:
    """A copy of a proxy with another name, which is not taken in any trace. Thunder's ``replace`` infers all metadata
    again."""
    new = copy.copy(proxy)
    vars(new).update(_name=name, _tags=set(proxy.tags))
    return new


def make_name_legal(proxy: Proxy) -> None:
    """Renames a new proxy whose name Python could not read. Thunder names that of ``heads.a-b.weight``
    ``t_heads_a-b_weight``."""
    if not proxy.name.isidentifier():
        proxy._name = get_tracectx().make_name(prefix=re.sub(r"\W", "_", proxy.name))


def shape_of(proxy: TensorProxy) -> tuple[Any, ...]:
    """The shape of a proxy, inside or outside a trace. A dimension is itself a proxy if values are symbolic."""
    return tuple(proxy._shape)


def has_grad_rule(bsym: BoundSymbol) -> bool:
    """True if Thunder, or the executor that will run the line, has a grad rule for the symbol as a whole."""
    return _get_gradfn_and_executor(bsym)[0] is not None


def differentiating_executor(bsym: BoundSymbol) -> Executor | None:
    """The executor whose grad rule will differentiate the line; None if none has one."""
    executor: Executor | None = _get_gradfn_and_executor(bsym)[1]
    return executor


def with_operators_of(executors: Sequence[Executor], trace: TraceCtx) -> TraceCtx:
    """The trace with the operators of these executors in the place of Thunder's symbols. Nothing is fused: lines that
    an executor would fuse stay as they are."""
    new: TraceCtx = _transform_for_operator_executor_execution(trace, executors)
    return new


def symbols_of_torch() -> dict[Any, Callable[..., Any]]:
    """Thunder's symbols, or functions that choose one, by the functions of torch that they stand for."""
    found: dict[Any, Callable[..., Any]] = _torch_to_thunder_function_map
    return found


def fake_argument(value: Any) -> Any:
    """Thunder's stand-in for an argument of a torch function. A tensor has no memory under ``FakeTensorMode``."""
    return _get_fake_arg(value)
