"""Writes the lines of a recorded computation again, on other operands, with the names, tags and sources that they have.

What a gather needs comes first among them, so that other lines compute while it is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from passes.analysis.calls import differentiated, unique_name
from passes.analysis.dims import TorchLine, resized
from passes.analysis.recognise import changes_values, is_random, is_return, is_unpack, names
from passes.comm.sequence import exchange_heads, gather_parts
from passes.compat.jit import compile_data_and_stats, exempt_from_autocast, renamed, symbols_of_torch
from passes.compat.versions import Fakes
from passes.kernels.aten import Meta
from passes.kernels.torch_call import TorchCall, call_of
from passes.kernels.torch_call import executor as torch_calls

import torch
from thunder.core import dtypes
from thunder.core.devices import to_torch_device
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import is_constant_for_vjp
from torch.utils import _pytree as pytree


def gathers_first(lines: Iterable[BoundSymbol]) -> list[BoundSymbol]:
    """The lines with each gather or exchange as early as possible. A line moves behind a gather only if it does not
    follow the first use of what was gathered, so that values live little longer: queries are computed after keys and
    values."""
    placed: list[BoundSymbol] = []
    waiting: list[BoundSymbol] = []  # lines since the last use of a gathered value
    gathered: set[str] = set()
    for bsym in lines:
        if bsym.sym.id in (gather_parts.id, exchange_heads.id):
            needed = _needed(waiting, names(bsym.flat_proxy_args))
            placed += [*needed, bsym]
            taken = set(map(id, needed))
            waiting = [b for b in waiting if id(b) not in taken]
            gathered |= names(bsym.flat_proxy_outs)
            continue
        waiting.append(bsym)
        fixed = is_unpack(bsym) or is_return(bsym) or changes_values(bsym)
        if fixed or not gathered.isdisjoint(names(bsym.flat_proxy_args)):
            placed += waiting
            waiting = []
    return placed + waiting


def _needed(lines: Sequence[BoundSymbol], wanted: set[str]) -> list[BoundSymbol]:
    """The lines that compute the values ``wanted``."""
    found = []
    for bsym in reversed(lines):
        if not wanted.isdisjoint(names(bsym.flat_proxy_outs)):
            found.append(bsym)
            wanted = wanted | names(bsym.flat_proxy_args)
    return found[::-1]


@contextmanager
def writing() -> Iterator[None]:
    """Around what writes lines of a recorded computation again, before autodiff. Casts are lines already, and detached
    values are marked, whatever the modes in which tracing has ended."""
    data, _ = compile_data_and_stats()
    torch_calls.join(data)
    enabled, data.is_grad_enabled = data.is_grad_enabled, True
    try:
        with exempt_from_autocast(data), langctx(Languages.TORCH):
            yield
    finally:
        data.is_grad_enabled = enabled


class Writer:
    """A new computation, which begins without lines.

    Args:
        old: the recorded computation.
        inputs: the names of its inputs that need a gradient; None: those that are marked.
    """

    def __init__(self, old: TraceCtx, inputs: set[str] | None = None) -> None:
        self.trace = from_trace(old)
        self.taken: set[str] = set()  # names of the recorded computation that new values have
        self._named: dict[Variable, TensorProxy] = {}  # by new value: the one of that name
        self._differentiated = differentiated(old, inputs)

    def emit(self, line: BoundSymbol | None, write: Callable[[], Any]) -> list[TensorProxy]:
        """Adds the lines that ``write`` makes, with the tags and the source of ``line``. Returns its results, which are
        detached if those of ``line`` are."""
        self.trace.push_scope([])
        try:
            with tracectx(self.trace):
                result = write()
        finally:
            lines = self.trace.pop_scope()
        for bsym in lines:
            if line is not None:
                bsym.tags |= line.tags
                bsym.source_filename, bsym.source_positions = line.source_filename, line.source_positions
        self.trace.bound_symbols += lines
        results = [p for p in tree_flatten(result)[0] if isinstance(p, Proxy)]
        if line is not None and any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for o in line.flat_proxy_outs):
            for p in results:
                p.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        return results

    def swapped(self, line: BoundSymbol, swap: dict[Variable, Proxy]) -> BoundSymbol:
        """Adds a line as it was recorded, on other operands. Its results keep their names unless these are taken."""
        for o in line.flat_proxy_outs:
            if o.name in self.taken and variableify(o) not in swap:
                swap[variableify(o)] = renamed(o, self.trace.make_name())
            self.taken.add(o.name)
        new = line.from_bsym_swap_proxies(swap)
        new.tags = set(line.tags)
        self.trace.bound_symbols.append(new)
        return new

    def on_parts(
        self, line: BoundSymbol, call: TorchLine, operands: Sequence[TensorProxy], shapes: Sequence[tuple[int, ...]]
    ) -> list[TensorProxy]:
        """Adds a line on other operands, with results of these shapes."""
        args, kwargs = resized(call, shapes)
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_proxy)
        given = iter(operands)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, TensorProxy) else x for x in flat], spec)
        found = self.as_call(line, call, args, kwargs)
        for new, shape in zip(found, shapes, strict=True):
            if tuple(new.shape) != tuple(shape):
                raise AssertionError(f"{call.name} of a part has shape {tuple(new.shape)}, not {shape}{place(line)}")
        return found

    def as_call(self, line: BoundSymbol, call: TorchLine, args: Any, kwargs: Any) -> list[TensorProxy]:
        """Adds a call of the line's function with other arguments, but as many tensors."""
        made = call_of(line.sym)
        if made is None:
            return self.emit(line, lambda: line.sym(*args, **kwargs))
        return self.torch(line, made.function, args, kwargs, self.grads(line, call), like=made)

    def torch(
        self,
        line: BoundSymbol,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        grads: Sequence[bool],
        *,
        like: TorchCall | None = None,
        name: str = "",
    ) -> list[TensorProxy]:
        """Adds a line that calls torch's function, in the modes of the call ``like``. ``grads``: which of its tensors
        need a gradient. ``name``: of the function in the trace, by default that of a part."""
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_proxy)
        places = [i for i, x in enumerate(flat) if isinstance(x, TensorProxy)]
        operands = [flat[i] for i in places]
        absent = _absent(operands)
        inputs = [_meta(p, grad, absent) for p, grad in zip(operands, grads, strict=True)]
        flat = [None if isinstance(x, TensorProxy) else x for x in flat]
        options: dict[str, Any] = {"random": is_random(line)}
        if like is not None:
            options = {"random": like.random, "written": like.written, "autocast": like.autocast}
        name = name or f"torch_{getattr(function, '__name__', 'call').strip('_')}_part"
        call = TorchCall(
            name=unique_name(self.trace, name), function=function, flat=flat, spec=spec, places=places,
            inputs=inputs, results=(), absent=absent, **options,
        )  # fmt: skip
        with Fakes(allow_non_fake_inputs=True), torch.set_grad_enabled(any(grads)):
            call.results = [Meta.of(t) for t in call.call([m.empty().requires_grad_(m.grad) for m in inputs])]
        if not call.results:  # the function returns its argument, if that lies as asked for
            return self.emit(line, lambda: symbols_of_torch()[function](*args, **kwargs))
        return self.emit(line, lambda: call.symbol(*operands))

    def grads(self, line: BoundSymbol, call: TorchLine) -> list[bool]:
        """Which operands of a line need a gradient."""
        flows = not is_constant_for_vjp(line)
        return [flows and self.has_gradient(o) for o in call.operands]

    def has_gradient(self, proxy: TensorProxy) -> bool:
        """Whether a value of the recorded computation has a gradient."""
        return proxy.name in self._differentiated and dtypes.is_inexact_dtype(proxy.dtype)

    def name(self, new: TensorProxy, old: TensorProxy) -> None:
        """Gives a new value the name of the recorded one, if no other has it."""
        if old.name not in self.taken:
            self.taken.add(old.name)
            self._named[variableify(new)] = renamed(new, old.name)

    def finished(self) -> TraceCtx:
        """The new computation."""
        lines = gathers_first(self.trace.bound_symbols)
        self.trace.bound_symbols = [b.from_bsym_swap_proxies(self._named) for b in lines]
        return self.trace

    def final(self, proxy: TensorProxy) -> TensorProxy:
        """A value as it is called in the finished computation."""
        return self._named.get(variableify(proxy), proxy)


def place(line: BoundSymbol | None) -> str:
    """The line of the user's program, in parentheses; empty if it is not known."""
    if line is None or line.source_filename is None or line.source_positions is None:
        return ""
    return f" ({line.source_filename}:{line.source_positions.lineno})"


def _is_proxy(value: Any) -> bool:
    return isinstance(value, Proxy)


def _absent(operands: Sequence[TensorProxy]) -> torch.device | None:
    """The device of the step if torch sees none here. The CPU then stands for it."""
    devices = (to_torch_device(p.device) for p in operands)
    return next((d for d in devices if d.type == "cuda" and not torch.cuda.is_available()), None)


def _meta(p: TensorProxy, grad: bool, absent: torch.device | None) -> Meta:
    shape = tuple(p.shape)
    stride = torch.empty(shape, device="meta").stride()
    device = to_torch_device(p.device) if absent is None else torch.device("cpu")
    return Meta(shape, stride, dtypes.to_torch_dtype(p.dtype), device, grad)
