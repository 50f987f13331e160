"""Modules and functions that PyTorch runs: one line of the trace for each call.

A module whose forward depends on the values of tensors (``.item()``, ``nonzero``, a branch) cannot be recorded on fake
tensors. It is tried on real tensors with random values instead, twice. If only tensors come out, with the same metadata
both times, its call is one function of its arguments, parameters and buffers, which PyTorch runs and differentiates.
Each step checks that what comes out is still the like.

So is a function of torch that reads values, such as ``F.ctc_loss``, on zeros, ones and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from passes.compat.messages import NoMessages
from passes.kernels.torch_call import Meta, storage
from shardtrace.record.effects import reachable
from shardtrace.record.marks import ATTRIBUTE, PART_ATTRIBUTE
from shardtrace.record.random_state import RandomStates

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree

PLAIN = (bool, int, float, str, type(None))
GIVEN = (*PLAIN, torch.Tensor, torch.dtype, torch.device, slice, type(...))  # to functions and modules
Make = Callable[[torch.Tensor], torch.Tensor]  # a real tensor like a fake
Known = Mapping[int, torch.Tensor]
NOTHING: Known = MappingProxyType({})


class CannotStandAlone(Exception):
    """Why a module's call is no function of tensors."""


class Facts(NamedTuple):
    """What must not depend on the values of tensors: the structure of a result, its plain values, the shapes and dtypes
    of its tensors."""

    values: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, result: Any) -> Facts:
        leaves, spec = pytree.tree_flatten(result, is_leaf=lambda v: isinstance(v, Meta))
        return cls(tuple(map(_fact, leaves)), spec)


