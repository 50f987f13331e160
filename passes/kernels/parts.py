"""Parts of a tensor along a dimension. Backward joins their gradients.

Thunder does so for a split, and pads the gradients of other parts to the whole and adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from passes.comm.properties import Property
from passes.compat import shape_of
from passes.kernels.registration import Differentiated, implements, is_floating, kernel, like

import thunder.torch as ltorch
import torch
from thunder.core.proxies import TensorProxy


def _supported(a: TensorProxy, *options: Any, dim: int = 0, **others: Any) -> bool:
    return is_floating(a) and not others


def _of_parts(name: str, sizes: int, function: Callable[..., Any], join: Callable[..., TensorProxy]) -> None:
    """Implements a function of a tensor, arguments that tell the sizes of its parts (so many), and a dimension."""

    def meta(a: TensorProxy, *options: Any) -> tuple[TensorProxy, ...]:
        return tuple(like(a, part.shape) for part in function(torch.empty(shape_of(a), device="meta"), *options))

    parts_of = kernel(name, meta, lambda a, *options: tuple(function(a, *options)), tags=(Property.VIEW,))

    @implements(getattr(ltorch, name), supported=_supported)
    def parts(a: TensorProxy, *options: Any, dim: int = 0) -> Differentiated:
        options, dim = options[:sizes], options[sizes] if len(options) > sizes else dim
        return parts_of(a, *options, dim), lambda *grads: [(a, join(grads, dim))]


_of_parts("chunk", 1, torch.chunk, ltorch.cat)
_of_parts("unbind", 0, torch.unbind, ltorch.stack)
