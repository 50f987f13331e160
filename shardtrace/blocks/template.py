"""The lines of a traced block, and how they are written again for another instance."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any, NamedTuple

from passes.checkpoint_activations import Call
from passes.compat import constraints, name_of_input, proxied_values, side_effects, without_constraints
from passes.merge_checks import MISSING, Fact, Steps, check_values, follow, unlike
from shardtrace.blocks.observe import Observer, Seen
from shardtrace.blocks.provenance import Reach, Unknown, moved, step_of, steps_to
from shardtrace.blocks.structure import PLAIN, CannotShare

from thunder import clang
from thunder.core.codeutils import ContextObject
from thunder.core.interpreter import ProvenanceRecord, wrap
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_flatten_with_dataclass, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from torch import nn


class Capture(NamedTuple):
    """A parameter or buffer that a block's lines read: its proxy, and where the block has it."""

    proxy: TensorProxy
    record: ProvenanceRecord
    steps: Steps


class Outside(NamedTuple):
    """A plain attribute of an object that does not belong to the block, with its value when it was read."""

    owner: Any
    name: str
    value: Any


class Made(NamedTuple):
    """A value that the lines compute, with its tags from then."""

    proxy: Proxy
    tags: frozenset[Any]


class Template(NamedTuple):
    """A traced block. Values of the outside are the ``inputs`` of its call, or ``captures``."""

    name: str
    root: ProvenanceRecord
    inputs: tuple[TensorProxy, ...]
    captures: tuple[Capture, ...]
    facts: tuple[Fact, ...]
    outside: tuple[Outside, ...]
    seen: tuple[Seen, ...]
    side_effects: int
    lines: tuple[BoundSymbol, ...]
    traced: tuple[BoundSymbol, ...]
    made: tuple[Made, ...]
    outputs: tuple[Any, ...]
    spec: Any


def remarked(template: Template, name: str, recomputed: str | None) -> Template:
    """The template of a block that differs only in what is ``recomputed`` of the whole of it: "full", "cheap", or None.
    It was never traced."""
    call = {Call(cheap=recomputed == "cheap")} if recomputed else set()
    lines = (b.from_bsym(tags=call.union(t for t in b.tags if not isinstance(t, Call))) for b in template.lines)
    return template._replace(name=name, lines=tuple(lines), traced=())


def make_template(
    name: str,
    module: nn.Module,
    root: ProvenanceRecord,
    inputs: Sequence[TensorProxy],
    lines: Sequence[BoundSymbol],
    result: Any,
    observer: Observer,
    added: Iterable[tuple[Any, ...]],
) -> Template:
    """The template of ``lines``, which were just traced.

    Args:
        root: where the ``module`` comes from.
        inputs: the tensors that it was called with, each once.
        result: what it returned.
        added: the checks that tracing it added to the prologue.

    Raises:
        CannotShare: if the lines do not tell all that another instance would do.
    """
    if observer.obstacle:
        raise CannotShare(observer.obstacle)
    read, made = values_of(lines, {p.name for p in inputs})
    reach = Reach(root)
    captures = tuple(_captures(read, module, reach))
    outputs, spec = _flat(result)
    known = made.keys() | {p.name for p in inputs} | {c.proxy.name for c in captures}
    for o in outputs:
        if (isinstance(o, Proxy) and o.name not in known) or not isinstance(o, (Proxy, *PLAIN, type(None))):
            raise CannotShare(f"returns a {type(o).__name__} that it does not make")
    facts = (*_attributes(observer, module, reach), *_items(added, module, reach))
    snapshot = tuple(b.from_bsym() for b in lines)
    return Template(
        name=name,
        root=root,
        inputs=tuple(inputs),
        captures=captures,
        facts=facts,
        outside=tuple(_outside(observer, reach)),
        seen=tuple(observer.seen.values()),
        side_effects=side_effects(),
        lines=snapshot,
        traced=tuple(lines),
        made=tuple(made.values()),
        outputs=tuple(outputs),
        spec=spec,
    )


def _flat(result: Any) -> tuple[list[Any], Any]:
    try:
        flat, spec = tree_flatten(result)
    except (ValueError, TypeError):
        raise CannotShare(f"returns a {type(result).__name__}") from None
    return flat, spec


