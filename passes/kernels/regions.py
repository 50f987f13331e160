"""Regions of a trace that torch.compile compiles, with the lines of torch in them.

    [t12, t19] = TorchCompile0(x, w)
      # t11 = torch_gelu_0(x)
      # t12 = aten_mm(t11, w)

Thunder's executor ``torchcompile`` takes Thunder's symbols. In a sharded model :class:`Regions` stands in its place,
which takes lines of torch's functions and of ATen as well, so that a model is recorded as it is without an executor
that fuses, and the forward of a block is one region, its backward another.

Note [Small regions]
~~~~~~~~~~~~~~~~~~~~
To compile a region takes one to three seconds the first time, however little it computes. A GPT has half a dozen small
ones around its blocks: the positions, the embedding, the last norm, the gradients of these. A region whose fusion saves
less than two thousandths of the trace's compute, which repays its compilation only after a quarter of an hour, stays
lines. Equal regions, such as those of equal blocks, are compiled once, and count together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from passes.comm.symbols import Property
from passes.compat.jit import symbol_that_calls
from passes.kernels.aten import ATTENTION, LAID_OUT, RESHAPES, draws, operator_of, properties_of
from passes.kernels.torch_call import Line

import torch
from thunder.core.prims import OpTags
from thunder.core.proxies import unvariableify
from thunder.core.rematerialization import rematerialize
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.transform_common import dce
from thunder.core.utils import producers_and_consumers
from thunder.executors.data_dependent_partition import fuse_bound_symbols
from thunder.executors.passes import update_fusion_call_ctx
from thunder.executors.torch_compile import (
    TorchCompileExecutor,
    make_compiled,
    torch_compile_ex,
    torch_compile_xentropy_ex,
)
from thunder.executors.utils import Region
from thunder.extend import Executor, FusionExecutor
from torch._ops import OpOverload

OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # a graph would end at such an operator

NORMS = {"aten::native_layer_norm", "aten::_fused_rms_norm", "aten::native_group_norm"}

SMALL = 2e-3  # of the seconds of a trace's lines


class Regions(TorchCompileExecutor):
    """Makes a region of neighbouring lines that torch.compile surely compiles as a whole.

    ``seconds`` estimates those of a line or a fusion. Without it, no region is too small.
    """

    def __init__(self, seconds: Callable[[BoundSymbol], float] | None = None):
        super().__init__(torch_compile_ex.name)
        self.implmap.update(torch_compile_ex.implmap)
        self._seconds = seconds

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        operations = _operations(bsym)
        if operations is None:  # Thunder would drop a symbol without parts, such as zeros(), from a region
            return super().can_fuse(bsym) and bool(bsym.sym.is_prim or bsym.subsymbols)
        return not any(_ends_graph(*operation) for operation in operations)

    def fuse(self, region: Region, number: int) -> BoundSymbol:
        fusion = self._fusion(region, number)
        lines = list(map(_calling_operator, fusion.subsymbols))
        compiled = make_compiled(lines, list(fusion.args), list(fusion.output))
        return fusion.from_bsym(_call_ctx={fusion.sym.name: compiled})

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """As Thunder's, but a small region stays lines, and a region of a single line of torch is that line."""
        producers, consumers = producers_and_consumers(trace)
        groups = fuse_bound_symbols(trace, lambda *nodes: all(self.can_fuse(n.group_bsyms[0]) for n in nodes))
        regions = [Region(producers, consumers, g) if self.can_fuse(g[0]) else None for g in groups]
        small = self._small(trace, [r for r in regions if r is not None])
        numbers = count()
        new = from_trace(trace)
        for group, region in zip(groups, regions, strict=True):
            keep = region is None or region in small
            new.bound_symbols += group if keep else [self._fusion(region, next(numbers))]
        new = update_fusion_call_ctx(dce(rematerialize(new)))  # calls fuse
        new.bound_symbols = list(map(_alone, new.bound_symbols))
        new.set_provenance(TraceProvenance("Regions for torch.compile"))
        return new

    def _fusion(self, region: Region, number: int = 0) -> BoundSymbol:
        inputs, outputs = ([unvariableify(v) for v in variables] for variables in (region.inputs, region.outputs))
        sym = Symbol(f"TorchCompile{number}", meta=None, is_fusion=True, executor=self)
        return BoundSymbol(sym, inputs, {}, outputs, list(map(_tagged, region.bound_symbols)))

    def _small(self, trace: TraceCtx, regions: Sequence[Region]) -> set[Region]:
        """The regions that are not worth the time it takes to compile them. See Note [Small regions]."""
        if self._seconds is None:
            return set()
        saved: dict[Hashable, float] = defaultdict(float)
        for region in regions:
            saved[_kind(region)] += sum(map(self._seconds, region.bound_symbols)) - self._seconds(self._fusion(region))
        least = SMALL * sum(map(self._seconds, trace.bound_symbols))
        return {region for region in regions if saved[_kind(region)] < least}


