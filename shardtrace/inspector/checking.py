"""``prove``, ``check`` and reports: what a sharded step computes, and what it sends and keeps.

``prove`` shows without running anything that the compiled step is the unsharded program.

``check`` runs a step of a sharded and compiled model beside the same step in eager PyTorch.


Note [Rounding]. The same step in float64 decides what is rounding: the compiled step may be ``SLACK`` times as far from
it as eager PyTorch is, or as many units in the last place. Where the model does not run in float64, or computes
something else there, ``SLACK_ALONE`` units in the last place are rounding.

Note [Lines]. If something is different, the step is compiled again with the value of each call of torch among its
results, to find the first line that differs: a mode within the model's forward leaves them on a module, as any forward
could. Calls are compared by place, function and number: a model may ask ``torch.compiler.is_compiling``.
"""

from __future__ import annotations

import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from typing import Any, NamedTuple

import passes
from passes import Collective
from passes.analysis.calls import block_functions
from passes.analysis.liveness import StepLiveness, step_liveness
from passes.blocks import traced_block
from passes.compat.jit import attention_of_gpus
from passes.compat.versions import functional_transform
from passes.kernels.torch_call import call_of
from passes.pipeline import FirstStage
from passes.proof.prove import Difference, Proof, needs_backward
from passes.proof.prove import prove as prove_traces
from shardtrace.api import fsdp
from shardtrace.inspector.step_data import Rows
from shardtrace.model.state import link_of
from shardtrace.options.policies import whole_sequences
from shardtrace.record.arguments import is_absent
from shardtrace.record.calls import only_losses, tensors_in
from shardtrace.record.eager import EagerModule
from shardtrace.record.symbols import name_of
from shardtrace.record.watcher import is_library
from shardtrace.testing import Arguments, parse_arguments

import thunder
import torch
import torch.distributed as dist
from thunder.core.devices import to_torch_device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

# ---- the proof ----


__all__ = ["Difference", "Proof", "prove"]


def prove(cmodel: Callable[..., Any]) -> Proof:
    """Proves that the last call of a sharded model, or of a jitted function, computes the unsharded program.

    Collectives are erased by their laws. What is left, forward and backward, is compared with what Thunder makes of the
    recorded calls without any pass of shardtrace: the outputs, the gradient of each parameter, and all writes into
    memory that outlives the step. Nothing runs, and no other rank is needed.

    Returns:
        A :class:`Proof`. Its ``verdict`` is "proven", "rounding" (proven up to what travels with less precision) or
        "unproven"; it prints with the reasons.

    Raises:
        TypeError: if ``cmodel`` is not jitted or was not called yet.
        ValueError: if the call had no sharded model.
    """
    data, stats = thunder.compile_data(cmodel), thunder.compile_stats(cmodel)
    if data is None or not stats.last_traces:
        raise TypeError("prove() needs a call: call the sharded model, or the jitted function that calls it, first")
    forward, backward = executed(cmodel)
    assert forward is not None
    proof = prove_compiled(data, stats.last_traces, forward, backward, _functions(stats, forward, backward))
    if proof is None:
        raise ValueError("prove() found no sharded model in the last call: call shardtrace.fsdp(model) before it")
    return proof


Functions = Sequence[tuple[TraceCtx, Callable[..., Any]]]  # traces that run, with the functions that run them


def prove_compiled(
    data: Any, stages: Sequence[TraceCtx], forward: TraceCtx, backward: TraceCtx | None, functions: Functions = ()
) -> Proof | None:
    """Proves a step that Thunder has compiled with ``data``; None if it has no sharded model.

    Args:
        stages: the traces of its forward, one for each pass.
        forward: the one that runs.
        backward: likewise.
        functions: that run, each with its trace, whose texts are read.
    """
    compiled = [t.compilation for t in data.transforms if isinstance(t, FirstStage)]
    for facts in (facts for one in compiled for facts in one.finished):
        record, variables = facts.record, facts.variables
        if record is None or variables is None or not any(trace is record.traced for trace in stages):
            continue
        before, data.is_grad_enabled = data.is_grad_enabled, needs_backward(record.first)
        if facts.choose is not None:
            functions = [(t, facts.choose.function_of(t) or function) for t, function in functions]
        devices = {to_torch_device(p.device) for p in forward.args if isinstance(p, TensorProxy)}
        try:
            with attention_of_gpus() if any(map(is_absent, devices)) else nullcontext():  # as it was compiled
                contexts = facts.tensors, facts.context
                return variables.run(
                    prove_traces, record, facts.parameters, forward, backward, contexts, facts.border, functions
                )
        finally:
            data.is_grad_enabled = before
    return None


