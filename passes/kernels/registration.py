"""The executor of torch's own kernels.

A model that has it among its executors is recorded with lines that call torch's own functions, differentiated by
:mod:`passes.kernels.aten`: see ``shardtrace/record/symbols.py``. For the few functions that need a kernel of ours, each
is one line of forward and one line of backward, which save what eager saves.

    @implements(ltorch.softmax, supported=lambda a, **others: is_floating(a))
    def softmax(a, dim):
        out = softmax_forward(a, dim)
        return out, lambda grad: [(a, softmax_backward(grad, out, dim))]

A function returns its result (or several) and a function from its gradient to pairs of an argument and its gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from passes.compat.jit import compile_data_and_stats, shape_of, symbol_that_calls
from passes.kernels.regions import fuses, fuses_symbols

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import OperatorExecutor, register_executor

Gradients = Iterable[tuple[TensorProxy | None, TensorProxy | None]]
# A result or a tuple of results, and the function from their gradients to those of the arguments.
Differentiated = tuple[Any, Callable[..., Gradients]]
Implementation = Callable[..., Differentiated]
F = TypeVar("F", bound=Implementation)

HALF = frozenset({dtypes.float16, dtypes.bfloat16})
FLOATING = HALF | {dtypes.float32, dtypes.float64}


class KernelExecutor(OperatorExecutor):
    """Runs the functions that it implements.

    Beside an executor that fuses (torchcompile, nvFuser) it leaves it the functions that are better fused with their
    neighbours: those of :func:`implements` that are ``fusible``.
    """

    def __init__(self, name: str, *, version: str) -> None:
        super().__init__(name, version=version)
        self.fusible: set[Hashable] = set()  # ids of symbols

    def can_execute(self, bsym: BoundSymbol) -> bool:
        return not (bsym.sym.id in self.fusible and is_beside_fusions()) and super().can_execute(bsym)


def is_beside_fusions() -> bool:
    """True if an executor of the running compilation compiles regions of a trace."""
    data, _ = compile_data_and_stats()
    return data is not None and any(map(fuses, data.executors_list))


def is_beside_symbols() -> bool:
    """True if an executor of the running compilation compiles regions of Thunder's symbols alone."""
    data, _ = compile_data_and_stats()
    return data is not None and any(map(fuses_symbols, data.executors_list))


def has_kernels() -> bool:
    """True if an executor of the running compilation has these kernels."""
    data, _ = compile_data_and_stats()
    return data is not None and executor in data.executors_list


executor = KernelExecutor("torch_kernels", version="0.1")
register_executor(executor)


def kernel(name: str, meta: Callable[..., Any], fn: Callable[..., Any], *, tags: Sequence[Any] = ()) -> Symbol:
    """A symbol whose lines call ``fn``. ``meta`` gives its results as proxies."""
    symbol = symbol_that_calls(name, meta, fn, id=kernel_id(name), is_prim=True, executor=executor, tags=list(tags))
    executor.opmap[name] = symbol
    return symbol


def kernel_id(name: str) -> str:
    """The id of the symbol of a kernel. Symbols of Thunder may have the same name."""
    return f"kernels.{name}"


def implements(*functions: Any, supported: Callable[..., bool], fusible: bool = True) -> Callable[[F], F]:
    """Makes the decorated function, which has the parameters of ``functions`` (symbols of thunder.torch or their ids),
    the executor's implementation of them wherever ``supported``, which gets all parameters by name.

    ``fusible``: whether an executor that fuses does better.
    """

    def decorate(implementation: F) -> F:
        parameters = inspect.signature(implementation)

        def check(*args: Any, **kwargs: Any) -> bool:
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            return supported(**bound.arguments)

        def run(*args: Any, **kwargs: Any) -> Any:
            return implementation(*args, **kwargs)[0]

        def differentiate(*args: Any, **kwargs: Any) -> Any:
            out, gradients = implementation(*args, **kwargs)
            for tensor, gradient in gradients(*map(get_grad, out if isinstance(out, tuple) else (out,))):
                if isinstance(tensor, TensorProxy) and gradient is not None:
                    put_grad(tensor, gradient)
            return out

        for function in functions:
            executor.register_implementation(
                function, checker=check, execution_transform=run, grad_transform=differentiate
            )
            if fusible:
                executor.fusible.add(function.id if isinstance(function, Symbol) else function)
        return implementation

    return decorate


def lines_of_kernels(bsym: BoundSymbol, trace: TraceCtx) -> list[BoundSymbol]:
    """The lines of kernels for a line that the executor implements. New values get names of ``trace``."""
    run = executor.get_execution_transform(bsym)
    assert run is not None
    with tracectx(trace):
        trace.push_scope([])
        out = run(*bsym.args, **bsym.kwargs)
        lines = trace.pop_scope()
    swap = {variableify(out): bsym.output}
    return [line.from_bsym_swap_proxies(swap) for line in lines]


def like(a: TensorProxy, shape: Sequence[Any] | None = None, dtype: dtypes.dtype | None = None) -> TensorProxy:
    """A new proxy with the shape and dtype of ``a``, or with those given."""
    return TensorProxy(like=a, shape=tuple(a.shape if shape is None else shape), dtype=dtype or a.dtype)


def is_floating(*tensors: TensorProxy | None) -> bool:
    """True if all tensors have one floating dtype, one device and at least one element. None counts as absent."""
    present = [t for t in tensors if t is not None]
    return (
        all(isinstance(t, TensorProxy) and t.dtype in FLOATING for t in present)
        and len({(t.dtype, t.device) for t in present}) <= 1
        and not any(is_empty(t) for t in present)
    )


def is_empty(a: TensorProxy) -> bool:
    return any(isinstance(d, int) and d == 0 for d in shape_of(a))
