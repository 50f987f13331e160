"""The program of a call of torch: the operators of ATen that it and its autograd run, as lines of a trace.

    t5 = torch.addmm(bias, x, weight)             # one line of torch's own function
    t9 = aten_t(weight)                           # backward, by the operators that torch's autograd runs
    t10 = aten_mm(gy, t9)

A call runs once on fake tensors, forward and backward, under a dispatch mode below autograd. Each operator that runs
there is noted with the values that it takes and gives, which are numbered by the memory in which they lie. So what
lines compute, and in which order, is what eager PyTorch computes, to the last bit.

Note [Whole]. Forward stays one line of torch's own function if backward reads only its inputs, its results and views
of its inputs. Such views are taken again in backward, so that ZeRO-3 saves no view of a gathered parameter.

Note [Strides]. A gradient may be laid out otherwise than the fake one. ``view`` becomes ``reshape``. A call in which an
operator relies on strides has no program. Some kernels read memory as it lies, and torch's rules for gradients lay out
their tensors first, which shows no operator if they are laid out already: ``LAID_OUT`` does that in each call.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from passes.comm.symbols import Property
from passes.compat.jit import fake_argument, symbol_that_calls
from passes.compat.versions import Fakes

import torch
from thunder.core import dtypes
from thunder.core.devices import to_device
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import get_tracectx
from thunder.extend import OperatorExecutor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

Shape = Sequence[int]
CONSTANTS = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
DEFAULTS: Mapping[str, Any] = {"layout": torch.strided, "pin_memory": False, "non_blocking": False}
# They pick elements by their place in memory, whatever the strides of the argument
OF_MEMORY = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
# They rely on strides, and so does what torch makes of the factors of determinants; view_as_real on a conjugation that
# is computed; the last one gives no workspace where its fake kernel does.
UNFIT = OF_MEMORY | {"new_empty_strided", "_linalg_det", "_linalg_slogdet", "view_as_real", "mkldnn_rnn_layer"}
# The kernels of Note [Strides], by the place of the tensor whose memory format the others take. From torch's file of
# derivatives, and from gradients in other layouts for all operators of its database.
LAID_OUT: Mapping[str, int] = {
    "native_group_norm": 0, "native_group_norm_backward": 1,
    "_weight_norm_interface": 0, "_weight_norm_interface_backward": 1, "_cdist_backward": 1,
    "cudnn_batch_norm_backward": 0, "miopen_batch_norm_backward": 0, "_pdist_forward": 0, "_pdist_backward": 1,
    "_embedding_bag": 0, "_embedding_bag_forward_only": 0, "_embedding_bag_backward": 1,
    "_embedding_bag_dense_backward": 1, "_embedding_bag_per_sample_weights_backward": 2,
}  # fmt: skip
ATTENTION = "_scaled_dot_product_"  # the names of kernels that take rows without gaps begin so
NOT_FUNCTIONAL = frozenset({"resize", "resize_as", "set"})


class Meta(NamedTuple):
    """A tensor without its values. ``grad``: whether a gradient flows through it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def of(cls, t: torch.Tensor) -> Meta:
        return cls(tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)

    def proxy(self, device: torch.device | None = None) -> TensorProxy:
        """A new proxy, on ``device`` if that is given."""
        return TensorProxy(
            shape=self.shape,
            dtype=dtypes.to_dtype(self.dtype),
            device=to_device(device or self.device),
            requires_grad=self.grad,
        )

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Value:
    """A tensor of a program, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Operation(NamedTuple):
    """An operator that runs. ``args``, ``kwargs`` and ``results`` hold Values in the place of tensors."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any

    @property
    def reads(self) -> set[int]:
        return _numbers((self.args, self.kwargs))

    @property
    def makes(self) -> set[int]:
        return _numbers(self.results)


