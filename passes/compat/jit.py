"""Thunder's state while it traces, and the modules that it has jitted."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from passes.compat.versions import missing_nvfuser

import torch
from thunder.core import dtypes
from thunder.core.compile_data import _compile_data
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, get_interpreterruntimectx
from thunder.core.jit_ext import _maybe_update_proxy_name, get_jit_ctx, should_register_for_prologue
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.transform_common import Transform
from thunder.core.utils import AutocastStack
from thunder.executors import sdpaex
from thunder.executors.sdpaex import SpdaBackend
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction
from thunder.torch.experimental import dtensor_proxy
from torch.distributed.tensor import DTensor

# Thunder and torch import these in the first step. The profiler of torch, with_stack, names code of modules that are
# imported meanwhile by memory that is free by then.
for _name in (
    "thunder.distributed.utils",
    "thunder.torch.experimental.dtensor_codeutils",
    "thunder.transforms.autocast",
    "torch.profiler._cupti_monitor",
):
    with suppress(ImportError):
        importlib.import_module(_name)


def nodes_of_thunder(outputs: Iterable[torch.Tensor], *, of_backward: bool = False) -> list[Any]:
    """The autograd nodes to which the gradients of a step's outputs go. Inputs that are passed on have nodes of their
    own. ``of_backward``: the nodes that run the compiled backward, which may come after those."""
    nodes: set[Any] = {output.grad_fn for output in outputs}
    kinds = {n: getattr(type(n), "_forward_cls", None) for n in nodes}
    found = {n: kind for n, kind in kinds.items() if kind in (ThunderFunction, ThunderOutputFunction)}
    if not of_backward:
        return list(found)
    return list({n if kind is ThunderFunction else n.next_functions[0][0] for n, kind in found.items()})


class _Dummy(torch.Tensor):
    """A tensor without values that says it holds no NaN."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.bool)


def without_meta(results: tuple[Any, ...], gradients: Any) -> tuple[Any, ...] | None:
    """A hook of a node of Thunder's outputs: lets torch's anomaly mode look for NaN in the tensor on the meta device
    that Thunder passes from this node to the next one."""
    if not torch.is_anomaly_check_nan_enabled():
        return None
    return tuple(r.as_subclass(_Dummy) if r is not None and r.is_meta else r for r in results)


def compile_data_and_stats() -> tuple[Any, Any]:
    """Thunder's data and statistics of the current compilation; a pair of None outside a compilation."""
    data, stats = _compile_data.get()
    return data, stats


def refresh_modules(current: Callable[[torch.nn.Parameter], torch.nn.Parameter]) -> None:
    """Makes the current compilation read the current submodules and parameters of jitted modules, not those of earlier
    traces. ``current`` finds the parameter of now by an earlier one."""
    data, _ = compile_data_and_stats()
    for jitted in data._thunder_module_map.values():
        jitted._module_cache = dict(jitted._model.named_modules())
        for name, parameter in jitted._overrides_parameters.items():
            jitted._overrides_parameters[name] = current(parameter)


def live_tensors() -> Callable[[], None] | None:
    """A function that makes the jitted modules of the current compilation read the buffers that their modules hold when
    it is called, and the parameters that are no DTensors, in place of those that were there when they were jitted.
    None if there are none. The function raises RuntimeError for a tensor in the place of a parameter."""
    data, _ = compile_data_and_stats()
    rows: list[tuple[dict[str, Any], str, dict[str, Any], str]] = []
    parameters: dict[int, Any] = {}
    for jitted in data._thunder_module_map.values():
        for name, module in jitted._model.named_modules(remove_duplicate=False):
            parameters[id(module._parameters)] = module._parameters
            for overrides, held in (
                (jitted._overrides_buffers, module._buffers),
                (jitted._overrides_parameters, module._parameters),
            ):
                for key, value in held.items():
                    path = f"{name}.{key}" if name else key
                    if overrides.get(path) is value is not None and not isinstance(value, DTensor):
                        rows.append((overrides, path, held, key))

    def is_same() -> bool:
        try:
            for overrides, path, held, key in rows:
                if held[key] is not overrides[path]:
                    return False
        except KeyError:
            return False
        return True

    def refresh() -> None:
        if is_same():
            return
        for overrides, path, held, key in rows:
            new = held.get(key)
            if held is parameters.get(id(held)) and not isinstance(new, torch.nn.Parameter):
                raise RuntimeError(f"parameter {path} was replaced by a {type(new).__name__}")
            overrides.pop(path, None)
            if new is not None:
                overrides[path] = new

    return refresh if rows else None


def proxied_values() -> set[Any]:
    """The wrapped values that the running interpreter has given proxies. The set grows until tracing is over."""
    found: set[Any] = get_interpreterruntimectx()._proxied_values
    return found


def check_dtensors(refuse: Callable[[torch.Tensor], None]) -> None:
    """Calls ``refuse`` with each DTensor before Thunder traces it. Thunder's own errors do not say which one it is."""
    traced = dtensor_proxy.proxify_dtensor

    @functools.wraps(traced)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, DTensor):
            refuse(value)
        return traced(value, *args, **kwargs)

    dtensor_proxy.proxify_dtensor = checked


