"""Pass: equal fusions call one function, so that torch.compile compiles one for all blocks of a kind.

Thunder makes a function of each region that the torchcompile executor fuses, which is compiled when it is first called.
Two regions are equal if they consist of the same lines on values of the same shapes, whatever their names. Such regions
may list their inputs and outputs in different orders.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from passes.compat.lines import calling_function_of

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.torch_compile import TorchCompileExecutor


class Region(NamedTuple):
    """A fusion, and the numbers of its inputs and outputs: values are numbered in the order in which they appear."""

    fusion: BoundSymbol
    inputs: Sequence[int]
    outputs: Sequence[int]


def share_fusions(trace: TraceCtx) -> TraceCtx:
    """Compiles equal fusions once (torchcompile).

    Takes: a lowered forward or backward.
    Gives: a call of the first of equal fusions in the place of each.
    No-op when: no two fusions are equal.
    """
    first: dict[Hashable, Region] = {}
    lines, shared = [], False
    for bsym in trace.bound_symbols:
        if bsym.sym.is_fusion and isinstance(bsym.sym.executor, TorchCompileExecutor):
            numbers: dict[str, int] = {}
            key = _key(bsym, numbers)
            region = Region(bsym, _numbers(bsym.args, numbers), _numbers(bsym.output, numbers))
            known = first.setdefault(key, region)
            if known is not region:
                bsym, shared = _call(known, region), True
        lines.append(bsym)
    if not shared:
        return trace
    new = from_trace(trace)
    new.bound_symbols = lines
    return new


def _key(fusion: BoundSymbol, numbers: dict[str, int]) -> Hashable:
    """Equal for two fusions if they do the same. Fills ``numbers``, by the names of values."""
    parts = tuple(_part(b, numbers) for b in fusion.subsymbols)
    return parts, tuple(sorted(_numbers(fusion.args, numbers))), tuple(sorted(_numbers(fusion.output, numbers)))


def _part(bsym: BoundSymbol, numbers: dict[str, int]) -> Hashable:
    flat, spec = tree_flatten_with_dataclass((bsym.args, bsym.kwargs, bsym.output))
    values = tuple(_value(v, numbers) for v in flat)
    return bsym.sym.id, bsym.sym.name, values, str(spec), tuple(_part(b, numbers) for b in bsym.subsymbols)


def _value(value: Any, numbers: dict[str, int]) -> Hashable:
    if isinstance(value, TensorProxy):
        number = numbers.setdefault(value.name, len(numbers))
        return number, tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, Proxy):
        return numbers.setdefault(value.name, len(numbers)), type(value), getattr(value, "value", None)
    return type(value), value if isinstance(value, Hashable) else id(value)


def _numbers(proxies: Iterable[Proxy], numbers: dict[str, int]) -> list[int]:
    return [numbers.setdefault(p.name, len(numbers)) for p in proxies]


def _call(known: Region, region: Region) -> BoundSymbol:
    """The call of a known fusion with the values of an equal one."""
    inputs = dict(zip(region.inputs, region.fusion.args, strict=True))
    outputs = dict(zip(region.outputs, region.fusion.output, strict=True))
    return calling_function_of(
        known.fusion,
        region.fusion,
        args=[inputs[n] for n in known.inputs],
        output=[outputs[n] for n in known.outputs],
    )
