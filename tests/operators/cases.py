"""A case: a function of torch with arguments, inside a module that owns some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Function = Callable[..., Any]
Process = Callable[[Any], Any]
DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Sample:
    """The arguments of one call. ``process``: takes from the result what is comparable, such as the absolute values of
    eigenvectors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Process = lambda result: result

    def flat(self) -> tuple[list[Any], pytree.TreeSpec]:
        return pytree.tree_flatten((self.args, self.kwargs))

    def double(self) -> Sample:
        """The sample with tensors and dtypes of twice the precision."""
        args, kwargs = pytree.tree_map(double, (self.args, self.kwargs))
        return Sample(args, kwargs, self.process)

    def structure(self) -> tuple[Any, ...]:
        """Equal for samples that differ only in sizes and numbers."""
        flat, spec = self.flat()
        return str(spec), tuple(map(_kind, flat))


def double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in DOUBLE:
        return value.detach().to(DOUBLE[value.dtype]).requires_grad_(value.requires_grad)
    return DOUBLE.get(value, value) if isinstance(value, torch.dtype) else value


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        layout = value.is_contiguous() if value.layout == torch.strided else value.layout
        return value.ndim, value.dtype, 0 in value.shape, layout, value.requires_grad
    return value if isinstance(value, (bool, str, torch.dtype)) else type(value)


class Applied(nn.Module):
    """Calls a function with a sample. Tensors that require a gradient are parameters if it ``owns`` them; else all are
    arguments of the call."""

    def __init__(self, function: Function, sample: Sample, *, owns: bool) -> None:
        super().__init__()
        self.function = function
        self.values, self.spec = sample.flat()
        tensors = [i for i, v in enumerate(self.values) if isinstance(v, torch.Tensor)]
        own = [i for i in tensors if owns and self.values[i].requires_grad]
        for i in own:
            self.register_parameter(f"of_{i}", nn.Parameter(self.values[i].detach().clone()))
        self.own, self.given = own, [i for i in tensors if i not in own]
        self.spare = nn.Parameter(torch.zeros(1))  # a module without parameters cannot be sharded
        for i in tensors:
            self.values[i] = None

    def forward(self, *tensors: torch.Tensor) -> Any:
        values = list(self.values)
        for i in self.own:
            values[i] = getattr(self, f"of_{i}")
        for i, t in zip(self.given, tensors, strict=True):
            values[i] = t
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Step:
    """One call: the values of parameters and buffers before it (None: as they are), and its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: dict[str, torch.Tensor] | None = None
    process: Process = lambda result: result


@dataclass(frozen=True)
class Case:
    """``build`` makes the module, ``steps`` its calls; with True in twice the precision. ``eps``: of the numbers that
    backward computes with, if these have less precision than the gradients."""

    name: str  # operator/variant/dtype/number
    build: Callable[[bool], nn.Module]
    steps: Callable[[bool], Sequence[Step]]
    eps: float = 0.0


def applied(name: str, function: Function, samples: Sequence[Sample], *, owns: bool) -> Case:
    """A case of a function: a step for each of the samples, which are of one structure."""

    def build(precise: bool) -> nn.Module:
        return Applied(function, samples[0].double() if precise else samples[0], owns=owns)

    def steps(precise: bool) -> list[Step]:
        found = []
        for sample in samples:
            flat, _ = (sample.double() if precise else sample).flat()
            own = {f"of_{i}" for i, v in enumerate(flat) if owns and isinstance(v, torch.Tensor) and v.requires_grad}
            state = {f"of_{i}": v.detach() for i, v in enumerate(flat) if f"of_{i}" in own}
            args = [v for i, v in enumerate(flat) if isinstance(v, torch.Tensor) and f"of_{i}" not in own]
            found.append(Step(tuple(args), {}, state, sample.process))
        return found

    return Case(name, build, steps)