def _fact(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    return (tuple(value.shape), value.dtype) if isinstance(value, (torch.Tensor, Meta)) else value


class Eager:
    """A function that PyTorch runs. ``expected`` are the facts of its result, once they are known. Raises RuntimeError
    for others."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.__name__ = function, name
        self.expected: Facts | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._run(*args, **kwargs)
        if self.expected is not None and Facts.of(result) != self.expected:
            raise RuntimeError(
                f"{self.__name__.removeprefix('eager_')}, which PyTorch runs, has returned other shapes or values than "
                "when it was recorded: they depend on the values of tensors. Let it return tensors whose shapes do not"
            )
        return result

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def random_states(self) -> RandomStates:
        """A context around a trial."""
        return RandomStates()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Eager) and (other.function, other.expected) == (self.function, self.expected)

    def __hash__(self) -> int:
        return hash(self.function)


class EagerModule(Eager):
    """The call of a module as a function of its arguments, and of its own tensors by their names. Each result is a
    tensor of its own."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__(module, f"eager_{type(module).__name__}")
        self.module, self._original = module, original
        marks = (m.__dict__.get(a) for m in module.modules() for a in (ATTRIBUTE, PART_ATTRIBUTE))
        self._running = next((state.running for state in marks if state is not None), nullcontext)

    def _run(self, args: Any, kwargs: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> Any:
        trial = any(isinstance(t, FakeTensor) for t in pytree.tree_leaves((args, kwargs, dict(own))))
        random = self.random_states() if trial else nullcontext()
        with random, self._running(), _reparametrize_module(self.module, dict(own), stack_weights=True):
            result = self._original(self.module, *args, **kwargs)
            for name, buffer in self.module.named_buffers(remove_duplicate=False):
                if (given := own.get(name)) is not None and buffer is not given:  # it was replaced
                    with torch.no_grad():
                        given.copy_(buffer)
        inputs = set(map(id, pytree.tree_leaves((args, kwargs, dict(own)))))
        return pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if id(t) in inputs else t, result)

    def random_states(self) -> RandomStates:
        return RandomStates(reachable(self.module, self.__name__).seen.values())


class Trial(NamedTuple):
    """What a call gave: the result (with fakes in the place of tensors, in the end), the numbers of the tensors that it
    wrote into, whether it drew random numbers, and whether results share memory with what it was given."""

    result: Any
    written: tuple[int, ...]
    random: bool
    shares_memory: bool

    def facts(self) -> Any:
        metas = [Meta.of(t) for t in pytree.tree_leaves(self.result) if isinstance(t, torch.Tensor)]
        return Facts.of(self.result), metas, self.written


def try_module(
    module: EagerModule, args: Any, kwargs: Any, own: Mapping[str, torch.Tensor], known: Known = NOTHING
) -> Trial:
    """Calls a module on real tensors with random values like the given fakes. ``known``: see :func:`try_function`.

    Raises CannotStandAlone if it returns anything else than tensors, or other ones in a second call; or what it raises.
    """
    with _pop_mode_temporarily():
        return _try(module, (args, kwargs, dict(own)), {}, [partial(_like, fill=_random, known=known)] * 2)


def try_function(function: Eager, args: Any, kwargs: Any, known: Known = NOTHING) -> Trial:
    """Calls a function on real tensors like the given fakes. ``known`` are the values of some, by their ids.

    Raises CannotStandAlone if it returns anything else than tensors of its own, or other ones for other values; or what
    it raises.
    """
    makes = [partial(_like, fill=fill, known=known) for fill in (torch.zero_, lambda t: t.fill_(1), _uniform)]
    trial = _try(function, args, kwargs, makes)
    if not all(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(trial.result)) or trial.shares_memory:
        raise CannotStandAlone("it returns something else than tensors of its own")
    return trial


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Outside of the mode of fake tensors and of inference mode, in which nothing counts writes."""
    grad = torch.is_grad_enabled()
    with unset_fake_temporarily(), torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _try(function: Eager, args: Any, kwargs: Any, makes: Sequence[Make]) -> Trial:
    given, spec = pytree.tree_flatten((tuple(args), kwargs))
    for value in given:
        if not isinstance(value, GIVEN):
            raise CannotStandAlone(f"it is given a {type(value).__name__}")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with on_real_tensors(), torch.random.fork_rng(devices), function.random_states(), NoMessages():
        first, *others = (_call(function, given, spec, make) for make in makes)
    for value in pytree.tree_leaves(first.result):
        if not isinstance(value, (torch.Tensor, *PLAIN)):
            raise CannotStandAlone(f"it returns a {type(value).__name__}")
    if any(other.facts() != first.facts() for other in others):
        raise CannotStandAlone("the shapes that it returns, or other results, depend on the values of tensors")
    function.expected = Facts.of(first.result)
    made = pytree.tree_map_only(torch.Tensor, lambda t: made_like(Meta.of(t)), first.result)
    return first._replace(result=made, random=any(trial.random for trial in (first, *others)))


def _call(function: Eager, given: list[Any], spec: Any, make: Make) -> Trial:
    given = [_from_outside(v, make) if isinstance(v, FakeTensor) else v for v in given]
    inputs = [v for v in given if isinstance(v, torch.Tensor)]
    before, versions = torch.get_rng_state(), [t._version for t in inputs]
    args, kwargs = pytree.tree_unflatten(given, spec)
    result = function(*args, **kwargs)
    drawn = not torch.equal(before, torch.get_rng_state())
    written = tuple(i for i, t in enumerate(inputs) if t._version != versions[i])
    made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    shares = not {storage(t) for t in inputs}.isdisjoint(map(storage, made))
    return Trial(result, written, drawn, shares)


def _from_outside(fake: torch.Tensor, make: Make) -> torch.Tensor:
    """A real tensor like a fake. Those that no module holds by name have their values."""
    held: torch.Tensor | None = getattr(fake, "_shardtrace_outside", None)
    return make(fake) if held is None else held.clone()


def made_like(meta: Meta) -> torch.Tensor:
    """A fake that has a gradient if the metadata say so, and is no leaf."""
    fake = meta.empty()
    return fake.requires_grad_().clone() if meta.grad else fake


def _random(t: torch.Tensor) -> torch.Tensor:
    return t.normal_() if t.is_floating_point() or t.is_complex() else t.random_(0, 2)


def _uniform(t: torch.Tensor) -> torch.Tensor:
    return t.copy_(torch.rand(t.shape)) if t.is_floating_point() or t.is_complex() else t.random_(0, 2)


def _like(fake: torch.Tensor, fill: Callable[[torch.Tensor], Any], known: Known) -> torch.Tensor:
    real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    real.copy_(known[id(fake)]) if id(fake) in known else fill(real)
    leaf = real.requires_grad_(fake.requires_grad)
    return leaf.clone() if fake.requires_grad and not isinstance(fake, nn.Parameter) else leaf


def is_plain(value: Any) -> bool:
    return isinstance(value, (*PLAIN, np.ndarray))
