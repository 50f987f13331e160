"""Modules that PyTorch runs: one line of the trace for each call.

A module whose forward depends on the values of tensors (``.item()``, ``nonzero``, a branch) cannot be recorded on fake
tensors. It is tried on real tensors with random values instead, twice. If only tensors come out, with the same metadata
both times, its call is one function of its arguments, parameters and buffers, which PyTorch runs and differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

from passes.kernels.torch_call import Meta
from shardtrace.record.marks import PART_ATTRIBUTE

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree

PLAIN = (bool, int, float, str, type(None))


class CannotStandAlone(Exception):
    """Why a module's call is no function of tensors."""


class EagerModule:
    """The call of a module as a function of its arguments, and of its own tensors by their names."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self.module, self._original = module, original
        self.__name__ = f"eager_{type(module).__name__}"
        owners = (m.__dict__[PART_ATTRIBUTE] for m in module.modules() if PART_ATTRIBUTE in m.__dict__)
        self._running = next((state.running for state in owners), nullcontext)

    def __call__(self, args: Any, kwargs: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> Any:
        with self._running(), _reparametrize_module(self.module, dict(own)):
            result = self._original(self.module, *args, **kwargs)
            for name, buffer in self.module.named_buffers(remove_duplicate=False):
                if (given := own.get(name)) is not None and buffer is not given:  # it was replaced
                    with torch.no_grad():
                        given.copy_(buffer)
            return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EagerModule) and other.module is self.module

    def __hash__(self) -> int:
        return id(self.module)


class Trial(NamedTuple):
    """What a call of an eager module gave: the result with fakes in the place of tensors, the numbers of the tensors
    that it wrote into, and whether it drew random numbers."""

    result: Any
    written: tuple[int, ...]
    random: bool


def try_module(module: EagerModule, args: Any, kwargs: Any, own: Mapping[str, torch.Tensor]) -> Trial:
    """Calls a module on real tensors with random values like the given fakes.

    Raises CannotStandAlone if it returns anything else than tensors, or other ones in a second call; or what it raises.
    """
    given, spec = pytree.tree_flatten((args, kwargs, dict(own)))
    fakes = [t for t in given if isinstance(t, torch.Tensor)]
    for value in given:
        if not isinstance(value, (torch.Tensor, *PLAIN, torch.dtype, torch.device)):
            raise CannotStandAlone(f"it is given a {type(value).__name__}")
    with _pop_mode_temporarily(), unset_fake_temporarily():
        first = _call(module, given, spec)
        second = _call(module, given, spec)
    if first.facts() != second.facts():
        raise CannotStandAlone("the shapes that it returns, or other results, depend on the values of tensors")
    leaves: list[Any] = []
    for value in first.leaves:
        if isinstance(value, torch.Tensor):
            number = next((i for i, t in enumerate(first.inputs) if t is value), None)
            if number is None:
                leaves.append(_made_like(value))
            else:
                leaves.append(fakes[number])
        elif isinstance(value, PLAIN):
            leaves.append(value)
        else:
            raise CannotStandAlone(f"it returns a {type(value).__name__}")
    return Trial(pytree.tree_unflatten(leaves, first.spec), first.written, first.random or second.random)


class _Real(NamedTuple):
    inputs: list[torch.Tensor]
    leaves: list[Any]
    spec: Any
    written: tuple[int, ...]
    random: bool

    def facts(self) -> Any:
        values = [Meta.of(v) if isinstance(v, torch.Tensor) else v for v in self.leaves]
        return values, self.spec, self.written


def _call(module: EagerModule, given: list[Any], spec: Any) -> _Real:
    given = [_random_like(v) if isinstance(v, torch.Tensor) else v for v in given]
    inputs = [v for v in given if isinstance(v, torch.Tensor)]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        before, versions = torch.get_rng_state(), [t._version for t in inputs]
        args, kwargs, own = pytree.tree_unflatten(given, spec)
        leaves, out = pytree.tree_flatten(module(args, kwargs, own))
        drawn = not torch.equal(before, torch.get_rng_state())
    written = tuple(i for i, t in enumerate(inputs) if t._version != versions[i])
    return _Real(inputs, leaves, out, written, drawn)


def _made_like(t: torch.Tensor) -> torch.Tensor:
    """A fake like ``t``, which has a gradient like ``t`` and is no leaf."""
    fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return fake.requires_grad_().clone() if t.requires_grad else fake


def _random_like(fake: torch.Tensor) -> torch.Tensor:
    if not isinstance(fake, FakeTensor):  # from outside the model
        return fake
    real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    if real.is_floating_point() or real.is_complex():
        real.normal_()
    else:
        real.random_(0, 2)
    leaf = real.requires_grad_(fake.requires_grad)
    return leaf.clone() if fake.requires_grad and not isinstance(fake, nn.Parameter) else leaf
