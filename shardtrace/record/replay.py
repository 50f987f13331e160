"""Writes recorded calls as lines of the running trace, and equal calls of blocks as calls of one function.

Note [Safe]. The record of a block has all that its lines are made of. Two blocks with equal records therefore give
equal lines, apart from the tensors that they read. Those are the arguments of the function.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import groupby
from typing import Any

from passes.analysis.calls import ON_HOST, Block, CallOf, unique_name, way_of
from passes.analysis.recognise import InModule, names
from passes.blocks import executor as block_calls
from passes.compat.jit import add_note, compile_data_and_stats, name_as_user, names_of_users
from passes.kernels.aten import Meta
from passes.kernels.executors import has_kernels, is_beside_symbols
from passes.kernels.torch_call import TorchCall, executor, laid_out
from passes.plan import ShardedParameter
from passes.save import mark_block
from shardtrace.record.calls import (
    PLAIN,
    Call,
    Kind,
    Mark,
    Outline,
    Record,
    Span,
    Uses,
    find_kinds,
    is_whole,
    outermost,
    storage,
)
from shardtrace.record.memory import Memory, Values, covers
from shardtrace.record.symbols import (
    NotTrusted,
    check_as_eager,
    is_of_user,
    name_of,
    of_memory,
    out_of_place,
    value,
    value_in_place,
)

import torch
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.codeutils import Positions
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.trace import get_tracectx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

Leaf = Callable[[torch.Tensor], Any]
KNOWN_TYPES = (torch.Tensor, nn.Parameter)
LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
PYTHON_TYPES = {int: torch.int64, float: torch.float32, bool: torch.bool}  # as dtypes


class CannotWrite(Exception):
    """Why a call cannot be a line. ``module`` is the qualified name of the module that made it."""

    module = ""


class Constant:
    """A tensor that no module holds by name. ``written``: whether forward writes into it. Backward may read what was
    there before."""

    __name__ = "constant"

    def __init__(self, tensor: torch.Tensor, written: bool) -> None:
        self.tensor, self.written = tensor, written

    def __call__(self) -> torch.Tensor:
        return self.tensor.clone() if self.written else self.tensor


def without_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor like another one, called without the other's values."""

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        empty = lambda x: x.empty() if isinstance(x, Meta) else x  # noqa: E731
        args, kwargs = pytree.tree_map(empty, (args, kwargs), is_leaf=lambda x: isinstance(x, Meta))
        return function(*args, **kwargs)

    return made


