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

import builtins
import copy
import gc
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
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


def keeps_graph() -> bool:
    """True while autograd runs a backward that was called with ``retain_graph=True``."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


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


def copied_line(bsym: BoundSymbol, **changes: Any) -> BoundSymbol:
    """A copy of a line that is printed with objects of its own. ``changes``: its args, output and tags."""
    return bsym.from_bsym(_object_ctx={}, **changes)


def renamed(proxy: Proxy, name: str) -> Proxy:
    """A copy of a proxy with another name, which is not taken in any trace. Thunder's ``replace`` infers all metadata
    again."""
    new = copy.copy(proxy)
    vars(new).update(_name=name, _tags=set(proxy.tags))
    return new


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


def fake_argument(value: Any) -> Any:
    """Thunder's stand-in for an argument of a torch function. A tensor has no memory under ``FakeTensorMode``."""
    from thunder.torch import _get_fake_arg

    return _get_fake_arg(value)


@contextmanager
def fake_calls_on_cpu(device: torch.device) -> Iterator[None]:
    """Lets Thunder call torch functions with fake tensors on the CPU in place of ``device``.

    Thunder calls a function that it does not know, such as ``torch.addmm``, to see the shape of its result. A torch
    that was built without CUDA aborts the process if autograd meets a fake tensor on CUDA. (torch's own stand-in for a
    missing device, ``torch._C._ensureCUDADeviceGuardSet``, acts only in builds with CUDA, whose autograd then asks for
    a context of CUDA.) It also finds no fused attention there, which every CUDA device has. Thunder has no hook for
    these calls. This is the only place where functions of Thunder are replaced, for the compilation of a step that is
    never run.
    """
    from thunder import torch as ltorch
    from thunder.core.devices import to_device
    from thunder.core.proxies import TensorProxy
    from thunder.executors import sdpaex

    there, cpu = to_device(device), torch.device("cpu")

    def fake_argument(value: Any) -> Any:
        if isinstance(value, TensorProxy | torch.Tensor) and to_device(value.device) == there:
            return torch.empty(
                tuple(value.shape), dtype=ltorch.to_torch_dtype(value.dtype), requires_grad=value.requires_grad
            )
        return cpu if value in (there, device) else to_fake(value)

    def proxy_of(fake: Any) -> Any:
        if not isinstance(fake, torch.Tensor):
            return to_thunder(fake)
        dtype = ltorch.to_dtype(fake.dtype)
        return TensorProxy(shape=fake.shape, device=there, dtype=dtype, requires_grad=fake.requires_grad)

    to_fake, to_thunder = ltorch._get_fake_arg, ltorch._fake_type_to_thunder
    with (
        mock.patch.object(ltorch, "_get_fake_arg", fake_argument),
        mock.patch.object(ltorch, "_fake_type_to_thunder", proxy_of),
        mock.patch.object(sdpaex, "_fused_sdp_choice", _usual_attention),
    ):
        yield


def _usual_attention(query: Any, key: Any, value: Any, mask: Any, *options: Any) -> Any:
    """The kernel of attention that torch chooses on a CUDA device of today."""
    from thunder.core import dtypes
    from thunder.executors.sdpaex import SpdaBackend

    if query.dtype in (dtypes.bfloat16, dtypes.float16) and mask is None and query.shape[-1] <= 256:
        return SpdaBackend.FLASH_ATTENTION
    return SpdaBackend.MATH if query.dtype is dtypes.float64 else SpdaBackend.MEMORY_EFFICIENT


# ---- tracing ----


def interpret(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function`` in Thunder's running interpreter. Arguments and result are wrapped values."""
    from thunder.core.interpreter import _interpret_call

    return _interpret_call(function, *args, **kwargs)


@contextmanager
def _replaced(context: Any, **functions: Any) -> Iterator[None]:
    """Puts ``functions`` in place of those of the running interpreter's context, by the names of its attributes."""
    before = {name: getattr(context, name) for name in functions}
    vars(context).update(functions)
    try:
        yield
    finally:
        vars(context).update(before)


@contextmanager
def quick_tracing() -> Iterator[None]:
    """Saves a sixth of the time of tracing, by settings of Python that are restored afterwards.

    Thunder makes the frame of a traceback in a thread, for each exception such as one of ``hasattr``, and waits for it
    in a loop: the thread runs after Python's switch interval. It makes many small objects and little garbage, for which
    Python would look more often.
    """
    interval, (most, *others) = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(interval, 1e-4))
    gc.set_threshold(max(most, 20_000) if most else 0, *others)  # 0 turns it off
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(most, *others)