def _functions(stats: Any, forward: TraceCtx, backward: TraceCtx | None) -> Functions:
    """The functions of the compiled step that has these traces. Another backward than Thunder's own has none here."""
    found: list[tuple[TraceCtx, Callable[..., Any]]] = []
    for entry in stats.interpreter_cache:
        if entry.computation_traces[-1] is not forward:
            continue
        stages = (entry.computation_traces, entry.epilogue_traces, entry.backward_traces)
        for traces, function in zip(stages, (entry.computation_fn, entry.epilogue_fn, entry.backward_fn), strict=True):
            if function is not None and traces and (traces is not entry.backward_traces or traces[-1] is backward):
                found.append((traces[-1], function))
    return found


def executed(cmodel: Callable[..., Any]) -> tuple[TraceCtx | None, TraceCtx | None]:
    """The executed trace of the last forward, and that of its backward."""
    forward = thunder.last_traces(cmodel)
    # on a cache hit Thunder updates only last_traces: the matching backward is in the cache
    entries = thunder.compile_stats(cmodel).interpreter_cache
    uncached = thunder.last_backward_traces(cmodel)
    backward: list[Any] = next((e.backward_traces for e in entries if e.computation_traces is forward), uncached)
    last = next((t for t in reversed(forward) if t.bound_symbols), None)
    return last, backward[-1] if backward else None


# ---- the comparison with eager PyTorch ----


# ---- check ----


SEED = 0
SLACK, SLACK_ALONE = 16.0, 1000.0
UNRELATED = 0.01  # of the largest value: what float64 differs in by more than this is another computation
VERDICTS = ("equal", "rounding", "different")
KINDS = ("line", "gradient", "buffer")  # that belong to a module

TRUSTED = "trusted: torch's kernels and autograd, the backend's collectives, the optimizer (docs/proof.md)"

Tensors = Mapping[Any, torch.Tensor]


class Line(NamedTuple):
    """The ``number``-th call of a function at a line of the model's source, in a module."""

    module: str
    function: str
    file: str
    line: int
    number: int

    def __str__(self) -> str:
        return f"{self.function} at {self.file}:{self.line}"


@dataclass(frozen=True)
class Row:
    """One comparison.

    ``what`` is "result", "gradient", "buffer", "input" or "line", ``verdict`` "equal" (to the bit), "rounding" or
    "different". ``difference`` is the largest one, relative to the largest value; ``eager`` is that of eager PyTorch
    from float64, nan if float64 does not decide.
    """

    what: str
    module: str
    name: str
    verdict: str
    difference: float = 0.0
    eager: float = nan
    note: str = ""

    def __str__(self) -> str:
        eager = "" if self.eager != self.eager else f"; eager PyTorch is {self.eager:.1e} from float64"
        size = self.note or f"by {self.difference:.1e} of the largest value{eager}"
        where = f" of {self.module}" if self.what == "line" and self.module else ""
        return f"{self.what} {self.name}{where}: {size}"


