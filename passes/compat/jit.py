"""Thunder's state while it traces, the modules that it has jitted, and what it keeps private of traces."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import logging
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from passes.compat.versions import missing_nvfuser

import optree
import torch
from thunder.core import dtypes, interpreter, jit_ext, prims, pytree, transform_common, utils
from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import _compile_data
from thunder.core.interpreter import InterpreterError, ProvenanceRecord, PseudoInst, do_raise, get_interpreterruntimectx
from thunder.core.jit_ext import _maybe_update_proxy_name, get_jit_ctx, should_register_for_prologue
from thunder.core.module import ThunderModule
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, get_tracectx, tracectx
from thunder.core.transform_common import Transform
from thunder.core.transforms import _get_gradfn_and_executor
from thunder.core.utils import AutocastStack
from thunder.executors import sdpaex
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.executors.sdpaex import SpdaBackend
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction
from thunder.extend import Executor, OperatorExecutor
from thunder.torch import _get_fake_arg, _torch_to_thunder_function_map
from thunder.torch.experimental import dtensor_proxy
from torch.distributed.tensor import DTensor

# ---- traces ----


def raised(error: BaseException) -> Any:
    """What a lookaside returns to raise ``error`` in the program that is traced. An exception that a lookaside itself
    raises becomes an InterpreterError."""
    return do_raise(error)


def interrupt_of(error: BaseException) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that an exception is, or that Thunder's interpreter has made an InterpreterError."""
    cause: BaseException | None = error
    while isinstance(cause, InterpreterError):
        cause = cause.__cause__
    return cause if isinstance(cause, KeyboardInterrupt) else None


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


@contextmanager
def deeper_recursion() -> Iterator[None]:
    """Raises Python's limit of recursion. Recording a call of nested modules takes more frames than the call itself."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


class Collections:
    """Lets Python look for garbage rarely while a step is recorded and compiled. That makes so many objects, and so
    little garbage, that Python would scan all of torch and of the script, which takes a third of a first step.

    The process has one collector. Therefore this state belongs to the process, too.
    """

    RARE = (100_000, 50, 50)
    _before: tuple[int, int, int] | None = None  # the thresholds of the script, while ours are set

    @classmethod
    def become_rare(cls) -> None:
        before = gc.get_threshold()
        if cls._before is None and 0 < before[0] < cls.RARE[0]:
            cls._before = before
            gc.set_threshold(*cls.RARE)

    @classmethod
    def become_usual(cls) -> None:
        if cls._before is not None:
            gc.set_threshold(*cls._before)
            cls._before = None


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


def symbol_that_calls(
    name: str, meta: Callable[..., Any] | None, fn: Callable[..., Any] | None, **options: Any
) -> Symbol:
    """A symbol whose lines call ``fn``. ``options`` are those of Thunder's ``Symbol``."""

    def bind(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: fn}

    return Symbol(name=name, meta=meta, _bind_postprocess=bind, **options)


def set_signature(trace: TraceCtx, name: str) -> None:
    """Makes a trace print, and run, as a function of this name with the trace's arguments."""
    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(a.name, None) for a in trace.args]


def function_of(bsym: BoundSymbol) -> Any:
    """The function stored in a line; None if the line calls the function of that name in the symbol's module."""
    return (bsym._call_ctx or {}).get(bsym.sym.name)


def calling_function_of(other: BoundSymbol, bsym: BoundSymbol, **changes: Any) -> BoundSymbol:
    """The line ``bsym`` as a call of the function that the line ``other`` calls. ``changes``: its args and output."""
    return bsym.from_bsym(sym=other.sym, _call_ctx=other._call_ctx, **changes)


def print_traces_as(text: Callable[[TraceCtx], str | None]) -> None:
    """Lets Python print traces as ``text`` says; as Thunder does if it is None. What runs is not affected."""
    thunders = TraceCtx.__repr__

    def __repr__(self: TraceCtx) -> str:
        own = text(self)
        return thunders(self) if own is None else own

    TraceCtx.__repr__ = __repr__


def renamed(proxy: Proxy, name: str) -> Proxy:
    """A copy of a proxy with another name, which is not taken in any trace. Thunder's ``replace`` infers all metadata
    again."""
    new = copy.copy(proxy)
    vars(new).update(_name=name, _tags=set(proxy.tags))
    return new


def make_name_legal(proxy: Proxy) -> None:
    """Renames a new proxy whose name Python could not read. Thunder names that of ``heads.a-b.weight``
    ``t_heads_a-b_weight``."""
    if not proxy.name.isidentifier():
        proxy._name = get_tracectx().make_name(prefix=re.sub(r"\W", "_", proxy.name))