@contextmanager
def quick_builtins() -> Iterator[None]:
    """Saves half of the time of tracing: the running interpreter does without functions of its own, which it interprets
    like those of a model, when it reads Python's builtin functions and classes or the truth of a dict, when a loop
    takes the next of a dict's values, and when it calls a module.

    To look up a builtin such as ``len``, Thunder calls four small functions. The truth of a dict takes about nine
    builtins, and each call of a module asks eight dicts of hooks. Thunder has no guard on a builtin or on the truth of
    a dict, so that none is lost. The values of a dict and the function that a module's call runs are reached in the
    same way as before.
    """
    from thunder.core.interpreter import (
        INTERPRETER_SIGNALS,
        ProvenanceRecord,
        PseudoInst,
        Py_NULL,
        _interpret_call,
        get_interpretercompilectx,
        get_interpreterruntimectx,
        global_callback,
        wrap,
        wrap_const,
    )

    context, runtime = get_interpretercompilectx(), get_interpreterruntimectx()
    interpret_instruction, lookaside = context._opcode_interpreter, context._fn_lookaside
    has_null = sys.version_info >= (3, 11)  # a LOAD_GLOBAL may push a NULL: from 3.13 after the value

    def load_global(inst: Any, state: dict[str, Any]) -> Any:
        found, name = state["globals_dict"], inst.argval
        if type(found.value) is dict and name in found.value:
            values = [global_callback(_interpret_call(dict.__getitem__, found, wrap_const(name)), name)]
        elif (builtin := _builtin(name, found.value)) is not None:
            values = [wrap_const(builtin)]
        else:
            return None
        if has_null and inst.arg & 1:
            values.insert(1 if sys.version_info >= (3, 13) else 0, wrap_const(Py_NULL()))
        return values

    def next_value(inst: Any, state: dict[str, Any]) -> Any:
        if (found := _key_iterator(state["stack"].getitem_wrapped(-1))) is None:
            return None
        mapping, keys = found
        key = _interpret_call(type(keys.value).__next__, keys)
        if key is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            runtime.curexc = None  # the iterator stays at its end, and raises again when it is interpreted
            return None
        return [value_of(mapping, key)]

    def item(inst: Any, state: dict[str, Any]) -> Any:
        stack = state["stack"]
        if (function := _GET_ITEM.get(type(stack.getitem_wrapped(-2).value))) is None:
            return None
        key, container = stack.pop_wrapped(), stack.pop_wrapped()
        return [_interpret_call(function, container, key)]

    def contains(inst: Any, state: dict[str, Any]) -> Any:
        stack = state["stack"]
        if inst.arg or type(stack.getitem_wrapped(-1).value) not in (dict, OrderedDict):  # 1 is "not in"
            return None
        mapping, key = stack.pop_wrapped(), stack.pop_wrapped()
        return [_interpret_call(dict.__contains__, mapping, key)]

    def extend_list(inst: Any, state: dict[str, Any]) -> Any:
        stack = state["stack"]
        if type(stack.getitem_wrapped(-inst.arg - 1).value) is not list:
            return None
        values, extended = stack.pop_wrapped(), stack.getitem_wrapped(-inst.arg)
        return raised([_interpret_call(list.extend, extended, values)])

    def merge_dict(inst: Any, state: dict[str, Any]) -> Any:
        stack = state["stack"]
        merged, mapping = stack.getitem_wrapped(-2), stack.getitem_wrapped(-1)
        if not {type(merged.value), type(mapping.value)} <= {dict, OrderedDict} or merged.value.keys() & mapping.value:
            return None
        stack.pop_wrapped()
        merged.track_items()
        mapping.track_items()
        keys = [mapping.key_wrappers[name] for name in mapping.value]
        return raised([_interpret_call(dict.__setitem__, merged, k, value_of(mapping, k)) for k in keys])

    def call_unpacked(inst: Any, state: dict[str, Any]) -> Any:
        stack, count = state["stack"], 1 + (inst.arg & 1)  # a tuple, and perhaps a dict
        given = [stack.getitem_wrapped(-i) for i in range(count, 0, -1)]
        if any(type(g.value) is not t for g, t in zip(given, (tuple, dict), strict=False)):
            return None
        for _ in given:
            stack.pop_wrapped()
        function = [stack.pop_wrapped() for _ in range(1 + has_null)][-1 if sys.version_info >= (3, 13) else 0]
        args = [_interpret_call(tuple.__getitem__, given[0], wrap_const(i)) for i in range(len(given[0].value))]
        kwargs = {name: value_of(m, wrap_const(name)) for m in given[1:] for name in m.value}
        return [_interpret_call(function, *args, **kwargs)]

    def value_of(mapping: Any, key: Any) -> Any:
        return _interpret_call(dict.__getitem__, mapping, key)

    def raised(results: list[Any]) -> list[Any]:
        """The signal of an exception, if one of the results is that."""
        return [r for r in results if r is INTERPRETER_SIGNALS.EXCEPTION_RAISED]

    # give the values that the instruction pushes, or None
    quick = {
        "BINARY_SUBSCR": item,
        "CALL_FUNCTION_EX": call_unpacked,
        "CONTAINS_OP": contains,
        "DICT_MERGE": merge_dict,
        "FOR_ITER": next_value,
        "LIST_EXTEND": extend_list,
        "LOAD_GLOBAL": load_global,
    }

    def instruction(inst: Any, /, **state: Any) -> Any:
        values = quick[inst.opname](inst, state) if inst.opname in quick else None
        if values is None:
            return interpret_instruction(inst, **state)
        if values and values[-1] is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return values[-1]
        with state["stack"].set_cur_instruction(inst):
            state["stack"].extend(values)
        return None

    def truth(x: Any) -> Any:
        return wrap(bool(x.value), provenance=ProvenanceRecord(PseudoInst.GET_LEN, inputs=[x.provenance]))

    def call_of(module: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            method = _interpret_call(getattr, module, wrap_const("__call__"))
            return _interpret_call(_interpret_call(getattr, method, wrap_const("__func__")), module, *args, **kwargs)

        return call

    def quick_lookaside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function is bool and len(args) == 1 and type(args[0].value) in (dict, OrderedDict):
            return truth
        found = lookaside(function, *args, **kwargs)
        if found is None and isinstance(function, torch.nn.Module) and _has_own_call(function):
            module = _wrapper_of(function)
            return call_of(module) if module is not None else None
        return found

    with _replaced(context, _opcode_interpreter=instruction, _fn_lookaside=quick_lookaside):
        yield


# The functions that read an item of a builtin container. Subclasses may have functions of their own.
_GET_ITEM: dict[type, Callable[..., Any]] = {
    dict: dict.__getitem__,
    OrderedDict: dict.__getitem__,
    list: list.__getitem__,
    tuple: tuple.__getitem__,
}


def _has_own_call(module: torch.nn.Module) -> bool:
    method = module.__call__
    return isinstance(method, types.MethodType) and method.__self__ is module


def _key_iterator(iterator: Any) -> tuple[Any, Any] | None:
    """The dict and the iterator over its keys that Thunder's iterator over its values has; None for another one."""
    from thunder.core.interpreter import MappingKeysIterator, MappingValuesIterator

    if type(iterator.value) is not MappingValuesIterator:
        return None
    mapping, keys = map(iterator.attribute_wrappers.get, ("_mapping", "_key_iter"))
    return (mapping, keys) if keys is not None and type(keys.value) is MappingKeysIterator else None


def _builtin(name: str, module_globals: dict[str, Any]) -> Any:
    """The builtin function or class that ``name`` stands for in a module; None if it stands for something else."""
    if name in module_globals:
        return None
    namespace = module_globals.get("__builtins__")  # a dict, or the module
    value = (namespace if isinstance(namespace, dict) else vars(builtins)).get(name)
    return value if isinstance(value, type | types.BuiltinFunctionType) else None


@contextmanager
def comparable_dtypes() -> Iterator[None]:
    """Lets the running interpreter compare a tensor's dtype with torch's, by ``==``, ``!=``, ``is`` and ``in``.

    While a model is traced, ``tensor.dtype`` is one of Thunder's, which equals none of torch's. Thunder then takes
    ``tensor.dtype == torch.float32`` for False without an error. The prologue checks the dtypes of tensors anyway.
    """
    import torch
    from thunder.core.dtypes import dtype, to_torch_dtype
    from thunder.core.interpreter import get_interpretercompilectx, wrap_const

    context = get_interpretercompilectx()
    interpret_instruction = context._opcode_interpreter

    def is_torch(value: Any) -> bool:
        if isinstance(value, list | tuple | set | frozenset | dict):
            return any(isinstance(v, torch.dtype) for v in value)
        return isinstance(value, torch.dtype)

    def instruction(inst: Any, /, **state: Any) -> Any:
        if inst.opname in ("COMPARE_OP", "IS_OP", "CONTAINS_OP"):
            stack = state["stack"]
            pair = stack.getitem_wrapped(-2), stack.getitem_wrapped(-1)
            if any(isinstance(v.value, dtype) for v in pair) and any(is_torch(v.value) for v in pair):
                new = [wrap_const(to_torch_dtype(v.value)) if isinstance(v.value, dtype) else v for v in pair]
                with stack.set_cur_instruction(inst):
                    stack[-2], stack[-1] = new
        return interpret_instruction(inst, **state)

    with _replaced(context, _opcode_interpreter=instruction):
        yield


def proxied_values() -> set[Any]:
    """The wrapped values that the running interpreter has given proxies. The set grows until tracing is over."""
    from thunder.core.interpreter import get_interpreterruntimectx

    found: set[Any] = get_interpreterruntimectx()._proxied_values
    return found


def forget_item(mapping: dict[str, Any], key: str) -> Any:
    """Makes the running interpreter read ``mapping[key]`` again at its next use. Returns the interpreter's record of
    the item, for :func:`remember_item`; None if the item was never read."""
    wrapper = _wrapper_of(mapping)
    if wrapper is None or key not in wrapper.item_wrappers:
        return None
    return wrapper.key_wrappers.pop(key), wrapper.item_wrappers.pop(key)


def remember_item(mapping: dict[str, Any], key: str, item: Any) -> None:
    """Undoes :func:`forget_item`."""
    wrapper = _wrapper_of(mapping)
    wrapper.key_wrappers[key], wrapper.item_wrappers[key] = item


def _wrapper_of(value: Any) -> Any:
    """The wrapped value that the running interpreter holds of a dict or a module; None if it has not met it."""
    from thunder.core.interpreter import get_interpreterruntimectx

    known = get_interpreterruntimectx()._known_wrappers.get(id(value))
    return known[0]() if known is not None else None


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


def known_values() -> dict[int, Any]:
    """The wrapped values that the running interpreter holds, by the ids of the objects; not numbers, strings and
    tensors. An id is not used for another object while its value is held."""
    from thunder.core.interpreter import get_interpreterruntimectx

    known = {id: reference() for id, (reference,) in get_interpreterruntimectx()._known_wrappers.items()}
    return {id: wrapped for id, wrapped in known.items() if wrapped is not None}


@contextmanager
def observing(
    called: Callable[[Callable[..., Any], tuple[Any, ...]], None], assigned: Callable[[str], None]
) -> Iterator[None]:
    """Lets ``called(function, args)`` see each call that the running interpreter is about to make, and
    ``assigned(name)`` each assignment to a variable that is global or of an enclosing function."""
    from thunder.core.interpreter import INTERPRETER_CALLBACKS, get_interpretercompilectx

    context = get_interpretercompilectx()
    lookaside, callbacks = context._fn_lookaside, context._callbacks

    def observed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called(function, args)
        return lookaside(function, *args, **kwargs)

    def to_global(value: Any, name: str) -> Any:
        assigned(name)
        return value

    store_deref = callbacks[INTERPRETER_CALLBACKS.STORE_DEREF_CALLBACK]

    def to_cell(value: Any, name: str, cells: tuple[str, ...], free: tuple[str, ...]) -> Any:
        if name in free:
            assigned(name)
        return store_deref(value, name, cells, free)

    storing = {
        INTERPRETER_CALLBACKS.STORE_GLOBAL_CALLBACK: to_global,
        INTERPRETER_CALLBACKS.STORE_DEREF_CALLBACK: to_cell,
    }
    with _replaced(context, _fn_lookaside=observed, _callbacks=callbacks | storing):
        yield


class Failure(NamedTuple):
    """An exception in the running interpreter, and the program's frames when it was raised, the innermost last."""

    exception: BaseException
    frames: tuple[Frame, ...]
    by_source: bool  # raised by a statement of the traced program


class Frame(NamedTuple):
    """A call of a function that is traced: the module that defines it, its line, and its first argument if it has
    one."""

    module: str
    file: str
    function: str
    line: int
    receiver: Any


@contextmanager
def noticing_failures(failures: dict[int, Failure]) -> Iterator[None]:
    """Adds to ``failures`` each exception in the running interpreter where it is first seen, by its id."""
    from thunder.core.interpreter import INTERPRETER_SIGNALS, get_interpretercompilectx, get_interpreterruntimectx

    context, runtime = get_interpretercompilectx(), get_interpreterruntimectx()
    interpret_instruction = context._opcode_interpreter

    def notice(error: BaseException | None, inst: Any) -> None:
        if error is not None and id(error) not in failures:
            frames = tuple(map(_frame, runtime.frame_stack))
            own = frames[-1].module.partition(".")[0] == "thunder"
            failures[id(error)] = Failure(error, frames, inst.opname == "RAISE_VARARGS" and not own)

    def noticed(inst: Any, /, **state: Any) -> Any:
        try:
            result = interpret_instruction(inst, **state)
        except Exception as error:
            notice(error, inst)
            raise
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            notice(runtime.curexc, inst)
        return result

    with _replaced(context, _opcode_interpreter=noticed):
        yield


def _frame(frame: Any) -> Frame:
    from thunder.core.interpreter import unwrap

    code, receiver = frame.code, None
    if code.co_argcount and frame.localsplus:
        receiver = unwrap(frame.localsplus[0])
        if isinstance(receiver, types.CellType):  # a function inside reads it
            receiver = receiver.cell_contents
    line = frame.positions.lineno if frame.positions is not None else None
    return Frame(
        unwrap(frame.globals).get("__name__", ""), code.co_filename, code.co_name, line or code.co_firstlineno, receiver
    )


def exception_of(result: Any) -> BaseException | None:
    """The exception that :func:`interpret` returned in place of a result; None for a result."""
    from thunder.core.interpreter import INTERPRETER_SIGNALS, get_interpreterruntimectx

    if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return None
    error: BaseException | None = get_interpreterruntimectx().curexc
    return error


def side_effects() -> int:
    """How many attributes and buffers tracing has set so far."""
    from thunder.core.jit_ext import get_jit_ctx

    return sum(map(len, get_jit_ctx()._additional_outputs.values()))


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


def names_of_users() -> dict[Any, TensorProxy]:
    """The proxies that get the name of a variable of the user's program when tracing is over: by ``variableify`` of the
    old one."""
    from thunder.core.jit_ext import get_jit_ctx

    found: dict[Any, TensorProxy] = get_jit_ctx()._proxy_swapmap
    return found


def line_that_makes(value: Any) -> BoundSymbol | None:
    """The line of the running trace that returns the proxy ``value`` alone; None if there is none."""
    from thunder.core.jit_ext import get_jit_ctx

    lines = get_jit_ctx().computation_trace.scopes[-1]
    return next((line for line in reversed(lines) if line.output is value), None)


def name_of_input(record: Any) -> str:
    """The name that Thunder gives the proxy of a tensor with this provenance; empty if it makes one up."""
    from thunder.core.jit_ext import _infer_name_postfix_from_provenance

    postfix = _infer_name_postfix_from_provenance(record)
    return f"t{postfix}" if postfix else ""


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
