"""The call of a sharded module inside a jitted function: recorded, then written into the running trace."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from typing import Any, NamedTuple

from passes.analysis.recognise import names
from passes.compat.jit import (
    add_note,
    constraints,
    exempt_from_autocast,
    make_name_legal,
    pack_tensors,
    traced_device,
    without_constraints,
)
from passes.kernels import aten
from passes.kernels.aten import Meta
from shardtrace.record.arguments import Arguments, WholeOf, check_reads, is_absent, stand_in, step
from shardtrace.record.calls import Call, Rebuild, Record, Refused, check_result, map_tensors, storage, tensors_in
from shardtrace.record.calls import is_plain as is_returnable
from shardtrace.record.eager import EagerModule, updated_parameter
from shardtrace.record.effects import Change
from shardtrace.record.memory import Held, Memory
from shardtrace.record.reads import Reads, Seen, Source
from shardtrace.record.recorder import VALUES, CannotRecord, FakeMode, SendsMessages
from shardtrace.record.recording import (
    Described,
    Number,
    Recording,
    RecordingOfNumbers,
    Varying,
    apply,
    check_no_fakes,
    check_recurrent,
    described,
    holds_fake,
    is_comparable,
    is_number,
    made,
    numbered,
    only_written,
    places_of,
    record_numbers,
    replaces_tensors,
    written_outside,
)
from shardtrace.record.replay import Blocks, CannotWrite, ParameterOf, Replay
from shardtrace.record.snapshot import MISSING, Entry, Snapshot, is_named
from shardtrace.record.watcher import EAGER, REPEATED, Check, CodeWatcher, after_checks, is_library, recomputed

import torch
from thunder import clang
from thunder import torch as ltorch
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, unwrap, wrap
from thunder.core.jit_ext import EXT_FLAG_IS_MODULE
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx
from torch import nn
from torch.nn.utils import parametrize

# ---- what runs of modules mean ----


def unguarded(changes: Iterable[Change], used: Collection[int], names: Collection[str]) -> list[Entry]:
    """The entries that PyTorch's runs of modules change and that the forward around these does not read: a
    :class:`Snapshot` excludes them.

    Args:
        used: the ids of the tensors from outside that calls used.
        names: those that occur in the code around the modules.

    Raises:
        RuntimeError: if the forward may read a value that depends on the values of tensors.
    """
    found = []
    for change in (c for c in changes if c.kind != "written"):
        is_read = is_named(change.label, names)
        if is_read and change.kind == "varies":
            raise RuntimeError(
                f"forward may read {change.label}, which a module that PyTorch runs sets by the values of tensors: let "
                "it be a tensor, or have a name that nothing else reads"
            )
        if not is_read or replaces_tensors(change, used):
            found.append(change.entry)
    return found


def _check_memory(calls: Sequence[Call], read: Iterable[torch.Tensor]) -> None:
    """Raises CannotWrite if the forward writes into what a module that PyTorch runs returns, and then reads what may
    share memory with that, or the other way round. ``read``: the tensors that are read after the calls."""
    partners: dict[int, set[int]] = {}  # of a memory; -1 is that of the user's objects
    stale: dict[int, Call] = {}  # a memory, and the call that wrote into another one that may be the same

    def check(memories: Iterable[int]) -> None:
        for call in (stale[m] for m in memories if m in stale):
            error = CannotWrite(
                "it writes into a tensor that may share memory with what a module that PyTorch runs returns, is given "
                "or keeps: write into a clone"
            )
            error.module = call.place.module
            add_note(error, f"at {call.place}")
            raise error

    for call in calls:
        tensors = [*call.tensors(), *call.results]
        check(map(aten.storage, tensors))
        stale |= {other: call for t in call.written for other in partners.get(aten.storage(t), ())}
        check([-1])
        for pair in call.function.shared if isinstance(call.function, EagerModule) else ():
            a, b = (aten.storage(tensors[i]) if i >= 0 else -1 for i in pair)
            partners.setdefault(a, set()).add(b)
            partners.setdefault(b, set()).add(a)
    check(map(aten.storage, read))


def settle_runs(calls: list[Call], read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Drops the results of modules' runs that they leave in places which nothing reads, so that a later run need not
    leave them. Returns tokens: the step has to return them, because Thunder drops a call of which nothing is read.

    Args:
        calls: those of a forward in which there are such runs.
        read: the tensors that are read after the calls.

    Raises:
        CannotWrite: if the forward reads memory that it may have written into unseen.
    """
    live, tokens = set(map(aten.storage, read)), []
    _check_memory(calls, read)
    for i, call in reversed(list(enumerate(calls))):
        run = call.function if isinstance(call.function, EagerModule) else None
        is_live = not live.isdisjoint(map(aten.storage, (*call.results, *call.written)))
        if run is not None:
            of_result, left = run.expected
            count = len(call.results) - len(left) - 1
            *pairs, (_, token) = zip((*left, None), call.results[count:], strict=True)
            places = {number[0] for number, t in pairs if aten.storage(t) in live}
            run.places = {number: run.places[number] for number in places}
            run.expected = of_result, {number: facts for number, facts in left.items() if number[0] in places}
            run.token = not is_live
            kept = [t for number, t in pairs if number[0] in places] + [token] * run.token
            tokens += [token] * run.token
            calls[i] = replace(call, results=(*call.results[:count], *kept))
        if is_live or run is not None:
            live |= set(map(aten.storage, call.tensors()))
    return tokens


