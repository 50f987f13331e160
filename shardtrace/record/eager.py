"""Modules and functions that PyTorch runs: one line of the trace for each call.

A module whose forward depends on the values of tensors (``.item()``, ``nonzero``, a branch) cannot be recorded on fake
tensors. It is tried on real tensors with random values instead, twice. If only tensors come out, with the same metadata
both times, its call is one function of its arguments, parameters and buffers, which PyTorch runs and differentiates.
Each step checks that what comes out is still the like.

A trial leaves nothing. What the module does to the user's objects, it does in each step. Tensors that it leaves there
are further results of the call, which the rest of the forward reads. Those with a gradient are then replaced by the
step's own.

A function of torch that reads values, such as ``F.ctc_loss``, is tried on zeros, ones and random numbers.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

from passes.compat.versions import NoMessages
from passes.kernels.aten import Meta, storage
from shardtrace.record.calls import map_tensors, tensors_in, tensors_of
from shardtrace.record.effects import FIXED, Change, Effects
from shardtrace.record.snapshot import contents_of, is_array, is_named, is_plain, same
from shardtrace.record.watcher import ATTRIBUTE, PART_ATTRIBUTE, CodeWatcher, RandomStates

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree

PLAIN = (bool, int, float, str, type(None))
GIVEN = (*PLAIN, torch.Tensor, torch.dtype, torch.device, slice, type(...))  # to functions and modules
Make = Callable[[torch.Tensor], torch.Tensor]  # a real tensor like a fake
Known = Mapping[int, torch.Tensor]
NOTHING: Known = MappingProxyType({})


class CannotStandAlone(Exception):
    """Why a module's call is no function of tensors."""


class Facts(NamedTuple):
    """What must not depend on the values of tensors: the structure of a result, its plain values, the shapes and dtypes
    of its tensors."""

    values: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, result: Any) -> Facts:
        leaves, spec = pytree.tree_flatten(result, is_leaf=lambda v: isinstance(v, Meta))
        return cls(tuple(map(_fact, leaves)), spec)