@dataclass(frozen=True)
class Program:
    """The operators of a call and of its backward, over numbered values, the inputs of the call first.

    Attributes:
        metas: of each value.
        forward, results: the operators of the call, and its results.
        gradients: of those results that have one: the values that backward is given.
        backward, found: the operators of backward, views of inputs included, and the gradients of those inputs that
            want one, None where torch gives none.
        whole: whether forward may be one line, as Note [Whole] says.
        returns: what the function returns if that is all results: a tensor, or a tuple of tensors.
    """

    metas: Sequence[Meta]
    forward: Sequence[Operation]
    results: Sequence[int]
    gradients: Sequence[int]
    backward: Sequence[Operation]
    found: Sequence[int | None]
    whole: bool
    returns: type | None

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of the products of forward."""
        return sum(self._flops(operation) for operation in self.forward)

    def _flops(self, operation: Operation) -> int:
        by_number = lambda x: self.metas[x.number] if isinstance(x, Value) else x  # noqa: E731
        return flops_of(*pytree.tree_map(by_number, operation))

    def write(self, operations: Sequence[Operation], values: dict[int, Any], device: torch.device | None) -> None:
        """Adds lines for ``operations`` to the running trace. ``values``: the proxies of values, to which it adds those
        that the lines make, on ``device`` if that is given."""

        def given(value: Any) -> Any:
            return values[value.number] if isinstance(value, Value) else value

        def made(value: Any) -> Any:
            if not isinstance(value, Value):
                return value
            values[value.number] = proxy = self.metas[value.number].proxy(device)
            return proxy

        lines = get_tracectx().peek_scope()
        for operator, args, kwargs, results in operations:
            args, kwargs = pytree.tree_map(given, (args, kwargs))
            lines.append(symbol_of(operator).bind(*args, **kwargs, output=pytree.tree_map(made, results)))


def find_program(
    run: Callable[[Sequence[torch.Tensor]], tuple[Sequence[torch.Tensor], type | None]],
    inputs: Sequence[Meta],
    returned: Sequence[int],
) -> Program | None:
    """The program of a function of tensors like ``inputs``; None if it has none.

    Args:
        run: gives the results, and what the function returns if they are all of that.
        returned: the numbers of the results that have a gradient.
    """
    log = _Log()
    wanted = [i for i, m in enumerate(inputs) if m.grad and returned]
    try:
        with Fakes(allow_non_fake_inputs=True):
            leaves = [m.empty().requires_grad_(i in wanted) for i, m in enumerate(inputs)]
            for leaf in leaves:
                log.know(leaf)
            with torch.set_grad_enabled(bool(wanted)), log:
                results, returns = run(leaves)
            forward, log.operations = log.operations, []
            gradients = [Meta.of(results[i]).empty() for i in returned]
            numbers = [log.know(g) for g in gradients]
            pairs = [(results[i], g) for i, g in zip(returned, gradients, strict=True) if results[i].requires_grad]
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs and wanted:
                outs, grads = zip(*pairs, strict=True)
                with log:
                    found = torch.autograd.grad(outs, [leaves[i] for i in wanted], grads, allow_unused=True)
    except Exception:  # whatever a function raises that torch cannot run on fake tensors
        return None
    known = [log.number(r) for r in results]
    gives = [None if g is None else log.number(g) for g in found]
    lost = None in known or any(n is None and g is not None for n, g in zip(gives, found, strict=True))
    if log.why or lost or not _reached({*numbers}, log.operations) >= {n for n in gives if n is not None}:
        return None
    results_by_number = [n for n in known if n is not None]
    return _without_dead(log.metas, len(inputs), forward, results_by_number, numbers, log.operations, gives, returns)


def _reached(given: Collection[int], operations: Sequence[Operation]) -> set[int]:
    """The values that are computed from those given. A gradient that is not, such as the zeros of ``sgn``, would be
    taken for one that nothing reaches, and for None."""
    found = set(given)
    for operation in operations:
        if not found.isdisjoint(operation.reads):
            found |= operation.makes
    return found


def _without_dead(
    metas: Sequence[Meta],
    inputs: int,
    forward: Sequence[Operation],
    results: Sequence[int],
    gradients: Sequence[int],
    backward: Sequence[Operation],
    found: Sequence[int | None],
    returns: type | None,
) -> Program:
    """The program of the operators whose results are read."""
    backward, read = _live(backward, {n for n in found if n is not None})
    views, pure = [], set(range(inputs))  # of inputs, and of views of inputs
    for operation in forward:
        if is_view(operation.operator) and operation.reads <= pure:
            pure |= operation.makes
            views.append(operation)
    again, read = _live(views, read)
    made = {n for operation in forward for n in operation.makes}
    saved = read & made - {n for operation in again for n in operation.makes}
    whole = saved <= set(results) and len({*results} - set(range(inputs))) == len(results)
    forward, _ = _live(forward, saved | set(results))
    return Program(metas, forward, results, gradients, (*again, *backward), found, whole, returns)


def _live(operations: Sequence[Operation], read: Collection[int]) -> tuple[Sequence[Operation], set[int]]:
    """The operations of which others, or ``read``, need a result, and all that they and it read. Those that draw random
    numbers move torch's generator: they stay."""
    kept, read = [], set(read)
    for operation in reversed(operations):
        if not read.isdisjoint(operation.makes) or draws(*operation[:3]):
            kept.append(operation)
            read |= operation.reads
    return kept[::-1], read


