"""The arguments of a sharded module's call: proxies, fakes for the recording, and a guard for what is no tensor."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial, reduce
from typing import Any

from passes.compat.jit import constraints, is_input, name_as_user, proxied_values, proxy_tensors
from passes.insert_guards import check_value
from shardtrace.record.absent import is_absent
from shardtrace.record.calls import storage
from shardtrace.record.memory import overlap
from shardtrace.record.recorder import FakeMode
from shardtrace.record.results import LEAVES, PLAIN, Path, map_tensors, parts

import torch
from thunder.core import dtypes
from thunder.core.codeutils import ContextObject
from thunder.core.devices import to_torch_device
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, unwrap, wrap
from thunder.core.proxies import Proxy, TensorProxy

WholeOf = Callable[[TensorProxy], TensorProxy]


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
        for value in (*args, *kwargs.values()):
            proxy_tensors(value)
            _guard(value)
        _name_after(function, args, kwargs)
        self._originals = {v.value.name: v.original_value for v in proxied_values() if isinstance(v.value, TensorProxy)}
        self.args = tuple(self._converted(unwrap(v), v.provenance) for v in args)
        self.kwargs = {k: self._converted(unwrap(v), v.provenance) for k, v in kwargs.items()}
        self._held = {i: [v for *_, v in parts(made)] for i, (_, made) in self._copies.items()}

    def proxy(self, fake: torch.Tensor) -> Any:
        return self.by_fake.get(id(fake), (None, None))[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the model was given, by the names of their proxies, without those that are computed."""
        named = {name: self._originals.get(name) for name in self._made}
        return {name: t for name, t in named.items() if isinstance(t, torch.Tensor)}

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
        for i, (original, made) in self._copies.items():
            if list(map(id, self._held[i])) != [id(v) for *_, v in parts(made)]:
                raise RuntimeError(
                    f"forward changes its argument, a {type(original).__name__}, which no step would do again: return "
                    "what it is to hold, or call the model inside shardtrace.full_params without Thunder"
                )

    def _converted(self, value: Any, record: ProvenanceRecord) -> Any:
        def fake(tensor: Any, path: Path) -> torch.Tensor:
            if isinstance(tensor, TensorProxy):
                return self._fake(tensor)
            return self._fake(wrap(tensor, provenance=reduce(step, path, record)).value)

        return map_tensors(value, fake, self._copies)

    def _fake(self, value: TensorProxy) -> torch.Tensor:
        if value.name not in self._made:
            real = self._originals.get(value.name)
            if isinstance(real, torch.Tensor) and real.layout != torch.strided:
                raise RuntimeError(
                    f"argument {value.name!r} is a sparse tensor: pass a dense one, or its indices and values"
                )
            computed = value.history is None and dtypes.is_inexact_dtype(value.dtype)
            whole = self._whole_of(value)
            with self._fakes:
                fake = torch.empty(
                    tuple(whole.shape),
                    dtype=dtypes.to_torch_dtype(value.dtype),
                    device=stand_in(to_torch_device(value.device)),
                    requires_grad=value.requires_grad or computed,
                )
                fake = fake.clone() if computed else fake
            if whole is not value:
                self._parts.add(id(fake))
            elif isinstance(real, torch.Tensor) and not dtypes.is_inexact_dtype(value.dtype):
                fake._shardtrace_real = real  # type: ignore[attr-defined]  # for modules that PyTorch tries
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


def _guard(wrapped: Any) -> None:
    """Lets the prologue compare the structure and the plain values of an argument that is a container or an object."""
    value = wrapped.value if wrapped.original_value is wrapped.nothing else wrapped.original_value
    if isinstance(value, (*LEAVES, torch.Tensor)) or not is_input(wrapped):
        return
    proxy = Proxy(prefix="argument", history=copy.copy(wrapped.provenance))
    constraints().append((partial(_check, signature(value)), proxy))


def _check(expected: Hashable, proxy: Proxy) -> None:
    check_value(ContextObject(f"signature_of_{proxy.name}", partial(_compare, expected)), proxy)


def _compare(expected: Hashable, value: Any) -> None:
    if signature(value) != expected:
        raise RuntimeError(f"an argument, a {type(value).__name__}, has another structure")  # Thunder compiles another


def _check_memory(compare: Callable[[Any], None], *proxies: TensorProxy) -> None:
    check_value(ContextObject("memory_of_arguments", compare), proxies)


def _compare_memory(held: Callable[[], Sequence[torch.Tensor]], written: bool, tensors: Sequence[torch.Tensor]) -> None:
    found = [storage(t) for t in tensors if t.layout == torch.strided]
    if not set(map(storage, held())).isdisjoint(found) or (written and len(set(found)) < len(found)):
        raise RuntimeError("an argument shares memory with what forward writes into")


def signature(value: Any, inside: Set[int] = frozenset()) -> Hashable:
    """Equal for two arguments that differ only in their tensors. ``inside``: the ids of the objects around."""
    if isinstance(value, (torch.Tensor, TensorProxy)):
        return "tensor"
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, LEAVES) or id(value) in inside:
        return type(value), id(value)
    contents = tuple((kind, k, signature(v, inside | {id(value)})) for kind, k, v in parts(value))
    return type(value), contents if contents or isinstance(value, (dict, list, tuple)) else id(value)
