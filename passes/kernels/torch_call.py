"""Calls of torch as lines of a trace.

    y = torch_silu_0(x)                           # forward calls torch's own function
    gx = aten_silu_backward(gy, x)                # backward: its program, see passes.kernels.aten

A call without a program, such as one of an autograd function, keeps what it may need for backward:

    y, saved = torch_square_3_forward(x)
    gx = torch_square_3_backward(saved, x, gy)

Its forward line runs the function under autograd and keeps the nodes of its graph. What these nodes save is in the list
``saved``, except for inputs and results of the line: backward takes them as arguments, so that passes see them. In
ZeRO-3 no gathered parameter is saved. Backward empties the list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import ref

from passes.comm.symbols import Property
from passes.compat.jit import OwnLine, OwnLines, symbol_that_calls
from passes.compat.versions import Fakes, keeps_graph
from passes.kernels.aten import CONSTANTS, Meta, Operation, Program, find_program, flop_counter, properties_of, storage
from passes.plan.runtime import Unused

import thunder.torch as ltorch
import torch
from thunder.core import dtypes, prims
from thunder.core.devices import to_device
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grad
from torch._ops import OpOverload
from torch.autograd.graph import get_gradient_edge
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

Tensors = tuple[torch.Tensor, ...]


class Autocast(NamedTuple):
    """The state of autocast for one type of device."""

    device: str
    dtype: torch.dtype

    def __call__(self) -> Any:
        return torch.autocast(self.device, self.dtype, cache_enabled=False)


class Saved(list[Any]):
    """The tensors saved by the autograd graph of a line, and its nodes: those of the results that have a gradient (by
    number) and of the inputs that want one. ``given`` are the inputs of the line, while backward runs."""

    results: Mapping[int, Any]
    inputs: Sequence[Any]
    given: Mapping[int, torch.Tensor]

    def clear(self) -> None:
        super().clear()
        self.results, self.inputs, self.given = {}, (), {}


class _Source(torch.autograd.Function):
    """Where the graph of a line begins. (A leaf's own node would keep the leaf alive: a gathered parameter.)"""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("the gradients of its results are what is asked for")


class InputView(NamedTuple):
    """A tensor that is an input of the line, or a view of it. ``of_whole`` is the stride of that input, None if the
    tensor is the input itself."""

    number: int
    size: Sequence[int] = ()
    stride: Sequence[int] = ()
    offset: int = 0
    of_whole: Sequence[int] | None = None

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        if self.of_whole is None:
            return whole
        whole = laid_out(whole, self.of_whole)  # it may have been computed again
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class Slot:
    """What a node keeps of a tensor that it saves: the part of an input that it is, or its number in the list."""

    def __init__(self, place: int | InputView) -> None:
        self.place = place


class Reads(NamedTuple):
    """What a line does. ``inputs``: the numbers of those that backward needs. ``flops``: those of forward. ``saved``:
    what the list holds. ``known``: False if there is no fake kernel that tells."""

    inputs: tuple[int, ...]
    flops: int = 0
    saved: tuple[Meta, ...] = ()
    known: bool = True


@dataclass(eq=False)
class TorchCall(OwnLine):
    """One call, a pure function of its tensors. It is the id of the symbol whose lines make it.

    ``name`` is that of the symbol, unique in the trace. ``function`` is called with the tensors in their ``places``
    among ``flat``, the flattened arguments of this ``spec``. ``written`` has the numbers, among the tensors, of those
    that the function writes into: it gets clones of them, which are further results. ``inputs`` and ``results`` are the
    tensors' metadata; ``autocast`` are the states under which the function runs; ``random`` tells whether it draws
    random numbers; ``absent`` is the device of the step, if the metadata say the CPU in its place. Backward reads in
    ``unused`` which gradients of results are zeros in the place of None, and notes there those that torch gives none.
    ``of_user``: whether the function is the user's, and may rely on strides, as kernels do: it gets its tensors with
    the strides that were recorded.
    ``hooked``: whether hooks see what its graph saves, as torch.func inside of the function does not allow.
    """

    name: str
    function: Callable[..., Any]
    flat: Sequence[Any]
    spec: pytree.TreeSpec
    places: Sequence[int]
    inputs: Sequence[Meta]
    results: Sequence[Meta]
    written: Collection[int] = ()
    autocast: Sequence[Autocast] = ()
    random: bool = False
    absent: torch.device | None = None
    unused: Unused = field(default_factory=Unused)
    of_user: bool = False
    hooked: bool = True

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The inputs that want a gradient."""
        return tuple(i for i, m in enumerate(self.inputs) if m.grad)

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """The results that have a gradient."""
        return tuple(i for i, m in enumerate(self.results) if m.grad) if self.wanted else ()

    @cached_property
    def is_certain(self) -> bool:
        """Whether backward surely returns gradients: of one input from one result, by a function of torch's own; or by
        a function that says so."""
        if getattr(self.function, "always_differentiates", False):
            return True
        return len(self.wanted) == len(self.returned) == 1 and resolve_name(self.function) is not None

    def __repr__(self) -> str:
        return f"TorchCall({self.name})"

    # ---- at run time ----

    def call(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        return self._found_and_results(tensors)[1]

    def called(self, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, type | None]:
        """The results; and what the function returns if they are all of that: a tensor, or a tuple of tensors."""
        found, results = self._found_and_results(tensors)
        returned, kind = (found, tuple) if isinstance(found, tuple | list) else ((found,), torch.Tensor)
        return results, kind if list(map(id, returned)) == list(map(id, results)) and not self.written else None

    def _found_and_results(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Tensors]:
        if self.of_user:
            tensors = [lying_like(t, m.stride) for t, m in zip(tensors, self.inputs, strict=True)]
        flat, into = list(self.flat), {id(tensors[n]): tensors[n].clone() for n in self.written}
        for i, t in zip(self.places, tensors, strict=True):
            flat[i] = into.get(id(t), t)
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        with ExitStack() as stack:
            for state in self.autocast:
                stack.enter_context(state())
            found = self.function(*args, **kwargs)
        clones = [flat[self.places[n]] for n in sorted(self.written)]
        same = {id(t) for t in (*flat, *tensors)}  # inputs that the function returns as they are, and what is written
        made = (t for t in pytree.tree_leaves(found) if id(t) not in same)
        return found, tuple(t for t in (*made, *clones) if isinstance(t, torch.Tensor))

    def run(self, *tensors: torch.Tensor) -> Tensors:
        """The line where nothing is differentiated."""
        with torch.no_grad():
            return self.call(tensors)

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """The results, and what backward needs of them."""
        return self._forward(tensors, self.reads.inputs, set())

    def _forward(self, tensors: Sequence[torch.Tensor], readable: Sequence[int], read: set[int]) -> tuple[Any, ...]:
        """Adds to ``read`` the numbers of the ``readable`` inputs that backward will read."""
        saved = Saved()
        given = list(tensors)
        with torch.enable_grad():
            sources = _Source.apply(torch.empty(0, requires_grad=True), *(tensors[i] for i in self.wanted))
        for i, t in zip(self.wanted, sources, strict=True):
            given[i] = t
        saved.given = inputs = {i: given[i] for i in readable}  # a function may run a graph of its own
        the_list = ref(saved)  # the nodes, which it holds, hold the functions below
        slots: list[ref[Slot]] = []

        def pack(t: torch.Tensor) -> Slot:
            saved = the_list()
            assert saved is not None
            slot = Slot(_view_of(t, inputs) or len(saved))
            if isinstance(slot.place, int):
                saved.append(t.detach())
            slots.append(ref(slot))
            return slot

        def unpack(slot: Slot) -> torch.Tensor:
            saved, place = the_list(), slot.place
            assert saved is not None
            found: torch.Tensor = saved[place] if isinstance(place, int) else place.take(saved.given[place.number])
            return found

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack) if self.hooked else nullcontext()
        with torch.enable_grad(), hooks:
            outs = self.call(given)
        inputs.clear()
        places = {slot.place for one in slots if (slot := one()) is not None}  # without those of such a graph
        read |= {place.number for place in places if isinstance(place, InputView)}
        saved[:] = (t if i in places else None for i, t in enumerate(saved))
        saved.results = {i: get_gradient_edge(outs[i]) for i in self.returned if outs[i].requires_grad}
        saved.inputs = [get_gradient_edge(given[i]) for i in self.wanted]
        return (*(o.detach() for o in outs), saved)

    def backward(self, saved: Saved, *values: torch.Tensor) -> Tensors:
        """The gradients of the ``wanted`` inputs. ``values``: the inputs that are read, the results' gradients."""
        keep, count = keeps_graph(), len(self.reads.inputs)
        saved.given = dict(zip(self.reads.inputs, values[:count], strict=True))
        given = dict(zip(self.returned, values[count:], strict=True))
        sources, first = ((), 0) if self.is_certain else next(self.unused.coming, ((), 0))
        lacking = {i for i, s in zip(self.returned, sources, strict=False) if s <= self.unused.absent}
        pairs = [(edge, given[i]) for i, edge in saved.results.items() if i not in lacking]
        found: Sequence[torch.Tensor | None] = [None] * len(self.wanted)
        if pairs:
            edges, grads = zip(*pairs, strict=True)
            found = torch.autograd.grad(edges, saved.inputs, grads, retain_graph=keep, allow_unused=True)
        if keep:
            saved.given = {}
        else:
            saved.clear()
        if sources:
            self.unused.absent.update(first + n for n, gradient in enumerate(found) if gradient is None)
        return tuple(self.inputs[i].zeros() if g is None else g for i, g in zip(self.wanted, found, strict=True))

    # ---- at compile time ----

    @cached_property
    def casts(self) -> bool:
        """Whether autocast casts a tensor in the call."""
        made = self.program.forward if self.program is not None else ()
        cast = torch.ops.aten._to_copy.default
        return bool(self.autocast) and (self.program is None or any(o.operator == cast for o in made))

    @cached_property
    def program(self) -> Program | None:
        """The operators that the call and its backward run; None if it has to keep a graph of autograd."""
        if resolve_name(self.function) is None and not isinstance(self.function, OpOverload):
            return None  # a function of Python may keep what it likes for backward
        return _program(self.key) if self.key.parts is not None else None

    @cached_property
    def key(self) -> Key:
        return Key(self)

    @cached_property
    def properties(self) -> Property:
        """Those of the operators that the call runs, if it runs one, or only views and copies."""
        found = Property.RANDOM if self.random else Property.NONE
        if self.program is None or self.written:
            return found
        operators = [operation.operator for operation in self.program.forward]
        each = [properties_of(operator) for operator in operators]
        copies = [operator == torch.ops.aten.clone.default for operator in operators]
        if all(copy or Property.VIEW in one for copy, one in zip(copies, each, strict=True)):
            if not (copies and all(copies)):
                return found | Property.VIEW
            return found | (Property.COPY if self.function is torch.Tensor.contiguous else Property.NONE)
        return found | (each[0] & ~Property.RANDOM if len(each) == 1 else Property.NONE)

    @cached_property
    def reads(self) -> Reads:
        """Found by a run on fake tensors. If torch has no fake kernel, backward gets all inputs."""
        return Reads((), self.program.flops) if self.program is not None else self._find_reads()

    def _find_reads(self) -> Reads:
        read: set[int] = set()
        everything = range(len(self.inputs))
        try:
            with Fakes(allow_non_fake_inputs=True), flop_counter() as counter:
                *_, saved = self._forward([m.empty() for m in self.inputs], everything, read)
        except Exception as error:  # whatever the function raises on fake tensors
            if self.hooked and "saved tensor hooks" in str(error):  # it calls torch.func.grad
                self.hooked = False
                return self._find_reads()
            return Reads(tuple(everything), known=False)
        kept = tuple(Meta.of(t) for t in {storage(t): t for t in saved if t is not None}.values())
        return Reads(tuple(sorted(read)), counter.get_total_flops(), kept)

    def proxies(self, *tensors: TensorProxy) -> tuple[TensorProxy, ...]:
        return tuple(m.proxy(self.absent) for m in self.results)

    @cached_property
    def symbol(self) -> Symbol:
        """The symbol of the line as it is traced."""
        tags: list[Any] = [self.properties, *([OpTags.RANDOM_OP] if self.random else [])]
        return symbol_that_calls(self.name, self.proxies, self.run, id=self, is_prim=True, tags=tags)

    def _lowered(self, kind: str, meta: Callable[..., Any], function: Callable[..., Any]) -> Symbol:
        name = f"{self.name}{kind}"
        tags = list(self.symbol.tags or ()) if kind != "_backward" else []
        return symbol_that_calls(name, meta, function, id=Line(self, kind), is_prim=True, executor=executor, tags=tags)

    def execute(self, *tensors: TensorProxy) -> Any:
        """Adds the line that makes the call where nothing is differentiated."""
        direct = self._direct()
        if direct is None or self.program.returns is tuple:  # type: ignore[union-attr]
            function = direct or (self.run if self.program is None else _first(self.key).run)
            return self._lowered("", self.proxies, function)(*tensors)
        return (self._lowered("", lambda *tensors: self.proxies()[0], direct)(*tensors),)

    def _direct(self) -> Callable[..., Any] | None:
        """A function of the tensors that does no more than to call torch's function, with the constants in their
        places: it returns a tensor if that does. One for all equal calls. None if the call needs more."""
        if self.casts or self.program is None or self.program.returns is None:
            return None
        return _direct(self.key)

    @property
    def operations(self) -> Sequence[Operation] | None:
        """The operators that the line runs where nothing is differentiated; None if it may do more than that."""
        return self.program.forward if self.program is not None and self._direct() is not None else None

    def differentiate(self, *tensors: TensorProxy) -> Any:
        """The grad rule of the line."""
        if not self.returned:
            return self.execute(*tensors)
        if self.program is not None:
            return self._by_program(self.program, tensors)

        def forward_meta(*tensors: TensorProxy) -> tuple[Any, ...]:
            return (*self.proxies(), AnyProxy(None, prefix="saved"))

        def backward_meta(*values: Any) -> tuple[TensorProxy, ...]:
            return tuple(TensorProxy(like=tensors[i], requires_grad=False) for i in self.wanted)

        *outs, saved = self._lowered("_forward", forward_meta, self.forward)(*tensors)
        values = (*(tensors[i] for i in self.reads.inputs), *(get_grad(outs[i]) for i in self.returned))
        gradients = self._lowered("_backward", backward_meta, self.backward)(saved, *values)
        for i, gradient in zip(self.wanted, gradients, strict=True):
            put_grad(tensors[i], gradient)
        return tuple(outs)

    def _by_program(self, program: Program, tensors: Sequence[TensorProxy]) -> tuple[TensorProxy, ...]:
        """Adds the lines of the program, and its gradients."""
        values: dict[int, TensorProxy] = dict(enumerate(tensors))
        if program.whole and not self.casts:
            values |= zip(program.results, self.execute(*tensors), strict=True)
        else:
            program.write(program.forward, values, self.absent)
        outs: list[TensorProxy] = []
        for n in program.results:
            is_new = n >= len(tensors) and all(values[n] is not out for out in outs)
            outs.append(values[n] if is_new else prims.shallow_copy(values[n]))
        values |= {n: get_grad(outs[i]) for i, n in zip(self.returned, program.gradients, strict=True)}
        program.write(program.backward, values, self.absent)
        for i, found in zip(self.wanted, program.found, strict=True):
            if found is not None:
                put_grad(tensors[i], values[found])
        return tuple(outs)


class _Name(str):
    """A name that prints as it is."""

    __repr__ = str.__str__


class Key:
    """All that the program of a call depends on. ``parts`` is None if an argument cannot be compared."""

    def __init__(self, call: TorchCall) -> None:
        self.call, self.parts = call, None
        constants = [(type(x), repr(x)) for i, x in enumerate(call.flat) if i not in call.places]
        if all(issubclass(kind, (*CONSTANTS, slice, type(...), torch.Size)) for kind, _ in constants):
            self.parts = (
                call.function, tuple(constants), str(call.spec), tuple(call.places), tuple(call.inputs),
                tuple(call.returned), tuple(call.written), tuple(call.autocast), _switches(),
            )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.parts == other.parts


def _switches() -> tuple[Any, ...]:
    """The settings of torch by which functions choose their operators."""
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    attentions = (getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in kinds)
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), *attentions


