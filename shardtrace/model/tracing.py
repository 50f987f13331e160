"""The hook into ``thunder.jit``: a sharded module adds its own passes when Thunder traces its forward.

Thunder's interpreter finds a lookaside for functions of a sharded module. It adds the passes, puts full-shape stand-ins
in place, and records the call (:mod:`shardtrace.record`).

CUDA graphs: what ``CUDAGraphTransform`` of Thunder cannot hold is refused, by name. The lines of a step become graphs.
In the first step they run three times, and once more while CUDA notes their kernels. Later steps launch these kernels
and run no line. A graph reads parameters where they are, and copies its other inputs into memory of its own. Therefore
it cannot hold a line that acts in Python, keeps an object of Python for backward, waits for the device, or writes into
an input.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from passes.analysis.recognise import module_of
from passes.analysis.seconds import compute_seconds
from passes.comm.sequence import Part, gather_parts
from passes.compat.jit import (
    Collections,
    check_dtensors,
    compile_data_and_stats,
    deeper_recursion,
    live_tensors,
    proxied_values,
    raised,
    refresh_modules,
    without_log_of_fakes,
)
from passes.kernels import executor as kernels
from passes.kernels.executors import fuses, with_regions
from passes.kernels.torch_call import call_of
from passes.pipeline import Compilation, Facts, FirstStage, Observe, Pass, pipeline
from passes.plan import Axis, CostModel, Gradients, ShardedParameter
from passes.plan.plan import ContextPlan, Split
from passes.sequence import Context
from passes.split import Tensors
from shardtrace.model.shards import current
from shardtrace.model.state import REMEDY, ShardedState, link_of, own_state, refuse_shard, states_in
from shardtrace.options.policies import ExpertParallel
from shardtrace.ranks.consensus import compare
from shardtrace.ranks.mesh import is_alone, transport
from shardtrace.ranks.progress import compiling
from shardtrace.record import front
from shardtrace.record.calls import Record, only_losses
from shardtrace.record.eager import Eager
from shardtrace.record.recording import Comparison, Recording, Varying, is_comparable

import torch
import torch.distributed as dist
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import unwrap
from thunder.core.jit_ext import get_jit_ctx, register_general_jit_lookaside
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from thunder.extend import FusionExecutor, TemporaryExecutor, get_always_executors, get_default_executors
from thunder.transforms.cudagraph import CUDAGraphTransform
from thunder.transforms.extraction_only_prologue_transform import ExtractionOnlyPrologueTransform
from thunder.transforms.prune_prologue_checks import PrunePrologueChecks
from torch import nn

# ---- sequences in parts ----


def contexts_of(states: Sequence[ShardedState], facts: Facts) -> tuple[Tensors | None, Context | None]:
    """How the models' parameters and sequences are split over ranks; None if each rank computes with whole ones.

    Raises RuntimeError if another model of the jitted function splits them in another way.
    """
    found = [(_tensors_of(state), _context_of(state)) for state in states]
    known = (facts.tensors, facts.context) if facts.models else found[0]
    for state, contexts in zip(states, found, strict=True):
        if [*map(_way, contexts)] != [*map(_way, known)]:
            raise RuntimeError(
                f"{state.model_name} is computed together with a model that splits sequences or parameters over other "
                "ranks, or in another way, or not at all: pass the same mesh and the same context_parallel or "
                "tensor_parallel to fsdp() for both, or jit them apart"
            )
    return known


def _context_of(state: ShardedState) -> Context | None:
    plan, options = plan_of(state), state.options.context
    if plan is None or options is None:
        return None
    experts = isinstance(options, ExpertParallel)
    return Context(plan, options.sequence_dim, returns_parts=options.returns == "part", experts=experts)


def plan_of(state: ShardedState) -> ContextPlan | None:
    """The ranks that hold the parts of the model's sequences; None if each rank has whole ones."""
    group, options = state.groups.context, state.options.context
    if group is None or options is None:
        return None
    direct = transport(group, {e.device.type for e in state.entries}).direct
    return ContextPlan(
        group.size(),
        group.rank(),
        pieces=options.pieces,
        attention=options.attention,
        direct=direct,
        runtime=state.runtime,
        seats=state.groups.seats["context"],
        cost=state.cost,
    )