class _Log(TorchDispatchMode):
    """Notes operators. It never raises, because a function may catch that: ``why`` says what a program cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.why = ""
        self.operations: list[Operation] = []
        self.metas: list[Meta] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._alive: list[Any] = []  # memory that is freed may be that of another tensor

    def know(self, t: torch.Tensor) -> int:
        """Gives a tensor the next number."""
        self._alive.append(t)
        self._numbers[_place(t)] = number = len(self.metas)
        self.metas.append(Meta.of(t)._replace(grad=False))
        return number

    def number(self, t: torch.Tensor) -> int | None:
        return self._numbers.get(_place(t)) if t.layout == torch.strided else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive.append((args, kwargs, out))
        if not self.why:
            self.why = self._note(func, args, kwargs or {}, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> str:
        """Notes an operator. Returns why a program cannot have it."""
        name = func._schema.name.partition("::")[2]
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not results and not func._schema.is_mutable:
            return ""  # a question
        if func.namespace not in ("aten", "prims") or name in UNFIT:
            return f"{func} is no function of values"
        if any(t.layout != torch.strided or t.is_conj() or t.is_neg() for t in results):
            return f"{func} gives a tensor of another kind"
        kwargs = {key: x for key, x in kwargs.items() if key not in DEFAULTS or x != DEFAULTS[key]}
        given = args, kwargs
        args, kwargs = pytree.tree_map(self._value, given)
        if not all(isinstance(x, (Value, *CONSTANTS)) for x in pytree.tree_leaves((args, kwargs))):
            return f"{func} takes a tensor that no operator made, or an object of Python"
        if any(x is None and str(a.type) == "Tensor" for x, a in zip(args, func._schema.arguments, strict=False)):
            return f"{func} takes None for a tensor"
        if func._schema.is_mutable:
            functional = without_writing(func, args, kwargs)
            if functional is None:
                return f"{func} writes"
            self._forget(results[0])
            if len({t.dtype for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)}) > 1:
                function, like, named = without_writing(func, *given)
                wide = function(*like, **named)  # a write keeps the dtype, the function may promote it
                func, args, kwargs = functional
                self.operations.append(Operation(func, args, kwargs, Value(self.know(wide))))
                functional = torch.ops.aten._to_copy.default, (self._value(wide),), {"dtype": results[0].dtype}
            func, args, kwargs = functional
        elif results and all(self.number(t) is not None for t in results):
            return ""  # detach, or a view of the whole
        made = pytree.tree_map(lambda x: Value(self.know(x)) if isinstance(x, torch.Tensor) else x, out)
        self.operations.append(Operation(func, args, kwargs, made))
        return ""

    def _value(self, x: Any) -> Any:
        number = self.number(x) if isinstance(x, torch.Tensor) else None
        return x if number is None else Value(number)

    def _forget(self, written: torch.Tensor) -> None:
        """Forgets all values that share memory with one that is written: reading another of them is then an error."""
        self._numbers = {place: n for place, n in self._numbers.items() if place[0] != storage(written)}


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    """The memory, offset, shape, strides and dtype of a tensor: equal for equal views."""
    return storage(t), t.storage_offset(), tuple(t.shape), t.stride(), t.dtype


def _numbers(values: Any) -> set[int]:
    return {x.number for x in pytree.tree_leaves(values) if isinstance(x, Value)}


def without_writing(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator that gives what ``operator`` writes into its first argument, with its arguments; None if there is
    none."""
    name, schema = operator._schema.name.partition("::")[2], operator._schema
    changes_shape = torch.Tag.inplace_view in operator.tags  # also of what the caller holds
    writes_self = name.endswith("_") and name[:-1] not in NOT_FUNCTIONAL and not changes_shape
    packet = getattr(torch.ops.aten, name[:-1], None) if writes_self else None
    takes = [(a.name, str(a.type)) for a in schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in found._schema.arguments] == takes and not found._schema.is_mutable:
            break
    else:
        return None
    given = dict(zip((name for name, _ in takes), args, strict=False)) | dict(kwargs)
    full = {a.name: given.get(a.name, a.default_value) for a in schema.arguments}  # defaults of the two may differ
    positional = tuple(full[a.name] for a in schema.arguments if not a.kwarg_only)
    named = {a.name: full[a.name] for a in schema.arguments if a.kwarg_only and full[a.name] is not None}
    return found, positional, named


