"""Runs the forward of a module once on fake tensors and keeps each call of torch.

The module's own Python runs, so that whatever it reads is read by Python. Calls are seen as they are written, by a
``TorchFunctionMode``. Where torch does not tell this mode (in scripted functions, below ``torch.vmap``), the operators
that these call are seen by the mode of the fake tensors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

from passes.compat.versions import APPLIES_IN_CPP, CHECKPOINT_GENERATOR, NAMESPACES, Fakes, functional_transform
from passes.kernels.aten import draws
from passes.kernels.torch_call import Autocast
from shardtrace.ranks.progress import meanwhile
from shardtrace.record.calls import DEVICES, Call, Place, Record, Refused, Span, Whole, storage, tensors_in, tensors_of
from shardtrace.record.eager import CannotStandAlone, Eager, EagerModule, own_tensors, try_function, try_module
from shardtrace.record.effects import Effects
from shardtrace.record.memory import Memory, arguments_written, written_by
from shardtrace.record.reads import CannotRead, Reads, pass_class_on
from shardtrace.record.symbols import WITHOUT_GRADIENT, is_query, name_of
from shardtrace.record.watcher import CodeWatcher, RandomStates, assigned, check_of, is_library, token

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.autograd.function import FunctionMeta, _SingleLevelFunction
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

FAKE = torch._C._TorchDispatchModeKey.FAKE
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
STATISTICS = {nn.functional.batch_norm}  # Thunder's symbol writes into the running statistics of a module itself
GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_HOOK = (
    "of a tensor, and no step would run the hook: pass the tensor through a torch.autograd.Function that returns it, "
    "and do in its backward what the hook does"
)
REFUSED = {
    torch.Tensor.register_hook: _HOOK,
    torch.Tensor.register_post_accumulate_grad_hook: _HOOK,
    torch._make_dual: "(derivatives in forward mode), whose own gradient would be lost: use torch.func.grad",
    torch.Tensor.retain_grad: "of a tensor, and no step would keep the gradient: return the tensor, or call the model "
    "inside shardtrace.full_params",
}
# about a tensor from outside, which in later steps may be another one
OF_THIS_STEP = {
    torch.Tensor.storage_offset, torch.Tensor._is_view, torch.Tensor.is_conj, torch.Tensor.is_neg,
    torch.Tensor.is_inference, torch.Tensor.is_pinned, torch.Tensor.is_shared, torch.is_conj, torch.is_neg,
    torch.is_inference, torch.Tensor._base.__get__, torch.Tensor._version.__get__,  # type: ignore[attr-defined, union-attr]
}  # fmt: skip
GRAD_FN = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
OF_GRADIENT = {torch.Tensor.is_leaf.__get__, GRAD_FN}  # type: ignore[attr-defined]
MOVING = {torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_}
GRADIENTS = {torch.Tensor.backward, torch.autograd.backward}
GRADIENT = {torch.Tensor.grad.__get__, torch.Tensor.grad.__set__}  # type: ignore[union-attr]
SEED = "asks for torch's seed (initial_seed), which a script may set before each step: pass it as an argument"
GENERATOR = "makes a torch.Generator, which no step would make again: make it once, as an attribute of a module"


class ReadsValues(NotImplementedError):
    """A function of torch gives values of tensors to forward."""


VALUES = (DataDependentOutputException, DynamicOutputShapeException, ReadsValues)


class CannotRecord(Exception):
    """``modules`` are those that ran when the cause was raised, outer ones first."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules = tuple(modules)


class SendsMessages(NotImplementedError):
    """Raised where forward itself sends messages to other ranks."""


