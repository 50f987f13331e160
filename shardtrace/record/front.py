"""The call of a sharded module inside a jitted function: recorded, then written into the running trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from passes.compat import constraints, exempt_from_autocast, traced_device, without_constraints
from passes.kernels.torch_call import enlist
from shardtrace.model.absent import is_absent
from shardtrace.model.marks import REPEATED, recomputed
from shardtrace.record.blocks import Blocks, ParameterOf
from shardtrace.record.recorder import CannotRecord, FakeMode, Record, record
from shardtrace.record.replay import CannotWrite, Replay

import torch
from thunder import clang
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.compile_data import get_compile_data
from thunder.core.devices import to_torch_device
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, unwrap, wrap
from thunder.core.jit_ext import EXT_FLAG_IS_MODULE, recursively_proxy
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.trace import get_tracectx
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

Found = Callable[[torch.Tensor, Any], None]


class Inputs:
    """The tensors that a trace takes from a module: its parameters and buffers, by their fakes."""

    def __init__(self, module: Any, fakes: FakeMode, found: Found, known: dict[int, Any]) -> None:
        self.module, self._fakes, self._found, self._known = module, fakes, found, known
        self._records: dict[str, ProvenanceRecord] = {"": module.provenance}
        self._names: dict[int, tuple[str, str, torch.Tensor]] = {}  # of a fake: its kind, its name, the tensor
        self._added: list[TensorProxy] = []
        self.by_name: dict[str, torch.Tensor] = {}
        self.written: dict[int, Any] = {}
        root = unwrap(module)
        made: dict[int, torch.Tensor] = {}
        kinds = (("_parameters", root.named_parameters), ("_buffers", root.named_buffers))
        for kind, named in kinds:
            for name, t in named(remove_duplicate=False):
                if id(t) not in made:
                    made[id(t)] = fake = self._fake(t)
                    self._names[id(fake)] = kind, name, t
                self.by_name[name] = made[id(t)]

    def _fake(self, t: torch.Tensor) -> torch.Tensor:
        device = traced_device(t)
        with self._fakes:
            fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_stand_in(device))
            return nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake

    def proxy(self, fake: torch.Tensor) -> Any:
        """The proxy of a parameter or buffer, which becomes an input of the trace; None for another fake."""
        if id(fake) not in self._names:
            return None
        kind, name, t = self._names[id(fake)]
        if id(t) not in self._known:
            path, _, last = name.rpartition(".")
            with without_constraints():
                wrapped = wrap(t, provenance=_item(self._record(path), kind, last))
            self._known[id(t)] = wrapped
            self._added.append(wrapped.value)
            self._found(t, wrapped)
        return self._known[id(t)].value

    def tensor(self, fake: torch.Tensor) -> torch.Tensor:
        """The parameter or buffer of a fake, or ``fake``."""
        return self._names[id(fake)][2] if id(fake) in self._names else fake

    def kind(self, fake: torch.Tensor) -> tuple[str, str]:
        """ "_parameters" or "_buffers", and the name; two empty texts for another fake."""
        return self._names.get(id(fake), ("", "", None))[:2]

    def _record(self, path: str) -> ProvenanceRecord:
        if path not in self._records:
            parent, _, last = path.rpartition(".")
            found = _item(self._record(parent), "_modules", last)
            found.ext_flag |= EXT_FLAG_IS_MODULE
            self._records[path] = found
        return self._records[path]

    def guard(self) -> None:
        """Lets the prologue check the inputs. One constraint for all: Thunder compares each with all inputs."""
        if self._added:
            constraints().append((partial(_check_tensors, tuple(self._added)),))


def _item(owner: ProvenanceRecord, members: str, name: str) -> ProvenanceRecord:
    """Thunder's record of ``owner.members[name]``."""
    found = ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[owner, _constant(members)])
    return ProvenanceRecord(PseudoInst.BINARY_SUBSCR, inputs=[found, _constant(name)])


def _constant(value: str) -> ProvenanceRecord:
    return ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=value)


