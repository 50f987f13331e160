"""Everything that depends on one release of torch or Thunder: stand-ins, renamed functions, Thunder's private names.

lightning-thunder 0.2.6 looks up every method of ``torch.Tensor`` that it knows when it is imported, to map it to its
own symbol or to mark it as unsupported. torch 2.13 removed named tensors, and with them five of those methods, so that
``import thunder`` raises AttributeError. :func:`install` sets a stand-in for each missing method: a function that has
the method's name (Thunder checks it) and raises AttributeError when it is called. It does
nothing on torch up to 2.12.

nvFuser's wheels have renamed their module. :func:`install` lets Thunder find it.

torch 2.13 also renamed two collectives. :data:`all_gather_single` and :data:`reduce_scatter_single` are these functions
under the name that this torch has.

The functions below :func:`install` are the only users of Thunder's private names. They import Thunder when they are
called, because this module is imported before Thunder can be.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import profiler

if TYPE_CHECKING:
    from thunder.core.module import ThunderModule
    from thunder.core.proxies import Proxy, TensorProxy
    from thunder.core.symbol import BoundSymbol, Symbol
    from thunder.core.trace import TraceCtx
    from thunder.core.transform_common import Transform
    from thunder.extend import Executor

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


def replace_missing_fuser() -> None:
    """Gives Thunder's recipes its default executors in place of a fuser that is missing, for which Thunder 0.2.6 hands
    itself None. Its default recipe names nvFuser."""
    from thunder.extend import get_default_executors
    from thunder.recipes import BaseRecipe

    setup = BaseRecipe.setup_executors

    @functools.wraps(setup)
    def setup_executors(self: Any) -> list[Any]:
        found = setup(self)
        return [e for e in found if e is not None] + (list(get_default_executors()) if None in found else [])

    BaseRecipe.setup_executors = setup_executors


def keeps_graph() -> bool:
    """True while autograd runs a backward that was called with ``retain_graph=True``."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


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


def import_thunder() -> None:
    """Imports Thunder without its warning about a library that it does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformer_engine module not found")
        import thunder  # noqa: F401


def add_note(error: BaseException, note: str) -> None:
    """Python's ``error.add_note``. Python 3.10 prints no notes: there the message gets it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def notes_of(error: BaseException) -> str:
    """The notes of an exception and of its causes, each on lines of its own, after a line break."""
    notes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        notes += getattr(cause, "__notes__", ())
        cause = cause.__cause__
    return "".join(f"\n{note}" for note in notes)


# ---- symbols and lines of a trace ----


def symbol_that_calls(name: str, meta: Callable[..., Any], fn: Callable[..., Any] | None, **options: Any) -> Symbol:
    """A symbol whose lines call ``fn``. ``options`` are those of Thunder's ``Symbol``."""
    from thunder.core.symbol import Symbol

    def bind(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: fn}

    return Symbol(name=name, meta=meta, _bind_postprocess=bind, **options)


def is_profiling() -> bool:
    """Whether a profiler of torch is on, or ``torch.autograd.profiler.emit_nvtx``."""
    return profiler._is_profiler_enabled


def set_signature(trace: TraceCtx, name: str) -> None:
    """Makes a trace print, and run, as a function of this name with the trace's arguments."""
    from thunder.core.codeutils import SigInfo

    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(a.name, None) for a in trace.args]


def function_of(bsym: BoundSymbol) -> Any:
    """The function stored in a line; None if the line calls the function of that name in the symbol's module."""
    return (bsym._call_ctx or {}).get(bsym.sym.name)


def calling_function_of(other: BoundSymbol, bsym: BoundSymbol, **changes: Any) -> BoundSymbol:
    """The line ``bsym`` as a call of the function that the line ``other`` calls. ``changes``: its args and output."""
    return bsym.from_bsym(sym=other.sym, _call_ctx=other._call_ctx, **changes)


def renamed(proxy: Proxy, name: str) -> Proxy:
    """A copy of a proxy with another name, which is not taken in any trace. Thunder's ``replace`` infers all metadata
    again."""
    new = copy.copy(proxy)
    vars(new).update(_name=name, _tags=set(proxy.tags))
    return new