class FakeMode(Fakes):
    """Fake tensors, which tell the recorder about operators."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._allow_unsafe_data_ptr_access = False  # whoever asks for the memory of fakes gets an error
        self.recorder: Recorder | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder is not None and func.namespace in NAMESPACES:
            raise SendsMessages(
                f"it calls a collective of torch.distributed ({func.__name__.partition('.')[0].strip('_')})"
            )
        if self.recorder is not None and self.recorder.lifts(func, args):
            return args[0]
        recorder, self.recorder = self.recorder, None  # kernels of fakes call further operators and functions
        try:
            with torch._C.DisableTorchFunction():
                result = super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            self.recorder = recorder
        if recorder is not None:
            recorder.see_operator(func, args, kwargs or {}, result)
        return result


class Recorder(TorchFunctionMode):
    """Keeps calls while it is the current mode of torch functions.

    Args:
        modules: the names of modules, by their ids.
        watcher: sees the functions that run, apart from those of torch.
        memory: has the fakes of tensors that forward meets.
        watched: the modules whose calls become spans.
        eager: the modules whose calls are one call each, which PyTorch runs.
        effects: sees what the forward changes in the user's objects; needed if there are such modules.
        random: sees what becomes of generators of random numbers; None: they are of no interest.
        reads: what the forward reads of its inputs.
    """

    def __init__(
        self,
        modules: Mapping[int, str],
        watcher: CodeWatcher,
        memory: Memory,
        *,
        watched: Collection[nn.Module] = (),
        eager: Set[nn.Module] = frozenset(),
        effects: Effects | None = None,
        random: RandomStates | None = None,
        reads: Reads | None = None,
    ) -> None:
        super().__init__()
        self.random = RandomStates() if random is None else random
        self.record = Record()
        self.failed: tuple[nn.Module, ...] = ()  # the modules that ran when an exception was raised, outer ones first
        self._eager, self._effects = eager, effects
        self._reads = reads or Reads(lambda fake: None, {})
        self._modules, self._watched = modules, set(map(id, watched))
        self._stack: list[nn.Module] = []  # the modules that run
        self._inside = 0  # calls of torch that run
        self._drawn = False
        self._checkpoints: list[int] = []
        self._count = 0
        self._watcher = watcher
        self._memory = memory
        memory.begin()
        self._written: list[torch.Tensor] = []  # by the operators of the call of torch that runs
        self._hooks = _saved_tensors_hooks()
        self._unwatched: set[int] = set()  # memory of results with a gradient that forward has got by .data
        self._leaves: list[torch.Tensor] = []  # results that forward has made to require a gradient

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around what torch calls."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    # ---- calls ----

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or functional_transform() is not None:
            return func(*args, **kwargs)
        return self._make(func, args, kwargs)

    def _make(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls ``func`` and keeps the call. What runs meanwhile is no code of the model."""
        self._watcher.pause()
        try:
            return self._call(func, args, kwargs)
        finally:
            self._watcher.resume()

    def _call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if (why := REFUSED.get(func)) is not None:
            raise NotImplementedError(f"forward calls {func.__name__} {why}")
        if func in GRADIENTS or (func in GRADIENT and args[0].is_leaf and args[0].requires_grad):
            raise Refused(
                f"forward calls {name_of(func)}, but gradients belong to steps: return the loss, and read or change "
                "gradients outside of forward, or call the model inside shardtrace.full_params"
            )
        if func == SET_DATA:
            return self._set_data(*args)
        if func in OF_THIS_STEP or (func in OF_GRADIENT and args[0].requires_grad):
            self._check_made(func, args[0])
        if func in INDEXING:
            args = pytree.tree_map_only(slice, self._with_numbers, tuple(args))
        flat, spec = pytree.tree_flatten((args, kwargs))
        own = [self._met(x) if isinstance(x, torch.Tensor) else x for x in flat]
        kept_args, kept_kwargs = pytree.tree_unflatten(own, spec)  # copies: a list may change later
        given = {id(t): t for t in own if isinstance(t, torch.Tensor)}
        outside = {id(fake): t for fake, t in zip(own, flat, strict=True) if fake is not t}
        if outside:
            args, kwargs = kept_args, kept_kwargs
        before = {i: TensorState.of(t) for i, t in given.items() if t.layout == torch.strided}
        function, self._drawn, self._inside = func, False, self._inside + 1
        self._written = []
        try:
            result = func(*args, **kwargs)
            changed = arguments_written(self._written, given.values())
        except Exception as error:  # whatever torch raises for fake tensors
            function, result, tried = self._read(func, args, kwargs, error)
            changed = tuple(tried)
        finally:
            self._inside -= 1
            self._written = []
        self._check_unwatched(func, given, changed)
        self._memory.use(given.values(), written=changed)
        pass_class_on(func, given.values(), result)
        is_cut = self._check_states(func, given, before, changed)
        if func == SET_REQUIRES_GRAD:
            return result
        if is_cut:
            self._keep(torch.Tensor.detach, kept_args, kept_kwargs, result, (), False, renewed=True)
        else:
            if func in STATISTICS:
                changed = tuple(t for t in changed if id(t) not in self._memory.named)
            self._keep(function, kept_args, kept_kwargs, result, changed, self._drawn)
        if func == GRAD_FN and result is not None:
            return _Node(result)
        return pytree.tree_map_only(torch.Tensor, lambda t: outside.get(id(t), t), result) if outside else result

    def _check_made(self, func: Any, t: torch.Tensor) -> None:
        """Raises NotImplementedError for what a step cannot tell of a tensor that forward has not made."""
        parameter = isinstance(t, nn.Parameter) and func in OF_GRADIENT
        if not parameter and not any(t is r for call in self.record.calls for r in call.results):
            raise NotImplementedError(
                f"forward asks for {name_of(func)} of a tensor that it was given, which may be another one in the next "
                "step: ask for it outside of forward, and pass the answer as an argument"
            )

    def _met(self, t: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor that forward meets."""
        with self.inside():  # what makes a fake is no call of forward's
            return self._memory.met(t)

    def _set_data(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """Keeps ``t.data = value`` as a write."""
        t, value = self._met(t), self._met(value)
        if (t.shape, t.dtype, t.device) != (value.shape, value.dtype, value.device):
            raise NotImplementedError("forward gives a tensor data of another shape, dtype or device: use a new tensor")
        given, made = set[int](), set[int]()  # memory that forward was given, and that it has made
        for call in self.record.calls:
            given |= {storage(x) for x in call.tensors()} - made
            made |= {storage(x) for x in call.results} - given
        if storage(t) != storage(value) and made.isdisjoint(map(storage, (t, value))):
            raise Refused(
                "forward sets .data of a tensor to the memory of another one that it was given, which both would share "
                "from then on: use copy_, or set it to a clone"
            )
        self._memory.use([t, value], written=[t])
        self._memory.assign(t, value, chain.from_iterable(call.results for call in self.record.calls))
        self._keep(torch.Tensor.copy_, (t, value), {}, t, (t,), False, grad=False)

    def _check_unwatched(self, func: Any, given: Mapping[int, torch.Tensor], changed: Sequence[torch.Tensor]) -> None:
        """Raises NotImplementedError for a write by ``.data`` into what a backward has saved: torch's would read what
        was written, and that of a line what was there before."""
        if func == GET_DATA:
            self._unwatched |= {storage(t) for t in given.values() if t.grad_fn is not None}
        written = {storage(t) for t in changed if not t.requires_grad} & self._unwatched
        if written and not written.isdisjoint(_saved(r for call in self.record.calls for r in call.results)):
            raise NotImplementedError(
                f"{name_of(func)} writes by .data into a tensor that backward has saved: compute a new tensor"
            )

    def _check_states(
        self, func: Any, given: Mapping[int, torch.Tensor], before: Mapping[int, TensorState], changed: Any
    ) -> bool:
        """Raises NotImplementedError if a function has changed what no line can change of a tensor that it was given.
        Returns whether it has cut the first one from its gradient, as ``detach_`` does."""
        name, written = name_of(func), set(map(storage, changed))
        for i in before:
            t = given[i]
            then, now = before[i], TensorState.of(t)
            if now == then:
                continue
            if now.layout != then.layout:
                raise NotImplementedError(
                    f"{name} changes the shape of its argument in place: use what {name.strip('_')} returns"
                )
            if now.memory != then.memory:
                raise NotImplementedError(f"{name} gives its argument the memory of another tensor: use a new tensor")
            if then.memory[0] in written:
                continue
            if any(t is r for call in self.record.calls for r in call.results):
                if now.requires_grad:
                    self._leaves.append(t)
                    continue
                if func is torch.Tensor.detach_:
                    return True
            raise Refused(
                f"{name} changes in forward whether a parameter, an argument or a view requires a gradient: "
                "do it outside of forward, or use a new tensor (detach)"
            )
        return False

    def _with_numbers(self, part: slice) -> slice:
        """A slice with the values of tensors in their place."""
        bounds = (part.start, part.stop, part.step)
        index = torch.Tensor.__index__
        return slice(*(self._make(index, (v,), {}) if isinstance(v, torch.Tensor) else v for v in bounds))

    def _read(self, func: Any, args: Any, kwargs: Any, error: Exception) -> tuple[Any, Any, list[torch.Tensor]]:
        """What stands for a function that fake tensors cannot run, its result, and what it writes into. Raises
        ``error`` or another one if it reads what each step computes, and cannot stand alone."""
        if isinstance(error, SendsMessages) and not isinstance(func, Whole):
            raise error
        with suppress(CannotRead):
            sizes = isinstance(error, DynamicOutputShapeException)
            return *self._reads.read(self.record.calls, func, args, kwargs, self._place(), sizes), []
        function = Eager(func, str(getattr(func, "__name__", "call")))
        try:
            trial = try_function(function, args, kwargs)
        except Exception as why:
            if (check := check_of(_frame("shardtrace"), func, args)) is not None:
                self._add(check, args, kwargs, (token(args[0]),))
                return func, check.holds, []
            if isinstance(why, CannotStandAlone) and not isinstance(error, (*VALUES, SendsMessages)):
                raise ReadsValues(f"{function.__name__} cannot be recorded: {why} ({error})") from error
            raise error from None
        self._drawn = trial.random
        tensors = tensors_of((args, kwargs))
        return function, trial.result, [tensors[i] for i in trial.written]

    def _keep(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        written: Sequence[torch.Tensor],
        random: bool,
        *,
        grad: bool | None = None,
        renewed: bool = False,
    ) -> None:
        """Keeps a call. ``renewed``: an argument that is returned is a result, too."""
        returned = tensors_of(result)
        given = set(map(id, tensors_of((args, kwargs))))
        same = given - set(map(id, written))  # passed on as they are
        results = tuple(returned if renewed else (t for t in returned if id(t) not in same))
        if not written and not results:
            if given and not returned and not is_query(function):  # others set modes, which each call knows
                raise NotImplementedError(
                    f"forward calls {name_of(function)}, which returns no tensor and writes into none: no step would "
                    "call it again"
                )
            self._memory.asked |= given
            return
        names = assigned(_frame())
        grad = torch.is_grad_enabled() if grad is None else grad
        if not any(t.requires_grad for t in results) and name_of(function) in WITHOUT_GRADIENT:
            grad = False  # Thunder's symbols for them pass zeros on
        self._add(function, args, kwargs, results, tuple(written), random, names, grad)

    def _add(
        self, function: Any, args: Any, kwargs: Any, results: Any = (), written: Any = (), random: bool = False,
        names: tuple[str, ...] = (), grad: bool = False,
    ) -> None:  # fmt: skip
        """Adds a call to the record."""
        hooks = _saved_tensors_hooks()
        if hooks != self._hooks and hooks is not None and not is_library(str(hooks[0].__module__)):
            raise NotImplementedError(
                "forward sets hooks on what is saved for backward (saved_tensors_hooks), which no step would call: "
                "set them around the call of the model"
            )
        checkpoint = self._checkpoints[-1] if self._checkpoints else None
        self.record.calls.append(
            Call(
                function, args, kwargs, results, written, grad, autocast_states(), random, self._place(), checkpoint,
                names,
            )
        )  # fmt: skip

    def _place(self) -> Place:
        frame, module = _frame(), self._modules[id(self._stack[-1])] if self._stack else ""
        return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, module)

    def lifts(self, func: Any, args: Any) -> bool:
        """Whether forward makes a tensor of memory from outside of torch (from_numpy), which then is its own memory."""
        return func is torch.ops.aten.lift_fresh.default and not self._inside and not isinstance(args[0], FakeTensor)

    def see_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps the call of an operator that no call of torch contains.

        Raises NotImplementedError in forward mode, if gradients are wanted: its results get them above of what is seen.
        """
        transform = functional_transform()
        forward_mode = transform is not None and transform.key() == torch._C._functorch.TransformType.Jvp
        if forward_mode and any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(args)):
            raise NotImplementedError(
                "forward computes derivatives in forward mode (torch.func.jvp, jacfwd), whose own gradient would be "
                "lost: use torch.func.grad or jacrev"
            )
        drawn, written = draws(func, args, kwargs), written_by(func, args, kwargs)
        if drawn:
            self.random.see_draw(kwargs.get("generator"), pytree.tree_leaves(result)[0].device)
        if self._inside:
            self._drawn = self._drawn or drawn
            self._written += written
            return
        if func.overloadpacket is torch.ops.aten.set_:
            raise NotImplementedError("set_ gives its argument the memory of another tensor: use a new tensor")
        if not written and func.namespace == "prim":  # such as the device of a tensor
            return
        if func.overloadpacket in MOVING:
            raise NotImplementedError(f"{func.__name__} gives a tensor other memory: use a new tensor")
        if not all(isinstance(t, FakeTensor) for t in written):
            raise NotImplementedError("forward writes into a tensor from outside, where torch does not tell which")
        self._keep(func, args, kwargs, result, written, drawn)

    # ---- what runs around calls ----

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a module, in place of ``nn.Module.__call__``."""
        name = self._modules.get(id(module))
        if name is None or self._inside:
            return original(module, *args, **kwargs)
        self._stack.append(module)
        begin = len(self.record.calls)
        try:
            if module in self._eager:
                result = self._call_eager(original, module, args, kwargs)
            else:
                result = original(module, *args, **kwargs)
            if not is_library(type(module).__module__):
                self.random.check()
        except Exception:
            self.failed = self.failed or tuple(self._stack)
            raise
        finally:
            self._stack.pop()
        if id(module) in self._watched:
            self.record.spans.append(Span(name, module, begin, len(self.record.calls)))
        return result

    def _call_eager(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a module as one call."""
        assert self._effects is not None
        label = ".".join(filter(None, (self._effects.label, self._modules[id(module)])))
        call, own, watcher = EagerModule(module, original, label), own_tensors(module), CodeWatcher()
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._met, (args, kwargs))
        fakes = [t for t in pytree.tree_leaves((args, kwargs, own)) if isinstance(t, FakeTensor)]
        if len(self._stack) > 1:  # the model itself has the arguments of this step
            fakes = [t for t in fakes if not t.is_floating_point() and not t.is_complex()]
        self._watcher.pause()
        try:
            with self.inside(), meanwhile(f"a try of {label}, which PyTorch runs, on its values"):
                found = {id(t): self._reads.value(self.record.calls, t) for t in fakes}
                known = {i: value for i, value in found.items() if value is not None}
                trial = try_module(call, args, kwargs, own, self._effects, watcher, known)
        finally:
            self._watcher.resume()
        self.record.ran += trial.changes
        self.record.left += trial.left
        self.record.watchers.append(watcher)
        tensors = [t for t in pytree.tree_leaves((args, kwargs, own)) if isinstance(t, torch.Tensor)]
        written = {storage(tensors[i]): tensors[i] for i in sorted(trial.written, reverse=True)}
        self._keep(call, (args, kwargs, own), {}, trial.result, tuple(written.values()), trial.random)
        return trial.result[0]

    def call_whole(self, original: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
        """The call of a function that computes its gradient itself: the ``apply`` of an autograd.Function, a scripted
        function. The modes would see what its forward does, and never its backward."""
        if self._inside or functional_transform() is not None:
            return original(owner, *args, **kwargs)
        function = Whole(owner, functools.partial(original, owner))
        below = not torch._C._len_torch_function_stack()  # what torch.vmap calls
        with nullcontext() if below else _pop_mode_temporarily():
            return self._make(function, args, kwargs)

    def refusing(self, original: Callable[..., Any], why: str) -> Callable[..., Any]:
        """A function that only torch may call while a forward is recorded."""

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                raise NotImplementedError(f"forward {why}")
            return original(*args, **kwargs)

        return refuse

    def check_apply(self, function: type) -> None:
        """Raises NotImplementedError if torch is about to run the forward of an autograd function unseen."""
        if not self._inside and functional_transform() is None:
            raise NotImplementedError(
                f"forward calls {function.__name__}.apply by a reference from before shardtrace was imported: import "
                "shardtrace first, so that its backward is seen"
            )

    def check_leaves(self) -> None:
        """Raises NotImplementedError if a script could ask for the gradient of a result that forward has made to
        require one, which would be None."""
        returned = {id(t) for t in tensors_in(self.record.result)}
        if any(id(t) in returned for t in self._leaves):
            raise NotImplementedError(
                "forward returns a tensor of which it has called requires_grad_, and whose gradient no step would "
                "keep: call requires_grad_ on what the model returns, or the model inside shardtrace.full_params"
            )

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Around what ``torch.utils.checkpoint`` runs."""
        self._checkpoints.append(self._count)
        self._count += 1
        try:
            yield
        finally:
            self._checkpoints.pop()


def record(
    function: Callable[..., Any], args: Any, kwargs: Any, *, mode: FakeMode, recorder: Recorder, compiling: bool = True
) -> Record:
    """Calls ``function`` and returns what it did.

    Args:
        args, kwargs: with fake tensors of ``mode`` in the place of tensors.
        recorder: a new one.
        compiling: whether models are told that they are being compiled. Some then do without the values of tensors.

    Raises:
        CannotRecord: from what the function raised. It names the modules that ran.
    """
    with _in_place_of_torchs(recorder, compiling), mode, recorder:
        mode.recorder, modes = recorder, Modes.now()
        try:
            recorder.record.result = function(*args, **kwargs)
            if Modes.now() != modes:
                raise Refused(
                    "forward leaves gradients, autocast or the default dtype in another state, which no step would do: "
                    "put what needs that state into a with block"
                )
            recorder.random.check()
            recorder.check_leaves()
        except Exception as error:
            raise CannotRecord(recorder.failed) from error
        finally:
            mode.recorder = None
    found, recorder.record = recorder.record, Record()  # what refers to the recorder may live on, but no fake with it
    return found


def _in_this_thread() -> Callable[..., Any]:
    """Takes two functions: the first one in this thread, in others the second one."""
    thread = get_ident()

    def here(new: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def choose(*args: Any, **kwargs: Any) -> Any:
            return (new if get_ident() == thread else original)(*args, **kwargs)

        return choose

    return here


def _generators(refuse: Callable[..., Any]) -> type:
    """A class like torch.Generator that makes none."""
    original = torch.Generator

    class Generators(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> torch.Generator:
            made: torch.Generator = refuse(*args, **kwargs)
            return made

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

    return Generators("Generator", (original,), {})


def _hidden_fakes(is_here: Callable[[], bool]) -> type:
    """A class like FakeTensor, which torch alone finds to be the class of fakes."""
    original = torch._subclasses.FakeTensor

    class Hidden(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            asks = str(sys._getframe(1).f_globals.get("__name__", ""))
            return isinstance(value, original) and (asks.partition(".")[0] == "torch" or not is_here())

    return Hidden("FakeTensor", (original,), {})


@contextmanager
def _in_place_of_torchs(recorder: Recorder, compiling: bool) -> Iterator[None]:
    """Lets the recorder see calls of modules, autograd functions and checkpoints, and tells models whether they are
    being compiled. Only in this thread: another one may write a checkpoint."""
    call, checkpoints, here = nn.Module.__call__, torch.utils.checkpoint, _in_this_thread()

    def whole(original: Callable[..., Any]) -> Callable[..., Any]:  # a method whose calls are one call each
        return here(lambda self, *args, **kwargs: recorder.call_whole(original, self, args, kwargs), original)

    def call_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(call, module, args, kwargs)

    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with recorder.checkpoint():
            yield

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        gradients = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)  # else torch warns, and has none
        with recorder.checkpoint(), nullcontext() if gradients else torch.no_grad():
            return function(*args)

    def is_compiling(*args: Any) -> bool:
        return compiling and torch._C._get_dispatch_mode(FAKE) is not None  # a trial runs as PyTorch will

    def attribute(function: type, name: str) -> Any:
        if name == "forward":
            recorder.check_apply(function)
        return type.__getattribute__(function, name)

    generators = _generators(here(recorder.refusing(torch.Generator, GENERATOR), torch.Generator))
    functions: list[tuple[Any, str, Callable[..., Any]]] = [
        (nn.Module, "__call__", call_module),
        (checkpoints, CHECKPOINT_GENERATOR, checkpoint),
        (torch.compiler, "is_compiling", is_compiling),
        (torch.compiler, "is_dynamo_compiling", is_compiling),
        (torch._dynamo, "is_compiling", is_compiling),
    ]
    patches = [
        *((owner, name, here(new, getattr(owner, name))) for owner, name, new in functions),
        # below Function.apply, of which a model may have taken a reference
        (_SingleLevelFunction, "apply", classmethod(whole(torch._C._FunctionBase.__dict__["apply"]))),
        (checkpoints.CheckpointFunction, "apply", here(reentrant, checkpoints.CheckpointFunction.apply)),
        (torch._C.ScriptFunction, "__call__", whole(torch._C.ScriptFunction.__call__)),
        (torch._C.ScriptMethod, "__call__", whole(torch._C.ScriptMethod.__call__)),
        (torch, "Generator", generators),
        (torch, "initial_seed", here(recorder.refusing(torch.initial_seed, SEED), torch.initial_seed)),
        *([] if compiling else [(torch._subclasses, "FakeTensor", _hidden_fakes(here(lambda: True, lambda: False)))]),
        *([(FunctionMeta, "__getattribute__", here(attribute, type.__getattribute__))] if APPLIES_IN_CPP else []),
    ]
    with ExitStack() as stack:
        for owner, name, new in patches:
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


def _frame(without: str = "") -> FrameType:
    """The innermost frame that is no library's, or outside of one library."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not (name.partition(".")[0] == without if without else is_library(name)):
            break
        frame = frame.f_back
    return frame


def _saved_tensors_hooks() -> Any:
    """What is called for each tensor that is saved for backward, and that is called for it in backward; or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@dataclass(frozen=True)
class Modes:
    """Grad mode, inference mode, the state of autocast by device and the default dtype."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    dtype: torch.dtype

    @classmethod
    def now(cls) -> Modes:
        states = ((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES)
        inference, dtype = torch.is_inference_mode_enabled(), torch.get_default_dtype()
        return cls(torch.is_grad_enabled(), inference, tuple(states), dtype)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Sets all but the default dtype, by which a step is compiled anew."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for now, then in zip(Modes.now().autocast, self.autocast, strict=True):
                if now != then:
                    device, enabled, dtype = then
                    stack.enter_context(torch.autocast(device, dtype, enabled))
            yield


class _Node:
    """A node of autograd's graph, without hooks."""

    def __init__(self, node: torch.autograd.graph.Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise NotImplementedError(f"forward calls {name} of the grad_fn {_HOOK}")
        return getattr(self._node, name)


class TensorState(NamedTuple):
    """What a call can change of a tensor apart from its values."""

    layout: tuple[Sequence[int], Sequence[int]]
    memory: tuple[int, int]
    requires_grad: bool

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorState:
        return cls((t.size(), t.stride()), (storage(t), int(t.storage_offset())), t.requires_grad)


def autocast_states() -> tuple[Autocast, ...]:
    """The states of autocast that are on."""
    return tuple(Autocast(d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))


def _saved(results: Iterable[torch.Tensor]) -> set[int]:
    """The memory of what the graphs of results have saved for backward."""
    nodes, seen, found = [t.grad_fn for t in results], set[Any](), set[int]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        found |= {storage(t) for t in (*kept, *getattr(node, "saved_tensors", ())) if isinstance(t, torch.Tensor)}
    return found