def _kind(region: Region) -> Hashable:
    """Equal for the regions of equal blocks."""
    return tuple((b.sym.name, *(getattr(p, "shape", None) for p in b.flat_proxy_outs)) for b in region.bound_symbols)


def _alone(bsym: BoundSymbol) -> BoundSymbol:
    line = bsym.subsymbols[0] if bsym.sym.is_fusion and len(bsym.subsymbols) == 1 else bsym
    return bsym if _operations(line) is None else line


def _operations(line: BoundSymbol) -> Sequence[tuple[OpOverload, Any, Any]] | None:
    """The operators of ATen that a line of torch runs, with their arguments; None for other lines."""
    if isinstance(line.sym.id, Line):
        call, kind = line.sym.id
        return None if kind or call.operations is None else [operation[:3] for operation in call.operations]
    operator = operator_of(line.sym)
    return None if operator is None else [(operator, line.args, line.kwargs)]


def _ends_graph(operator: OpOverload, args: Any, kwargs: Any) -> bool:
    """True for an operator that does not fit into one whole graph, or draws numbers that inductor would draw anew."""
    return bool(OF_VALUES & set(operator.tags)) or draws(operator, args, kwargs)


def _tagged(line: BoundSymbol) -> BoundSymbol:
    """The line with a tag that keeps Thunder from computing it again in the region of backward, if it costs more than
    the passes over memory that this saves."""
    costly = any(not _is_cheap(operator) for operator, *_ in _operations(line) or ())
    if not costly or OpTags.REDUCTION_OP in line.sym.tags:
        return line
    return line.from_bsym(sym=replace(line.sym, tags=[*line.sym.tags, OpTags.REDUCTION_OP]))


def _is_cheap(operator: OpOverload) -> bool:
    """True for an operator that computes each element by itself. Backward of a norm reads the norm's input anyway."""
    moves = Property.VIEW | Property.CAST | Property.COPY | Property.CONSTANT
    if torch.Tag.pointwise in operator.tags or properties_of(operator) & moves:
        return True
    return operator._schema.name in NORMS


def _calling_operator(line: BoundSymbol) -> BoundSymbol:
    """A line of ATen as one that calls the operator itself: torch.compile does not know all functions of Python."""
    operator, sym = operator_of(line.sym), line.sym
    name = "" if operator is None else operator._schema.name.partition("::")[2]
    if not name or name in LAID_OUT or name in RESHAPES or name.startswith(ATTENTION):
        return line
    own = symbol_that_calls(sym.name, sym.meta, operator, id=sym.id, is_prim=True, executor=sym.executor, tags=sym.tags)
    return line.from_bsym(sym=own)


def with_regions(
    executors: Sequence[Executor], seconds: Callable[[BoundSymbol], float] | None = None
) -> tuple[Executor, ...]:
    """The executors, with :class:`Regions` in the place of Thunder's own."""
    return tuple(Regions(seconds) if executor is torch_compile_ex else executor for executor in executors)


def fuses(executor: Executor) -> bool:
    """True for an executor that compiles regions of a trace. Thunder's executor for cross entropy does nothing else."""
    return isinstance(executor, FusionExecutor) and executor != torch_compile_xentropy_ex


def fuses_symbols(executor: Executor) -> bool:
    """True for such an executor if it takes only Thunder's symbols."""
    return fuses(executor) and not isinstance(executor, Regions)