def make_name_legal(proxy: Proxy) -> None:
    """Renames a new proxy whose name Python could not read. Thunder names that of ``heads.a-b.weight``
    ``t_heads_a-b_weight``."""
    from thunder.core.trace import get_tracectx

    if not proxy.name.isidentifier():
        proxy._name = get_tracectx().make_name(prefix=re.sub(r"\W", "_", proxy.name))


def shape_of(proxy: TensorProxy) -> tuple[Any, ...]:
    """The shape of a proxy, inside or outside a trace. A dimension is itself a proxy if values are symbolic."""
    return tuple(proxy._shape)


def has_grad_rule(bsym: BoundSymbol) -> bool:
    """True if Thunder, or the executor that will run the line, has a grad rule for the symbol as a whole."""
    from thunder.core.transforms import _get_gradfn_and_executor

    return _get_gradfn_and_executor(bsym)[0] is not None


def differentiating_executor(bsym: BoundSymbol) -> Executor | None:
    """The executor whose grad rule will differentiate the line; None if none has one."""
    from thunder.core.transforms import _get_gradfn_and_executor

    executor: Executor | None = _get_gradfn_and_executor(bsym)[1]
    return executor


def symbols_of_torch() -> dict[Any, Callable[..., Any]]:
    """Thunder's symbols, or functions that choose one, by the functions of torch that they stand for."""
    from thunder.torch import _torch_to_thunder_function_map

    found: dict[Any, Callable[..., Any]] = _torch_to_thunder_function_map
    return found


def fake_argument(value: Any) -> Any:
    """Thunder's stand-in for an argument of a torch function. A tensor has no memory under ``FakeTensorMode``."""
    from thunder.torch import _get_fake_arg

    return _get_fake_arg(value)


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """Lets Thunder choose the fused attention of a CUDA device where there is none, for the compilation of a step that
    is never run: torch, which Thunder asks, finds none there. Thunder has no hook for this. This is the only place
    where a function of Thunder is replaced."""
    from thunder.executors import sdpaex

    with mock.patch.object(sdpaex, "_fused_sdp_choice", _usual_attention):
        yield


def _usual_attention(query: Any, key: Any, value: Any, mask: Any, *options: Any) -> Any:
    """The kernel of attention that torch chooses on a CUDA device of today."""
    from thunder.core import dtypes
    from thunder.executors.sdpaex import SpdaBackend

    if query.dtype in (dtypes.bfloat16, dtypes.float16) and mask is None and query.shape[-1] <= 256:
        return SpdaBackend.FLASH_ATTENTION
    return SpdaBackend.MATH if query.dtype is dtypes.float64 else SpdaBackend.MEMORY_EFFICIENT


# ---- tracing ----


def proxied_values() -> set[Any]:
    """The wrapped values that the running interpreter has given proxies. The set grows until tracing is over."""
    from thunder.core.interpreter import get_interpreterruntimectx

    found: set[Any] = get_interpreterruntimectx()._proxied_values
    return found


def refresh_modules() -> None:
    """Makes the current compilation read the current submodules of jitted modules, not those of earlier traces."""
    data, _ = compile_data_and_stats()
    for jitted in data._thunder_module_map.values():
        jitted._module_cache = dict(jitted._model.named_modules())


def compile_data_and_stats() -> tuple[Any, Any]:
    """Thunder's data and statistics of the current compilation; a pair of None outside a compilation."""
    from thunder.core.compile_data import _compile_data

    data, stats = _compile_data.get()
    return data, stats


def set_traced_device(tensor: torch.Tensor, device: torch.device) -> None:
    """Lets Thunder trace ``tensor``, which may be a meta tensor, as if it were on ``device``."""
    tensor._thunder_device = device  # type: ignore[attr-defined]


def traced_device(tensor: torch.Tensor) -> torch.device:
    """The device that :func:`set_traced_device` set, else the tensor's own."""
    device: torch.device = getattr(tensor, "_thunder_device", tensor.device)
    return device


def constraints() -> list[tuple[Any, ...]]:
    """The checks that the prologue of the trace will make: tuples of a function of thunder.clang and its arguments."""
    from thunder.core.jit_ext import get_jit_ctx

    found: list[tuple[Any, ...]] = get_jit_ctx()._constraints
    return found


@contextmanager
def without_constraints() -> Iterator[None]:
    """Leaves out the checks that are added inside. Thunder compares each with all others."""
    from thunder.core.jit_ext import get_jit_ctx

    context = get_jit_ctx()
    kept, context._constraints = context._constraints, []
    try:
        yield
    finally:
        context._constraints = kept