@lru_cache(maxsize=1024)
def _program(key: Key) -> Program | None:
    return find_program(key.call.called, key.call.inputs, key.call.returned)


@lru_cache(maxsize=1024)
def _first(key: Key) -> TorchCall:
    """One call for all equal ones: lines of one name must have one function."""
    return key.call


@lru_cache(maxsize=1024)
def _direct(key: Key) -> Callable[..., Any]:
    """As :meth:`TorchCall._direct`."""
    call = key.call
    assert call.program is not None
    names = {place: f"t{i}" for i, place in enumerate(call.places)}
    constants = {f"c{i}": x for i, x in enumerate(call.flat) if i not in names}
    flat = [_Name(names.get(i, f"c{i}")) for i in range(len(call.flat))]
    args, kwargs = pytree.tree_unflatten(flat, call.spec)
    given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
    called = f"tuple(f({given}))" if call.program.returns is tuple else f"f({given})"
    return eval(f"lambda {', '.join(names.values())}: {called}", {"f": call.function, **constants})


class Line(NamedTuple):
    """The id of the symbol of a lowered line: the call, and "", "_forward" or "_backward"."""

    call: TorchCall
    kind: str

    @property
    def name(self) -> str:
        return self.call.name + self.kind


def call_of(sym: Symbol) -> TorchCall | None:
    """The call of torch that a symbol stands for, before and after lowering; None for other symbols."""
    if isinstance(sym.id, Line):
        return sym.id.call
    return sym.id if isinstance(sym.id, TorchCall) else None


