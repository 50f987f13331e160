"""Calls of blocks: one line of the trace for each, with the block's lines in a trace of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from passes.analysis.calls import Block, CallOf, block_of, unique_name
from passes.analysis.recognise import changes_values, names
from passes.analysis.symbols import properties
from passes.compat import names_of_users
from passes.outline import enlist
from passes.plan import ShardedParameter
from shardtrace.blocks.template import Template, captured, values_of, wrapped_tensors

from thunder.core.compile_data import get_compile_data
from thunder.core.prims import OpTags
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from torch import nn

ParameterOf = Callable[[Any], ShardedParameter | None]


class CannotCall(Exception):
    """Why the lines of a block are written for each of its calls."""


class Outlined(NamedTuple):
    """A block, and what its inputs and outputs are in the template."""

    block: Block
    inputs: tuple[TensorProxy, ...]
    outputs: tuple[TensorProxy, ...]


def make_block(template: Template, trace: TraceCtx, class_name: str, parameter_of: ParameterOf) -> Outlined:
    """The block of a template whose lines are in ``trace``.

    ``parameter_of`` gives the sharded parameter of a tensor, or None.

    Raises:
        CannotCall: if the lines would do something else in a function of their own.
    """
    _refuse_buckets(template, parameter_of)
    lines = [b for b in template.lines if OpTags.CTX_MANAGER_ENTER_EXIT_OP not in (b.sym.tags or ())]
    if len(lines) < 2:
        raise CannotCall("there is only one")
    if any(map(changes_values, lines)):
        raise CannotCall("they change values in place")
    outputs = _outputs(template)
    if not outputs or not all(type(p) is TensorProxy for p in outputs):
        raise CannotCall("they make no tensor, or numbers")
    lines, used = _live(lines, {o.name for o in outputs})
    inputs = tuple(p for p in _inputs(template) if p.name in used)
    if not template.inputs or not all(type(p) is TensorProxy for p in inputs):
        raise CannotCall("they take no tensor, or numbers")
    aliases = _aliases(lines, {p.name for p in inputs})
    if any(o.name in aliases for o in outputs):
        raise CannotCall("they return a view of an input")
    enlist(get_compile_data())
    names_in = names_of_users()
    with tracectx(TraceCtx()):  # tags are copied: Thunder changes those of the lines that it has traced
        made = {variableify(p): names_in.get(variableify(p), p).replace(tags=set(tags)) for p, tags in template.made}
    own = {**names_in, **made}
    block = Block(
        unique_name(trace, class_name),
        [b.from_bsym_swap_proxies(own) for b in lines],
        [own.get(variableify(p), p) for p in inputs],
        [own.get(variableify(p), p) for p in outputs],
        trace.names | {p.name for p in own.values()},
        template.name,
    )
    return Outlined(block, inputs, outputs)


def _live(lines: Sequence[BoundSymbol], used: set[str]) -> tuple[list[BoundSymbol], set[str]]:
    """The lines that the ``used`` values depend on, and the names of all values that these read."""
    found = []
    for bsym in reversed(lines):
        if not used.isdisjoint(names(bsym.flat_proxy_outs)):
            used |= names(bsym.flat_proxy_args)
            found.append(bsym)
    return found[::-1], used


def _refuse_buckets(template: Template, parameter_of: ParameterOf) -> None:
    wrapped = wrapped_tensors()
    found = [parameter_of(wrapped[c.proxy.name].original_value) for c in template.captures]
    parameters = [p for p in found if p is not None and p.plan.world_size > 1]
    for p in parameters:
        if p.plan.bucketing not in ("block", "model") or (p.plan.bucketing == "block" and p.plan.pieces > 1):
            raise CannotCall("its parameters are in several buckets")
    if len({p.block for p in parameters if p.plan.bucketing == "block"}) > 1:
        raise CannotCall("it has buckets within")


def _inputs(template: Template) -> list[TensorProxy]:
    """The tensors of the call, those of the block, and those of elsewhere, each once."""
    given = {p.name: p for p in (*template.inputs, *(c.proxy for c in template.captures))}
    read, _ = values_of(template.lines, set(given))
    return [*given.values(), *(p for name, p in read.items() if name not in given)]


def _outputs(template: Template) -> tuple[TensorProxy, ...]:
    made = {m.proxy.name for m in template.made}
    return tuple({o.name: o for o in template.outputs if isinstance(o, Proxy) and o.name in made}.values())


def _aliases(lines: Iterable[BoundSymbol], found: set[str]) -> set[str]:
    for bsym in lines:
        _aliases(bsym.subsymbols, found)
        tensors = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        if properties(bsym.sym).is_alias and tensors and tensors[0] in found:
            found.update(o.name for o in bsym.flat_proxy_outs)
    return found


def call(
    outlined: Outlined,
    template: Template,
    trace: TraceCtx,
    module: nn.Module,
    name: str,
    root: Any,
    inputs: Sequence[TensorProxy],
) -> list[Any]:
    """Adds a line to ``trace`` that calls the block for another instance, of this name. Returns its outputs, flat."""
    values: dict[str, Proxy] = {old.name: new for old, new in zip(template.inputs, inputs, strict=True)}
    values |= captured(template, trace, module, root)
    with tracectx(trace):
        results = outlined.block.symbol(*(values.get(p.name, p) for p in outlined.inputs))
    lines = trace.scopes[-1]
    lines[-1].tags.add(CallOf(name))
    if not any(block_of(b) is outlined.block for b in lines[:-1]):
        _replace_first(outlined, template, lines)
    values |= {old.name: new for old, new in zip(outlined.outputs, results, strict=True)}
    return [values.get(o.name, o) if isinstance(o, Proxy) else o for o in template.outputs]


def _replace_first(outlined: Outlined, template: Template, lines: list[BoundSymbol]) -> None:
    """Puts a call in place of the lines that were traced, unless torch.utils.checkpoint or a checkpointed module holds
    them. ``lines`` end with the second call."""
    at = next((i for i, b in enumerate(lines) if template.traced and b is template.traced[0]), None)
    if at is None or lines[at].tags != template.lines[0].tags:
        return
    first = lines[-1].from_bsym(args=outlined.inputs, output=outlined.outputs, tags={CallOf(template.name)})
    lines[at : at + len(template.traced)] = [first]