def _fact(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    return (tuple(value.shape), value.dtype) if isinstance(value, (torch.Tensor, Meta)) else value


class Eager:
    """A function that PyTorch runs. ``expected`` are the facts of its result, once they are known. Raises RuntimeError
    for others."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.__name__ = function, name
        self.expected: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.run(*args, **kwargs)
        if self.expected is not None and self.facts(result) != self.expected:
            raise RuntimeError(
                f"{self.__name__.removeprefix('eager_')}, which PyTorch runs, has returned other shapes or values than "
                "when it was recorded: they depend on the values of tensors. Let it return tensors whose shapes do not"
            )
        return result

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def facts(self, result: Any) -> Any:
        return Facts.of(result)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Eager) and (other.function, other.expected) == (self.function, self.expected)

    def __hash__(self) -> int:
        return hash(self.function)


class EagerModule(Eager):
    """The call of a module as a function of its arguments, and of its own tensors by their names.

    Returns what the module returns, and the tensors that it leaves in ``places``, which are entries of the user's
    objects: by the number of the place and that in it. Each is a tensor of its own. A ``token`` without elements
    follows if nothing reads the others. ``before`` is set before each run. ``left`` are the tensors that the last run
    has left. ``shared`` has pairs of tensors that had memory in common, by their numbers among those that the call is
    given and returns; -1 is any other.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any], label: str) -> None:
        super().__init__(module, f"eager_{type(module).__name__}")
        self.module, self.label, self._original = module, label, original
        self.before: list[Change] = []
        self.places: dict[int, Change] = {}
        self.left: dict[Any, ref[torch.Tensor]] = {}
        self.token = True
        self.shared: frozenset[tuple[int, int]] = frozenset()
        marks = (m.__dict__.get(a) for m in module.modules() for a in (ATTRIBUTE, PART_ATTRIBUTE))
        self._running = next((state.running for state in marks if state is not None), nullcontext)

    def __call__(self, *given: Any) -> Any:
        inputs = {id(t): t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)}
        on_fakes = any(isinstance(t, FakeTensor) for t in inputs.values())
        with untouched(self) if on_fakes else nullcontext():
            found = super().__call__(*given)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if id(t) in inputs else t, found)

    def run(self, args: Any, kwargs: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> Any:
        for change in self.before:
            change.put(change.new)
        before = {i: place.get() for i, place in self.places.items()}
        marks = {name: _mark(t) for name, t in own.items()}
        with self._running(), _reparametrize_module(self.module, dict(own), stack_weights=True):
            result = self._original(self.module, *args, **kwargs)
            now = own_tensors(self.module)
            for name, given in own.items():
                if now.get(name) is not given or _mark(given) != marks[name]:
                    self._write(name, given, now.get(name))
        left = _numbered((i, before[i], place.get()) for i, place in self.places.items())
        self.left = {number: ref(t) for number, t in left.items()}
        return result, left, [torch.empty(0)] if self.token else []

    def facts(self, result: Any) -> Any:
        return Facts.of(result[0]), {number: (t.shape, t.dtype) for number, t in result[1].items()}

    def _write(self, name: str, given: torch.Tensor, now: torch.Tensor | None) -> None:
        """Gives a tensor of the module the value that is there after its forward."""
        if self.expected is not None and name in dict(self.module.named_parameters(remove_duplicate=False)):
            raise updated_parameter(name)
        if now is None or (now.shape, now.dtype) != (given.shape, given.dtype):
            raise RuntimeError(
                f"{type(self.module).__name__}, which PyTorch runs, replaces its {name} by None or by a tensor of "
                "another shape or dtype: let it be an attribute, not a parameter or buffer"
            )
        if now is not given:
            with torch.no_grad():
                given.copy_(now)

    def __eq__(self, other: object) -> bool:
        return self is other  # each call leaves tensors of its own

    __hash__ = Eager.__hash__


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by their names."""
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return dict(chain(*named))


def updated_parameter(name: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name!r} is updated in place in forward, which would change a copy of it: make it a buffer, or "
        "change it outside of forward in shardtrace.full_params"
    )


@dataclass(frozen=True, eq=False)
class Left(Change):
    """A tensor with a gradient that a call leaves. After a step the step's own takes its place if it is still there."""

    call: EagerModule
    number: tuple[int, int]

    def put(self, value: Any) -> None:
        left = self.call.left[self.number]()
        if left is None:
            return
        new = lambda held: map_tensors(held, lambda t, path: value if t is left else t)  # noqa: E731
        if self.key is not None:
            super().put(new(self.get()))
        for i, held in enumerate(self.owner) if self.key is None else ():
            self.owner[i] = new(held)


class Trial(NamedTuple):
    """What a call gave: the result (with fakes in the place of tensors, in the end), the numbers of the tensors that it
    wrote into, whether it drew random numbers, the pairs of tensors that share memory (as :class:`EagerModule` has
    them), what it changed in the user's objects, and the tensors with a gradient that it left there."""

    result: Any
    written: frozenset[int]
    random: bool
    shared: frozenset[tuple[int, int]]
    changes: Sequence[Change] = ()
    left: Sequence[Left] = ()

    def facts(self) -> Any:
        metas = [Meta.of(t) for t in pytree.tree_leaves(self.result) if isinstance(t, torch.Tensor)]
        return Facts.of(self.result), metas, [_key(change) for change in self.changes if _place(change)]


class Observer(NamedTuple):
    """What sees the changes of trials, the copies in the user's objects, and what sees the code that runs."""

    effects: Effects
    copies: list[Change]
    watcher: CodeWatcher


def try_module(
    module: EagerModule,
    args: Any,
    kwargs: Any,
    own: Mapping[str, torch.Tensor],
    effects: Effects,
    watcher: CodeWatcher,
    known: Known = NOTHING,
) -> Trial:
    """Calls a module on real tensors with random values like the given fakes. In the user's objects it then leaves
    what the module leaves, which ``effects`` takes for unchanged: ``changes``, of the kind "varies" if they depend on
    the values of tensors, and ``left``. ``watcher`` sees the code that runs.
    ``known``: see :func:`try_function`.

    Raises CannotStandAlone if it returns or leaves anything else than tensors, or other ones in a second call; or what
    it raises.
    """
    with _pop_mode_temporarily(), on_real_tensors(), untouched(module) as observed:
        observer = Observer(*observed, watcher)
        first, second = _try(
            module, (args, kwargs, dict(own)), {}, [partial(_like, fill=_random, known=known)] * 2, observer
        )
        written = [replace(c, kind="written", new=c.old) for c in observer.copies if _is_written(c)]
        seen = set(observer.effects.seen())
    _set_before(effects.changes(seen), module, watcher)
    fakes: dict[int, Any] = {id(c.new): c.old for c in observer.copies}
    tensors = tensors_of(first.result)
    fakes |= {id(t): made_like(Meta.of(t)) for t in {id(t): t for t in tensors}.values()}
    with_fakes = partial(map_tensors, change=lambda t, path: fakes.get(id(t), t))

    twins = {_key(c): c for c in second.changes}
    changes: list[Change] = []
    places = [place for change in first.changes if (place := _place(change)) is not None]
    for change in first.changes:
        old, new, twin = with_fakes(change.old), with_fakes(change.new), twins.pop(_key(change), None)
        change.put([*old, *new] if change.kind == "append" else new)
        varies = twin is None or not _alike(change.new, twin.new)
        if change.kind not in FIXED:
            changes.append(replace(change, kind="varies" if varies else change.kind, old=old, new=new))
    changes += [replace(c, kind="varies", old=with_fakes(c.old)) for c in twins.values()]
    effects.accept(changes)
    changes += written
    left = [
        Left(places[i].owner, places[i].key, "left", places[i].label, None, fakes[id(t)], module, (i, k))
        for (i, k), t in first.result[1].items()
        if t.requires_grad
    ]
    emptied = (replace(p, old=None, new=[None] * len(p.new) if p.key is None else None) for p in places)
    module.places = dict(enumerate(emptied))
    module.shared = first.shared
    result = pytree.tree_map_only(torch.Tensor, lambda t: fakes[id(t)], first.result)
    return first._replace(result=result, changes=changes, left=left)


def _set_before(pending: Iterable[Change], module: EagerModule, watcher: CodeWatcher) -> None:
    """Lets each run begin with what the forward has set before the call and the module may read. Raises
    CannotStandAlone if that is no plain value."""
    names = watcher.names()
    for change in pending:
        if change.kind in (*FIXED, "buffer") or not is_named(change.label, names):
            continue
        if change.key is None or not is_plain(change.new):
            raise CannotStandAlone(f"the forward around it sets {change.label}, which it may read")
        module.before.append(change)


def try_function(function: Eager, args: Any, kwargs: Any, known: Known = NOTHING) -> Trial:
    """Calls a function on real tensors like the given fakes. ``known`` are the values of some, by their ids.

    Raises CannotStandAlone if it returns anything else than tensors of its own, or other ones for other values; or what
    it raises.
    """
    makes = [partial(_like, fill=fill, known=known) for fill in (torch.zero_, lambda t: t.fill_(1), _uniform)]
    trial, *_ = _try(function, args, kwargs, makes)
    given = sum(isinstance(t, torch.Tensor) for t in pytree.tree_leaves((args, kwargs)))
    shares = any(i < given for i, _ in trial.shared)
    if shares or not all(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(trial.result)):
        raise CannotStandAlone("it returns something else than tensors of its own")
    return trial._replace(result=pytree.tree_map_only(torch.Tensor, lambda t: made_like(Meta.of(t)), trial.result))


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Outside of the mode of fake tensors and of inference mode, in which nothing counts writes."""
    grad = torch.is_grad_enabled()
    with unset_fake_temporarily(), torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _try(
    function: Eager, args: Any, kwargs: Any, makes: Sequence[Make], observer: Observer | None = None
) -> list[Trial]:
    given, spec = pytree.tree_flatten((tuple(args), kwargs))
    for value in given:
        if not isinstance(value, GIVEN):
            raise CannotStandAlone(f"it is given a {type(value).__name__}")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with on_real_tensors(), torch.random.fork_rng(devices), RandomStates(), NoMessages():
        trials = [_call(function, given, spec, make, devices, observer) for make in makes]
    first = trials[0]
    for value in pytree.tree_leaves(first.result):
        if not isinstance(value, (torch.Tensor, *PLAIN)):
            raise CannotStandAlone(f"it returns a {type(value).__name__}")
    if any(other.facts() != first.facts() for other in trials):
        raise CannotStandAlone("the shapes that it returns, or other results, depend on the values of tensors")
    function.expected = function.facts(first.result)
    written, shared = (frozenset().union(*sets) for sets in zip(*((t.written, t.shared) for t in trials), strict=True))
    random = any(trial.random for trial in trials)
    return [trial._replace(written=written, shared=shared, random=random) for trial in trials]


def _call(
    function: Eager,
    given: list[Any],
    spec: Any,
    make: Make,
    devices: Sequence[int],
    observer: Observer | None,
) -> Trial:
    given = [_from_outside(v, make) if isinstance(v, FakeTensor) else v for v in given]
    inputs = [v for v in given if isinstance(v, torch.Tensor)]
    before, marks, values = _random_state(devices), list(map(_mark, inputs)), [t.detach().clone() for t in inputs]
    args, kwargs = pytree.tree_unflatten(given, spec)
    changes: list[Change] = []
    others: list[Any] = []
    if observer is not None:
        grad = torch.is_grad_enabled()
        with observer.watcher:
            result, _, token = function.run(*args, **kwargs)
        changes = observer.effects.changes()
        for change in changes:
            change.put(change.old)
        if torch.is_grad_enabled() != grad:
            raise CannotStandAlone("it switches gradients on or off for what follows")
        places = [place for change in changes if (place := _place(change)) is not None]
        left = _numbered((i, p.old, p.new) for i, p in enumerate(places))
        made, others = tensors_of(result), [*left.values(), *(c.new for c in observer.copies)]
        result = result, left, token
    else:
        result = function.run(*args, **kwargs)
        made = tensors_of(result)
    if _leaves(tensors_of(result)) - _leaves(inputs):
        raise CannotStandAlone("its gradient flows into what is neither its parameter nor its argument")
    drawn = any(not torch.equal(a, b) for a, b in zip(before, _random_state(devices), strict=True))
    written = {i for i, t in enumerate(inputs) if _mark(t) != marks[i] or not torch.equal(t.detach(), values[i])}
    shared = _shared(inputs, made, others)
    return Trial(result, frozenset(written), drawn, shared, changes)


def _shared(inputs: list[torch.Tensor], made: list[torch.Tensor], others: list[Any]) -> frozenset[tuple[int, int]]:
    """The pairs of tensors that share memory, other than two inputs or one tensor that is made twice."""
    tensors, kept = [*inputs, *made], {storage(t) for t in others if isinstance(t, torch.Tensor)}
    groups: dict[int, list[int]] = defaultdict(list)
    for i, t in enumerate(tensors):
        groups[storage(t)].append(i)
    pairs = {p for group in groups.values() for p in combinations(group, 2) if p[1] >= len(inputs)}
    pairs = {(i, j) for i, j in pairs if i < len(inputs) or tensors[i] is not tensors[j]}
    return frozenset(pairs | {(-1, i) for key, group in groups.items() if key in kept for i in group})


def _leaves(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the tensors that get the gradients."""
    nodes: list[Any] = [get_gradient_edge(t).node for t in tensors if t.requires_grad]
    seen, found = set(), set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            found |= {id(node.variable)} if node.name().endswith("AccumulateGrad") else set()
    return found


def _mark(t: torch.Tensor) -> tuple[int, int]:
    """What changes if a tensor is written into, other than through ``data``, or gets other memory."""
    return storage(t), 0 if t.is_inference() else t._version


def _random_state(devices: Iterable[int]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


@contextmanager
def untouched(run: EagerModule) -> Iterator[tuple[Effects, list[Change]]]:
    """Context of a run that leaves nothing: no warnings, no random numbers drawn, all objects of the user as they were,
    and these hold copies of tensors and iterators meanwhile. Gives what sees changes, and the copies."""
    own = set(map(id, own_tensors(run.module).values()))
    made: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in own:
                return value
            is_fake = isinstance(value, FakeTensor)
            real = (_like(value, _random) if is_fake else value).detach().clone().requires_grad_(value.requires_grad)
            real.__dict__.update({} if is_fake else value.__dict__)  # a shard is known by its attributes
            return made.setdefault(id(value), real)
        if type(value).__module__ != "itertools":
            return value
        return made[id(value)] if id(value) in made else made.setdefault(id(value), copy.deepcopy(value))

    with (
        warnings.catch_warnings(),
        torch.set_grad_enabled(torch.is_grad_enabled()),
        Effects(run.module, run.label) as effects,
        RandomStates(effects.state.seen.values()),
    ):
        warnings.simplefilter("ignore")
        yield effects, effects.replace(copied)


def _key(change: Change) -> tuple[int, Any]:
    return id(change.owner), change.key


def _place(change: Change) -> Change | None:
    """The part of a change that tensors are left in. None if it has none; the last values of a list or deque.

    Raises CannotStandAlone if they are among others."""
    if change.kind in FIXED or not _new_tensors(change.old, change.new):
        return None
    if change.key is not None:
        return change
    start = next(i for i, item in enumerate(change.new) if _new_tensors(change.old, item))
    tail = list(change.new)[start:]
    if isinstance(change.owner, set) or any(tensors_in(v) and not _new_tensors(change.old, v) for v in tail):
        raise CannotStandAlone(f"it leaves tensors in the midst of {change.label}")
    return replace(change, kind="append", new=tail)


def _new_tensors(old: Any, new: Any) -> list[torch.Tensor]:
    known = set(map(id, tensors_in(old)))
    return [t for t in tensors_in(new) if id(t) not in known]


def _numbered(places: Iterable[tuple[int, Any, Any]]) -> dict[tuple[int, int], torch.Tensor]:
    """The new tensors by the numbers of places, of which the old and the new value are given, and theirs there."""
    return {(i, k): t for i, old, new in places for k, t in enumerate(_new_tensors(old, new))}


def _alike(a: Any, b: Any) -> bool:
    """Whether two values differ in their tensors only."""
    if is_array(a) and is_array(b):
        return contents_of(a, sampled=False) == contents_of(b, sampled=False)
    (a, spec), (b, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    pairs = zip(a, b, strict=False)
    return spec == other and all(same(x, y) or (type(x) is type(y) and isinstance(x, torch.Tensor)) for x, y in pairs)


def _is_written(copied: Change) -> bool:
    """Whether a trial has written into a copy of a tensor. Raises CannotStandAlone if the tensor is the forward's."""
    old, new = copied.old, copied.new
    if not isinstance(old, torch.Tensor):
        return False
    if isinstance(old, FakeTensor) and _mark(new)[1]:
        raise CannotStandAlone(f"it writes into {copied.label}, which the forward around it may read")
    return not isinstance(old, FakeTensor) and not bool(((old == new) | (new != new)).all())


def _from_outside(fake: torch.Tensor, make: Make) -> torch.Tensor:
    """A real tensor like a fake. Those that no module holds by name have their values."""
    held: torch.Tensor | None = getattr(fake, "_shardtrace_outside", None)
    return make(fake) if held is None else held.clone()


def made_like(meta: Meta) -> torch.Tensor:
    """A fake that has a gradient if the metadata say so, and is no leaf."""
    fake = meta.empty()
    return fake.requires_grad_().clone() if meta.grad else fake


def _random(t: torch.Tensor) -> torch.Tensor:
    return t.normal_() if t.is_floating_point() or t.is_complex() else t.random_(0, 2)


def _uniform(t: torch.Tensor) -> torch.Tensor:
    return t.copy_(torch.rand(t.shape)) if t.is_floating_point() or t.is_complex() else t.random_(0, 2)


def _like(fake: torch.Tensor, fill: Callable[[torch.Tensor], Any], known: Known = NOTHING) -> torch.Tensor:
    real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    real.copy_(known[id(fake)]) if id(fake) in known else fill(real)
    leaf = real.requires_grad_(fake.requires_grad)
    return leaf.clone() if fake.requires_grad and not isinstance(fake, nn.Parameter) else leaf