def shape_of(proxy: TensorProxy) -> tuple[Any, ...]:
    """The shape of a proxy, inside or outside a trace. A dimension is itself a proxy if values are symbolic."""
    return tuple(proxy._shape)


class OwnLine:
    """The id of a symbol whose lines define their own gradient and lowering: calls of torch and of blocks."""

    def differentiate(self, *args: Any) -> Any:
        """The grad rule: adds lines for the results, and gives the arguments their gradients."""
        raise NotImplementedError

    def execute(self, *args: Any) -> Any:
        """Adds the lines that run where nothing is differentiated."""
        raise NotImplementedError


class OwnLines(OperatorExecutor):
    """Differentiates and lowers lines with an :class:`OwnLine`. Has no state."""

    def __init__(self, name: str) -> None:
        super().__init__(name, version="0.1")

    def can_execute(self, bsym: BoundSymbol) -> bool:
        return isinstance(bsym.sym.id, OwnLine) or super().can_execute(bsym)

    def get_grad_transform(self, sym: Symbol) -> Any:
        return sym.id.differentiate if isinstance(sym.id, OwnLine) else super().get_grad_transform(sym)

    def get_execution_transform(self, bsym: BoundSymbol) -> Any:
        own = isinstance(bsym.sym.id, OwnLine)
        return bsym.sym.id.execute if own else super().get_execution_transform(bsym)

    def join(self, data: Any) -> None:
        """Puts this executor first in the compilation that ``data`` describes, unless it is there already."""
        if self not in data.executors_list:
            data.executors_list = (self, *data.executors_list)


def grad_rule_of(bsym: BoundSymbol) -> Any:
    """The grad rule that Thunder, or the executor that will run the line, has for the symbol as a whole, or None."""
    return _get_gradfn_and_executor(bsym)[0]


def differentiating_executor(bsym: BoundSymbol) -> Executor | None:
    """The executor whose grad rule will differentiate the line; None if none has one."""
    executor: Executor | None = _get_gradfn_and_executor(bsym)[1]
    return executor


def with_operators_of(executors: Sequence[Executor], trace: TraceCtx) -> TraceCtx:
    """The trace with the operators of these executors in the place of Thunder's symbols. Nothing is fused: lines that
    an executor would fuse stay as they are."""
    new: TraceCtx = _transform_for_operator_executor_execution(trace, executors)
    return new


def symbols_of_torch() -> dict[Any, Callable[..., Any]]:
    """Thunder's symbols, or functions that choose one, by the functions of torch that they stand for."""
    found: dict[Any, Callable[..., Any]] = _torch_to_thunder_function_map
    return found


def fake_argument(value: Any) -> Any:
    """Thunder's stand-in for an argument of a torch function. A tensor has no memory under ``FakeTensorMode``."""
    return _get_fake_arg(value)


# ---- modules ----


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


Live = set[tuple[int, str]]  # the tensors that are read from modules: the id of where Thunder keeps each, and its name


def refresh_modules(current: Callable[[torch.nn.Parameter], torch.nn.Parameter], live: Live) -> None:
    """Makes the current compilation read the current submodules and tensors of jitted modules, not those of earlier
    traces. ``current`` finds the parameter of now by an earlier one. ``live``: see :func:`live_tensors`."""
    data, _ = compile_data_and_stats()
    for jitted in data._thunder_module_map.values():
        jitted._module_cache = dict(jitted._model.named_modules())
        for name, parameter in jitted._overrides_parameters.items():
            jitted._overrides_parameters[name] = current(parameter)
        for known, held, key, path in _tensors_of(jitted):
            if (id(known), path) not in live:
                continue
            if held[key] is None:
                known.pop(path, None)
            else:
                known[path] = held[key]


def _tensors_of(jitted: ThunderModule) -> Iterator[tuple[dict[str, Any], dict[str, Any], str, str]]:
    """Each tensor of a jitted module: the dict in which Thunder keeps it, the dict of the module that holds it, its key
    there, and its qualified name, which is its key for Thunder."""
    for name, module in jitted._model.named_modules(remove_duplicate=False):
        for known, held in (
            (jitted._overrides_buffers, module._buffers),
            (jitted._overrides_parameters, module._parameters),
        ):
            yield from ((known, held, key, f"{name}.{key}" if name else key) for key in held)