# ---- what an operator does ----


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a call of PyTorch's operator draws random numbers. One of attention does not without dropout."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    given = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | dict(kwargs)
    takes_dropout = any(a.name == "dropout_p" for a in operator._schema.arguments)
    return not takes_dropout or given.get("dropout_p", 0.0) != 0


def is_view(operator: OpOverload) -> bool:
    """True if the results share the memory of an argument."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns)


PROPERTIES = {
    Property.CAST: "_to_copy",
    Property.COPY: "contiguous",
    Property.LOOK_UP: "embedding gather index index_select take",
    Property.CONSTANT: "arange full ones scalar_tensor zeros",
}


def properties_of(operator: OpOverload) -> Property:
    """The properties of an operator's lines. One that draws may not do so in each line: see :func:`draws`."""
    name = operator._schema.name.partition("::")[2]
    found = Property.VIEW if is_view(operator) or name in RESHAPES else Property.NONE
    if torch.Tag.nondeterministic_seeded in operator.tags:
        found |= Property.RANDOM
    return functools.reduce(lambda a, b: a | b, (p for p, names in PROPERTIES.items() if name in names.split()), found)


def _grouped_flops(a: Shape, b: Shape, *others: Any, **options: Any) -> int:
    """(m, k) x (g, k, n) -> (m, n), or with groups of other dimensions. Each row is taken to be in a group."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _attention_flops(query: Shape, key: Shape, value: Shape, *others: Any, **options: Any) -> int:
    """Scores, and the sum of values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward_flops(grad: Shape, query: Shape, key: Shape, value: Shape, *others: Any, **options: Any) -> int:
    """Scores again, and the gradients of scores, query, key, probabilities and value."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


# The second product stands in for the first where transformers cannot call it.
FLOPS: Mapping[str, Callable[..., int]] = {
    "aten._grouped_mm": _grouped_flops,
    "transformers.grouped_mm_fallback": _grouped_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
}


def own_flops() -> Mapping[Any, Callable[..., int]]:
    """FLOPs of operators that torch's counter does not know."""
    known: dict[Any, Any] = {}
    for name, rule in FLOPS.items():
        with suppress(AttributeError):  # transformers is not imported
            known[attrgetter(name)(torch.ops)] = rule
    return known


def flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=dict(own_flops()))


def counts_flops(operator: OpOverload) -> bool:
    """True for a product, a convolution or attention, also for one of backward."""
    return _flops_rule(operator) is not None