# ---- the call ----


Found = Callable[[torch.Tensor, Any], None]
Compare = Callable[[Recording, Record], Callable[[], None] | None]
Refuse = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


@dataclass
class Known:
    """A parameter or buffer that is an input of the trace, and what it holds after the calls so far."""

    wrapped: Any
    now: Any


class Inputs:
    """The tensors that a trace takes from a module: its parameters and buffers, by their fakes."""

    def __init__(self, module: Any, fakes: FakeMode, setting: Setting) -> None:
        self.module, self._fakes, self._found, self._known = module, fakes, setting.found, setting.known
        self._records: dict[str, ProvenanceRecord] = {"": module.provenance}
        self._names: dict[int, tuple[str, str, torch.Tensor]] = {}  # of a fake: its kind, its name, the tensor
        self._added: list[TensorProxy] = []
        self.by_name: dict[str, torch.Tensor] = {}
        self.replaced: set[int] = set()  # fakes of buffers that get another value after the step
        self.root = root = unwrap(module)
        devices = (traced_device(t) for t in chain(root.parameters(), root.buffers()))
        self._device = next((d for d in devices if d.type != "meta"), torch.device("cpu"))
        self.absent = self._device if is_absent(self._device) else None
        self._made: dict[int, torch.Tensor] = {}
        self.memory = Memory(fakes, lambda t: self._made.get(id(setting.stand_in_of(t))))
        parameters = [("_parameters", *named) for named in root.named_parameters(remove_duplicate=False)]
        buffers = [("_buffers", *named) for named in root.named_buffers(remove_duplicate=False)]
        for kind, name, t in (*parameters, *sorted(buffers, key=lambda b: -b[2].nbytes)):  # parts after the whole
            if id(t) not in self._made:
                fake = self._fake(t) if isinstance(t, nn.Parameter) else self.memory.hold(t, self._fake)
                Seen.mark(fake)
                self._made[id(t)] = fake
                self._names[id(fake)] = kind, name, t
            self.by_name[name] = self._made[id(t)]

    def _fake(self, t: torch.Tensor) -> torch.Tensor:
        device = self._device if traced_device(t).type == "meta" else traced_device(t)  # one without elements
        with self._fakes:
            fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=stand_in(device))
            return nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake

    def proxy(self, fake: torch.Tensor) -> Any:
        """The proxy of a parameter or buffer, which becomes an input of the trace."""
        kind, name, t = self._names[id(fake)]
        if id(t) not in self._known:
            path, _, last = name.rpartition(".")
            with without_constraints():
                wrapped = wrap(t, provenance=_item(self._record(path), kind, last))
            make_name_legal(wrapped.value)
            self._known[id(t)] = Known(wrapped, wrapped.value)
            self._added.append(wrapped.value)
            self._found(t, wrapped)
        now = self._known[id(t)].now
        return ltorch.clone(now) if id(fake) in self.replaced else now  # backward may read what was there before

    def write(self, fake: torch.Tensor, new: Any) -> None:
        """Adds the line that writes ``new`` into the buffer of a fake. Later calls of the module read it."""
        known = self._known[id(self.tensor(fake))]
        _write(known.wrapped.value, new)
        known.now = new

    def renew(self, changes: Iterable[Change], replay: Replay) -> None:
        """Lets later calls of the module read the buffers that ``changes`` put in the place of others."""
        for old, new in ((c.old, c.new) for c in changes if c.kind == "buffer"):
            if isinstance(new, torch.Tensor) and self.has(old) and Meta.of(old) == Meta.of(new):
                self.proxy(old)
                self._known[id(self.tensor(old))].now = replay.proxy(new)

    def source(self, fake: torch.Tensor) -> Source | None:
        """What a buffer holds, or a tensor that no module holds by name. None for a parameter, and for a buffer that an
        earlier call has written into."""
        if (held := self.memory.outside.get(id(fake))) is not None:
            return Source(held, fake.stride(), buffer=lambda: held)
        kind, name, t = self._names[id(fake)]
        known = self._known.get(id(t))
        if kind != "_buffers" or (known is not None and known.now is not known.wrapped.value):
            return None
        return Source(t, fake.stride(), buffer=partial(unwrap(self.module).get_buffer, name))

    def has(self, fake: torch.Tensor) -> bool:
        return id(fake) in self._names

    def name(self, fake: torch.Tensor) -> str:
        """The qualified name of the parameter or buffer of a fake."""
        return self._names[id(fake)][1]

    def tensor(self, fake: torch.Tensor) -> torch.Tensor:
        """The parameter or buffer of a fake, or ``fake``."""
        return self._names[id(fake)][2] if id(fake) in self._names else fake

    def asked(self, calls: Iterable[Call]) -> set[int]:
        """The ids of the buffers whose metadata forward has read, and of the tensors that it uses and no line does:
        the metadata of others are checked. The shapes of sharded parameters are fixed."""
        used = {id(t) for call in calls for t in call.tensors()} | self.memory.asked
        held = ((i, kind, id(t)) for i, (kind, _, t) in self._names.items() if i in used and not t.is_meta)
        return {t for i, kind, t in held if t not in self._known or (kind == "_buffers" and i in self.memory.asked)}

    def _record(self, path: str) -> ProvenanceRecord:
        if path not in self._records:
            parent, _, last = path.rpartition(".")
            found = _item(self._record(parent), "_modules", last)
            found.ext_flag |= EXT_FLAG_IS_MODULE
            self._records[path] = found
        return self._records[path]

    def guard(self) -> None:
        """Lets the prologue check the inputs. One constraint for all that lines read: Thunder compares each tensor of a
        constraint with all inputs. It fetches those that no line reads, such as what a block uses for nothing."""
        read = {name for line in get_tracectx().scopes[-1] for name in names(line.flat_proxy_args)}
        seen, unread = ([p for p in self._added if (p.name in read) == is_read] for is_read in (True, False))
        constraints().extend([(partial(_check_tensors, *seen),), (_check_tensors, *unread)])


