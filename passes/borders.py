"""Passes over the borders of a computation: the prologue, the epilogue, the arguments that forward writes, other ranks.

``insert_guards``: guards that tell whether a compiled step is still right.

A guard that raises makes Thunder look for another compiled step, and compile one if there is none. Guards run ahead of
the checks of tensors.

``merge_checks``: it fetches all parameters of a module in one line, and checks all tensors in another.

Thunder writes two lines for each parameter. They cost more to compile than the call of a block that has a dozen: a
tenth of the first step of a GPT.

``compare_ranks``: compares across ranks the collectives that they have compiled, and inserts a check of each step
before it runs.

    check_ranks(ranks_0)        before a forward computes anything
    note(forward_ends_0)        the last line of a forward
    note(backward_begins_0)     the first line of a backward
    note(backward_ends_0)       the last line of a backward

The notes tell the next forward if an exception has left this rank in the middle of a step, or if the rank has skipped a
backward.

``rebuild_result``: what the model returns is made of the tensors of the step.

    result = rebuild(model_output, (t3, t4))

Thunder itself can return tensors in tuples, lists and dicts.

``set_state``: after each step the model's state is set as its forward has set it.

    set_state(state_0, (t3, t4))        before the epilogue returns

The tensors are results of the step, so that gradients flow through them. Tracing passes them by a line that packs a
buffer (:func:`passes.compat.jit.pack_tensors`), which this pass replaces.

``watch_backward``: watches the backward of a step.

    watch_backward((t0, t1), backward)      before an epilogue returns the outputs

The line puts a hook on the autograd node that calls the compiled backward. The hook runs before anything is sent, in
the mode of ``torch.autograd.grad``. It notes for :mod:`passes.parameters` the outputs that the backward does not come
from, and refuses what would be dropped or wrong silently:

- ``create_graph=True``, because autograd cannot differentiate a compiled backward: a gradient penalty;
- a hook on an output, or its ``retain_grad``, if this backward also comes from an output that is computed from it: all
  outputs belong to one node, so that no gradient passes from one to another.

The node calls what :mod:`passes.pipeline` chooses.

``keep_stream``: runs a backward on the stream on which its forward ran, as autograd does for other functions.

    keep_stream((t0,))        before an epilogue returns the outputs

Thunder hides its backward from autograd's streams behind a tensor on the meta device. It would run on the stream on
which ``loss.backward()`` is called, but autograd makes gradients ready, and reads the results, on forward's stream.
Nothing would order the two. A backward on the stream of its forward costs nothing.

``delay_writes``, over the computation: what forward writes into buffers and arguments is written at its end, and
returned.

    t5 = prims.copy_(t4, t_steps)                           before: anywhere
    return {"output": t3, "flat_args": [x, t_steps]}

    s = snapshot(t_steps)                                   after: t_steps is read here and nowhere else
    ...
    t5 = prims.copy_(t4, t_steps)
    return {"output": t3, "flat_args": [x, t5]}

Thunder's fusions do not look at writes. A fusion is dropped if no line reads a result of it, and autodiff leaves to
backward what forward does not return: hence the last line reads each write. Cheap lines of forward are repeated in
later fusions and in backward (thunder.core.rematerialization), when an input that is written holds another value: hence
such an input is read only once, by a line that no executor fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

from passes.analysis.calls import Flow, block_of, results_of_step, stops_gradients
from passes.analysis.liveness import collectives, issues
from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_deletion,
    is_issue,
    is_return,
    is_unpack,
    names,
    part_at,
    updated_by,
)
from passes.comm.symbols import Property, check_ranks, note, symbol
from passes.compat.jit import compile_data_and_stats, nodes_of_thunder, without_meta
from passes.kernels.executors import fuses
from passes.plan import Runtime, Step, TracedParameters
from passes.plan.runtime import Unused

import torch
from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.devices import DeviceType
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace, tracectx
from torch.utils.hooks import unserializable_hook

# ---- the prologue, and other ranks ----


Guard = Callable[[], None]


def insert_guards(
    prologue: TraceCtx, *, parameters: TracedParameters, guards: Sequence[Guard] = (), last_guards: Sequence[Guard] = ()
) -> TraceCtx:
    """Lets a call run only a step that is valid for it.

    Takes: a prologue.
    Gives: a line for the step of each sharded model and for each guard, ahead of the checks of tensors, and one for
    each last guard, which runs if all checks have passed.
    No-op when: there is neither a model nor a guard.
    """
    guards = [*(partial(r.check_step, parameters.step_of(r)) for r in parameters.runtimes), *guards]
    if not guards and not last_guards:
        return prologue
    lines = list(prologue.bound_symbols)
    first = next(i for i, b in enumerate(lines) if b.sym is prims.unpack_trivial)
    args = lines[first].output

    # it reads the call's arguments only because Thunder's PrunePrologueChecks takes a line that reads nothing for wrong
    def line(name: str, guard: Guard) -> BoundSymbol:
        return check_value.bind(ContextObject(name, lambda args: guard()), args, output=None)

    lines[-1:-1] = [line(f"last_guard_{i}", guard) for i, guard in enumerate(last_guards)]
    lines[first + 1 : first + 1] = [line(f"guard_{i}", guard) for i, guard in enumerate(guards)]
    new = from_trace(prologue)
    new.bound_symbols = lines
    return new


def _run_check(check: ContextObject, value: Any) -> None:
    check.obj(value)


# A line of the prologue: raises if the compiled step is not right for a value, or not right any more.
check_value = symbol("check_value", lambda check, value: None, _run_check, tags=[OpTags.DONT_DCE])


class Metadata(NamedTuple):
    """The properties that a tensor must have for the compiled step to fit."""

    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    requires_grad: bool


def merge_checks(prologue: TraceCtx) -> TraceCtx:
    """Merges the prologue's fetches of parameters, and its checks of tensors, into one line each.

    Takes: a prologue.
    Gives: one line for the parameters of each module, where the first of them was fetched, and one for all tensors,
    where the last was checked.
    No-op when: fewer than two tensors are checked.
    """
    lines = prologue.bound_symbols
    fetches: dict[str, list[BoundSymbol]] = {}
    for bsym in lines:
        if bsym.sym is prims.unpack_parameter:
            fetches.setdefault(bsym.args[0].name, []).append(bsym)
    checks = [b for b in lines if b.sym is prims.check_tensor_shape_and_metadata and _is_plain(b)]
    if len(checks) < 2:
        return prologue
    merged = {id(b): None for b in (*checks, *(b for found in fetches.values() for b in found))}
    instead = {id(found[0]): _fetch(i, found) for i, found in enumerate(fetches.values())}
    instead[id(checks[-1])] = _check(checks)
    new = from_trace(prologue)
    new.bound_symbols = [instead.get(id(b), b) for b in lines if id(b) in instead or id(b) not in merged]
    return new


def _is_plain(check: BoundSymbol) -> bool:
    """False if a dimension is symbolic."""
    return all(isinstance(d, int) for d in check.args[1])


def _fetch(i: int, fetches: Sequence[BoundSymbol]) -> BoundSymbol:
    names = ContextObject(f"names_{i}", tuple(b.args[1] for b in fetches))
    return fetch.bind(fetches[0].args[0], names, output=tuple(b.output for b in fetches))


def _check(checks: Sequence[BoundSymbol]) -> BoundSymbol:
    expected = (b.args[1:] for b in checks)
    metadata = [Metadata(tuple(shape), torch.device(d), dtype, grad) for shape, d, dtype, grad in expected]
    return check.bind(tuple(b.args[0] for b in checks), ContextObject("metadata", metadata), output=None)


def _run_fetch(module: Any, names: ContextObject) -> tuple[torch.Tensor, ...]:
    return tuple(map(module.get_parameter, names.obj))


_metadata = attrgetter(*Metadata._fields)  # at the speed of C


def _run_check_tensors(tensors: tuple[torch.Tensor, ...], metadata: ContextObject) -> None:
    found = list(map(_metadata, tensors))
    if found != metadata.obj:
        raise RuntimeError(f"expected tensors with {metadata.obj}, got {found}")  # Thunder then compiles another step


fetch = symbol("fetch_parameters", lambda module, names: None, _run_fetch)
check = symbol("check_tensors", lambda tensors, metadata: None, _run_check_tensors, tags=[OpTags.DONT_DCE])


def compare_ranks(trace: TraceCtx, *, parameters: TracedParameters) -> TraceCtx:
    """Compares the collectives of all ranks, when they are compiled and before they are sent.

    Takes: a forward or backward with its final collectives.
    Gives: the lines above for each model whose steps are compared. Adds the collectives, and the parameters that
    backward reads again, to the steps in ``parameters``.
    No-op when: no model has more than one rank.

    Raises:
        Exception: on every rank of a model, if its ranks have compiled different collectives.
    """
    for runtime, lines in sent(trace).items():
        parameters.step_of(runtime).collectives.extend(lines)
        runtime.compare_trace(lines)
    if not is_backward(trace) and TraceTag.AUGMENTED_FORWARD in trace.tags:
        saved = names(trace.bound_symbols[-1].args[1][0])
        for p in trace.args:
            if p.name in saved and (parameter := parameters.get(p)) is not None:
                parameters.step_of(parameter.plan.runtime).rereads.add(p.name)
    return insert_checks(trace, {runtime: parameters.step_of(runtime) for runtime in parameters.runtimes})


def sent(trace: TraceCtx) -> dict[Runtime, list[str]]:
    """The collectives of each model as texts, in order."""
    found: dict[Runtime, list[str]] = {}
    for bsym, row in zip(issues(trace), collectives(trace), strict=True):
        plan = bucket_of(bsym).plan if is_issue(bsym) else part_at(bsym).plan
        found.setdefault(plan.runtime, []).append(f"{row.phase}: {row}")
    return found


def insert_checks(trace: TraceCtx, steps: Mapping[Runtime, Step]) -> TraceCtx:
    """Returns the trace with checks and notes for each model whose steps are compared."""
    compared = [(runtime, step) for runtime, step in steps.items() if runtime.compares]
    if not compared:
        return trace
    new = from_trace(trace)
    lines = trace.bound_symbols
    first = next(i for i, b in enumerate(lines) if not is_unpack(b) and not is_deletion(b))
    last = next(i for i, b in enumerate(lines) if is_return(b))
    around = _around_backward if is_backward(trace) else _around_forward
    before, after = zip(*(around(i, *model) for i, model in enumerate(compared)), strict=True)
    new.bound_symbols = [*lines[:first], *before, *lines[first:last], *after, *lines[last:]]
    return new


def _around_forward(i: int, runtime: Runtime, step: Step) -> Iterator[BoundSymbol]:
    assert runtime.progress is not None
    yield _line(check_ranks, f"ranks_{i}", partial(runtime.compare_step, step))
    yield _line(note, f"forward_ends_{i}", partial(runtime.progress.end, step))


def _around_backward(i: int, runtime: Runtime, step: Step) -> Iterator[BoundSymbol]:
    assert runtime.progress is not None
    yield _line(note, f"backward_begins_{i}", partial(runtime.progress.begin, step, "backward"))
    yield _line(note, f"backward_ends_{i}", partial(runtime.progress.end, step))


def _line(symbol: Symbol, name: str, call: Callable[[], None]) -> BoundSymbol:
    why = "raises if another rank is about to run a different step" if symbol is check_ranks else "noted for that check"
    return symbol.bind(ContextObject(name, call), output=None).from_bsym(header=why)


# ---- the epilogue, and what forward writes ----


Rebuild = Callable[[Sequence[torch.Tensor]], Any]


def rebuild_result(epilogue: TraceCtx, *, rebuild: Rebuild | None) -> TraceCtx:
    """Returns what the model returns, made of the tensors of the step.

    Takes: an epilogue that returns a tuple of tensors.
    Gives: ``rebuild(tensors)`` as its result.
    No-op when: Thunder itself can return what the model returns.
    """
    if rebuild is None:
        return epilogue
    *lines, last = epilogue.bound_symbols
    new = from_trace(epilogue)
    with tracectx(new):
        result = AnyProxy(None, prefix="result")
    line = run_rebuild.bind(ContextObject("model_output", rebuild), tuple(last.args[0]), output=result)
    new.bound_symbols = [*lines, line, last.from_bsym(args=(result,))]
    return new


def _run(rebuild: ContextObject, tensors: tuple[Any, ...]) -> Any:
    return rebuild.obj(tensors)


run_rebuild = symbol("rebuild", lambda rebuild, tensors: None, _run, tags=[OpTags.DONT_DCE])


Setter = Callable[[tuple[torch.Tensor, ...]], None]


def set_state(epilogue: TraceCtx, *, setters: Mapping[str, Setter]) -> TraceCtx:
    """Sets after each step what forward sets on modules.

    Takes: an epilogue in which tracing has packed the tensors.
    Gives: a call of each setter in the place of the line that packed its tensors, by its name.
    No-op when: there are no setters.
    """
    if not setters:
        return epilogue
    new = from_trace(epilogue)
    for bsym in epilogue.bound_symbols:
        name = str(bsym.args[1]).lstrip(".") if bsym.sym is prims.pack_buffer else ""
        if name in setters:
            bsym = run_setter.bind(ContextObject(name, setters[name]), tuple(bsym.args[2]), output=None)
        new.bound_symbols.append(bsym)
    return new


def _run_set_state(setter: ContextObject, tensors: tuple[Any, ...]) -> None:
    setter.obj(tensors)


run_setter = symbol("set_state", lambda setter, tensors: None, _run_set_state, tags=[OpTags.DONT_DCE])


Choose = Callable[[Callable[..., Any], list[Any], list[Any]], Any]  # runs one for a compiled backward


class Watch(NamedTuple):
    """The model, what its backward fills, what chooses it, and of each output the numbers of others that are computed
    from it."""

    model: str
    unused: Unused
    choose: Choose | None
    others: Sequence[frozenset[int]]


def watch_backward(
    epilogue: TraceCtx, *, models: Collection[str], unused: Unused, record: Sequence[Any], choose: Choose | None
) -> TraceCtx:
    """Refuses a backward of which something would be dropped, notes which outputs it does not come from, and lets
    ``choose`` run it.

    Takes: an epilogue, and the computation whose outputs it gets, last in ``record``.
    Gives: a line that watches their backward, and fills ``unused`` when it runs.
    No-op when: no model was traced, or it computes no tensor.
    """
    outputs = results_of_step(epilogue, record[-1])
    if not outputs or not models:
        return epilogue
    *lines, last = epilogue.bound_symbols
    new = from_trace(epilogue)
    hook = ContextObject("backward", Watch(" and ".join(models), unused, choose, _others(record[-1], outputs)))
    new.bound_symbols = [*lines, watch.bind(outputs, hook, output=None), last]
    return new


def _others(computation: TraceCtx, outputs: Sequence[TensorProxy]) -> list[frozenset[int]]:
    """Of each output, the numbers of the others that are computed from it."""
    own = {o.name: frozenset([i]) for i, o in enumerate(outputs)}
    found: dict[str, frozenset[int]] = {}
    Flow(stops_gradients).follow(computation.bound_symbols, found, own)
    return [
        frozenset(
            i
            for i, other in enumerate(outputs)
            if other is not o and own[o.name] <= found.get(other.name, own[other.name])
        )
        for o in outputs
    ]


def _watch(outputs: tuple[torch.Tensor, ...], hook: ContextObject) -> None:
    model, unused, choose, others = hook.obj
    if any(others):  # first those from which the fewest are computed: each one follows all that are computed from it
        used: set[int] = set()
        for i in sorted(range(len(outputs)), key=lambda i: len(others[i])):
            if outputs[i].requires_grad:
                _observe(outputs[i], i, others[i], used, model)

    def begin(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward of {model} was called with create_graph=True, but a compiled backward cannot be "
                "differentiated and a gradient penalty would be dropped: call it with create_graph=False, or "
                "compute that loss without Thunder"
            )
        unused.begin(gradients)

    for node in nodes_of_thunder(outputs):
        node.register_prehook(begin)
        node.register_hook(without_meta)
    for node in nodes_of_thunder(outputs, of_backward=True) if choose is not None else ():
        node.compiled_backward = partial(choose, node.compiled_backward)


def _observe(output: torch.Tensor, number: int, others: frozenset[int], used: set[int], model: str) -> None:
    """Refuses a backward that comes from ``others``, too, if someone looks at the gradient of ``output``."""
    tensor = ref(output)

    def see(gradient: torch.Tensor | None) -> None:
        (used.discard if gradient is None else used.add)(number)
        watched = any(hook is not see and _sees_gradient(hook) for hook in (hooks() or {}).values())
        if not used.isdisjoint(others) and (watched or getattr(tensor(), "retains_grad", False)):
            raise RuntimeError(
                f"a result of {model} has a hook or retain_grad, and the loss also uses another result that is "
                "computed from it, whose part of the gradient it would not see: pass it in forward through a "
                "torch.autograd.Function that returns it, and do in its backward what the hook does"
            )

    output.register_hook(unserializable_hook(see))
    hooks = ref(output._backward_hooks)  # also those that are registered later


def _sees_gradient(hook: Any) -> bool:
    """False for the hooks by which Lightning only sees that a backward is its own."""
    return not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("lightning")


watch = symbol("watch_backward", lambda outputs, hook: None, _watch, tags=[OpTags.DONT_DCE])


WITHOUT_STREAMS = (DeviceType.CPU, DeviceType.META)


def keep_stream(epilogue: TraceCtx, *, models: Collection[str], record: Sequence[Any]) -> TraceCtx:
    """Runs a backward on the stream on which its forward ran.

    Takes: an epilogue, and the computation whose outputs it gets, last in ``record``.
    Gives: a line that notes the current stream.
    No-op when: no model was traced, or it computes no tensor on a device with streams.
    """
    *lines, last = epilogue.bound_symbols
    outputs = results_of_step(epilogue, record[-1])
    on_device = tuple(x for x in outputs if x.device.devicetype not in WITHOUT_STREAMS)
    if not on_device or not models:
        return epilogue
    new = from_trace(epilogue)
    new.bound_symbols = [*lines, keeping.bind(on_device, output=None), last]
    return new


class _Streams:
    """The stream of a forward, and the one on which its backward is called."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._forward = self._module.current_stream(device)
        self._called: Any = None

    def enter(self, gradients: Any) -> None:
        called = self._module.current_stream(self._device)
        if called != self._forward:
            self._called = called
            self._forward.wait_stream(called)
            self._module.set_stream(self._forward)

    def leave(self, results: Any, gradients: Any) -> None:
        called, self._called = self._called, None
        if called is not None:
            called.wait_stream(self._forward)
            self._module.set_stream(called)