@dataclass(frozen=True)
class Check:
    """The result of :func:`check`. ``print`` shows it by modules.

    ``rows`` compare results, gradients, buffers and inputs; ``lines``, if any of them is different, what each call of
    torch in forward returns. ``by_torch`` counts the functions whose lines are torch's own, and modules that PyTorch
    runs. ``proof`` is that of the compiled step, which begins where ``rows`` end: with the record that they compare.
    """

    rows: tuple[Row, ...]
    lines: tuple[Row, ...]  # none if nothing is different
    by_torch: Mapping[str, int]
    remarks: tuple[str, ...]
    proof: Proof | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return all(row.verdict != "different" for row in self.rows)

    @property
    def first(self) -> Row | None:
        """The first line that differs by more than rounding."""
        return next((row for row in self.lines if row.verdict == "different"), None)

    def __str__(self) -> str:
        wrong = [row for row in self.rows if row.verdict == "different"]
        found = [*(f"different: {row}" for row in wrong), *([f"first of all: {self.first}"] if self.first else [])]
        torchs = ", ".join(f"{name} {count}" for name, count in sorted(self.by_torch.items()))
        counts = Counter(row.verdict for row in self.rows)
        total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        return "\n".join(
            [
                *_by_module([*self.lines, *self.rows]),
                *found,
                f"lines of torch: {torchs or 'none'}",
                *self.remarks,
                *([str(self.proof), TRUSTED] if self.proof is not None else ()),
                f"{'DIFFERENT' if wrong else 'the same' if counts['rounding'] else 'equal to the bit'}: "
                f"of {len(self.rows)} results, gradients, buffers and inputs {total}",
            ]
        )


def _by_module(rows: Sequence[Row]) -> Iterator[str]:
    """A table of the modules in which anything is not equal to the bit."""
    cells: dict[str, dict[str, str]] = {}
    for row in (row for row in rows if row.what in KINDS):
        cell = cells.setdefault(row.module, {})
        cell[row.what] = max(cell.get(row.what, "equal"), row.verdict, key=VERDICTS.index)
    shown = {module: cell for module, cell in cells.items() if set(cell.values()) != {"equal"}}
    kinds = [kind for kind in KINDS if any(kind in cell for cell in cells.values())]
    width = max(map(len, (*shown, "module")), default=0)
    if shown:
        yield f"{'module':{width}}  " + "  ".join(f"{kind + 's':10}" for kind in kinds).rstrip()
    for module, cell in shown.items():
        yield f"{module or '(the model)':{width}}  " + "  ".join(f"{cell.get(kind, '-'):10}" for kind in kinds).rstrip()
    if equal := len(cells) - len(shown):
        yield f"{equal} {'other ' if shown else ''}modules: equal to the bit"


def check(model: nn.Module | Callable[[], nn.Module], example_inputs: Any, **fsdp_options: Any) -> Check:
    """Runs a step of a model in eager PyTorch, and sharded and compiled, and compares them.

    Compared are results, gradients, buffers and inputs after the step. If any of them differs by more than rounding, so
    is what each call of torch in forward returns, to find the first one that differs. The compiled step is proven, too:
    the report says what was compared, what was proven and what is trusted. The loss is the first result without
    dimensions, else a weighted sum of all results. All ranks take the same model and inputs. The model is not changed:
    several copies of it are made.

    Args:
        model: a module, or a function that returns one.
        example_inputs: a tuple of arguments, a mapping of keyword arguments, or the only argument.
        fsdp_options: options of :func:`shardtrace.fsdp`. ``mp_policy`` and rounded communication make a difference.

    Without a process group or torchrun's environment, a group of one rank is made for the time of the check.

    Raises:
        Exception: what the model raises in eager PyTorch, or what its compilation raises.
    """
    whole = model if isinstance(model, nn.Module) else model()
    arguments = parse_arguments(example_inputs)
    fsdp_options |= whole_sequences(fsdp_options)
    remarks = list(_rounding_options(fsdp_options))
    policy = fsdp_options.get("compile_policy")
    step = partial(_step, returned=only_losses) if policy is not None and policy.returns == "loss" else _step
    expected = step(copy.deepcopy(whole), arguments)
    exact = _in_float64(step, whole, arguments, remarks) or Step({})
    with one_rank():
        cmodel = thunder.jit(fsdp(copy.deepcopy(whole), **fsdp_options))
        found = _step(cmodel, arguments, into=expected.into)
        rows = _worst_of_ranks(_compared(found, _parts_of_rank(cmodel, expected), _parts_of_rank(cmodel, exact)))
        done = Check(tuple(rows), (), _torchs_lines(cmodel), (), prove(cmodel))
        if not done.ok:
            try:
                ours = _values(copy.deepcopy(whole), arguments, lambda m: thunder.jit(fsdp(m, **fsdp_options)))
                done = replace(done, lines=tuple(_lines(whole, arguments, ours, remarks)))
            except Exception as error:  # what is checked has compiled
                remarks.append(f"no lines were compared: {type(error).__name__}: {error}")
    return replace(done, remarks=tuple(remarks))


