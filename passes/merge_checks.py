"""Pass over the prologue: it fetches all parameters of a module in one line, and checks all tensors in another.

Thunder writes two lines for each parameter. They cost more to compile than the call of a block that has a dozen: a
tenth of the first step of a GPT.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from passes.comm.symbols import symbol

import torch
from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace


class Metadata(NamedTuple):
    """What a tensor must be for the compiled step to fit."""

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


def _run_check(tensors: tuple[torch.Tensor, ...], metadata: ContextObject) -> None:
    found = list(map(_metadata, tensors))
    if found != metadata.obj:
        raise RuntimeError(f"expected tensors with {metadata.obj}, got {found}")  # Thunder then compiles another step


fetch = symbol("fetch_parameters", lambda module, names: None, _run_fetch)
check = symbol("check_tensors", lambda tensors, metadata: None, _run_check, tags=[OpTags.DONT_DCE])