def _item(owner: ProvenanceRecord, members: str, name: str) -> ProvenanceRecord:
    """Thunder's record of ``owner.members[name]``."""
    return reduce(step, ((PseudoInst.LOAD_ATTR, members), (PseudoInst.BINARY_SUBSCR, name)), owner)


def _check_tensors(*tensors: TensorProxy) -> None:
    for tensor in tensors:
        clang.check_tensor_shape_and_metadata(tensor)


class Traced(NamedTuple):
    """What :func:`trace` returns.

    ``guard`` raises if the record is not valid any more, and so do the ``last_guards``. ``setter`` sets after a step
    what forward sets, from the tensors that were packed under the given name; None if it sets nothing. ``remark`` is
    about blocks and modules. ``rebuild`` makes what the jitted model returns of the tensors that are the result; None
    if they are that. ``given`` are the tensors among the arguments.
    """

    result: Any
    guard: Callable[[], None]
    last_guards: Sequence[Callable[[], None]]
    setter: Callable[[tuple[torch.Tensor, ...]], None] | None
    remark: str
    rebuild: Rebuild | None
    given: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The compilation that a call is recorded in.

    Args:
        known: the parameters and buffers that an earlier call has met, by their ids.
        earlier: what earlier calls of the step set. This one adds its own.
        found: is told of each further one that becomes an input of the trace, and of its wrapped value.
        parameter_of: gives the sharded parameter of a tensor, or None.
        stand_in_of: gives for a shard what stands for the whole parameter, and for another tensor itself.
        state: the name under which the tensors are packed that forward leaves on modules.
        compare: makes the last guard of a recording and its record, or None.
        refuse: raises for a tensor that is no parameter, buffer or argument, if it may not be used; each with a name.
        whole_of: gives the proxy of a whole argument for that of a part of it, and for another one itself.
        fall_back: whether PyTorch runs modules that cannot be recorded, besides those that are marked for it.
        varying: tells which plain numbers have changed.
        obstacle: why the lines of blocks must stand in the trace; empty if they need not.
        computing: whether lines may take plain numbers as inputs.
        whole: whether PyTorch may run the model itself, as one line.
        variants: what was read of inputs, see :class:`Reads`.
        returned: takes from what forward returns what a step is to return.
    """

    known: dict[int, Any]
    earlier: list[Change]
    found: Found
    parameter_of: ParameterOf
    stand_in_of: Callable[[torch.Tensor], torch.Tensor]
    state: str
    compare: Compare
    refuse: Refuse
    whole_of: WholeOf
    varying: Varying
    fall_back: bool = True
    obstacle: str = ""
    computing: bool = True
    whole: bool = True
    variants: dict[Hashable, set[Hashable]] | None = None
    returned: Callable[[Any], Any] | None = None


def trace(function: Callable[..., Any], module: Any, args: Any, kwargs: Any, setting: Setting) -> Traced:
    """Records ``function(module, ...)`` and writes it into the running trace. Arguments and result are wrapped."""
    front = Front(unwrap(module), setting)
    taken = setting.returned
    called = function if taken is None else lambda *given, **named: taken(function(*given, **named))
    while True:
        try:
            done = front.record(called, module, args, kwargs)
            if front.has_rebuilt(done):
                continue
            traced = front.write(done)
            break
        except CannotRecord as error:
            if isinstance(error.__cause__, Refused):
                raise front.with_place(error.__cause__) from None
            front.fall_back(error.modules, error.__cause__ or error)
        except CannotWrite as error:
            front.fall_back(front.modules_around(error.module), error)
    record = done.record
    del done
    check_no_fakes(record)
    return traced


# Whether models are told that they are being compiled, until one way can be recorded: some then do without the values
# of tensors, and some make masks for lengths that they do not know, which take memory and the place of faster kernels.
COMPILING = (False, True)


class Recorded(NamedTuple):
    """A record, the inputs of its trace, what forward has set, the code that ran, how to record it again, and what
    remembers its plain values."""

    record: Record
    inputs: Inputs
    arguments: Arguments
    changes: list[Change]
    watcher: CodeWatcher
    recording: RecordingOfNumbers
    keep: Callable[[], None]


class Front:
    """One call of a sharded module. Modules that cannot be recorded are left to PyTorch, the smallest that can be."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        self._module, self._setting = module, setting
        self._modules = dict(module.named_modules())
        self._names = {id(part): name for name, part in self._modules.items()}
        self._eager = {m for m in self._modules.values() if EAGER in m.__dict__}
        self._impossible: set[nn.Module] = set()
        self._last: BaseException | None = None
        self._alone = ""  # why PyTorch cannot run the model itself
        self._compiling = list(COMPILING)
        self.remarks: dict[str, None] = {}
        self._apart = ""  # why PyTorch cannot run the first module that it was to run
        self._caches = False
        self._kept: list[Change] = []  # what the recording before has set once
        self._may_keep, self._calls = True, Described((), (), ())

    def record(self, function: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Recorded:
        if parametrize._cache_enabled and any(map(parametrize.is_parametrized, self._modules.values())):
            raise RuntimeError(
                f"{type(self._module).__name__} is called within parametrize.cached(), and a cached weight would have "
                "its gradient in one of the calls only: enter it inside of forward, or leave it out"
            )
        fakes, watcher = FakeMode(), CodeWatcher()
        arguments = Arguments(self._module.forward, fakes, args, kwargs, self._setting.whole_of)
        inputs = Inputs(module, fakes, self._setting)
        config = getattr(self._module, "config", None)
        self._caches = bool(arguments.kwargs.get("use_cache", getattr(config, "use_cache", False)))
        recording = Recording(
            self._module, function, arguments.args, arguments.kwargs, fakes, inputs.by_name, inputs.memory,
            self._names,
            watched=[m for m in self._modules.values() if REPEATED in m.__dict__ or recomputed(m)],
            eager=frozenset(self._eager), compiling=self._compiling[0],
            reads=Reads(
                lambda t: (inputs if inputs.has(t) or id(t) in inputs.memory.outside else arguments).source(t),
                self._setting.variants,
            ),
        )  # fmt: skip
        record, changes = recording(watcher)
        arguments.check_unchanged()
        shared, varying = get_compile_data().fn is not self._module, self._setting.varying
        given: dict[Any, Any] = {} if shared else {**dict(enumerate(arguments.args)), **arguments.kwargs}
        state = Snapshot(self._module, watcher, label=type(self._module).__name__)
        places = places_of(state.take(), self._module.forward, given)
        tried = [] if record.ran else varying.changed(places)  # what PyTorch runs may compute with them
        recording, record, changes = record_numbers(
            recording, record, changes, watcher, tried, computing=self._setting.computing, shared=shared
        )
        self._check_earlier(recording, record, changes)
        keep = partial(varying.keep, places, tried, recording)
        return Recorded(record, inputs, arguments, changes, watcher, recording, keep)

    def _check_earlier(self, recording: RecordingOfNumbers, done: Record, changes: Sequence[Change]) -> None:
        """Raises Refused if the forward depends on what earlier calls of the step set: they set it after the step."""
        earlier = self._setting.earlier
        written = {storage(c.owner) for c in earlier if c.kind == "memory"}
        outside = recording.memory.outside
        used = (outside[id(t)] for call in done.calls for t in call.tensors() if id(t) in outside)
        depends = any(storage(t) in written for t in used)
        if earlier and not depends and is_comparable(done):
            numbers = [Number(number.place) for number in recording.numbers]
            again = replace(recording, numbers=numbers, inputs={})
            expected = Described.of(done)
            with made(earlier):
                try:
                    found, new = again(CodeWatcher())
                except (CannotRecord, TypeError):
                    depends = True
                else:
                    depends = bool(expected.difference(Described.of(found))) or described(new) != described(changes)
                    check_no_fakes(found)
        if depends:
            raise self.with_place(
                Refused(
                    f"a jitted function calls {type(self._module).__name__} several times, and a call depends on what "
                    f"an earlier one sets ({', '.join(sorted({c.label for c in earlier}))}), which each step sets at "
                    "its end: call the model itself, outside of a jitted function"
                )
            )

    def write(self, done: Recorded) -> Traced:
        record, inputs, arguments, setting = done.record, done.inputs, done.arguments, self._setting
        memory = inputs.memory
        used = {id(t) for t in memory.outside.values()}
        written = {storage(t) for call in record.calls for t in call.written}
        self._check(done, used, written)
        excluded = unguarded(record.ran, used, done.watcher.names())
        changes, left = numbered([*done.changes, *written_outside(memory, written)])
        inputs.replaced = {id(c.old) for c in done.changes if c.kind == "buffer"}
        replay = Replay(lambda t: (inputs if inputs.has(t) else arguments).proxy(t), memory, written, inputs.absent)
        blocks = Blocks(
            record, replay,
            repeated={name for name, m in self._modules.items() if REPEATED in m.__dict__},
            marked={name: what for name, m in self._modules.items() if (what := recomputed(m)) is not None},
            parameter_of=lambda t: setting.parameter_of(inputs.tensor(t)), obstacle=setting.obstacle,
        )  # fmt: skip
        check_result(record.result)
        lines = get_tracectx().scopes[-1]
        count, returned, tokens = len(lines), tensors_in(record.result), _tokens(record)
        try:
            fakes = [*inputs.by_name.values(), *(fake for fake, _ in arguments.by_fake.values())]
            left += settle_runs(record.calls, [*returned, *left, *tokens, *fakes]) if record.watchers else []
            with exempt_from_autocast(get_compile_data()):
                takes = done.recording.write(replay)
                blocks.write([*returned, *left, *tokens])
                _write_back(replay, inputs, arguments)
                rebuild = None if self._thunder_returns(record.result) else Rebuild(record.result, returned)
                outputs = record.result if rebuild is None else tuple(returned)
                if returned and tokens:
                    replay.renew(returned[0], after_checks, tokens)
                result = map_tensors(outputs, lambda t, path: replay.proxy(t))
                inputs.renew(done.changes, replay)
                if changes or left:
                    pack_tensors(setting.state, tuple(map(replay.proxy, left)))
        except CannotWrite:
            del lines[count:]
            raise
        finally:
            replay.values.clear()
        setting.earlier.extend(changes)
        guards = self._guards(done, [*excluded, *(change.entry for change in only_written(done.changes, used))])
        return Traced(
            wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[inputs.module.provenance])),
            partial(_call_all, guards),
            [*takes, *filter(None, [setting.compare(done.recording, record)])],
            partial(_set, changes, [t.requires_grad for t in left]) if changes or left else None,
            "; ".join(filter(None, (str(blocks), *self.remarks))),
            rebuild,
            arguments.tensors(),
        )

    def _check(self, done: Recorded, used: Set[int], written: Set[int]) -> None:
        """Raises for what a step could not do. ``used``: the ids of tensors that no module holds by name, and that
        forward uses. ``written``: the memory that it writes."""
        _refuse(done.record, done.inputs.memory, self._setting)
        check_recurrent([*done.changes, *done.record.ran], used)
        done.inputs.memory.check_whole(written)
        _check_apart(done.inputs, done.arguments, written)

    def _guards(self, done: Recorded, excluded: Sequence[Entry]) -> list[Callable[[], None]]:
        """What is checked before each later step. ``excluded``: entries that do not count."""
        arguments = done.arguments
        done.inputs.guard()
        for place in (p for p in done.recording.places if p.argument):
            arguments.take(place.key, place.put)
        arguments.guard_attributes()
        done.keep()
        for watcher in done.record.watchers:
            done.watcher.add(watcher)
        snapshot = Snapshot(
            self._module, done.watcher, excluded=excluded,
            replaced=[(p.owner, p.key) for p in done.recording.places], objects=arguments.objects,
            label=type(self._module).__name__,
        )  # fmt: skip
        held = Held(self._module, done.inputs.memory.outside.values(), done.inputs.asked(done.record.calls))
        guards: list[Callable[[], None]] = [snapshot.check, held.check]
        guards += [partial(_check_default, torch.get_default_dtype()), done.watcher.environment()]
        if (reads := done.recording.reads.guard()) is not None:
            check_reads(reads) if reads.proxies else guards.append(reads)
        return guards

    def _thunder_returns(self, result: Any) -> bool:
        """Whether Thunder can return a result as it is: to the function that calls the model, or a plain structure of
        tensors in which all numbers that are not integers have a gradient, as Thunder's have."""
        if get_compile_data().fn is not self._module:
            return True
        inexact = (t for t in tensors_in(result) if t.is_floating_point() or t.is_complex())
        return is_returnable(result) and (not torch.is_grad_enabled() or all(t.requires_grad for t in inexact))

    def has_rebuilt(self, done: Recorded) -> bool:
        """Whether the forward is to be recorded again, because it has done what it does once: put another submodule in
        the place of one, such as BigBird's attention after a look at the length of its input, or registered hooks, such
        as those of transformers for hidden states.

        All that it has set without tensors stays, unless it then sets that again or makes other calls.
        """
        once = [c for c in done.changes if (c.kind == "hook" and c.old is MISSING) or self._is_rebuilt(c)]
        if not once and not self._kept:
            return False
        calls = Described.of(done.record)
        if self._kept:
            set_again = {(id(c.owner), c.key) for c in self._kept} & {(id(c.owner), c.key) for c in done.changes}
            if not once and not set_again and not self._calls.difference(calls):
                self._kept = []
                return False
            for change in self._kept:
                change.put(change.old)
            kept = []
        elif self._may_keep:
            plain = (c for c in done.changes if c.kind in ("attribute", "item") and not is_number(c.new))
            kept = [*once, *(c for c in plain if not holds_fake(c.new))]
            for change in kept:
                change.put(change.new)
        else:
            return False
        check_no_fakes(done.record)
        self.__init__(self._module, self._setting)  # type: ignore[misc]
        self._kept, self._calls, self._may_keep = kept, calls, False
        return True

    def _is_rebuilt(self, change: Change) -> bool:
        old, new = change.old, change.new
        if change.kind != "submodule" or not isinstance(new, nn.Module) or new is old:
            return False
        return {*new.parameters(), *new.buffers()} <= {*self._module.parameters(), *self._module.buffers()}

    def modules_around(self, name: str) -> list[nn.Module]:
        """The modules from the root to the one of this qualified name."""
        parts = name.split(".") if name else []
        return [self._modules[".".join(parts[:i])] for i in range(len(parts) + 1)]

    def fall_back(self, modules: Sequence[nn.Module], error: BaseException) -> None:
        """Chooses the innermost of the modules that ran and that PyTorch may run, and all others of its class; the
        model itself at last. Raises the error of the last recording that PyTorch's part let happen if there is none."""
        if not modules or modules[-1] not in self._eager:
            self._last = error
        elif modules[-1] is self._module:
            self._alone = f"{type(error).__name__}: {error}".splitlines()[0]
        if len(self._compiling) > 1:
            self._compiling = self._compiling[1:]
            return
        self._compiling = list(COMPILING)
        for module in reversed(modules):
            if module in self._eager:
                if module is not self._module:
                    self._apart = self._apart or f"; PyTorch cannot run {self._names[id(module)]} by itself: {error}"
                self._eager.remove(module)
                self._impossible.add(module)
            elif module not in self._impossible and self._setting.fall_back and self._may_run(module):
                same = {m for m in self._modules.values() if type(m) is type(module)}
                self._eager |= same - self._impossible
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                name, whole = self._names[id(module)], ""
                if not name:
                    name, whole = "the model itself", ", with all its parameters whole"
                self.remarks[f"{name} ({type(module).__name__}) is run by PyTorch{whole}: {why}"] = None
                return
        raise self.with_place(self._explained(self._last or error))

    def _may_run(self, module: nn.Module) -> bool:
        """Whether PyTorch may run a module. What we refuse is refused in the model itself."""
        ours = isinstance(self._last, CannotWrite | NotImplementedError) and not isinstance(self._last, VALUES)
        return module is not self._module or (self._setting.whole and not ours)

    def _explained(self, error: BaseException) -> BaseException:
        """An error of fake tensors in the user's words; another one as it is."""
        if "data pointer" in str(error):  # torch's words for what asks for the memory of a fake
            what = "it reads the memory of a tensor (DLPack, data_ptr)"
        elif isinstance(error, VALUES):
            what = f"it depends on the values of tensors ({error})"
        elif isinstance(error, CannotWrite | SendsMessages):
            what = str(error)
        else:
            return error
        name = type(self._module).__name__
        remedy = "compute what is read outside of forward and pass it as an argument, or use torch.where"
        if not isinstance(error, VALUES):
            remedy = "move that part into a submodule that takes and returns tensors, which PyTorch can then run"
        elif not self._setting.fall_back:
            remedy = 'call fsdp(compile_policy=CompilePolicy(eager="auto")), or name the module that PyTorch is to run'
        elif self._alone:
            what += f", and PyTorch cannot run {name} as one line ({self._alone})"
        if self._caches:  # of keys and values, by Hugging Face's configs
            remedy = f"pass use_cache=False, if it is not to generate, or {remedy}"
        explained = RuntimeError(f"the forward of {name} cannot be recorded: {what}{self._apart}: {remedy}")
        explained.__cause__, explained.__traceback__ = error, error.__traceback__
        return explained

    def with_place(self, error: BaseException) -> BaseException:
        """The error with a note that says where the model's forward was."""
        walked = (f for f, _ in traceback.walk_tb(error.__traceback__))
        frames = [f for f in walked if not is_library(f.f_globals.get("__name__", ""))]
        if frames:
            frame, name = frames[-1], type(self._module).__name__
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            add_note(
                error,
                f"shardtrace was recording {name}, at {frame.f_code.co_filename}:{frame.f_lineno} in "
                f"{frame.f_code.co_name}:\n    {line}\n"
                "If it runs without shardtrace, see docs/guide/troubleshooting.md#models-that-cannot-be-recorded",
            )
        return error