def _tensors_of(state: ShardedState) -> Tensors | None:
    group, options = state.groups.tensor, state.options.tensor
    if group is None or options is None:
        return None
    direct = transport(group, {e.device.type for e in state.entries}).direct
    plan = ContextPlan(
        group.size(),
        group.rank(),
        pieces=1,
        axis=Axis.TENSOR,
        direct=direct,
        runtime=state.runtime,
        seats=state.groups.seats["tensor"],
        cost=state.cost,
        within=sequences.pieces * sequences.ranks if (sequences := plan_of(state)) is not None else 1,
    )
    return Tensors(plan, hows=options.hows(e.name for e in state.entries))


def _way(context: Context | None) -> tuple[Any, ...]:
    """A key that is equal for models that can be computed together."""
    if context is None or context.plan.ranks == 1:
        return ()
    plan = context.plan
    return plan.runtime.group(plan.axis), plan.attention, plan.pieces, context.dim, context.returns_parts


def takes_parts(state: ShardedState) -> bool:
    """Whether ranks give the model their parts of a sequence."""
    group, options = state.groups.context, state.options.context
    return group is not None and group.size() > 1 and options is not None and options.arguments == "part"


def check_call_of_parts(state: ShardedState, call: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raises RuntimeError if a jitted function around a model that takes parts could compute with parts itself, or if a
    model that computes the loss of several batches is asked for a sum over one."""
    function = get_compile_data().fn
    if takes_parts(state) and function is not state.model and getattr(function, "__wrapped__", None) is not call:
        of_batches = isinstance(state.options.context, ExpertParallel)
        parts = "parts of a batch (expert_parallel)" if of_batches else 'parts of sequences (arguments="part")'
        choose = "" if of_batches else ', or choose ContextParallel(arguments="whole")'
        raise RuntimeError(
            f"{state.model_name} takes {parts}, but a module in it is called by itself, or the model in a jitted "
            f"function that would see whole ones: call the model as a whole, and jit it alone{choose}"
        )
    if isinstance(state.options.context, ExpertParallel) and unwrap(kwargs.get("num_items_in_batch")) is not None:
        raise RuntimeError(
            f"{state.model_name} is given num_items_in_batch, by which transformers divides a sum over one batch, but "
            "its loss is that of the batches of all ranks of expert_parallel: set model.accepts_loss_kwargs = False "
            "before you make the Trainer, which then asks for means"
        )


def wholes(state: ShardedState, context: Context | None) -> Callable[[TensorProxy], TensorProxy]:
    """Gives for the proxy of an argument that of the whole value of which it is a part. The trace gathers it, once."""
    if context is None or not takes_parts(state):
        return lambda proxy: proxy
    dim, ranks, made = context.dim, context.plan.ranks, dict[str, TensorProxy]()

    def whole_of(p: TensorProxy) -> TensorProxy:
        if p.ndim <= dim or p.shape[dim] < context.plan.pieces:
            return p
        if p.shape[dim] % context.plan.pieces:
            raise RuntimeError(
                f"argument {p.name!r} of {state.model_name} has {p.shape[dim]} positions in dimension {dim}, but a "
                "part of a sequence has two chunks of equal length: cut it with shardtrace.shard_sequence"
            )
        if p.name not in made:
            made[p.name] = gather_parts(p, Part(context.plan, Split.along(dim, ranks * p.shape[dim])))
        return made[p.name]

    return whole_of


def compare_batches(state: ShardedState, given: Mapping[str, torch.Tensor]) -> None:
    """Raises RankMismatchError on all ranks that share a batch if they were given different ones. Compares the first
    one of these shapes, so that a rank that compiles again by itself does not wait for the others."""
    group = state.groups.tensor if takes_parts(state) else state.groups.sharing
    shapes = tuple((name, t.dtype, t.shape) for name, t in sorted(given.items()))
    if group is None or is_alone(group) or shapes in state.compared:
        return
    compare(
        group,
        f"the batch that {state.model_name} is given",
        [f"{name}: {dtype} of shape {tuple(shape)}, {_digest(given[name])}" for name, dtype, shape in shapes],
        timeout=state.options.checks.timeout,
        hint="the ranks of context_parallel or tensor_parallel need the same batch: let the sampler count the data "
        "ranks of the mesh",
    )
    state.compared.add(shapes)


def _digest(t: torch.Tensor) -> str:
    values = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    return f"digest {torch.hash_tensor(values).view(torch.int64).item()}" if t.numel() else "empty"


# ---- CUDA graphs ----


OTHERWISE = "or call thunder.jit without CUDAGraphTransform"


def makes_graphs(transforms: Iterable[Transform]) -> bool:
    """True if the lines of a step become CUDA graphs."""
    return any(isinstance(t, CUDAGraphTransform) for t in transforms)


def refuse_graphs(state: ShardedState) -> None:
    """Raises RuntimeError if the steps of a model act in Python."""
    name, ranks = state.model_name, state.group.size()
    if any(p.host for p in state.plans.values()):
        raise RuntimeError(
            f"a CUDA graph cannot hold {name}, whose parameters are in host memory, because the program waits for "
            f"their copies: call fsdp() without offload_policy, {OTHERWISE}"
        )
    if ranks > 1:
        raise RuntimeError(
            f"a CUDA graph cannot hold {name} over {ranks} ranks, because the program looks at each collective whether "
            f"another rank has failed: run on one rank, {OTHERWISE}"
        )
    if state.runtime.gradients() in (Gradients.KEPT, Gradients.ADDED):
        raise RuntimeError(
            f"a CUDA graph cannot hold {name} inside or after no_sync, because the program adds up its gradients: call "
            f"no_sync(model, reduce_each=True), {OTHERWISE}"
        )


def refuse_lines(name: str, computation: TraceCtx) -> None:
    """Raises RuntimeError if a line of a model's computation, as it was traced, cannot be in a graph."""
    inputs = {a.name for a in computation.args}
    for bsym in computation.bound_symbols:
        if reason := _obstacle(bsym, inputs):
            raise RuntimeError(f"a CUDA graph cannot hold {name}, because {reason}, {OTHERWISE}")


def _obstacle(bsym: BoundSymbol, inputs: set[str]) -> str:
    call = call_of(bsym.sym)
    if call is not None:
        function = getattr(call.function, "__name__", call.name).removeprefix("eager_")
        module = module_of(bsym)
        where = f"{function} in {module}" if module else function
        if isinstance(call.function, Eager):
            return f"PyTorch runs {where}, which may read values of tensors: leave it out of the model"
        if call.returned and call.program is None:
            return (
                f"torch's own autograd differentiates {where}, and keeps objects of Python for backward: compute it "
                "with other functions"
            )
    for place in _written(bsym):
        if place in inputs:
            what = place.removeprefix("t_")
            return f"forward writes into {what!r}, of which a graph has a copy: write outside of forward"
    return ""


def _written(bsym: BoundSymbol) -> Iterator[str]:
    """The tensors into which a line copies."""
    if bsym.sym.id is PrimIDs.COPY_:
        yield bsym.args[1].name
    for part in bsym.subsymbols:
        yield from _written(part)


# ---- tracing ----


def add_kernels(data: Any, cost: CostModel) -> None:
    """Adds torch's own kernels to the executors of Thunder's ``data`` of a compilation, and lets torch.compile have the
    lines of torch, in the regions that ``cost`` says are worth compiling.

    No kernels if the user chose the executors, or if a default one fuses (nvFuser). They go ahead of Thunder's
    executor for cross entropy, which would fuse nothing else, and after those with attention for CUDA.
    """
    own = tuple(e for e in data.executors_list if isinstance(e, TemporaryExecutor))
    defaults, always = get_default_executors(), get_always_executors()
    fusing = tuple(e for e in defaults if isinstance(e, FusionExecutor))
    chosen = tuple(data.executors_list) != (*own, *defaults, *always)
    if not chosen and not any(map(fuses, fusing)):
        operators = tuple(e for e in defaults if e not in fusing)
        data.executors_list = (*own, *operators, kernels, *fusing, *always)
    data.executors_list = with_regions(data.executors_list, partial(compute_seconds, cost))


def dump() -> Observe | None:
    """What writes the result of each pass, as ``08-forward-schedule.py``; numbers follow on those in the folder. None
    if the environment does not ask for it, and on every rank but the first."""
    folder = Path(os.environ.get("SHARDTRACE_DUMP", ""))
    if folder == Path() or dist.get_rank() != 0:
        return None

    def write(what: str, name: str, trace: TraceCtx) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in folder.glob("[0-9]*-*.py"))
        (folder / f"{number:02d}-{what}-{name}.py").write_text(f"{trace}\n")

    return write


