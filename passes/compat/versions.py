"""What depends on the release of torch: stand-ins that let Thunder be imported, functions that were renamed.

lightning-thunder 0.2.6 looks up names of torch when it is imported, so that ``import thunder`` raises AttributeError
if one is missing. :func:`install` adds what this release of torch lacks:

- torch 2.13 removed named tensors, and with them five methods of ``torch.Tensor``. A stand-in has the method's name
  (Thunder checks it) and raises AttributeError when it is called.
- torch 2.14 wrote ``apply`` of ``torch.autograd.Function`` in C++. Thunder reads ``apply.__func__``, which methods of
  Python have. The stand-in calls the method of C++, as that of earlier releases did.

It does nothing on torch up to 2.12. The names below are what torch has renamed, as this release calls it.

This module is imported before Thunder can be.

Operators of torch.distributed run here without a message where none may be sent: on fake tensors, and in a trial of a
module.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function, profiler
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

FUNCTIONAL = frozenset({"_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
NAMESPACES = FUNCTIONAL | {"c10d"}


class NoMessages(TorchDispatchMode):
    """Collectives have results of the right shapes at once, and this rank waits for no other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in NAMESPACES:
            return func(*args, **kwargs or {})
        return unsent(func, *args, **kwargs or {}) if func.namespace == "c10d" else _by_shape(func, args, kwargs or {})


def unsent(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an operator of c10d. Its outputs get what this rank sends, or zeros; all that it may write into
    counts as written. (Torch's own kernels for this draw Python's random numbers.)"""
    sent = _tensors((args[1:], kwargs))
    for t in _tensors(args[:1]) if not func.__name__.startswith("send") else ():
        if func._schema.arguments[0].name.startswith("output") or func.__name__.startswith("recv"):
            like = [s for s in sent if (s.shape, s.dtype) == (t.shape, t.dtype)]
            t.detach().copy_(like[0]) if like else t.detach().zero_()
        increment_version(t)
    work = FakeWork().boxed()
    return (None, work, (args[0], work))[len(func._schema.returns)]


def _by_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros of the shapes that a functional collective gives."""
    [device, *_] = (t.device for t in _tensors((args, kwargs)))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=device), func(*args, **kwargs))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


# torch 2.13
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch 2.14: runs around what backward recomputes
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(checkpoint, f"{CHECKPOINT_GENERATOR}_impl"):
    CHECKPOINT_GENERATOR += "_impl"

# torch 2.14: a reference to ``apply`` from before :func:`install` then calls no function of Python that can be replaced
APPLIES_IN_CPP = not hasattr(Function.apply, "__func__")

LAST_OF_NVFUSER = (2, 10)  # torch that it is built for

REMOVED_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _stand_in(name: str) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"torch.Tensor.{name} was removed from torch {torch.__version__} (named tensors)")

    method.__name__ = name
    method.__qualname__ = f"Tensor.{name}"
    return method


@classmethod  # type: ignore[misc]
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return super(Function, cls).apply(*args, **kwargs)


def install() -> tuple[str, ...]:
    """Adds what is missing for Thunder. Returns the names of missing methods of ``torch.Tensor`` (empty if there are
    none)."""
    missing = tuple(name for name in REMOVED_METHODS if not hasattr(torch.Tensor, name))
    for name in missing:
        setattr(torch.Tensor, name, _stand_in(name))
    if APPLIES_IN_CPP:
        Function.apply = _apply  # type: ignore[method-assign]
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


def missing_nvfuser() -> str:
    """The text of the warning that nvFuser is missing."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if release > LAST_OF_NVFUSER:
        why = "nvFuser is not built for torch {}.{} (the last was {}.{})".format(*release, *LAST_OF_NVFUSER)
    else:
        why = "nvFuser is missing, or there is no CUDA device (pip install 'shardtrace[nvfuser]')"
    return (
        f"{why}: Thunder's default executors are used in its place. To fuse without it: "
        'thunder.jit(model, executors=["sdpa", "torch_kernels", "torchcompile"])'
    )


def import_thunder() -> None:
    """Imports Thunder without its warning about a library that it does not need. Raises ImportError if this torch lacks
    something else that Thunder looks up."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformer_engine module not found")
        try:
            import thunder  # noqa: F401
        except AttributeError as error:
            raise ImportError(
                f"Thunder cannot be imported on torch {torch.__version__} ({error}): `shardtrace doctor` says which "
                "releases work"
            ) from error


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


@contextmanager
def aborted_together(group: Any, backend: Any) -> Iterator[None]:
    """Around the abort of several communicators of nccl, so that none waits for the kernels of another.

    ``group`` is one of the process groups, ``backend`` its nccl. Since torch 2.14 that has no start and end of its own.
    """
    start, end = (getattr(backend, name, None) for name in ("_group_start", "_group_end"))
    if start is None or end is None:
        c10d = dist.distributed_c10d
        c10d._world.pg_coalesce_state.pop(group, None)
        with c10d._coalescing_manager(group, torch.device("cuda")):
            yield
        return
    start()
    try:
        yield
    finally:
        end()


def keeps_graph() -> bool:
    """True while autograd runs a backward that was called with ``retain_graph=True``."""
    runs: bool = torch._C._current_graph_task_id() != -1
    return runs and bool(torch._C._autograd._get_current_graph_task_keep_graph())


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


grouped_mm = getattr(torch, "_grouped_mm", None)  # which torch.nn.functional.grouped_mm calls


def fake_kernel(func: Any, args: Any) -> Callable[..., Any] | None:
    """The function to call in the place of an operator whose kernel of fake tensors does not do. None for others.

    torch 2.13 lets only bfloat16 through in a grouped product, which it computes in each floating dtype.
    """
    if func.namespace == "c10d":
        return partial(unsent, func)
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return None
    from torch._meta_registrations import _create_grouped_mm_output_tensor

    def grouped_product(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)

    return grouped_product