def _rounding_options(options: Mapping[str, Any]) -> Iterator[str]:
    """A remark for each option that makes a sharded step differ from eager PyTorch in full precision."""
    comm = options.get("comm_policy")
    rounding = {
        "mp_policy": options.get("mp_policy", options.get("mp")),
        "gather_dtype": getattr(comm, "gather_dtype", None),
        "reduce_wire": getattr(comm, "reduce_wire", None),
    }
    for name, value in rounding.items():
        if value is not None:
            yield (
                f"{name}={value!r} rounds, and eager PyTorch does not, so that they differ. Check without it to find "
                "other differences"
            )


def _lines(whole: nn.Module, arguments: Arguments, ours: Tensors, remarks: list[str]) -> Iterator[Row]:
    values = _values(copy.deepcopy(whole), arguments)
    exact = _in_float64(_values, whole, arguments, []) or {}
    for when, some, others in (("compiled", ours, values), ("not compiled", values, ours)):
        if only := next((line for line in some if line not in others), None):
            remarks.append(f"called only when the model is {when}: {only}")
    for line in (line for line in ours if line in values):
        yield _judged("line", line.module, str(line), ours[line], values[line], exact.get(line))


# ---- steps ----


@dataclass(frozen=True)
class Step:
    """What a step leaves: tensors by what they are and their names. ``into``: the results that have a gradient."""

    tensors: Tensors
    into: tuple[int, ...] = ()