def live_tensors(live: Live) -> Callable[[], None] | None:
    """A function that makes the jitted modules of the current compilation read the buffers and parameters that their
    modules hold when it is called, in place of those that were there when they were jitted. None if there are none.
    The function raises RuntimeError for what is no parameter in the place of one. ``live`` gets these tensors; another
    transform may have set others."""
    data, _ = compile_data_and_stats()
    rows: list[tuple[dict[str, Any], str, Any]] = []  # what a module holds by a key
    overrides: list[tuple[dict[str, Any], str, bool]] = []  # where Thunder reads each, and whether it is a parameter
    for jitted in data._thunder_module_map.values():
        for known, held, key, path in _tensors_of(jitted):
            if known.get(path) is held[key] is not None:
                live.add((id(known), path))
                rows.append((held, key, held[key]))
                overrides.append((known, path, known is jitted._overrides_parameters))

    def is_same() -> bool:
        try:
            for held, key, value in rows:
                if held[key] is not value:
                    return False
        except KeyError:
            return False
        return True

    def refresh() -> None:
        if is_same():
            return
        for i, ((held, key, _), (known, path, is_parameter)) in enumerate(zip(rows, overrides, strict=True)):
            new = held.get(key)
            if is_parameter and not isinstance(new, torch.nn.Parameter):
                raise RuntimeError(f"parameter {path} was replaced by a {type(new).__name__}")
            known.pop(path, None)
            if new is not None:
                known[path] = new
            rows[i] = held, key, new

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


def allow_keyword_fn() -> None:
    """Lets a model have an argument ``fn``, which Thunder's interpreter would take for parameters of its own."""
    for function in (jit_ext.general_jit_lookaside, interpreter._call_dispatch):
        function.__code__ = _with_positional_fn(function.__code__)