def values_of(lines: Iterable[BoundSymbol], inputs: set[str]) -> tuple[dict[str, Proxy], dict[str, Made]]:
    """The values that lines read and do not make, besides inputs, and those that they make, by their names."""
    read: dict[str, Proxy] = {}
    made: dict[str, Made] = {}

    def visit(b: BoundSymbol) -> None:
        for p in b.flat_proxy_args:
            if p.name not in made and p.name not in inputs:
                read.setdefault(p.name, p)
        for part in b.subsymbols:
            visit(part)
        for p in b.flat_proxy_outs:
            if p.name not in inputs and p.name not in read:  # a line may return what it is given
                made.setdefault(p.name, Made(p, frozenset(p.tags)))

    for b in lines:
        visit(b)
    return read, made


def _captures(read: Mapping[str, Proxy], module: nn.Module, reach: Reach) -> Iterator[Capture]:
    wrapped, own = wrapped_tensors(), _own(module)
    for name, p in read.items():
        value = wrapped.get(name)
        if value is None or isinstance(p, NumberProxy):
            raise CannotShare(f"reads {name}, which is neither an argument nor its own")
        if reach.has(value.provenance):
            yield Capture(value.value, value.provenance, _steps(value.provenance, reach, module))
        elif id(value.original_value) in own:
            raise CannotShare(f"reads its {name} by another way than itself")


def _steps(record: ProvenanceRecord, reach: Reach, module: nn.Module) -> Steps:
    """``steps_to`` for what every block of the kind must have."""
    try:
        return steps_to(record, reach.root, module)
    except (Unknown, *MISSING) as why:
        raise CannotShare(f"reads {why}") from None


def _attributes(observer: Observer, module: nn.Module, reach: Reach) -> Iterator[Fact]:
    for seen in observer.reads.values():
        if not reach.has(seen.record):
            continue
        try:
            steps = steps_to(seen.record, reach.root, module)
            owner = follow(steps, module)
            value = getattr(owner, seen.name)
        except (Unknown, RuntimeError, *MISSING):
            continue  # an attribute of a tensor or of a value that was computed, or one that is not there
        if isinstance(value, PLAIN):
            guarded = isinstance(_stored(owner, seen.name), PLAIN)
            yield Fact(seen.name, (*steps, attrgetter(seen.name)), value, guarded)


def _items(added: Iterable[tuple[Any, ...]], module: nn.Module, reach: Reach) -> Iterator[Fact]:
    """The items of lists and mappings that Thunder checks."""
    for _, *checked in added:
        if len(checked) < 2 or not isinstance(checked[0], Proxy) or isinstance(checked[0], TensorProxy):
            continue
        record = checked[0].history
        if step_of(record) == "BINARY_SUBSCR" and reach.has(record):
            yield Fact(f"item {checked[1]!r}", _steps(record, reach, module), checked[1])


def _outside(observer: Observer, reach: Reach) -> Iterator[Outside]:
    for read in observer.reads.values():
        if isinstance(read.owner, Proxy) or reach.has(read.record):
            continue
        value = _stored(read.owner, read.name)
        if isinstance(value, PLAIN):
            yield Outside(read.owner, read.name, value)


def _stored(owner: Any, name: str) -> Any:
    """An attribute as its object has it, without calling a property; None if there is none."""
    value = inspect.getattr_static(owner, name, None)
    return getattr(owner, name, None) if isinstance(value, MemberDescriptorType) else value  # of __slots__


# ---- another instance ----


def fits(template: Template, module: nn.Module) -> str:
    """Which plain value that tracing has read is another one in ``module``, or now; empty if none is."""
    if side_effects() != template.side_effects:  # Thunder sets attributes after the step, not while it traces
        return "view of an attribute that was set since"
    for owner, name, value in template.outside:
        if _stored(owner, name) != value:
            return f"{type(owner).__name__}.{name}"
    for seen in template.seen:
        if not seen.is_unchanged():
            return f"view of a {type(seen.container).__name__}"
    return unlike(template.facts, module)