def flops_of(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of an operator. Anything with a shape stands for a tensor; ``out`` is its result."""
    rule = _flops_rule(operator)
    if rule is None:
        return 0
    is_tensor = lambda x: hasattr(x, "shape")  # noqa: E731
    shape = lambda x: torch.Size(x.shape) if is_tensor(x) else x  # noqa: E731
    shapes, named, results = pytree.tree_map(shape, (args, kwargs, out), is_leaf=is_tensor)
    return int(rule(*shapes, **named, out_val=results))


def _flops_rule(operator: OpOverload) -> Callable[..., int] | None:
    found: Callable[..., int] | None = own_flops().get(operator.overloadpacket)
    return found or flop_registry.get(operator.overloadpacket)


# ---- lines ----

executor = OperatorExecutor("aten", version="0.1")
RESHAPES = frozenset({"view", "_unsafe_view", "_reshape_alias"})


@functools.cache
def symbol_of(operator: OpOverload) -> Symbol:
    """The symbol whose lines call an operator. Its id is the operator."""
    name = operator._schema.name.partition("::")[2]
    if operator._overloadname != "default":
        name += f"_{operator._overloadname}"
    properties = properties_of(operator)
    tags: list[Any] = [properties, *([OpTags.RANDOM_OP] if Property.RANDOM in properties else [])]

    def meta(*args: Any, **kwargs: Any) -> Any:
        with Fakes():
            found = operator(*args_of(args), **args_of(kwargs))
        return pytree.tree_map(lambda x: Meta.of(x).proxy() if isinstance(x, torch.Tensor) else x, found)

    def args_of(values: Any) -> Any:
        return pytree.tree_map(fake_argument, values, is_leaf=lambda x: isinstance(x, TensorProxy))

    return symbol_that_calls(
        f"aten_{name}", meta, binding_of(operator), id=operator, is_prim=True, executor=executor, tags=tags
    )


def operator_of(sym: Symbol) -> OpOverload | None:
    """The operator of ATen that a symbol stands for; None for other symbols."""
    return sym.id if isinstance(sym.id, OpOverload) else None


def binding_of(operator: OpOverload) -> Callable[..., Any]:
    """A function of Python that calls an operator: one of torch's own where it has one, which parses its arguments
    faster."""
    name, overload = operator._schema.name.partition("::")[2], operator._overloadname
    if overload == "default" and name in RESHAPES:
        return _reshape
    if name == "_to_copy":
        return torch.Tensor.to
    if name in LAID_OUT:
        return functools.partial(_laid_out, operator, LAID_OUT[name])
    if name.startswith(ATTENTION):
        return functools.partial(_with_dense_rows, operator)
    takes = [str(a.type) for a in operator._schema.arguments]
    deprecated = overload == "Scalar" and len(takes) > 2  # torch.add(a, number, alpha)
    parsed = not deprecated and "List[Optional[Tensor]]" not in takes
    means = any(a.name == "reduction" and a.has_default_value() for a in operator._schema.arguments)
    parsed = parsed and not means  # the parser takes the default, the mean, for 0
    if parsed and overload in ("default", "Tensor", "Scalar", "int", "dim", "dim_IntList"):
        for home in (torch, torch._C._nn, torch.Tensor):
            found = getattr(home, name, None)
            if isinstance(found, types.BuiltinFunctionType | types.MethodDescriptorType):
                return found
    return operator


def _laid_out(operator: OpOverload, place: int, *args: Any) -> Any:
    """Calls an operator with tensors that are contiguous, or channels-last if the one at ``place`` is."""
    like, formats = args[place], {4: torch.channels_last, 5: torch.channels_last_3d}
    chosen = formats.get(like.dim())
    if chosen is None or like.is_contiguous() or not like.is_contiguous(memory_format=chosen):
        chosen = torch.contiguous_format

    def laid_out(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.contiguous(memory_format=chosen if x.dim() == like.dim() else torch.contiguous_format)

    return operator(*map(laid_out, args))


def _with_dense_rows(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    tensors = (x.contiguous() if isinstance(x, torch.Tensor) and x.dim() and x.stride(-1) > 1 else x for x in args)
    return operator(*tensors, **kwargs)


def _reshape(a: torch.Tensor, shape: Sequence[int], stride: Any = None) -> torch.Tensor:
    return torch.reshape(a, shape)
