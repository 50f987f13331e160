"""The arguments of a sharded module's call: proxies, fakes for the recording, and a guard for what is no tensor.

For steps that are compiled and never run, such as a GPU's on a laptop, shards are on the meta device. The stand-ins,
inputs and buffers of a trace claim to be on the device of the step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from types import FunctionType
from typing import Any

from passes.borders import check_value
from passes.compat.jit import constraints, is_input, name_as_user, proxied_values, proxy_tensors
from shardtrace.record.calls import CODE, PLAIN, Path, map_tensors, parts, storage
from shardtrace.record.memory import overlap
from shardtrace.record.reads import Attributes, Given, Guard, Source
from shardtrace.record.recorder import FakeMode
from shardtrace.record.snapshot import DEPTH, FUNCTIONS, MISSING, cell_contents, contents_of, is_array

import torch
from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.codeutils import ContextObject
from thunder.core.devices import to_torch_device
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, unwrap, wrap
from thunder.core.prims import OpTags
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import has_tags
from thunder.core.trace import get_tracectx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# ---- steps that never run ----


def is_absent(device: torch.device) -> bool:
    """True for a CUDA device on a machine without CUDA."""
    return device.type == "cuda" and not torch.cuda.is_available()


def claim(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor without memory that is like ``values`` and claims to be on another device. Compute nothing with it:
    torch without CUDA may abort the process."""
    return FakeTensor(FakeTensorMode(), values.detach().to("meta"), device)


def never_runs(module: nn.Module) -> None:
    """As ``param_init_fn``: the model will be compiled and not run, so that nothing of it needs memory."""


# ---- arguments ----


WholeOf = Callable[[TensorProxy], TensorProxy]
COMPARED = (bool, int, float, complex, str, torch.dtype, torch.device)  # plain values that Thunder compares