executor = OwnLines("torch_calls")


def _zeros(*shape: Any, device: Any = None, dtype: Any = None) -> TensorProxy:
    filled: TensorProxy = prims.full((), 0, device=to_device(device), dtype=dtypes.to_dtype(dtype))
    return filled


# Thunder's own operator has no shape to give to torch.zeros, for the gradient of a result that nothing reads
executor.register_implementation(
    ltorch.zeros, checker=lambda *shape, **options: shape in ((), ((),)), execution_transform=_zeros
)


def laid_out(t: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A tensor with this stride: ``t``, or a copy of it."""
    if t.stride() == tuple(stride):
        return t
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


def lying_like(t: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """As :func:`laid_out`, but ``t`` itself if only strides of dims of size 1 differ, or if elements would overlap."""
    steps = [(a, b) for size, a, b in zip(t.shape, t.stride(), stride, strict=True) if size > 1]
    return t if all(a == b for a, b in steps) or not all(b for _, b in steps) else laid_out(t, stride)


def _view_of(t: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> InputView | None:
    """Which of the ``inputs`` a tensor is or is a view of; None if that is not certain."""
    if t.layout != torch.strided or t.is_conj() or t.is_neg():
        return None
    same = [(i, a) for i, a in inputs.items() if storage(a) == storage(t) and a.dtype == t.dtype]
    for i, a in same:
        if (a.size(), a.stride(), a.storage_offset()) == (t.size(), t.stride(), t.storage_offset()):
            return InputView(i)
    if len(same) != 1 or not t.numel():  # parts of one tensor, of which each may be computed again by itself
        return None
    [(i, a)] = same
    offset = int(t.storage_offset() - a.storage_offset())
    if offset < 0 or offset + extent(t) > extent(a):
        return None
    return InputView(i, t.size(), t.stride(), offset, a.stride())


def extent(t: torch.Tensor) -> int:
    """The elements of memory from the first to the last of a tensor."""
    if t.is_contiguous():
        return t.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(t.size(), t.stride(), strict=True))