def _check_tensors(tensors: Iterable[TensorProxy]) -> None:
    for tensor in tensors:
        clang.check_tensor_shape_and_metadata(tensor)


class Arguments:
    """The arguments of the call, with fakes in the place of proxies."""

    def __init__(self, fakes: FakeMode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        recursively_proxy(*args, **kwargs)
        self._fakes = fakes
        self.by_fake: dict[int, tuple[torch.Tensor, TensorProxy]] = {}
        given = tuple(map(unwrap, args)), {k: unwrap(v) for k, v in kwargs.items()}
        self._made: dict[str, torch.Tensor] = {}
        self.args, self.kwargs = pytree.tree_map(self._fake, given, is_leaf=lambda x: isinstance(x, Proxy))

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, TensorProxy):
            return value.value if isinstance(value, Proxy) and hasattr(value, "value") else value
        if value.name not in self._made:
            device = to_torch_device(value.device)
            dtype = dtypes.to_torch_dtype(value.dtype)
            computed = value.history is None and dtypes.is_inexact_dtype(value.dtype)
            with self._fakes:
                fake = torch.empty(
                    tuple(value.shape), dtype=dtype, device=_stand_in(device),
                    requires_grad=value.requires_grad or computed,
                )  # fmt: skip
                fake = fake.clone() if computed else fake
            self._made[value.name] = fake
            self.by_fake[id(fake)] = fake, value
        return self._made[value.name]

    def proxy(self, fake: torch.Tensor) -> Any:
        return self.by_fake.get(id(fake), (None, None))[1]


def trace(
    function: Callable[..., Any],
    module: Any,
    args: Any,
    kwargs: Any,
    *,
    known: dict[int, Any],
    found: Found,
    parameter_of: ParameterOf,
    eager: Collection[nn.Module] | None = None,
    obstacle: str = "",
) -> tuple[Any, str]:
    """Records ``function(module, ...)`` and writes it into the running trace. Arguments and result are wrapped values.

    Args:
        known: the wrapped values of parameters and buffers that an earlier call has met, by their ids.
        found: is told of each further one that becomes an input of the trace, and of its wrapped value.
        parameter_of: gives the sharded parameter of a tensor, or None.
        eager: the modules that PyTorch runs; None for those that must be.
        obstacle: why the lines of blocks must stand in the trace; empty if they need not.

    Returns:
        The result, and what is to be said of blocks.
    """
    m: nn.Module = unwrap(module)
    front = Front(m, eager)
    while True:
        try:
            return front.write(*front.record(function, module, args, kwargs, found, known), parameter_of, obstacle)
        except CannotRecord as error:
            front.fall_back(error.modules, error.__cause__ or error)
        except CannotWrite as error:
            front.fall_back(front.modules_around(error.module), error)