class Arguments:
    """The arguments of the call, with fakes in the place of tensors. Tensors in containers and in other objects, such
    as dataclasses, become inputs of the trace.

    ``whole_of`` gives the proxy of a whole value for that of a part of it, and for another one itself.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        fakes: FakeMode,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        whole_of: WholeOf = lambda proxy: proxy,
    ) -> None:
        self._fakes, self._whole_of = fakes, whole_of
        self.by_fake: dict[int, tuple[torch.Tensor, TensorProxy]] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._inputs: list[TensorProxy] = []  # of the tensors that the prologue fetches
        self._parts: set[int] = set()  # the ids of the fakes whose tensors are parts
        self._copies: dict[int, tuple[Any, Any]] = {}  # of each object: itself and its copy
        self._kinds: list[tuple[TensorProxy, tuple[type, tuple[int, ...] | None]]] = []
        self._attributes: list[tuple[TensorProxy, Attributes]] = []
        self.objects: list[Any] = []  # what is no tensor and compared by identity: its state is to be guarded
        self._wrapped: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for value in (*args, *kwargs.values()):
            proxy_tensors(value)
            self.objects += _objects(_guard(value))
        _guard_order(kwargs)
        _name_after(function, args, kwargs)
        self._originals = {v.value.name: v.original_value for v in proxied_values() if isinstance(v.value, TensorProxy)}
        self.args = tuple(self._converted(unwrap(v), v.provenance) for v in args)
        self.kwargs = {k: self._converted(unwrap(v), v.provenance) for k, v in kwargs.items()}
        self._held = {i: [v for *_, v in parts(made)] for i, (_, made) in self._copies.items()}
        if self._kinds:
            proxies, kinds = zip(*self._kinds, strict=True)
            constraints().append((partial(_check_kinds, kinds), *proxies))

    def proxy(self, fake: torch.Tensor) -> Any:
        return self.by_fake.get(id(fake), (None, None))[1]

    def source(self, fake: torch.Tensor) -> Source | None:
        """What an argument holds; None for a fake that is none, for a part, and for one that is computed or written
        into before the call."""
        proxy = self.proxy(fake)
        real = self._originals.get(proxy.name) if proxy is not None and id(fake) not in self._parts else None
        if not isinstance(real, torch.Tensor) or proxy.history is None:
            return None
        writes = (b for b in get_tracectx().bound_symbols if b.sym is prims.copy_ or has_tags(b, {OpTags.IN_PLACE}))
        if any(p.name == proxy.name for b in writes for p in b.flat_proxy_args):
            return None
        return Source(real, fake.stride(), proxy)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the model was given, by the names of their proxies, without those that are computed."""
        named = {name: self._originals.get(name) for name in self._made}
        return {name: t for name, t in named.items() if isinstance(t, torch.Tensor)}

    def take(self, key: Any, put: Callable[[Any], None]) -> None:
        """Lets the prologue ``put`` an argument, a number, instead of comparing it. ``key``: its position or name."""
        history = self._wrapped[key].provenance
        is_value = lambda c: c[0] is clang.check_number_type_and_value and c[1].history is history  # noqa: E731
        constraints()[:] = [c for c in constraints() if not is_value(c)]
        check = partial(check_value, ContextObject(f"take_{key}", put))
        constraints().append((check, Proxy(prefix="argument", history=copy.copy(history))))

    def check_alone(self, fake: torch.Tensor) -> None:
        """Raises RuntimeError if an argument that forward writes into is a part of a value, or shares memory with
        another one."""
        if id(fake) in self._parts:
            raise RuntimeError(
                f"forward writes into an argument of shape {tuple(fake.shape)}, of which this rank was given a part: "
                'let it write into a clone, or choose ContextParallel(arguments="whole")'
            )
        memory = {n: t.untyped_storage().data_ptr() for n, t in self._originals.items() if isinstance(t, torch.Tensor)}
        if list(memory.values()).count(memory.get(self.by_fake[id(fake)][1].name, 0)) > 1:
            raise RuntimeError(
                f"forward writes into an argument of shape {tuple(fake.shape)} that shares memory with another one: "
                "pass a clone of it"
            )

    def check_apart(self, held: Callable[[], Sequence[torch.Tensor]], written: bool) -> None:
        """Raises RuntimeError if an argument shares memory with a tensor of the model that forward writes into, and
        lets the prologue look for that before each step.

        Args:
            held: gives those tensors.
            written: whether forward writes into arguments, which must not share memory with each other then.
        """
        for t in self.tensors().values():
            if t.layout == torch.strided and any(overlap(t, h) for h in held()):
                raise RuntimeError(
                    f"an argument of shape {tuple(t.shape)} shares memory with a tensor of the model that forward "
                    "writes into: pass a clone of it"
                )
        if self._inputs:
            check = partial(_check_memory, partial(_compare_memory, held, written))
            constraints().append((check, *self._inputs))

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the forward has changed an object or a container that it was given."""
        changed = [
            type(original).__name__
            for i, (original, made) in self._copies.items()
            if list(map(id, self._held[i])) != [id(v) for *_, v in parts(made)]
        ]
        changed += [f"{a.cls.__name__} with attributes" for _, a in self._attributes if a.has_changed()]
        if changed:
            raise RuntimeError(
                f"forward changes its argument, a {changed[0]}, which no step would do again: return what it is to "
                "hold, or call the model inside shardtrace.full_params without Thunder"
            )

    def guard_attributes(self) -> None:
        """Lets the prologue compare the attributes of tensors that forward has read, and lets go of the tensors."""
        for proxy, attributes in self._attributes:
            attributes.tensor = None
            if attributes.keys:
                self.objects += _objects(tuple(attributes.keys.values()))
                constraints().append((partial(_check_attributes, attributes.keys), proxy))

    def _converted(self, value: Any, record: ProvenanceRecord) -> Any:
        def fake(tensor: Any, path: Path) -> torch.Tensor:
            if isinstance(tensor, TensorProxy):
                return self._fake(tensor)
            return self._fake(wrap(tensor, provenance=reduce(step, path, record)).value, tensor)

        return map_tensors(value, fake, self._copies)

    def _fake(self, value: TensorProxy, real: Any = None) -> torch.Tensor:
        if value.name not in self._made:
            real = self._originals.get(value.name, real)
            if isinstance(real, torch.Tensor) and real.layout != torch.strided:
                raise RuntimeError(
                    f"argument {value.name!r} is a sparse tensor: pass a dense one, or its indices and values"
                )
            computed = value.history is None and dtypes.is_inexact_dtype(value.dtype)
            whole = self._whole_of(value)
            empty = partial(torch.empty, tuple(whole.shape))
            is_given = value.history is not None and isinstance(real, torch.Tensor)
            if is_given:
                self._kinds.append((value, (type(real), real.stride() if whole is value else None)))
            if is_given and whole is value:
                empty = partial(torch.empty_strided, tuple(whole.shape), real.stride())
            with self._fakes:
                fake = empty(
                    dtype=dtypes.to_torch_dtype(value.dtype),
                    device=stand_in(to_torch_device(value.device)),
                    requires_grad=value.requires_grad or computed,
                )
                fake = fake.clone() if computed else fake
            if is_given:
                self._attributes.append((value, Attributes(type(real), real, signature)))
                Given.describe(fake, self._attributes[-1][1])
            if whole is not value:
                self._parts.add(id(fake))
            if value.history is not None:
                self._inputs.append(value)
            self._made[value.name] = fake
            self.by_fake[id(fake)] = fake, whole
        return self._made[value.name]


def stand_in(device: torch.device) -> torch.device:
    """The device of fakes: the CPU stands in for an absent one."""
    return torch.device("cpu") if is_absent(device) else device


def _name_after(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Names the arguments after the parameters of ``function``, if they fit."""
    with suppress(TypeError, ValueError):
        for name, value in inspect.signature(function).bind(*args, **kwargs).arguments.items():
            name_as_user(unwrap(value), name)