class Replay:
    """Writes calls, in order.

    Args:
        input_of: gives the proxy of a fake that no call has made: a parameter, buffer or argument; None if it is none.
        memory: the fakes of tensors that no module holds by name, and which are parts of others.
        written: the keys of the storages that some call writes into.
        absent: the device of the step, if fakes are on the CPU in its place.
    """

    def __init__(
        self, input_of: Leaf, memory: Memory, written: Collection[int], absent: torch.device | None = None
    ) -> None:
        self.values = Values(self._take, self._put, self._keep)
        self.torch_lines: list[tuple[str, str, str]] = []  # calls that are lines of torch: the function, why, where
        self._input_of, self._memory, self._written, self._absent = input_of, memory, written, absent
        self._names: dict[Any, str] = {}
        self._is_repeated = False  # in backward: the call that is written
        self._has_kernels, self._fuses = has_kernels(), is_beside_symbols()

    def write(self, calls: Sequence[Call], first: int = 0, marks: Sequence[Mark] = ()) -> None:
        """Adds the lines of ``calls`` to the running trace. ``first``: the number of the first one in the record;
        ``marks``: those of which all calls are among these, inner ones first."""
        trace = get_tracectx()
        lines = trace.scopes[-1]
        starts = []  # of each call: the number of its first line
        repeated = {i for mark in marks if not mark.cheap for i in range(mark.begin, mark.end)}
        for i, call in enumerate(calls, first):
            starts.append(len(lines))
            self._is_repeated = call.checkpoint is not None or i in repeated
            trace.set_current_source_location(call.place.file, Positions(lineno=call.place.line))
            try:
                with _grad_mode(call.grad):
                    self._write(call)
            except CannotWrite as error:
                error.module = call.place.module
                add_note(error, f"at {call.place}")
                raise
            for bsym in lines[starts[-1] :]:
                bsym.tags.add(InModule(call.place.module))
        trace.set_current_source_location(None, None)
        starts.append(len(lines))
        for _, group in groupby(range(len(calls)), lambda i: calls[i].checkpoint):
            numbers = list(group)
            if calls[numbers[0]].checkpoint is not None:
                mark_block(lines[starts[numbers[0]] : starts[numbers[-1] + 1]])
        for mark in marks:
            if first <= mark.begin and mark.end <= first + len(calls):
                mark_block(lines[starts[mark.begin - first] : starts[mark.end - first]], cheap=mark.cheap)

    def proxy(self, t: torch.Tensor) -> Any:
        """The proxy of what a tensor holds now."""
        t = self._memory.met(t)
        if t in self.values:
            return self.values.read(t)
        base = self._memory.bases.get(id(t))
        if base is not None and storage(t) in self._written:
            self.proxy(base)
            self.values.know_part(t)
            return self.values.read(t)
        found = self._input_of(t)
        if found is None and isinstance(t, FakeTensor) and id(t) not in self._memory.outside:
            raise CannotWrite(f"a tensor of shape {tuple(t.shape)} comes from no call of torch that can be seen")
        self.values.know(t, found if found is not None else self._constant(t))
        return self.values.read(t)

    def renew(self, t: torch.Tensor, function: Callable[..., Any], others: Sequence[torch.Tensor]) -> None:
        """Adds a line whose result is the value of ``t`` from here on."""
        given = [t, *others]
        made = self.line(function, tuple(map(self.proxy, given)), {}, [t], inputs=given, grad=True)[0]
        self.values.know(t, made)

    def _constant(self, t: torch.Tensor) -> Any:
        if t.requires_grad and id(t) not in self._memory.outside:
            raise CannotWrite(
                f"a tensor of shape {tuple(t.shape)} requires a gradient and is neither a parameter of the module nor "
                "an argument: make it an nn.Parameter of the module"
            )
        tensor = self._memory.outside.get(id(t), t)
        with _grad_mode(False):
            return self.line(Constant(tensor, storage(t) in self._written), (), {}, [t])[0]

    # ---- one call ----

    def _write(self, call: Call) -> None:
        if call.function is torch.autograd.grad:
            raise CannotWrite("it computes gradients")
        args, kwargs = pytree.tree_map(self._leaf, (call.args, call.kwargs))
        try:
            new, old = self._by_symbol(call, *self._on_device((args, kwargs)))
        except Exception as why:  # whatever Thunder raises for arguments that it does not take
            if isinstance(why, CannotWrite):
                raise
            self.torch_lines.append((name_of(call.function), f"{type(why).__name__}: {why}"[:120], str(call.place)))
            new, old = self._by_torch(call, args, kwargs)
        written = {id(t) for t in call.written}
        for t, proxy in zip(old, new, strict=True):
            if id(t) not in written:
                self.values.know(t, proxy)
        if len(call.names) == len(call.results):
            for t, name in zip(call.results, call.names, strict=True):
                name_as_user(self.values.read(t), name)
        for t in call.written:
            found = next(p for o, p in zip(reversed(old), reversed(new), strict=True) if o is t)
            self.values.write(t, found, tracked=call.grad and t.requires_grad)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.proxy(value)
        return PYTHON_TYPES.get(value, value) if isinstance(value, type) else value

    def _on_device(self, values: Any) -> Any:
        """Arguments with the device of the step in the place of the CPU, if fakes are there in its place."""
        if self._absent is None:
            return values
        cpu = torch.device("cpu")
        return pytree.tree_map(
            lambda v: self._absent if isinstance(v, torch.device) and v == cpu else v, values, is_leaf=_is_proxy
        )

    def _by_symbol(self, call: Call, args: Any, kwargs: Any) -> tuple[list[Any], Sequence[torch.Tensor]]:
        """The new values by Thunder's symbols, and the tensors that hold them."""
        _check_tensors(call)
        if self._has_kernels:
            cuda = self._absent is not None or any(t.is_cuda for t in call.tensors())
            options = {"fuses": self._fuses, "cuda": cuda, "repeated": self._is_repeated}
            check_as_eager(call.function, call.args, call.kwargs, **options)
        if call.written:
            if not _writes_first(call):
                raise NotTrusted("writes into its arguments")
            old, compute = call.written, value_in_place
        else:
            old, compute = call.results, value
        if not _is_widened(call, old):
            try:
                return self._attempt(lambda: compute(call.function, args, kwargs), old), old
            except Exception:
                if not call.autocast:
                    raise
        args, kwargs = pytree.tree_map(partial(_cast, old[0].dtype), (args, kwargs), is_leaf=_is_proxy)  # as autocast
        return self._attempt(lambda: compute(call.function, args, kwargs), old), old

    def _attempt(self, compute: Callable[[], Any], expected: Sequence[torch.Tensor]) -> list[Any]:
        """What ``compute`` returns, if these are tensors like those ``expected``. Else raises, and leaves no line."""
        scopes = get_tracectx().scopes
        depth, lines, count = len(scopes), scopes[-1], len(scopes[-1])
        try:
            leaves = pytree.tree_leaves(compute(), is_leaf=_is_proxy)
            found = [p for p in leaves if isinstance(p, TensorProxy)]
            if len(found) != len(expected):
                raise NotTrusted(f"{len(found)} results, not {len(expected)}")
            for t, p in zip(expected, found, strict=True):
                if tuple(t.shape) != tuple(p.shape) or t.dtype != dtypes.to_torch_dtype(p.dtype):
                    raise NotTrusted(f"{p.dtype}{list(p.shape)}, not {t.dtype}{list(t.shape)}")
            return found
        except BaseException:
            del scopes[depth:], lines[count:]
            raise

    def _by_torch(self, call: Call, args: Any, kwargs: Any) -> tuple[list[Any], Sequence[torch.Tensor]]:
        function, tensors = call.function, call.tensors()
        if of_memory(function) and not call.written:
            return self._of_memory(call)
        if name_of(function) in LIKE and len(tensors) == 1:
            function, tensors = without_values(function), []
            args, kwargs = pytree.tree_map_only(torch.Tensor, Meta.of, (call.args, call.kwargs))
        if _is_lowered(call) or (not call.written and _is_widened(call, call.results)):
            # else the line would save the casts, also those of gathered parameters
            args, kwargs = pytree.tree_map(partial(_cast, call.results[0].dtype), (args, kwargs), is_leaf=_is_proxy)
        into = {id(t) for t in call.written}
        if _writes_first(call) and (functional := out_of_place(function, tensors, kwargs)) is not None:
            function, kwargs = functional
            made, written = list(call.written), []
        else:
            made = [t for t in call.results if id(t) not in into]
            written = [i for i, t in enumerate(tensors) if id(t) in into and all(t is not u for u in tensors[:i])]
        old = [*made, *(tensors[i] for i in written)]
        new = self.line(
            function, args, kwargs, old, inputs=tensors, written=written, grad=call.grad,
            autocast=call.autocast, random=call.random, of_user=is_of_user(call.function),
        )  # fmt: skip
        return list(new), old

    def line(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        results: Sequence[torch.Tensor],
        *,
        inputs: Sequence[torch.Tensor] = (),
        grad: bool = False,
        **options: Any,
    ) -> Any:
        """Adds a line that calls torch's function. ``args`` and ``kwargs`` hold proxies in the place of ``inputs``."""
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_proxy)
        places = [i for i, x in enumerate(flat) if isinstance(x, TensorProxy)]
        proxies = [flat[i] for i in places]
        for i in places:
            flat[i] = None
        grad = grad and any(t.requires_grad for t in inputs)
        of_inputs = [
            Meta.of(t)._replace(dtype=dtypes.to_torch_dtype(p.dtype), grad=grad and t.requires_grad)
            for t, p in zip(inputs, proxies, strict=True)
        ]
        of_results = [Meta.of(t)._replace(grad=grad and _differentiable(t)) for t in results]
        call = TorchCall(
            name="", function=function, flat=flat, spec=spec, places=places, inputs=of_inputs, results=of_results,
            absent=self._absent, **options,
        )  # fmt: skip
        call.name = self._name(call)
        executor.join(get_compile_data())
        with _grad_mode(grad):  # a view is taken again where gradients are off, and read where they are on
            return call.symbol(*proxies)

    def _name(self, call: TorchCall) -> str:
        """A name for the lines of a call, the same one for equal calls: Thunder finds a line's function by its name."""
        if call.program is None:  # its lines keep what they save
            return self._unique(call.function)
        key = get_tracectx(), call.key
        if key not in self._names:
            self._names[key] = self._unique(call.function)
        return self._names[key]

    def _unique(self, function: Callable[..., Any]) -> str:
        trace = get_tracectx()
        name = "torch_" + (re.sub(r"\W", "_", name_of(function)).strip("_") or "call")
        number = 0
        while trace.has_name(found := f"{name}_{number}"):
            number += 1
        trace.add_name(found)
        return found

    # ---- parts of memory ----

    def _of_memory(self, call: Call) -> tuple[list[Any], Sequence[torch.Tensor]]:
        """A call that picks elements by where they lie in memory. The line says how its tensor lies: a pass may compute
        the tensor so that it lies otherwise, such as one put together of parts."""
        name, [t], (x, *others) = of_memory(call.function), call.results, call.tensors()
        if name == "as_strided":  # sizes may be tensors, whose values these are
            picked, given = t, [x]
        else:
            given = [x, *others] if name == "as_strided_scatter" else [x]
            with torch.no_grad():
                picked = torch.as_strided(x, *_arguments_of_view(call.args[len(given) :], call.kwargs))
        base, function = self.values.base(x), VIEWS[name]
        args = (self.proxy(x), x.stride(), *map(self.proxy, given[1:]), *_part(x, picked))
        if not covers(x, picked):
            if not covers(base, picked) or name != "as_strided":
                raise CannotWrite(f"{name} picks elements that are not in its argument")
            now, given, function = self.values.read(base), [base.detach(), x], take_beyond
            args = (now, base.stride(), self.proxy(x), _part(base, x), _part(base, picked))
        return list(self.line(function, args, {}, [t], inputs=given, grad=call.grad)), [t]

    def _take(self, now: Any, base: torch.Tensor, t: torch.Tensor) -> Any:
        args = (now, base.stride(), *_part(base, t))
        return self.line(take_view, args, {}, [t], inputs=[base], grad=True)[0]

    def _put(self, now: Any, base: torch.Tensor, t: torch.Tensor, new: Any) -> Any:
        piece = _slice_of(base, t) if tuple(new.shape) == tuple(t.shape) else None
        if piece is not None:  # as a function whose dims are known
            return self.line(torch.slice_scatter, (now, new, *piece), {}, [base], inputs=[base, t], grad=True)[0]
        args = (now, base.stride(), new, *_part(base, t))
        return self.line(put_view, args, {}, [base], inputs=[base, t], grad=True)[0]

    def _keep(self, now: Any, base: torch.Tensor, new: Any) -> Any:
        return self.line(keep_gradient, (now, new), {}, [base], inputs=[base, base.detach()], grad=True)[0]