def _step(
    model: Any,
    arguments: Arguments,
    *,
    into: Sequence[int] | None = None,
    returned: Callable[[Any], Any] = lambda result: result,
) -> Step:
    args, kwargs = _copied(arguments)
    torch.manual_seed(SEED)
    results = tensors_in(returned(model(*args, **kwargs)))
    if into is None:
        into = [i for i, t in enumerate(results) if t.requires_grad]
    if loss := [results[i] for i in into if results[i].dim() == 0][:1] or [results[i] for i in into]:
        torch.autograd.backward([_weighted_sum(t) for t in loss])
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    found = {("result", str(i)): t for i, t in enumerate(results)}
    trained = ((name, p, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    found |= {("gradient", n): p if g is None else g for n, p, g in trained if g is not None or not p.numel()}
    found |= {("buffer", name): b for name, b in model.named_buffers()}
    found |= {("input", str(i)): t for i, t in enumerate(inputs)}
    found |= {("gradient", f"input {i}"): t.grad for i, t in enumerate(inputs) if t.grad is not None}
    return Step({key: _local(t.detach()).clone() for key, t in found.items()}, tuple(into))


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _copied(arguments: Arguments) -> Arguments:
    def copied(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    found: Arguments = tree_map_only(torch.Tensor, copied, arguments)
    return found


def _weighted_sum(t: torch.Tensor) -> torch.Tensor:
    t = torch.view_as_real(t) if t.is_complex() else t
    weights = torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float32, device=t.device)
    return (t * weights.view(t.shape).to(t.dtype)).sum()


def _in_float64(run: Callable[..., Any], whole: nn.Module, arguments: Arguments, remarks: list[str]) -> Any:
    """``run(model, arguments)`` in float64. None if the model does not run in it."""

    def double(t: torch.Tensor) -> torch.Tensor:
        return t.double().detach().requires_grad_(t.requires_grad) if t.is_floating_point() else t

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return run(copy.deepcopy(whole).double(), tree_map_only(torch.Tensor, double, arguments))
    except Exception as error:
        remarks.append(f"the model does not run in float64, which would tell what is rounding: {error}")
        return None
    finally:
        torch.set_default_dtype(before)


class Probe(nn.Module):
    """Calls a model and leaves in ``values`` what each call of torch in its forward has returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.values: dict[Line, torch.Tensor] = {}
        self._names = {id(m): name for name, m in model.named_modules()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Values(self._names) as mode:
            result = self.model(*args, **kwargs)
        self.values = mode.found
        return result


class _Values(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names, self._calls = names, Counter[Line]()
        self.found: dict[Line, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if functional_transform() is None:
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor):
                    line = self._line(name_of(func))
                    self._calls[line] += 1
                    self.found[line._replace(number=self._calls[line])] = t.detach().clone()
        return result

    def _line(self, function: str) -> Line:
        frame, module = sys._getframe(2), ""
        while frame.f_back is not None and is_library(frame.f_globals.get("__name__", "")):
            module = module or self._names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        module = module or self._names.get(id(frame.f_locals.get("self")), "")
        return Line(module, function, frame.f_code.co_filename, frame.f_lineno, 0)


def _values(model: nn.Module, arguments: Arguments, jit: Callable[[nn.Module], Any] | None = None) -> Tensors:
    """What each call of torch in the forward returns. ``jit`` shards and compiles the model."""
    probe = Probe(model)
    args, kwargs = _copied(arguments)
    call = probe if jit is None else jit(probe)
    torch.manual_seed(SEED)
    call(*args, **kwargs)
    return {line: t.detach() for line, t in probe.values.items()}


# ---- comparison ----


def _parts_of_rank(cmodel: Any, step: Step) -> Step:
    """The step with this rank's parts of gradients."""
    entries = {name: link.entry for name, p in cmodel.named_parameters() if (link := link_of(p)) is not None}
    parts = {
        key: _local(entries[key[1]].part(t)) if key[0] == "gradient" and key[1] in entries else t
        for key, t in step.tensors.items()
    }
    return replace(step, tensors=parts)


def _compared(found: Step, expected: Step, exact: Step) -> Iterator[Row]:
    gradients = [_largest(t) for (what, _), t in expected.tensors.items() if what == "gradient"]
    for key, value in {**found.tensors, **expected.tensors}.items():
        what, name = key
        module = name.rpartition(".")[0] if what in KINDS else ""
        if key not in found.tensors or key not in expected.tensors:
            note = "is missing" if key not in found.tensors else "is none in eager PyTorch, which is not zero"
            yield Row(what, module, name, "different", inf, note=note)
        else:
            of_all = max(gradients) if what == "gradient" else 0.0
            yield _judged(what, module, name, found.tensors[key], value, exact.tensors.get(key), of_all=of_all)


def _judged(
    what: str,
    module: str,
    name: str,
    ours: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor | None,
    *,
    of_all: float = 0.0,
) -> Row:
    """Note [Rounding]. ``of_all`` is the largest value of all tensors of its kind: what is small beside it has lost
    its digits in sums."""
    if (ours.dtype, ours.shape) != (eager.dtype, eager.shape):
        note = f"{ours.dtype}{list(ours.shape)} instead of {eager.dtype}{list(eager.shape)}"
        return Row(what, module, name, "different", inf, note=note)
    if torch.equal(ours, eager):
        return Row(what, module, name, "equal")
    if not (eager.is_floating_point() or eager.is_complex()):
        return Row(what, module, name, "different", inf, note="other integers")
    a, b = _doubles(ours), _doubles(eager)
    if not torch.equal(a.isfinite(), b.isfinite()) or not torch.equal(a.isnan(), b.isnan()):
        return Row(what, module, name, "different", inf, note="infinite or nan elsewhere")
    scale = _largest(b) or 1.0
    unit = torch.finfo(eager.dtype).eps * max(scale, of_all)
    own = inf if exact is None or exact.shape != eager.shape else _largest(b - _doubles(exact))
    decides = exact is not None and own <= UNRELATED * scale
    difference = _largest(a - (_doubles(exact) if exact is not None and decides else b))
    allowed = SLACK * max(own, unit) if decides else SLACK_ALONE * unit
    verdict = "equal" if _largest(a - b) == 0 else "rounding" if difference <= allowed else "different"
    return Row(what, module, name, verdict, difference / scale, own / scale if decides else nan)


def _doubles(t: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double()


def _largest(t: torch.Tensor) -> float:
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _worst_of_ranks(rows: Iterable[Row]) -> list[Row]:
    mine = list(rows)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return [max(same, key=lambda row: VERDICTS.index(row.verdict)) for same in zip(*everyones, strict=True)]


def _torchs_lines(cmodel: Any) -> Mapping[str, int]:
    last = thunder.last_traces(cmodel)[-1]
    lines = (
        b for trace in (last, *(called.traces[-1] for called in block_functions(last))) for b in trace.bound_symbols
    )
    functions = [call.function for b in lines if (call := call_of(b.sym)) is not None]
    return Counter(f"module {type(f.module).__name__}" if isinstance(f, EagerModule) else name_of(f) for f in functions)


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one rank, if there is none and no environment to make one from."""
    if dist.is_initialized() or "RANK" in os.environ:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- reports ----


def collectives(cmodel: Callable[..., Any]) -> Rows[Collective]:
    """The collectives of the last call of a jitted model or function, in order of issue.

    Those of forward come first, then those of its backward, if there is one. Each is a named tuple: ``kind``
    ("all_gather", "reduce_scatter"), ``phase`` ("forward", "backward"), ``bucket``, ``dtype``, ``bytes`` (of the
    unsharded bucket, with padding) and ``parameters`` (names). The list prints as a table.

    Raises:
        TypeError: if ``cmodel`` is not jitted or was not called yet.
    """
    traces = (trace for trace in executed(cmodel) if trace is not None)
    return Rows(row for trace in traces for row in passes.collectives(trace))


def memory(cmodel: Callable[..., Any], *, persistent: int = 0) -> StepLiveness:
    """Predicts the bytes of tensors during the last call of a jitted model or function, and during its backward.

    ``.forward`` and ``.backward`` (None if there is none) have ``.buffers`` and ``.lines``. A line is a named tuple of
    bytes: ``during`` is needed while the line runs, ``total`` is alive after it. The total consists of ``inputs``
    (shards and the batch), ``unsharded`` parameters, buffers ``in_flight``, ``activations``, tensors ``saved`` for
    backward, and ``gradients``. ``.peak`` is the peak of both traces.

    ``persistent`` bytes are added to every line. Use it for the optimizer's state, accumulated gradients, and
    parameters that the call does not use. The workspace of kernels and of the process group's backend is not included.

    Raises:
        TypeError: if ``cmodel`` is not jitted or was not called yet.
    """
    forward, backward = executed(cmodel)
    if forward is None:
        raise TypeError("memory() needs a call: call the jitted model first")
    return step_liveness(forward, backward, persistent=persistent)


def block_traces(cmodel: Callable[..., Any]) -> dict[str, tuple[TraceCtx, ...]]:
    """The functions of repeated blocks that the last call of a jitted model or function has compiled.

    Returns the traces of each function by its name, one for each pass; the last one runs. A block of class ``Block``
    has ``Block`` (as it was traced), ``Block_forward`` and ``Block_backward``; without gradients only ``Block``. Other
    kinds of the class, and calls that need other gradients, have a number: ``Block_2``. Empty if no block is called.

    Raises:
        TypeError: if ``cmodel`` is not jitted or was not called yet.
    """
    found: dict[str, tuple[TraceCtx, ...]] = {}
    for trace in thunder.last_traces(cmodel):
        found |= {block.name: (block.trace,) for b in trace.bound_symbols if (block := traced_block(b)) is not None}
    final = (trace for trace in executed(cmodel) if trace is not None)
    return found | {called.name: called.traces for called in block_functions(*final)}
