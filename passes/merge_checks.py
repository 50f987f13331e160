"""Pass: the prologue fetches all parameters of a module in one line, checks all tensors in another, and what blocks
share in a third.

Thunder writes two lines for each parameter. They cost more to compile than the call of a block that has a dozen, and
more at each step than a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


Steps = tuple[Callable[[Any], Any], ...]  # from an object to what it holds
MISSING = (AttributeError, KeyError, IndexError, TypeError)  # raised by a step to what is not there


class Fact(NamedTuple):
    """A plain value that tracing has read: an attribute of a block or of what it holds, or an item. ``guarded``:
    whether the prologue checks it. A property follows from what the prologue checks."""

    name: str
    steps: Steps
    value: Any
    guarded: bool = True


def follow(steps: Steps, value: Any) -> Any:
    """The value at the end of steps. Raises one of :data:`MISSING` if there is nothing."""
    for step in steps:
        value = step(value)
    return value


def unlike(facts: Iterable[Fact], block: Any) -> str:
    """The name of the first value of which ``block`` has another one, or nothing; empty if there is none."""
    for name, steps, expected, _ in facts:
        value = block
        try:
            for step in steps:  # no call of Python's for each, as blocks times facts are many
                value = step(value)
        except MISSING:
            return name
        if type(value) is not type(expected) or value != expected:
            return name
    return ""


def merge_checks(prologue: TraceCtx) -> TraceCtx:
    """Returns the prologue with one line that fetches the parameters of each module, where it fetched the first of
    them, one that checks tensors, and one that checks values of blocks, where it checked the last."""
    lines = prologue.bound_symbols
    fetches: dict[str, list[BoundSymbol]] = {}
    for bsym in lines:
        if bsym.sym is prims.unpack_parameter:
            fetches.setdefault(bsym.args[0].name, []).append(bsym)
    checks = [b for b in lines if b.sym is prims.check_tensor_shape_and_metadata and _is_plain(b)]
    if len(checks) < 2:
        return prologue
    blocks = [b for b in lines if b.sym.id == check_values.id]
    merged = {id(b): None for b in (*checks, *blocks, *(b for found in fetches.values() for b in found))}
    instead = {id(found[0]): _fetch(i, found) for i, found in enumerate(fetches.values())}
    instead[id(checks[-1])] = _check(checks)
    if blocks:
        instead[id(blocks[-1])] = _check_values(blocks)
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
    metadata = tuple(Metadata(tuple(shape), torch.device(d), dtype, grad) for shape, d, dtype, grad in expected)
    return check.bind(tuple(b.args[0] for b in checks), ContextObject("metadata", metadata), output=None)


def _check_values(checks: Sequence[BoundSymbol]) -> BoundSymbol:
    facts = ContextObject("facts", tuple(found for b in checks for found in b.args[1].obj))
    return check_values.bind(tuple(module for b in checks for module in b.args[0]), facts, output=None)


def _run_fetch(module: Any, names: ContextObject) -> tuple[torch.Tensor, ...]:
    return tuple(map(module.get_parameter, names.obj))


def _run_check(tensors: tuple[torch.Tensor, ...], metadata: ContextObject) -> None:
    for tensor, expected in zip(tensors, metadata.obj, strict=True):
        found = Metadata(tensor.shape, tensor.device, tensor.dtype, tensor.requires_grad)
        if found != expected:
            raise RuntimeError(f"expected a tensor with {expected}, got {found}")  # Thunder then compiles another step


def _run_check_values(blocks: tuple[Any, ...], facts: ContextObject) -> None:
    for block, expected in zip(blocks, facts.obj, strict=True):
        if name := unlike(expected, block):
            raise RuntimeError(f"{name} of {type(block).__name__} has changed")  # Thunder then compiles another step


fetch = symbol("fetch_parameters", lambda module, names: None, _run_fetch)
check = symbol("check_tensors", lambda tensors, metadata: None, _run_check, tags=[OpTags.DONT_DCE])
check_values = symbol("check_values", lambda blocks, facts: None, _run_check_values, tags=[OpTags.DONT_DCE])
