"""Modules that PyTorch runs: one line of the trace for each call.

A module whose forward depends on the values of tensors (``.item()``, ``nonzero``, a branch) cannot be recorded on fake
tensors. It is tried on real tensors with random values instead, twice. If only tensors come out, with the same metadata
both times, its call is one function of its arguments, parameters and buffers, which PyTorch runs and differentiates.
Each step checks that what comes out is still the like.
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


class Facts(NamedTuple):
    """What must not depend on the values of tensors: the structure of a result, its plain values, the shapes and dtypes
    of its tensors."""

    values: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, result: Any) -> Facts:
        leaves, spec = pytree.tree_flatten(result)
        return cls(tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in leaves), spec)


class EagerModule:
    """The call of a module as a function of its arguments, and of its own tensors by their names. Each result is a
    tensor of its own.

    ``expected`` are the facts of its result, once they are known. Raises RuntimeError for others.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self.module, self._original = module, original
        self.expected: Facts | None = None
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
        inputs = set(map(id, pytree.tree_leaves((args, kwargs, dict(own)))))
        result = pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if id(t) in inputs else t, result)
        if self.expected is not None and Facts.of(result) != self.expected:
            raise RuntimeError(
                f"{type(self.module).__name__}, which PyTorch runs, has returned other shapes or values than when it "
                "was recorded: they depend on the values of tensors. Let it return tensors whose shapes do not"
            )
        return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EagerModule) and (other.module, other.expected) == (self.module, self.expected)

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
    for value in given:
        if not isinstance(value, (torch.Tensor, *PLAIN, torch.dtype, torch.device)):
            raise CannotStandAlone(f"it is given a {type(value).__name__}")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with _pop_mode_temporarily(), unset_fake_temporarily(), torch.random.fork_rng(devices):
        first = _call(module, given, spec)
        second = _call(module, given, spec)
    if first.facts() != second.facts():
        raise CannotStandAlone("the shapes that it returns, or other results, depend on the values of tensors")
    for value in pytree.tree_leaves(first.result):
        if not isinstance(value, (torch.Tensor, *PLAIN)):
            raise CannotStandAlone(f"it returns a {type(value).__name__}")
    module.expected = Facts.of(first.result)
    made = pytree.tree_map_only(torch.Tensor, _made_like, first.result)
    return Trial(made, first.written, first.random or second.random)


class _Real(NamedTuple):
    result: Any
    written: tuple[int, ...]
    random: bool

    def facts(self) -> Any:
        metas = [Meta.of(t) for t in pytree.tree_leaves(self.result) if isinstance(t, torch.Tensor)]
        return Facts.of(self.result), metas, self.written


def _call(module: EagerModule, given: list[Any], spec: Any) -> _Real:
    given = [_random_like(v) if isinstance(v, torch.Tensor) else v for v in given]
    inputs = [v for v in given if isinstance(v, torch.Tensor)]
    before, versions = torch.get_rng_state(), [t._version for t in inputs]
    args, kwargs, own = pytree.tree_unflatten(given, spec)
    result = module(args, kwargs, own)
    drawn = not torch.equal(before, torch.get_rng_state())
    written = tuple(i for i, t in enumerate(inputs) if t._version != versions[i])
    return _Real(result, written, drawn)


def _made_like(t: torch.Tensor) -> torch.Tensor:
    """A fake like ``t``, which has a gradient like ``t`` and is no leaf."""
    fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return fake.requires_grad_().clone() if t.requires_grad else fake


def _random_like(fake: torch.Tensor) -> torch.Tensor:
    if not isinstance(fake, FakeTensor):  # from outside the model
        return fake
    if (given := getattr(fake, "_shardtrace_real", None)) is not None:  # such as sizes, which cannot be any numbers
        return given.clone()
    real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    if real.is_floating_point() or real.is_complex():
        real.normal_()
    else:
        real.random_(0, 2)
    leaf = real.requires_grad_(fake.requires_grad)
    return leaf.clone() if fake.requires_grad and not isinstance(fake, nn.Parameter) else leaf