def _call_all(guards: Iterable[Callable[[], None]]) -> None:
    for guard in guards:
        guard()


def _check_default(dtype: torch.dtype) -> None:
    if torch.get_default_dtype() is not dtype:
        raise RuntimeError("the default dtype is another one")


def _set(changes: Sequence[Change], differentiable: Sequence[bool], tensors: Sequence[torch.Tensor]) -> None:
    """A setter: what forward leaves on modules has a gradient only if it had one when it was recorded."""
    apply(changes, [t if d else t.detach() for t, d in zip(tensors, differentiable, strict=True)])


def _refuse(record: Record, memory: Memory, setting: Setting) -> None:
    """Lets the setting refuse tensors from outside that calls use."""
    met = ((str(call.place), memory.outside.get(id(t))) for call in record.calls for t in call.tensors())
    setting.refuse((place, t) for place, t in met if t is not None)


def _check_apart(inputs: Inputs, arguments: Arguments, written: Collection[int]) -> None:
    """Lets no argument share memory with what forward writes into. ``written``: the keys of the storages."""
    fakes = {id(fake): fake for fake in inputs.by_name.values() if storage(fake) in written}
    names = [inputs.name(fake) for fake in fakes.values() if not isinstance(fake, nn.Parameter)]
    outside = [t for t, _ in inputs.memory.outside_of(written)]
    given = any(storage(fake) in written for fake, _ in arguments.by_fake.values())
    if names or outside or given:
        owners = [
            (inputs.root.get_submodule(path)._buffers, key) for path, _, key in (n.rpartition(".") for n in names)
        ]
        arguments.check_apart(lambda: [*outside, *(t for b, k in owners if (t := b.get(k)) is not None)], given)