class Front:
    """One call of a sharded module. Modules that cannot be recorded are left to PyTorch, the smallest that can be."""

    def __init__(self, module: nn.Module, eager: Collection[nn.Module] | None) -> None:
        self._module, self._auto = module, eager is None
        self._modules = dict(module.named_modules())
        self._names = {id(part): name for name, part in self._modules.items()}
        self._eager, self._impossible = set(eager or ()), set[nn.Module]()
        self._first: BaseException | None = None
        self.remarks: dict[str, None] = {}

    def record(
        self, function: Callable[..., Any], module: Any, args: Any, kwargs: Any, found: Found, known: dict[int, Any]
    ) -> tuple[Record, Inputs, Arguments]:
        fakes = FakeMode()
        arguments = Arguments(fakes, args, kwargs)
        inputs = Inputs(module, fakes, found, known)
        with _reparametrize_module(self._module, inputs.by_name):
            done = record(
                function, (self._module, *arguments.args), arguments.kwargs, mode=fakes, modules=self._names,
                watched=[m for m in self._modules.values() if REPEATED in m.__dict__ or recomputed(m)],
                eager=self._eager,
            )  # fmt: skip
        return done, inputs, arguments

    def write(
        self, done: Record, inputs: Inputs, arguments: Arguments, parameter_of: ParameterOf, obstacle: str
    ) -> tuple[Any, str]:
        data, lines = get_compile_data(), get_tracectx().scopes[-1]
        count = len(lines)
        enlist(data)
        replay = Replay(lambda t: _first_of(inputs.proxy(t), arguments.proxy(t)), _absent_device(self._module))
        blocks = Blocks(
            done, replay,
            repeated={name for name, m in self._modules.items() if REPEATED in m.__dict__},
            marked={name: what for name, m in self._modules.items() if (what := recomputed(m)) is not None},
            parameter_of=lambda t: parameter_of(inputs.tensor(t)), obstacle=obstacle,
        )  # fmt: skip
        try:
            with exempt_from_autocast(data):
                blocks.write(_tensors(done.result))
                _write_back(replay, inputs, arguments)
                result = _with_proxies(done.result, replay)
        except CannotWrite:
            del lines[count:]
            raise
        inputs.guard()
        wrapped = wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[inputs.module.provenance]))
        return wrapped, "; ".join(filter(None, (str(blocks), *self.remarks)))

    def modules_around(self, name: str) -> list[nn.Module]:
        """The modules from the root to the one of this qualified name."""
        parts = name.split(".") if name else []
        return [self._modules[".".join(parts[:i])] for i in range(len(parts) + 1)]

    def fall_back(self, modules: Sequence[nn.Module], error: BaseException) -> None:
        """Chooses the innermost of the modules that ran and that PyTorch may run, and all others of its class. Raises
        the first error if there is none."""
        self._first = self._first or error
        for module in reversed(modules[1:]):
            if module in self._eager:
                self._eager.remove(module)
                self._impossible.add(module)
            elif module not in self._impossible and self._auto:
                same = {m for m in self._modules.values() if type(m) is type(module)}
                self._eager |= same - self._impossible
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                self.remarks[f"{self._names[id(module)]} ({type(module).__name__}) is run by PyTorch: {why}"] = None
                return
        raise self._first


def _stand_in(device: torch.device) -> torch.device:
    """The device of fakes: the CPU stands in for an absent one."""
    return torch.device("cpu") if is_absent(device) else device


def _first_of(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def _absent_device(module: nn.Module) -> torch.device | None:
    device = next((traced_device(p) for p in module.parameters()), None)
    return device if device is not None and is_absent(device) else None


def _write_back(replay: Replay, inputs: Inputs, arguments: Arguments) -> None:
    """Adds the lines that write into buffers and arguments what they hold at the end."""
    fakes = [*inputs.by_name.values(), *(fake for fake, _ in arguments.by_fake.values())]
    for fake in {id(t): t for t in fakes}.values():
        if fake not in replay.values or not replay.values.is_written(fake):
            continue
        before, kind = _first_of(inputs.proxy(fake), arguments.proxy(fake)), inputs.kind(fake)
        if kind[0] == "_parameters":
            raise RuntimeError(f"forward writes into parameter {kind[1]!r}, which is sharded: write outside of forward")
        ltorch.copy_(before, replay.values.read(fake))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a model returned."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in (*value.values(), *vars(value).values()) if type(value) is not dict else value.values():
            yield from _tensors(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)


def _with_proxies(value: Any, replay: Replay) -> Any:
    """What the model returned, with proxies in the place of fakes."""

    def out(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return replay.proxy(v)
        if type(v) is dict:
            return {k: out(x) for k, x in v.items()}
        if isinstance(v, dict):
            new = v.__class__.__new__(v.__class__)
            new.__dict__.update({k: out(x) for k, x in v.__dict__.items()})
            for k, x in v.items():
                super(type(v), new).__setitem__(k, out(x))
            return new
        if type(v) in (list, tuple):
            return type(v)(map(out, v))
        if isinstance(v, tuple):
            return tuple(map(out, v)) if type(v).__module__ == "torch.return_types" else type(v)(*map(out, v))
        return v

    return out(value)