def _part(base: torch.Tensor, t: torch.Tensor) -> tuple[Any, ...]:
    """Which part of a base a view is: its size, stride, offset (in elements of the view) and dtype."""
    begin = base.storage_offset() * base.element_size() // t.element_size()
    return tuple(t.shape), t.stride(), t.storage_offset() - begin, t.dtype


def _slice_of(base: torch.Tensor, t: torch.Tensor) -> tuple[int, int, int] | None:
    """The dim of a base of which a view is one range, its first position and its end; None for other views."""
    if t.dtype != base.dtype or t.ndim != base.ndim:
        return None
    cut = [d for d in range(t.ndim) if t.shape[d] != base.shape[d]]
    alike = all(a == b for a, b, size in zip(t.stride(), base.stride(), t.shape, strict=True) if size > 1)
    if len(cut) != 1 or not alike or not base.stride(cut[0]):
        return None
    start, rest = divmod(int(t.storage_offset()) - int(base.storage_offset()), base.stride(cut[0]))
    stop = start + t.shape[cut[0]]
    return (cut[0], start, stop) if not rest and start >= 0 and stop <= base.shape[cut[0]] else None


def take_view(base: Any, base_stride: Any, size: Any, stride: Any, offset: int, dtype: torch.dtype) -> torch.Tensor:
    return _view(laid_out(base, base_stride), size, stride, offset, dtype)