def _note(outputs: tuple[torch.Tensor, ...]) -> None:
    for node in nodes_of_thunder(outputs, of_backward=True):
        streams = _Streams(outputs[0].device)
        node.register_prehook(streams.enter)
        node.register_hook(streams.leave)


keeping = symbol("keep_stream", lambda outputs: None, _note, tags=[OpTags.DONT_DCE])


# ---- writes ----


def _snapshot_meta(a: TensorProxy) -> TensorProxy:
    return TensorProxy(like=a, tags={ProxyTag.DETACHED_AUTOGRAD_GRAPH})  # what is written has no gradient


snapshot = symbol("snapshot", _snapshot_meta, torch.clone, properties=Property.PARTS)


def delay_writes(computation: TraceCtx) -> TraceCtx:
    """Writes into buffers and arguments when all lines have read them, and returns what was written.

    Takes: a computation whose lines write into its inputs.
    Gives: the writes at the end, and their results in the place of the inputs that are returned; a snapshot of each
    input that is written and that results depend on.
    No-op when: no line writes into an input, or no executor fuses.
    """
    written = _written(computation)
    if not written or not any(map(fuses, compile_data_and_stats()[0].executors_list)):
        return computation
    new = from_trace(computation)
    new.bound_symbols += [b for b in computation.bound_symbols if is_unpack(b)]
    now: dict[Variable, TensorProxy] = {}  # what each input holds after the lines so far
    for p in _needed(computation, written):
        with tracectx(new):
            now[variableify(p)] = snapshot(p)
    writes: list[BoundSymbol] = []
    results: dict[Variable, TensorProxy] = {}  # of the last write into each input
    for line in computation.bound_symbols:
        if is_unpack(line):
            continue
        if _target(line) in written:
            source, target = line.from_bsym_swap_proxies(now, skip_output=True).args[0], line.args[1]
            place = results.get(variableify(target), target)
            writes.append(line.from_bsym(args=(source, place)))
            now[variableify(target)] = now[variableify(line.output)] = source
            results[variableify(target)] = line.output
        elif is_return(line):
            new.bound_symbols += [*writes, line.from_bsym_swap_proxies(results)]
        else:
            new.bound_symbols.append(line.from_bsym_swap_proxies(now, skip_output=True))
    return new