def is_input(wrapped: Any) -> bool:
    """Whether a wrapped value of the running interpreter was passed to the jitted function, by itself or in another."""
    return bool(should_register_for_prologue(wrapped.provenance))


def proxy_tensors(wrapped: Any) -> bool:
    """Gives the tensors in a wrapped value of the running interpreter proxies, in nested lists, tuples and dicts too.
    Returns whether there are any. (Thunder's own function fails on dicts, and passes over tensors after the first.)"""
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


def set_traced_device(tensor: torch.Tensor, device: torch.device) -> None:
    """Lets Thunder trace ``tensor``, which may be a meta tensor, as if it were on ``device``."""
    tensor._thunder_device = device  # type: ignore[attr-defined]


def traced_device(tensor: torch.Tensor) -> torch.device:
    """The device that :func:`set_traced_device` set, else the tensor's own."""
    device: torch.device = getattr(tensor, "_thunder_device", tensor.device)
    return device


def constraints() -> list[tuple[Any, ...]]:
    """The checks that the prologue of the trace will make: tuples of a function of thunder.clang and its arguments."""
    found: list[tuple[Any, ...]] = get_jit_ctx()._constraints
    return found


@contextmanager
def without_constraints() -> Iterator[None]:
    """Leaves out the checks that are added inside. Thunder compares each with all others."""
    context = get_jit_ctx()
    kept, context._constraints = context._constraints, []
    try:
        yield
    finally:
        context._constraints = kept


@contextmanager
def exempt_from_autocast(data: Any) -> Iterator[None]:
    """Keeps Thunder from casting the arguments of symbols that are called inside, whatever autocast is on.

    ``data``: Thunder's data of a compilation.
    """
    stack, data.autocast_stack = data.autocast_stack, AutocastStack()
    try:
        yield
    finally:
        data.autocast_stack = stack


def pack_tensors(name: str, tensors: tuple[TensorProxy, ...]) -> None:
    """Makes tensors of the running trace results of the step, which the epilogue packs as the buffer of this ``name``.

    Thunder has no other way to hand the epilogue tensors that the traced function does not return.
    """
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
    _maybe_update_proxy_name(proxy, name, is_internal=False)


def names_of_users() -> dict[Any, TensorProxy]:
    """The proxies that get the name of a variable of the user's program when tracing is over: by ``variableify`` of the
    old one."""
    found: dict[Any, TensorProxy] = get_jit_ctx()._proxy_swapmap
    return found


def jitted_module(jitted: ThunderModule) -> Any:
    """The module passed to ``thunder.jit``."""
    return jitted._model


def unjitted(model: Any) -> Any:
    """The module passed to ``thunder.jit`` if ``model`` is its result, else ``model`` itself."""
    return jitted_module(model) if isinstance(model, ThunderModule) else model


def jitted_transforms(jitted: ThunderModule) -> list[Transform]:
    """The transforms passed to ``thunder.jit``, and those added since."""
    return list(jitted._lc_transforms)


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """Lets Thunder choose the fused attention of a CUDA device where there is none, for the compilation of a step that
    is never run: torch, which Thunder asks, finds none there. Thunder has no hook for this."""
    with mock.patch.object(sdpaex, "_fused_sdp_choice", _usual_attention):
        yield


def _usual_attention(query: Any, key: Any, value: Any, mask: Any, *options: Any) -> Any:
    """The kernel of attention that torch chooses on a CUDA device of today."""
    if query.dtype in (dtypes.bfloat16, dtypes.float16) and mask is None and query.shape[-1] <= 256:
        return SpdaBackend.FLASH_ATTENTION
    return SpdaBackend.MATH if query.dtype is dtypes.float64 else SpdaBackend.MEMORY_EFFICIENT


def replace_missing_fuser() -> None:
    """Lets Thunder take its default executors in place of nvFuser where that is missing, and warns whoever asks for it.
    Thunder 0.2.6 raises an error for its name. Its recipes, of which the default one names it, hand themselves None."""
    import thunder
    from thunder.extend import get_default_executors, get_executor
    from thunder.recipes import BaseRecipe

    if get_executor("nvfuser") is not None:
        return
    resolve, setup = thunder.resolve_executors, BaseRecipe.setup_executors

    @functools.wraps(resolve)
    def resolve_executors(executors: Any) -> tuple[Any, ...]:
        if executors is None or "nvfuser" not in executors:
            return resolve(executors)
        warnings.warn(missing_nvfuser(), stacklevel=3)
        others = resolve([e for e in executors if e != "nvfuser"])
        return tuple(dict.fromkeys((*others, *get_default_executors())))

    @functools.wraps(setup)
    def setup_executors(self: Any) -> list[Any]:
        if "nvfuser" not in self.executor_names:
            return setup(self)
        if torch.cuda.is_available():  # else nobody expects it of the default recipe
            warnings.warn(missing_nvfuser(), stacklevel=2)
        with mock.patch.object(self, "executor_names", [n for n in self.executor_names if n != "nvfuser"]):
            return [*setup(self), *get_default_executors()]

    thunder.resolve_executors = resolve_executors
    BaseRecipe.setup_executors = setup_executors
