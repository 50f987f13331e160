"""Regions of a trace that torch.compile compiles, with the lines of torch in them.

    [t12, t19] = TorchCompile0(x, w)
      # t11 = torch_gelu_0(x)
      # t12 = aten_mm(t11, w)

Thunder's executor ``torchcompile`` takes Thunder's symbols. In a sharded model :class:`Regions` stands in its place,
which takes lines of torch's functions and of ATen as well, so that a model is recorded as it is without an executor
that fuses, and the forward of a block is one region, its backward another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from passes.comm.symbols import Property
from passes.compat.jit import symbol_that_calls
from passes.kernels.aten import ATTENTION, LAID_OUT, RESHAPES, draws, operator_of, properties_of
from passes.kernels.torch_call import Line

import torch
from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.torch_compile import TorchCompileExecutor, torch_compile_ex, torch_compile_xentropy_ex
from thunder.executors.utils import Region
from thunder.extend import Executor, FusionExecutor
from torch._ops import OpOverload

OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # a graph would end at such an operator

NORMS = {"aten::native_layer_norm", "aten::_fused_rms_norm", "aten::native_group_norm"}


class Regions(TorchCompileExecutor):
    """Makes a region of neighbouring lines that torch.compile surely compiles as a whole. Has no state."""

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        operations = _operations(bsym)
        if operations is None:  # Thunder would drop a symbol without parts, such as zeros(), from a region
            return super().can_fuse(bsym) and bool(bsym.sym.is_prim or bsym.subsymbols)
        return not any(_ends_graph(*operation) for operation in operations)

    def fuse(self, region: Region, number: int) -> BoundSymbol:
        lines = list(map(_tagged, region.bound_symbols))
        region.bound_symbols = list(map(_calling_operator, lines))
        return super().fuse(region, number).from_bsym(subsymbols=lines)

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """As Thunder's, but a region of a single line of torch is that line."""
        new = super().fusion_pass(trace)
        new.bound_symbols = list(map(_alone, new.bound_symbols))
        return new


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


regions = Regions("torchcompile")
regions.implmap.update(torch_compile_ex.implmap)


def with_regions(executors: Sequence[Executor]) -> tuple[Executor, ...]:
    """The executors, with :class:`Regions` in the place of Thunder's own."""
    return tuple(regions if executor is torch_compile_ex else executor for executor in executors)


def fuses(executor: Executor) -> bool:
    """True for an executor that compiles regions of a trace. Thunder's executor for cross entropy does nothing else."""
    return isinstance(executor, FusionExecutor) and executor != torch_compile_xentropy_ex


def fuses_symbols(executor: Executor) -> bool:
    """True for such an executor if it takes only Thunder's symbols."""
    return fuses(executor) and not isinstance(executor, Regions)