def write_again(
    template: Template, trace: TraceCtx, module: nn.Module, root: ProvenanceRecord, inputs: Sequence[TensorProxy]
) -> list[Any]:
    """Adds the template's lines to ``trace`` for another instance. Returns its outputs, flat."""
    names: dict[str, Proxy] = {old.name: new for old, new in zip(template.inputs, inputs, strict=True)}
    names |= captured(template, trace, module, root)
    with tracectx(trace):
        names |= {p.name: p.replace(name=None, tags=set(tags)) for p, tags in template.made}
    calls: dict[Hashable, Call] = {}
    trace.scopes[-1].extend(_renamed(b, names, calls) for b in template.lines)
    return [names.get(o.name, o) if isinstance(o, Proxy) else o for o in template.outputs]


def captured(template: Template, trace: TraceCtx, module: nn.Module, root: ProvenanceRecord) -> dict[str, Proxy]:
    """The proxies of the instance's own parameters and buffers. The prologue will unpack them, and check them and the
    values that tracing has read."""
    records = [moved(capture.record, template.root, root) for capture in template.captures]
    taken = [name_of_input(record) for record in records]
    known = wrapped_tensors() if any(map(trace.has_name, taken)) else {}
    found: dict[str, Proxy] = {}
    added: list[TensorProxy] = []
    for (p, _, steps), there, name in zip(template.captures, records, taken, strict=True):
        value = follow(steps, module)
        before = known.get(name)
        # wrapping a tensor twice would give its .grad a name twice, which Thunder refuses
        if before is not None and before.original_value is value:
            found[p.name] = before.value
            continue
        with without_constraints():
            found[p.name] = wrap(value, provenance=there).value
        added.append(found[p.name])
    # one constraint for all tensors, which hides them: Thunder compares each that it finds in one with all inputs
    constraints().append((partial(_check_tensors, tuple(added)),))
    facts = tuple(fact for fact in template.facts if fact.guarded)
    if facts and root != template.root:
        with tracectx(trace):
            block = Proxy(prefix="block", history=copy(root))
        constraints().append((partial(_check_values, facts), block))
    return found


def _check_tensors(tensors: Iterable[TensorProxy]) -> None:
    for tensor in tensors:
        clang.check_tensor_shape_and_metadata(tensor)


def _check_values(facts: tuple[Fact, ...], block: Proxy) -> None:
    check_values((block,), ContextObject(f"facts_of_{block.name}", (facts,)))


def _renamed(bsym: BoundSymbol, names: Mapping[str, Proxy], calls: dict[Hashable, Call]) -> BoundSymbol:
    """A line with other proxies. (``from_bsym_swap_proxies`` would follow a chain: a block's input is the last one's
    output, which has a new name too.) Lines of a checkpointed call stay those of one call, but of another."""

    def swap(values: Any) -> Any:
        flat, spec = tree_flatten_with_dataclass(values)
        return tree_unflatten([names.get(v.name, v) if isinstance(v, Proxy) else v for v in flat], spec)

    return bsym.from_bsym(
        args=swap(bsym.args),
        kwargs=swap(bsym.kwargs),
        output=swap(bsym.output),
        subsymbols=[_renamed(part, names, calls) for part in bsym.subsymbols],
        tags={calls.setdefault(tag, Call(cheap=tag.cheap)) if isinstance(tag, Call) else tag for tag in bsym.tags},
    )


def tensors_of(flat: Iterable[Any]) -> tuple[TensorProxy, ...]:
    """The tensors among the inputs of a call, each once."""
    return tuple({p.name: p for p in flat if isinstance(p, TensorProxy)}.values())


def is_own(tensors: Iterable[TensorProxy], module: nn.Module) -> bool:
    """True if a tensor is a parameter or buffer of the module."""
    inputs = [p for p in tensors if p.history is not None]  # not computed
    if not inputs:
        return False
    own, wrapped = _own(module), wrapped_tensors()
    return any(p.name in wrapped and id(wrapped[p.name].original_value) in own for p in inputs)


def _own(module: nn.Module) -> set[int]:
    """The ids of a module's parameters and buffers."""
    return {id(t) for t in (*module.parameters(), *module.buffers())}


def wrapped_tensors() -> dict[str, Any]:
    """The wrapped values of the tensors that tracing has read, by the names of their proxies."""
    return {v.value.name: v for v in proxied_values() if isinstance(v.value, TensorProxy)}