def proxy_tensors(wrapped: Any) -> bool:
    """Gives the tensors in a wrapped value of the running interpreter proxies, in nested lists, tuples and dicts too.
    Returns whether there are any. (Thunder's own function fails on dicts, and passes over tensors after the first.)"""
    from thunder.core.jit_ext import get_jit_ctx

    value = wrapped.value
    if type(value) in (list, tuple, dict, OrderedDict):  # others have constructors of their own
        wrapped.track_items()
        items = wrapped.item_wrappers
        parts = [proxy_tensors(i) for i in (items.values() if isinstance(value, dict) else items)]  # all of them
        found = any(parts)
    else:
        found = isinstance(value, torch.Tensor)
    if found:
        get_jit_ctx().proxify(wrapped)
    return found or wrapped.original_value is not wrapped.nothing


def is_input(wrapped: Any) -> bool:
    """Whether a wrapped value of the running interpreter was passed to the jitted function, by itself or in another."""
    from thunder.core.jit_ext import should_register_for_prologue

    return bool(should_register_for_prologue(wrapped.provenance))


def raised(error: BaseException) -> Any:
    """What a lookaside returns to raise ``error`` in the program that is traced. An exception that a lookaside itself
    raises becomes an InterpreterError."""
    from thunder.core.interpreter import do_raise

    return do_raise(error)


@contextmanager
def deeper_recursion() -> Iterator[None]:
    """Raises Python's limit of recursion. Recording a call of nested modules takes more frames than the call itself."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@contextmanager
def without_log_of_fakes() -> Iterator[None]:
    """Keeps torch from logging each error of a fake tensor with 20 lines of traceback. The error is raised as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_drop)
    try:
        yield
    finally:
        log.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def exempt_from_autocast(data: Any) -> Iterator[None]:
    """Keeps Thunder from casting the arguments of symbols that are called inside, whatever autocast is on.

    ``data``: Thunder's data of a compilation.
    """
    from thunder.core.utils import AutocastStack

    stack, data.autocast_stack = data.autocast_stack, AutocastStack()
    try:
        yield
    finally:
        data.autocast_stack = stack


def pack_tensors(name: str, tensors: tuple[TensorProxy, ...]) -> None:
    """Makes tensors of the running trace results of the step, which the epilogue packs as the buffer of this ``name``.

    Thunder has no other way to hand the epilogue tensors that the traced function does not return.
    """
    from thunder.core.interpreter import ProvenanceRecord, PseudoInst
    from thunder.core.jit_ext import get_jit_ctx

    function = ProvenanceRecord(PseudoInst.INPUT_FN, inputs=[])
    members = ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value="_buffers")
    owner = _Packed({}, ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[function, members]))
    get_jit_ctx()._additional_outputs[owner].append((PseudoInst.STORE_SUBSCR, owner, _Packed(name), _Packed(tensors)))


class _Packed:
    """What Thunder reads of a wrapped value."""

    def __init__(self, value: Any, provenance: Any = None) -> None:
        self.value, self.provenance = value, provenance


def name_as_user(proxy: Proxy, name: str) -> None:
    """Lets a proxy of the running trace have the ``name`` of a variable of the user's program when tracing is over, if
    no other value has it."""
    from thunder.core.jit_ext import _maybe_update_proxy_name

    _maybe_update_proxy_name(proxy, name, is_internal=False)


def names_of_users() -> dict[Any, TensorProxy]:
    """The proxies that get the name of a variable of the user's program when tracing is over: by ``variableify`` of the
    old one."""
    from thunder.core.jit_ext import get_jit_ctx

    found: dict[Any, TensorProxy] = get_jit_ctx()._proxy_swapmap
    return found


# ---- jitted modules ----


def jitted_module(jitted: ThunderModule) -> Any:
    """The module passed to ``thunder.jit``."""
    return jitted._model


def unjitted(model: Any) -> Any:
    """The module passed to ``thunder.jit`` if ``model`` is its result, else ``model`` itself."""
    from thunder.core.module import ThunderModule

    return jitted_module(model) if isinstance(model, ThunderModule) else model


def jitted_transforms(jitted: ThunderModule) -> list[Transform]:
    """The transforms passed to ``thunder.jit``, and those enlisted since."""
    return list(jitted._lc_transforms)