def _target(line: BoundSymbol) -> str | None:
    """The name of the tensor that a line copies into."""
    return line.args[1].name if line.sym is prims.copy_ else None


def _written(computation: TraceCtx) -> set[str]:
    """The names of the inputs that are written by lines that only copy."""
    found = {name for b in computation.bound_symbols if (name := _target(b)) is not None}
    others = {name for b in computation.bound_symbols if _target(b) is None for name in updated_by(b)}
    return found & names(computation.args) - others


def _needed(computation: TraceCtx, written: set[str]) -> list[TensorProxy]:
    """The written inputs that something else depends on than what is written into them, as with a counter."""
    *lines, last = computation.bound_symbols
    sources: dict[str, set[str]] = {p.name: {p.name} & written for p in computation.args}
    _trace_back(lines, sources)
    found = {s for name in names(last.args[0]["output"]) for s in sources.get(name, ())}
    for line in lines:
        for target in updated_by(line):
            found |= {s for a in line.flat_proxy_args for s in sources.get(a.name, ())} - {target}
    return [p for p in computation.args if p.name in found and not p.requires_grad]


def _trace_back(lines: Iterable[BoundSymbol], sources: dict[str, set[str]]) -> None:
    """Adds to ``sources`` the inputs that the result of each line depends on."""
    for line in lines:
        given = [sources.get(a.name, set()) for a in line.flat_proxy_args]
        if (block := block_of(line)) is None or not any(given):
            sources.update((o.name, set().union(*given)) for o in line.flat_proxy_outs if o.name not in sources)
            continue
        inside = {p.name: sources.get(a.name, set()) for p, a in zip(block.inputs, line.args, strict=True)}
        _trace_back(block.trace.bound_symbols, inside)
        results = zip(line.output, block.outputs, strict=True)
        sources.update((o.name, inside.get(p.name, set())) for o, p in results)