def _with_positional_fn(code: CodeType) -> CodeType:
    """The code with each first parameter ``fn`` of a function in it taken by position only."""
    consts = (_with_positional_fn(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    positional = code.co_posonlyargcount or int(code.co_varnames[:1] == ("fn",) and code.co_argcount > 0)
    return code.replace(co_posonlyargcount=positional, co_consts=tuple(consts))


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


# ---- tracing in less time ----


def trace_faster() -> None:
    """Replaces what Thunder calls most often while it traces by functions with the same results. Thunder asks for the
    signature of a symbol at each line, lists the types that it can flatten at each container, and describes all
    functions around a compilation, of which it wants one. Python 3.11 takes a lock for each cached property.
    """
    trees, remove = _Trees(), transform_common.remove_duplicate_number_proxies
    faster: dict[Any, Any] = {
        pytree.tree_flatten: trees.flatten,
        pytree.tree_flatten_with_dataclass: trees.flatten_with_dataclass,
        utils.safe_map_flat: trees.map,
        utils.producers: _producers,
        remove: _without_duplicate_numbers(remove),
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("thunder", "passes"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in faster:
                    setattr(module, attribute, faster[value])
    Symbol.normalize = _normalize
    BoundSymbol.from_bsym = _keeping(BoundSymbol.from_bsym)
    BoundSymbol.gather_ctxs = _gather_ctxs
    TraceCtx.python_callable = _gathering_once(TraceCtx.python_callable)
    for attribute, value in list(vars(BoundSymbol).items()) if sys.version_info < (3, 12) else ():
        if isinstance(value, functools.cached_property):
            setattr(BoundSymbol, attribute, _Cached(value.func))
    of_caller = ModuleType("inspect")
    vars(of_caller).update(vars(inspect), stack=_stack)
    interpreter.inspect = of_caller


def _stack() -> list[Any]:
    """The part of ``inspect.stack()`` that Thunder's interpreter reads: the caller of what makes its context."""
    return [None, None, inspect.getframeinfo(sys._getframe(3), context=0)]


class _Trees:
    """Thunder's functions of containers. Each type is looked at once: whether they take it depends on nothing else."""

    def __init__(self) -> None:
        self._known: set[type] = set()  # types of what was flattened
        self._leaves: set[type] = set()  # types of leaves that are no dataclasses
        self._flatten, self._flatten_all = pytree.tree_flatten, pytree.tree_flatten_with_dataclass

    def flatten(self, args: Any, namespace: str = pytree.OPTREE_NAMESPACE) -> Any:
        if type(args) in self._known:
            return optree.tree_flatten(args, none_is_leaf=True, namespace=namespace)
        found = self._flatten(args, namespace)
        self._known.add(type(args))
        return found

    def flatten_with_dataclass(self, tree: Any) -> Any:
        if type(tree) in self._known:
            found = optree.tree_flatten(tree, none_is_leaf=True, namespace=pytree.OPTREE_NAMESPACE)
            if self._leaves.issuperset(map(type, found[0])):
                return found
            self._leaves.update(type(leaf) for leaf in found[0] if not dataclasses.is_dataclass(leaf))
        return self._flatten_all(tree)

    def map(self, f: Callable[..., Any], *args: Any) -> Any:
        if all(type(x) is list and len(x) == len(args[0]) and all(isinstance(v, Proxy) for v in x) for x in args):
            return tuple(map(f, *args))
        flat, specs = zip(*(self.flatten(_as_tuples(x)) for x in args), strict=True)
        assert all(spec == specs[0] for spec in specs), f"argument layout mismatch: {args}"
        return pytree.tree_unflatten(list(map(f, *flat)), specs[0])


def _as_tuples(x: Any) -> Any:
    if type(x) in (tuple, list):
        return tuple(map(_as_tuples, x))
    return tuple(map(_as_tuples, x)) if isinstance(x, Sequence) and not isinstance(x, str | Proxy) else x


_SIGNATURES: WeakKeyDictionary[Any, tuple[inspect.Signature, int]] = WeakKeyDictionary()


def _normalize(self: Symbol, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a line as the signature of its symbol has them, with defaults."""
    meta: Any = self.meta
    known = _SIGNATURES.get(meta) if isinstance(meta, FunctionType) else None
    if known is None:
        signature = inspect.signature(meta)
        by_place = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values())
        known = signature, len(signature.parameters) if by_place else -1
        if isinstance(meta, FunctionType):
            _SIGNATURES[meta] = known
    signature, count = known
    if len(args) == count and not kwargs:
        return args, {}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _gather_ctxs(self: BoundSymbol) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The objects that a printed line names. ``import_ctx`` prints the line, by which it finds also the others."""
    return self.import_ctx(), self._get_call_ctx(), self._object_ctx


def _gathering_once(python_callable: Callable[..., Any]) -> Callable[..., Any]:
    """A trace's function is compiled of its text and the objects that it names, for each of which all lines would be
    printed."""

    @functools.wraps(python_callable)
    def with_one_gathering(self: TraceCtx, **options: Any) -> Any:
        with tracectx(self):
            found = TraceCtx._gather_ctxs(self)
        self._gather_ctxs = lambda: tuple(map(dict, found))
        try:
            return python_callable(self, **options)
        finally:
            del self._gather_ctxs

    return with_one_gathering


_MAKE_NOTHING = {prims.PrimIDs.COMMENT, prims.PrimIDs.PRINT, prims.PrimIDs.RETURN}


def _producers(trace_or_bsyms: Any, *, _map_to_numbers: bool = False) -> utils.ProxyDict:
    """The first line that makes each value, or its number."""
    found, known = utils.ProxyDict(), set[str]()
    for i, bsym in enumerate(trace_or_bsyms if isinstance(trace_or_bsyms, list) else trace_or_bsyms.bound_symbols):
        new = [o for o in bsym.flat_proxy_outs if o.name not in known] if bsym.sym.id not in _MAKE_NOTHING else []
        given = {a.name for a in bsym.flat_proxy_args} if new else ()
        for made in new:
            if made.name not in given:
                known.add(made.name)
                found[made] = i if _map_to_numbers else bsym
    return found


def _without_duplicate_numbers(remove: Callable[..., list[BoundSymbol]]) -> Callable[..., list[BoundSymbol]]:
    """``remove`` makes all lines anew, which then look for their proxies again. It is for lines that make numbers."""

    @functools.wraps(remove)
    def without(bsyms: Sequence[BoundSymbol]) -> list[BoundSymbol]:
        is_plain = all(b.flat_outs and not any(isinstance(o, NumberProxy) for o in b.flat_outs) for b in bsyms)
        return list(bsyms) if is_plain else remove(bsyms)

    return without


_OF_ARGUMENTS = ("flat_args_and_spec", "flat_args", "flat_proxy_args", "flat_variableified_proxy_args")
_OF_OUTPUT = ("flat_outs_and_spec", "flat_outs", "flat_proxy_outs", "flat_variableified_proxy_outs")


def _keeping(from_bsym: Callable[..., BoundSymbol]) -> Callable[..., BoundSymbol]:
    """A line that is like another one but for its header or tags has the same proxies."""

    @functools.wraps(from_bsym)
    def copied(self: BoundSymbol, **new: Any) -> BoundSymbol:
        made, known = from_bsym(self, **new), vars(self)
        same = () if "args" in new or "kwargs" in new else _OF_ARGUMENTS
        for name in same if "output" in new else (*same, *_OF_OUTPUT):
            if name in known:
                vars(made)[name] = known[name]
        return made

    return copied


class _Cached:
    """A ``functools.cached_property`` without its lock, as of Python 3.12."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function, self._name = function, function.__name__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        found = vars(instance)[self._name] = self._function(instance)
        return found