def take_beyond(base: Any, base_stride: Any, part: Any, of_part: Any, of_view: Any) -> torch.Tensor:
    """A view of a base that is not all within a part of it. Gradients reach that part only, as in torch."""
    return _view(put_view(base.detach(), base_stride, part, *of_part), *of_view)


def copy_view(*args: Any) -> torch.Tensor:
    return take_view(*args).clone()


def scatter_view(
    base: Any, base_stride: Any, new: Any, size: Any, stride: Any, offset: int, dtype: torch.dtype
) -> torch.Tensor:
    base = laid_out(base, base_stride)
    return torch.as_strided_scatter(base, new, size, stride, base.storage_offset() + offset)


def put_view(
    base: Any, base_stride: Any, new: Any, size: Any, stride: Any, offset: int, dtype: torch.dtype
) -> torch.Tensor:
    # torch.as_strided_scatter has a wrong gradient in torch 2.13: it clears what was not written
    out = laid_out(base, base_stride).clone()
    _view(out, size, stride, offset, dtype).copy_(new)
    return out


def _view(base: torch.Tensor, size: Any, stride: Any, offset: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex and not base.is_complex():
        pairs = _view(base, (*size, 2), (*(2 * step for step in stride), 1), 2 * offset, base.dtype)
        return torch.view_as_complex(pairs)
    if base.is_complex() and not dtype.is_complex:
        base = torch.view_as_real(base)
    base = base if base.dtype == dtype else base.view(dtype)
    return base.as_strided(size, stride, base.storage_offset() + offset)


# of functions that pick elements by where they lie
VIEWS = {"as_strided": take_view, "as_strided_copy": copy_view, "as_strided_scatter": scatter_view}


def _arguments_of_view(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Size, stride and offset."""
    keys = ("size", "stride", "storage_offset")
    given = dict(zip(keys, args, strict=False)) | {key: x for key, x in kwargs.items() if key in keys}
    return tuple(given[key] for key in keys if key in given)


class KeepGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.view_as(new)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def keep_gradient(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The values ``new`` with the gradient of ``old``: a write that autograd does not see."""
    found: torch.Tensor = KeepGradient.apply(old, new)
    return found


def _writes_first(call: Call) -> bool:
    """Whether a call writes into its first argument and nothing else, and makes no other tensor."""
    given = call.args[0] if call.args else None
    return len(call.written) == 1 and call.written[0] is given and all(t is given for t in call.results)


def _is_lowered(call: Call) -> bool:
    """Whether autocast casts the arguments of a call to its own dtype."""
    if not call.autocast or call.written or not call.results or not _has_autocast(call):
        return False
    dtype = call.results[0].dtype
    given = [t.dtype for t in call.tensors() if t.is_floating_point()]
    return dtype in (state.dtype for state in call.autocast) and torch.float32 in given and len(given) > 1


def _has_autocast(call: Call) -> bool:
    """Whether autocast knows the function. What it lowers inside of another one need not be all of that."""
    name = name_of(call.function)
    name = name.strip("_") if name.startswith("__") else name
    overloads = getattr(torch.ops.aten, name).overloads() if hasattr(torch.ops.aten, name) else ()
    names = [f"aten::{name}" + f".{o}" * (o != "default") for o in overloads]
    keys = [f"Autocast{state.device.upper()}" for state in call.autocast]
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return name == "einsum" or any(known(n, k) for n in filter(torch._C._dispatch_has_kernel, names) for k in keys)


def _is_widened(call: Call, results: Sequence[torch.Tensor]) -> bool:
    """Whether autocast may have cast arguments to float32 before the call: then a result in float32 is not enough."""
    lower = {state.dtype for state in call.autocast}
    return bool(results) and results[0].dtype == torch.float32 and any(t.dtype in lower for t in call.tensors())


def _is_proxy(value: Any) -> bool:
    return isinstance(value, Proxy)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    floating = isinstance(value, TensorProxy) and dtypes.is_float_dtype(value.dtype)
    return ltorch.to(value, dtype) if floating and dtype.is_floating_point else value


def _differentiable(t: torch.Tensor) -> bool:
    return t.requires_grad and (t.is_floating_point() or t.is_complex())


def _check_tensors(call: Call) -> None:
    given = call.tensors()
    for t in (*given, *call.results):
        if t.is_complex():
            raise NotTrusted("complex numbers")
        if not t.numel():
            raise NotTrusted("a tensor without elements")
        if t.layout != torch.strided or not (type(t) in KNOWN_TYPES or isinstance(t, FakeTensor)):
            raise NotTrusted("a tensor of another kind")
    if call.grad and any(t.ndim == 0 and t.requires_grad for t in given) and any(t.ndim for t in given):
        raise NotTrusted("a tensor without dimensions")
    if call.grad and name_of(call.function) in ("zero_", "fill_") and call.args[0].requires_grad:
        raise NotTrusted("no gradient would reach what was there before, in the place of zeros")
    if (
        call.grad
        and name_of(call.function) == "scaled_dot_product_attention"
        and _mask_requires_grad(*call.args, **call.kwargs)
    ):
        raise NotTrusted("a mask with a gradient")


def _mask_requires_grad(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Torch then uses none of its fused kernels, which differ in rows that are masked with finfo.min."""
    return attn_mask is not None and attn_mask.requires_grad


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Thunder's grad mode for some lines."""
    data = get_compile_data()
    before, data.is_grad_enabled = data.is_grad_enabled, enabled
    try:
        yield
    finally:
        data.is_grad_enabled = before


# ---- blocks ----


ParameterOf = Callable[[torch.Tensor], ShardedParameter | None]


class Function:
    """The block of a kind. ``pattern`` tells which inputs are the same value; ``used`` which ones the lines read."""

    def __init__(self, block: Block, used: Sequence[int], pattern: tuple[int, ...]) -> None:
        self.block, self.used, self.pattern = block, tuple(used), pattern


class Blocks:
    """Writes a record, with one line for each call of a block that has others of its kind.

    Args:
        repeated, marked: the names of the modules that may be called, and of those whose activations are recomputed
            or kept in host memory (:func:`passes.analysis.calls.way_of`).
        parameter_of: gives the sharded parameter of a tensor, or None.
        obstacle: why all lines must stand in the trace; empty if they need not.
    """

    def __init__(
        self,
        record: Record,
        replay: Replay,
        *,
        repeated: Collection[str],
        marked: Mapping[str, str],
        parameter_of: ParameterOf,
        obstacle: str = "",
    ) -> None:
        self._record, self._replay, self._parameter_of = record, replay, parameter_of
        self._repeated, self._obstacle = repeated, obstacle
        ways = {name: way_of(what) for name, what in marked.items()}
        self._on_host = {name for name, (_, on_host) in ways.items() if on_host}
        recomputed = {name: what for name, (what, _) in ways.items() if what}
        self._marks = [
            Mark(s.begin, s.end, recomputed[s.name] == "cheap") for s in record.spans if s.name in recomputed
        ]
        self._spans: list[Span] = []
        self._functions: dict[Kind, Function | None] = {}
        self.apart: dict[str, str] = {}  # why a block's lines stand in the trace, by its name
        self.called: dict[Kind, list[str]] = {}  # the names of the blocks that are called

    def write(self, returned: Iterable[torch.Tensor]) -> None:
        """Adds the lines of the record to the running trace. ``returned``: the tensors that are read after it."""
        calls, done = self._record.calls, 0
        kinds = self._kinds(Uses(self._record, returned))
        for span in sorted(kinds, key=lambda s: s.begin):
            self._replay.write(calls[done : span.begin], done, self._marks)
            done = span.begin
            if self._call(kinds[span], span):
                done = span.end
        self._replay.write(calls[done:], done, self._marks)

    def _kinds(self, uses: Uses) -> dict[Span, Kind]:
        spans = self._spans = outermost([s for s in self._record.spans if s.name in self._repeated])
        whole = [s for s in spans if is_whole(self._record, s, self._marks)]
        self.apart.update((s.name, "it is recomputed with others as a whole") for s in spans if s not in whole)
        if self._obstacle:
            self.apart.update((s.name, self._obstacle) for s in whole)
            return {}
        return find_kinds(self._record, whole, uses, self._marks, self._why_apart, self.apart)

    def _why_apart(self, outline: Outline) -> str:
        """Why a block cannot be a function because of its parameters' buckets; empty if it can."""
        found = [p for t in outline.inputs if (p := self._parameter_of(t)) is not None and p.plan.world_size > 1]
        for p in found:
            if p.plan.bucketing not in ("block", "model") or (p.plan.bucketing == "block" and p.plan.pieces > 1):
                return "its parameters are in several buckets"
        if len({p.block for p in found if p.plan.bucketing == "block"}) > 1:
            return "it has buckets within"
        return ""

    def _call(self, kind: Kind, span: Span) -> bool:
        """Adds a line that calls the block. False if the block's lines must stand in the trace."""
        [outline] = (m for m in kind.members if m.span is span)
        trace, replay = get_tracectx(), self._replay
        inputs = [replay.proxy(t) for t in outline.inputs]
        pattern = tuple(map([p.name for p in inputs].index, (p.name for p in inputs)))
        calls = self._record.calls[span.begin : span.end]
        if kind not in self._functions:
            self._functions[kind] = self._function(kind, outline, calls, inputs, pattern)
        function = self._functions[kind]
        if function is None or function.pattern != pattern:
            why = "its results are no tensors that it makes" if function is None else "it is given one tensor twice"
            self.apart[span.name] = why
            return False
        results = function.block.symbol(*(inputs[i] for i in function.used))
        trace.scopes[-1][-1].tags.add(CallOf(span.name, _digest(calls)))
        if span.name in self._on_host:
            trace.scopes[-1][-1].tags.add(ON_HOST)
        for (i, j), proxy in zip(kind.exports, results, strict=True):
            replay.values.know(calls[i].results[j], proxy)
        self.called.setdefault(kind, []).append(span.name)
        return True

    def _function(
        self, kind: Kind, outline: Outline, calls: Sequence[Call], inputs: Sequence[Any], pattern: tuple[int, ...]
    ) -> Function | None:
        """The function of the first call of its kind; None if its results are no tensors that its lines make."""
        trace, replay = get_tracectx(), self._replay
        trace.push_scope([])
        try:
            replay.write(calls, outline.span.begin, self._marks)
            outputs = [replay.proxy(calls[i].results[j]) for i, j in kind.exports]
        finally:
            lines = trace.pop_scope()
        made = {o.name for b in lines for o in b.flat_proxy_outs}
        distinct = len({o.name for o in outputs}) == len(outputs)
        read = _live(lines, {o.name for o in outputs})
        used = [i for i, p in enumerate(inputs) if pattern[i] == i and p.name in read]
        tensors = all(type(p) is TensorProxy for p in (*outputs, *(inputs[i] for i in used)))
        if not (used and distinct and tensors and all(o.name in made for o in outputs)):
            outside = {storage(t) for t in outline.inputs}
            replay.values.forget(t for call in calls for t in call.results if storage(t) not in outside)
            return None
        data, _ = compile_data_and_stats()
        block_calls.join(data)
        swap, name = names_of_users(), type(outline.span.module).__name__
        block = Block(
            unique_name(trace, name if name.isidentifier() else "Block"),
            [b.from_bsym_swap_proxies(swap) for b in lines],
            [swap.get(variableify(inputs[i]), inputs[i]) for i in used],
            [swap.get(variableify(o), o) for o in outputs],
            trace.names,
            outline.span.name,
        )
        return Function(block, used, pattern)

    def __str__(self) -> str:
        parts = [f"{called[0]} is compiled once for {len(called)} calls" for called in self.called.values()]
        reasons: dict[str, list[str]] = {}
        kinds = Counter(type(s.module) for s in self._spans)
        for span in self._spans:
            if kinds[type(span.module)] > 1 and span.name in self.apart:  # a single block has no equal
                reasons.setdefault(self.apart[span.name], []).append(span.name)
        for why, names_ in reasons.items():
            more = ", ..." if len(names_) > 4 else ""
            each = ", each" if len(names_) > 1 else ""
            parts.append(f"{', '.join(names_[:4])}{more}{each} by itself: {why}")
        return "; ".join(parts)


def _digest(calls: Sequence[Call]) -> str:
    """A digest of calls of torch: their functions, constants and tensors, which are numbers. The proof compares those
    of blocks that are taken for one. It is found otherwise than their kinds on purpose."""
    text, numbers = sha256(), dict[int, int]()
    for call in calls:
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        function = call.function if isinstance(call.function, Hashable) else id(call.function)
        said: list[Any] = [hash(function), str(spec), call.grad, len(call.written)]
        for leaf in (*leaves, *call.results):
            if isinstance(leaf, torch.Tensor):
                said += [numbers.setdefault(id(leaf), len(numbers)), tuple(leaf.shape), leaf.dtype]
            else:
                said.append(repr(leaf) if isinstance(leaf, PLAIN) else id(leaf))
        text.update(repr(said).encode())
    return text.hexdigest()


def _live(lines: Sequence[Any], read: set[str]) -> set[str]:
    """The names of all values that the lines behind the values ``read`` need."""
    for bsym in reversed(lines):
        if not read.isdisjoint(names(bsym.flat_proxy_outs)):
            read |= {a.name for a in bsym.flat_proxy_args if isinstance(a, Proxy)}
    return read