def step(owner: ProvenanceRecord, part: tuple[PseudoInst, Any]) -> ProvenanceRecord:
    """Thunder's record of ``owner[key]`` or ``owner.key``."""
    kind, key = part
    return ProvenanceRecord(kind, inputs=[owner, ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=key)])


# ---- what is no tensor ----


class Same:
    """An object that is equal to itself only. It is kept alive, so that no other one gets its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _guard(wrapped: Any) -> Hashable:
    """Lets the prologue compare the structure and the plain values of an argument that is a container or an object, and
    returns them. Raises RuntimeError for an iterator, which only the first call would advance."""
    value = wrapped.value if wrapped.original_value is wrapped.nothing else wrapped.original_value
    if isinstance(value, Iterator):
        raise RuntimeError(f"an argument is an iterator, a {type(value).__name__}: pass a list or a tuple")
    if isinstance(value, (*COMPARED, Proxy, torch.Tensor)) or not is_input(wrapped):
        return None
    proxy = Proxy(prefix="argument", history=copy.copy(wrapped.provenance))
    expected = signature(value)
    constraints().append((partial(_check, expected), proxy))
    return expected


def _check(expected: Hashable, proxy: Proxy) -> None:
    check_value(ContextObject(f"signature_of_{proxy.name}", partial(_compare, expected)), proxy)


def _compare(expected: Hashable, value: Any) -> None:
    if signature(value) != expected:
        raise RuntimeError(f"an argument, a {type(value).__name__}, has another structure")  # Thunder compiles another


def _guard_order(kwargs: Mapping[str, Any]) -> None:
    """Lets the prologue compare the order of keywords, in which a forward that takes ``**kwargs`` meets them."""
    owners: dict[ProvenanceRecord, set[str]] = {}
    for record in (v.provenance for v in kwargs.values()):
        if record.inst is PseudoInst.BINARY_SUBSCR and isinstance(record.inputs[1].value, str):
            owners.setdefault(record.inputs[0], set()).add(record.inputs[1].value)
    for owner, keys in ((o, k) for o, k in owners.items() if len(k) > 1):
        proxy = Proxy(prefix="keys", history=step(copy.copy(owner), (PseudoInst.LOAD_ATTR, "keys")))
        constraints().append((partial(_check_order, keys), proxy))


def _check_order(keys: Collection[str], proxy: Proxy) -> None:
    seen: list[list[str]] = []  # first in the step that is being compiled

    def compare(of_owner: Callable[[], Iterable[str]]) -> None:
        order = [key for key in of_owner() if key in keys]
        if order != (seen or [order])[0]:
            raise RuntimeError("keywords are in another order")
        seen[:] = [order]

    check_value(ContextObject(f"order_of_{proxy.name}", compare), proxy)


def check_reads(guard: Guard) -> None:
    """Lets the prologue read again what a forward has read of its arguments."""
    constraints().append((partial(_check_reads, guard, len(constraints())), *guard.proxies))


def _check_reads(guard: Guard, number: int, *proxies: TensorProxy) -> None:
    check_value(ContextObject(f"reads_{number}", lambda tensors: guard(*tensors)), proxies)


def _check_kinds(expected: tuple[tuple[type, tuple[int, ...] | None], ...], *proxies: TensorProxy) -> None:
    check_value(ContextObject(f"kinds_of_{proxies[0].name}", partial(_compare_kinds, expected)), proxies)


def _compare_kinds(expected: tuple[tuple[type, tuple[int, ...] | None], ...], tensors: Sequence[torch.Tensor]) -> None:
    for (cls, stride), t in zip(expected, tensors, strict=True):
        if type(t) is not cls or (stride is not None and t.stride() != stride):
            raise RuntimeError("an argument is of another class, or has other strides")


def _check_attributes(expected: Mapping[str, Hashable], proxy: TensorProxy) -> None:
    check_value(ContextObject(f"attributes_of_{proxy.name}", partial(_compare_attributes, expected)), proxy)


def _compare_attributes(expected: Mapping[str, Hashable], t: torch.Tensor) -> None:
    own = vars(t)
    if any(signature(own.get(name, MISSING)) != value for name, value in expected.items()):
        raise RuntimeError("an argument has other attributes")


def _check_memory(compare: Callable[[Any], None], *proxies: TensorProxy) -> None:
    check_value(ContextObject("memory_of_arguments", compare), proxies)


def _compare_memory(held: Callable[[], Sequence[torch.Tensor]], written: bool, tensors: Sequence[torch.Tensor]) -> None:
    found = [storage(t) for t in tensors if t.layout == torch.strided]
    if not set(map(storage, held())).isdisjoint(found) or (written and len(set(found)) < len(found)):
        raise RuntimeError("an argument shares memory with what forward writes into")


def signature(value: Any, inside: tuple[int, ...] = (), depth: int | None = None) -> Hashable:
    """Equal for two arguments that differ only in their tensors.

    Functions count by their code and what they are bound to, sets and arrays by their contents, modules and what has no
    contents by identity. ``inside``: the ids of the objects around. ``depth``: how far an object is looked into that a
    function is bound to, in which tensors are no inputs and count by identity.
    """
    if isinstance(value, (torch.Tensor, TensorProxy)) and depth is None:
        return "tensor"
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if id(value) in inside:
        return type(value), inside.index(id(value))
    if is_array(value):
        return type(value), contents_of(value, sampled=False)
    of = partial(signature, inside=(*inside, id(value)), depth=depth and depth - 1)
    if isinstance(value, FUNCTIONS) and depth != 0:
        return _signature_of_function(value, of if depth is not None else partial(of, depth=DEPTH))
    if isinstance(value, (torch.Tensor, *CODE)) or depth == 0:
        return Same(value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(of, value))
    contents = tuple((kind, k, of(v)) for kind, k, v in parts(value))
    return type(value), contents if contents or isinstance(value, (dict, list, tuple)) else Same(value)


def _signature_of_function(value: Any, of: Callable[[Any], Hashable]) -> Hashable:
    if isinstance(value, partial):
        return partial, of(value.func), of(value.args), of(value.keywords)
    if not isinstance(value, FunctionType):
        return type(value), value.__name__, of(getattr(value, "__func__", None)), of(value.__self__)
    cells = tuple(of(tuple(cell_contents(cell).values())) for cell in value.__closure__ or ())
    own = value.__defaults__, value.__kwdefaults__, value.__dict__
    return FunctionType, value.__code__, id(value.__globals__), cells, tuple(map(of, own))


def _objects(found: Hashable) -> Iterator[Any]:
    if isinstance(found, Same):
        yield found.value
    elif isinstance(found, (tuple, frozenset)):
        for part in found:
            yield from _objects(part)