def _write_back(replay: Replay, inputs: Inputs, arguments: Arguments) -> None:
    """Adds the lines that write into buffers and arguments what they hold at the end."""
    fakes = [*inputs.by_name.values(), *(fake for fake, _ in arguments.by_fake.values())]
    for fake in {id(t): t for t in fakes}.values():
        part = id(fake) in inputs.memory.bases  # what is written into the whole is in its parts
        if part or fake not in replay.values or not replay.values.is_written(fake):
            continue
        if inputs.has(fake) and isinstance(inputs.tensor(fake), nn.Parameter):
            raise updated_parameter(inputs.name(fake))
        new = replay.values.read(fake)
        if inputs.has(fake):
            inputs.write(fake, new)
        elif arguments.proxy(fake).requires_grad:
            raise RuntimeError(
                f"forward writes into its argument {arguments.proxy(fake).name!r}, which requires a gradient: write "
                "into a clone of it, or pass it detached"
            )
        else:
            arguments.check_alone(fake)
            _write(arguments.proxy(fake), new)


def _write(old: TensorProxy, new: TensorProxy) -> None:
    """Adds the line that writes into an input. It is the primitive: where Thunder sees its own function for that, it
    takes arguments that are parts of one tensor for the same."""
    converted = clang.maybe_convert_to_dtype(new, old.dtype)
    prims.copy_(converted, old, grad_enabled=get_compile_data().is_grad_enabled)


def _tokens(record: Record) -> list[torch.Tensor]:
    """What the checks of a record have made."""
    return [t for call in record.calls if isinstance(call.function, Check) for t in call.results]