F = TypeVar("F", bound=Callable[..., Any])
KEPT = 64  # compiled steps of a jitted function

# Transforms that every jitted function with a sharded module gets after its own. The command line uses them to see the
# traces that a script compiles.
watching: ContextVar[tuple[Transform, ...]] = ContextVar("watching", default=())
# Transforms of Thunder that leave the computation alone. Others say so by an attribute ``sees_no_lines``.
SEE_NO_LINES = (ExtractionOnlyPrologueTransform, PrunePrologueChecks)


def _trace(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Records the call of a sharded module at full shapes. Thunder's interpreter has wrapped all arguments."""
    try:
        with deeper_recursion(), without_log_of_fakes():
            Collections.become_rare()  # until the last stage has seen the step
            root: nn.Module = unwrap(module)
            return _trace_models(call, module, args, kwargs, [*dict.fromkeys([own_state(root), *states_in(root)])])
    except BaseException as error:  # Thunder would wrap it in an error that prints the model
        Collections.become_usual()
        return raised(error)


def _trace_models(call: Callable[..., Any], module: Any, args: Any, kwargs: Any, states: Sequence[ShardedState]) -> Any:
    _prepare(states)
    compilation = _compilation(states)
    refresh_modules(lambda p: functools.reduce(lambda q, state: state.now(q), states, current(p)), compilation.live)
    _drop_oldest(compilation, states[0])
    facts = compilation.trace(get_jit_ctx())
    facts.tensors, facts.context = contexts_of(states, facts)
    check_call_of_parts(states[0], call, kwargs)
    facts.chunks = states[0].options.compile.chunk_loss
    in_step = [*getattr(facts.contract, "states", ()), *states]  # also of earlier calls
    if makes := [s.contract for s in in_step if s.contract is not None]:
        facts.contract = makes[0](compilation, facts, list(dict.fromkeys(in_step)))
    by_stand_in: dict[int, ShardedParameter] = {}
    for state in states:
        if state.model_name not in facts.models:
            facts.models.append(state.model_name)
            if state.options.checks.prove:
                facts.proving.append(state.model_name)
        facts.parameters.steps[state.runtime] = state.runtime.step()
        by_stand_in |= state.by_stand_in

    def found(tensor: torch.Tensor, wrapped: Any) -> None:
        if facts.context is not None:
            facts.context.kept.append(wrapped.value.history)
        if id(tensor) in by_stand_in:
            facts.parameters.add(wrapped.value.history, by_stand_in[id(tensor)])

    proxied = proxied_values()  # grows until tracing ends
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(state.stand_ins())
        name = f"shardtrace_state_{len(facts.guards)}"
        varying = compilation.earlier.setdefault(name, Varying(partial(_warn, states[0])))
        setting = _setting(
            states, facts.known, found, by_stand_in, earlier=facts.changes,
            state=name, varying=varying, whole_of=wholes(states[0], facts.context),
            parts=facts.tensors is not None or facts.context is not None,
        )  # fmt: skip
        with compiling(states[0].model_name, states[0].group):
            traced = front.trace(call, module, args, kwargs, setting)
        compare_batches(states[0], traced.given)
    facts.guards += filter(None, [live_tensors(compilation.live)])
    _add_traced(facts, traced, name)
    for state in states:
        facts.at_end.append(partial(_refuse_values, state, proxied))
        facts.at_end.append(partial(_refuse_unsharded, state, proxied))
    if makes_graphs(get_compile_data().transforms):
        computation = get_jit_ctx().computation_trace
        facts.at_end.append(partial(refuse_lines, states[0].model_name, computation))
        facts.before_lowering.extend(partial(refuse_graphs, state) for state in states)
    return traced.result


def _setting(
    states: Sequence[ShardedState],
    known: dict[int, Any],
    found: front.Found,
    by_stand_in: Mapping[int, ShardedParameter],
    *,
    parts: bool,
    **others: Any,
) -> front.Setting:
    """What the record of a call needs. ``parts``: whether arguments are parts of sequences."""
    stand_ins = {id(e.shard): e.stand_in for state in states for e in state.entries}
    options = states[0].options
    return front.Setting(
        known=known,
        found=found,
        parameter_of=lambda tensor: by_stand_in.get(id(tensor)),
        stand_in_of=partial(_stand_in_of, stand_ins),
        compare=partial(_comparison, states),
        refuse=partial(_refuse_shards, states),
        fall_back=options.compile.eager is not None,
        obstacle=_why_no_call(),
        computing=not makes_graphs(get_compile_data().transforms),
        whole=options.precision is None and not parts,  # whose casts and parts are its own
        variants=states[0].variants,
        returned=only_losses if options.compile.returns == "loss" else None,
        **others,
    )


def _stand_in_of(stand_ins: Mapping[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor that forward uses, which is the tensor itself unless it is a parameter."""
    found = stand_ins.get(id(current(tensor)))
    if found is None:
        refuse_shard("a call", tensor)
        return tensor
    return found


def _add_traced(facts: Facts, traced: front.Traced, name: str) -> None:
    """Adds what the passes need of a traced call. ``name`` is that of the tensors which forward leaves on modules."""
    facts.guards.append(traced.guard)
    facts.last_guards.extend(traced.last_guards)
    if traced.setter is not None:
        facts.setters[name] = traced.setter
    facts.rebuild = traced.rebuild
    facts.remark = "; ".join(filter(None, (facts.remark, traced.remark)))


def _drop_oldest(compilation: Compilation, state: ShardedState) -> None:
    """Makes room for one more compiled step. The one of the last call counts as the newest."""
    _, stats = compile_data_and_stats()
    entries = stats.interpreter_cache
    if len(entries) < KEPT:
        return
    _warn(state, f"{KEPT} steps were compiled. Each further one takes the place of the oldest")
    entries.sort(key=lambda entry: entry.computation_traces is stats.last_traces)
    del entries[: len(entries) - KEPT + 1]
    alive = {id(trace) for entry in entries for trace in entry.computation_traces}
    compilation.finished = [f for f in compilation.finished if f.record is not None and id(f.record.traced) in alive]


def _warn(state: ShardedState, line: str) -> None:
    if is_alone(state.group) or state.group.rank() == 0:
        warnings.warn(f"{state.model_name}: {line}", stacklevel=2)


def _prepare(states: Sequence[ShardedState]) -> None:
    """Raises what keeps the models from being traced, and gives the jitted function our executors and watchers."""
    data = get_compile_data()
    if get_cache_option() is CACHE_OPTIONS.SYMBOLIC_VALUES:
        raise RuntimeError(
            'a sharded model is recorded for the shapes of one call: call thunder.jit without cache="symbolic values", '
            "which would use the step for other shapes"
        )
    for state in states:
        try:
            state.check_traceable()
            if makes_graphs(data.transforms):
                refuse_graphs(state)
        except RuntimeError as error:
            state.runtime.announce(str(error))
            raise
    if any(state.options.compile.kernels for state in states):
        add_kernels(data, states[0].cost)
    if not isinstance(data.transforms, list):
        raise TypeError(
            f"thunder.jit(transforms=...) takes a list, not a {type(data.transforms).__name__}: ours join it"
        )
    data.transforms.extend(watcher for watcher in watching.get() if watcher not in data.transforms)


def _comparison(states: Sequence[ShardedState], recording: Recording, done: Record) -> Comparison | None:
    """What records a step's forward again; None if it is not asked for."""
    how = states[0].options.checks.recording

    @contextmanager
    def with_stand_ins() -> Iterator[None]:
        with ExitStack() as stack:
            for state in states:
                stack.enter_context(state.stand_ins())
            yield

    def report(difference: str) -> None:
        states[0].difference = difference

    if not how or not is_comparable(done):
        return None
    return Comparison(recording, done, every=None if how is True else how, around=with_stand_ins, report=report)


def _why_no_call() -> str:
    """Why the lines of blocks must stand in the trace; empty if one line may stand for them."""
    others = (t for t in get_compile_data().transforms if not isinstance(t, (Pass, *SEE_NO_LINES)))
    seeing = [t for t in others if not getattr(t, "sees_no_lines", False)]
    return f"{type(seeing[0]).__name__} is to see them" if seeing else ""


def _compilation(states: Sequence[ShardedState]) -> Compilation:
    """The current compilation. Its passes join those of the jitted function once, as the first models ask for."""
    transforms = get_compile_data().transforms
    for transform in transforms:
        if isinstance(transform, FirstStage):
            return transform.compilation
    compilation = Compilation()
    # the list that thunder.jit goes through after tracing
    disabled = {name for state in states for name in state.options.compile.disable_passes}
    transforms[:] = pipeline(compilation, transforms, disable=disabled, observe=dump())
    return compilation


def _refuse_shards(states: Sequence[ShardedState], outside: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises RuntimeError for a tensor that forward uses, with its place, if it is in the memory that a parameter had
    before ``fsdp``, or a shard that has no stand-in."""
    for place, t in outside:
        refuse_shard(place, t)
        link = link_of(t)
        if link is None and (owner := next(filter(None, (s.left.owner(t) for s in states[0].known)), "")):
            raise RuntimeError(f"{place}: a tensor lies in the memory of {owner}, which fsdp() has replaced: {REMEDY}")


def _refuse_values(state: ShardedState, proxied: set[Any]) -> None:
    for value in _parameters(proxied):
        link = link_of(value.original_value)
        if link is not None and link.state is state:
            _refuse_value(value.original_value)


def _refuse_value(parameter: torch.Tensor) -> None:
    """Raises RuntimeError for a sharded parameter outside of the forward that gathers it."""
    if (link := link_of(parameter)) is not None:
        raise RuntimeError(
            f"parameter {link.entry.name!r} of {link.state.model_name} is used outside the forward of the sharded "
            "module, or through a list of its own, as in nn.LSTM, where it is this rank's shard: use it inside, by "
            "its name, or apply fsdp() to the module that uses it"
        )


@functools.cache  # once for each process
def refuse_dtensors() -> None:
    """Makes Thunder raise for a sharded parameter outside of its forward as soon as it meets it, with its name."""
    check_dtensors(_refuse_value)


def _refuse_unsharded(state: ShardedState, proxied: set[Any]) -> None:
    """Raises RuntimeError for a trainable parameter that is not sharded: each rank would train it by itself."""
    ignored = set(map(id, state.ignored))
    for value in _parameters(proxied):
        p = value.original_value
        known = link_of(p) is not None or id(p) in ignored or getattr(p, "is_meta", False)  # a stand-in
        if p.requires_grad and p.numel() and not known and state.group.size() > 1:
            raise RuntimeError(
                f"parameter {_name_of(p, value)!r} is trained beside the sharded {state.model_name}, but not sharded "
                "itself: ranks would drift apart, because its gradient is not reduced. Call fsdp() on the whole model, "
                "once all modules are in place; or freeze the parameter, or pass it as fsdp(ignored_params=[...])"
            )


def _parameters(proxied: set[Any]) -> list[Any]:
    """The wrapped parameters, in an order that is the same on all ranks."""
    found = [value for value in proxied if isinstance(value.original_value, nn.Parameter)]
    return sorted(found, key=lambda value: str(value.value.name))


def _name_of(parameter: nn.Parameter, value: Any) -> str:
    """The parameter's name in a jitted module, or the name of its proxy in a jitted function."""
    function = get_compile_data().fn
    named = function.named_parameters() if isinstance(function, nn.Module) else ()
    return next((name for name, p in named if p is parameter), value.value.name)


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Thunder record ``function`` as a whole, as it does a call of the model. The first argument of ``function``
    is a sharded model."""

    @functools.wraps(function)
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(model, *args, **kwargs)

    register_general_jit_lookaside(call)(partial(_trace, function))
    return call


def recorded_in_place(function: F) -> F:
    """``function``, which Thunder records as a whole. Its first argument is a sharded module or a part of one."""
    register_general_jit_lookaside(function)(partial(_trace, function))
    return function
