"""What depends on the release of torch: stand-ins that let Thunder be imported, functions that were renamed.

lightning-thunder 0.2.6 looks up every method of ``torch.Tensor`` that it knows when it is imported, to map it to its
own symbol or to mark it as unsupported. torch 2.13 removed named tensors, and with them five of those methods, so that
``import thunder`` raises AttributeError. :func:`install` sets a stand-in for each missing method: a function that has
the method's name (Thunder checks it) and raises AttributeError when it is called. It does nothing on torch up to 2.12.

torch 2.13 also renamed two collectives. :data:`all_gather_single` and :data:`reduce_scatter_single` are these functions
under the name that this torch has.

This module is imported before Thunder can be.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import profiler

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REMOVED_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _stand_in(name: str) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"torch.Tensor.{name} was removed from torch {torch.__version__} (named tensors)")

    method.__name__ = name
    method.__qualname__ = f"Tensor.{name}"
    return method


def install() -> tuple[str, ...]:
    """Adds the missing methods to ``torch.Tensor`` and returns their names (empty if none is missing)."""
    missing = tuple(name for name in REMOVED_METHODS if not hasattr(torch.Tensor, name))
    for name in missing:
        setattr(torch.Tensor, name, _stand_in(name))
    _name_nvfuser()
    return missing


def _name_nvfuser() -> None:
    """Lets ``import nvfuser`` find the module that nvFuser's wheels have.

    They have only ``nvfuser_direct`` by now. Thunder 0.2.6 imports that one too, but a fusion that is called for the
    first time imports ``compute_tensor_descriptor`` from ``nvfuser``.
    """
    old = find_spec("nvfuser")
    has_old = old is not None and old.origin is not None  # any folder of that name is a package without an origin
    if torch.cuda.is_available() and not has_old and find_spec("nvfuser_direct") is not None:
        with suppress(ImportError):  # then Thunder has no nvFuser either
            sys.modules["nvfuser"] = import_module("nvfuser_direct")


def import_thunder() -> None:
    """Imports Thunder without its warning about a library that it does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformer_engine module not found")
        import thunder  # noqa: F401


def functional_transform() -> Any:
    """The innermost of the function transforms (``torch.func``, ``torch.vmap``) that run; None if there is none."""
    return torch._C._functorch.peek_interpreter_stack()


def default_store() -> dist.Store:
    """The store of the default process group. Raises ValueError if there is none."""
    return dist.distributed_c10d._get_default_store()


def own_connection(store: dist.Store) -> dist.Store:
    """The same store over another connection: one waits for the answer to one question at a time."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs of torch 2.13
    return clone


def keeps_graph() -> bool:
    """True while autograd runs a backward that was called with ``retain_graph=True``."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def is_profiling() -> bool:
    """Whether a profiler of torch is on, or ``torch.autograd.profiler.emit_nvtx``."""
    return profiler._is_profiler_enabled


class Fakes(FakeTensorMode):
    """torch's mode of fake tensors, with :func:`fake_kernel`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = fake_kernel(func, args)
        if kernel is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        with self:
            return kernel(*args, **kwargs or {})


def fake_kernel(func: Any, args: Any) -> Callable[..., Any] | None:
    """What to call in the place of an operator whose kernels take more than torch lets fake and meta tensors through.
    None for all others.

    torch 2.13 lets only bfloat16 through in a grouped product, which it computes in each floating dtype.
    """
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return None
    from torch._meta_registrations import _create_grouped_mm_output_tensor

    def grouped_product(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)

    return grouped_product
