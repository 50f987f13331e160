"""Which module of the model each line of a trace belongs to.

Thunder records the source position of each traced line, but not the module that was running. Three rules recover it:

1. A line that reads a parameter belongs to the module that owns the parameter.
2. A line from the source of a class belongs to the instance nearest to the last, or next, line that rule 1 places.
3. A line of a later trace belongs to the module of the traced line that it comes from (passes.analysis.origins).

Lines without an origin, such as those of a model that is not sharded, fall back on rules 1 and 2, and then on the
modules that computed their arguments. A line that calls a block belongs to the block. The lines of its function are
placed in the same way, as those of the instance that was traced.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import NamedTuple

from passes.analysis.calls import called_module
from passes.analysis.origins import origin_of
from passes.analysis.recognise import is_collective, is_deletion, is_offload, is_return, is_unpack
from passes.plan import Bucket

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from torch import nn

Name = str  # a module's qualified name; "" is the model itself


class Scope(NamedTuple):
    """A function of a class: its place in the source, and the modules that are instances of the class."""

    file: str
    first: int
    last: int
    instances: frozenset[Name]


class ModuleMap(NamedTuple):
    """A model as the search for modules needs it.

    ``owners`` maps the name of a trace input to the module that owns the parameter, ``scopes`` a file to its functions,
    ``order`` a module to its position in ``named_modules``.
    """

    owners: Mapping[str, Name]
    scopes: Mapping[str, list[Scope]]
    order: Mapping[Name, int]


def map_modules(model: nn.Module | None) -> ModuleMap:
    """The map of a model; an empty one for None."""
    if model is None:
        return ModuleMap({}, {}, {})
    owners = {
        "t_" + name.replace(".", "_"): name.rpartition(".")[0]
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    instances: dict[type, set[Name]] = {}
    for name, module in model.named_modules():
        for cls in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
            instances.setdefault(cls, set()).add(name)
    scopes: dict[str, list[Scope]] = {}
    for cls, members in instances.items():
        for code in _functions(cls):
            scope = Scope(code.co_filename, code.co_firstlineno, _last_line(code), frozenset(members))
            scopes.setdefault(os.path.abspath(scope.file), []).append(scope)
    return ModuleMap(owners, scopes, {name: i for i, (name, _) in enumerate(model.named_modules())})


def _functions(cls: type) -> Iterator[CodeType]:
    for value in vars(cls).values():
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, FunctionType):
            yield function.__code__


def _last_line(code: CodeType) -> int:
    return max(line or 0 for *_, line in code.co_lines())


def modules_of_traced(traced: list[BoundSymbol], model: ModuleMap, within: Name | None = None) -> dict[str, Name]:
    """The modules of traced lines, by the name of a line's first result. This name is the mark that passes hand on.

    Lines without results, such as ``shape``, carry no mark. ``within``: as in :func:`assign_modules`.
    """
    modules = zip(traced, assign_modules(traced, model, {}, {}, within), strict=True)
    return {b.flat_proxy_outs[0].name: module for b, module in modules if module is not None and b.flat_proxy_outs}


def assign_modules(
    lines: list[BoundSymbol],
    model: ModuleMap,
    known: Mapping[str, Name],
    traced: Mapping[str, Name],
    within: Name | None = None,
) -> list[Name | None]:
    """The module of each line; None for collectives, ``del`` and the like, and for a line that no rule places.

    ``known`` has the modules of values that other traces computed, by name; ``traced`` is the result of
    :func:`modules_of_traced`. ``within`` is the module whose lines they are, to which a line belongs that no rule
    places; None for the lines of a whole model.
    """
    owned = _owners(lines, model)
    sure = _carry(owned, within)
    upcoming = reversed(_carry(owned[::-1], within))
    found: list[Name | None] = []
    modules = dict(known)
    reached: dict[Scope, Reached] = {}
    for bsym, owner, before, after in zip(lines, owned, sure, upcoming, strict=True):
        module = called_module(bsym)
        if module is None:
            module = _by_origin(bsym, traced)
        if module is None:
            module = owner
        if module is None and _computes(bsym):
            module = _by_source(bsym, model, before, after, reached)
            for source in (known, modules):  # values saved by forward say more than incoming gradients
                if module is None:
                    module = _deepest(source.get(a.name) for a in reversed(bsym.flat_proxy_args))  # newest first
            if module is None and bsym.flat_proxy_outs:
                module = within
        found.append(module)
        if module is not None:
            modules.update((o.name, module) for o in bsym.flat_proxy_outs)
    return found


def _computes(bsym: BoundSymbol) -> bool:
    return not (is_collective(bsym) or is_offload(bsym) or is_deletion(bsym) or is_return(bsym) or is_unpack(bsym))


def _by_origin(bsym: BoundSymbol, traced: Mapping[str, Name]) -> Name | None:
    """The module of the traced line that a line comes from; for a fusion, the module around those of all its parts."""
    marks = (origin_of(part) for part in (bsym.subsymbols if bsym.sym.is_fusion else [bsym]))
    found = [traced[mark] for mark in marks if mark is not None and mark in traced]
    return _around(found) if found else None


def _owners(lines: list[BoundSymbol], model: ModuleMap) -> list[Name | None]:
    """For each line that reads parameters, the innermost module that contains all their owners."""
    owner = dict(model.owners)
    found: list[Name | None] = []
    for bsym in lines:
        bucket = next((a for a in bsym.args if isinstance(a, Bucket)), None)
        if bucket is not None and len(bsym.flat_proxy_outs) == len(bucket.members):
            owner.update((o.name, m.parameter.layer) for o, m in zip(bsym.flat_proxy_outs, bucket.members, strict=True))
        tensors = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        read = [owner[name] for name in tensors if name in owner]
        module = _around(read) if read and _computes(bsym) and bucket is None else None
        if module is not None and len(read) == len(tensors):  # a view or a cast of a parameter
            owner.update((o.name, module) for o in bsym.flat_proxy_outs)
        found.append(module)
    return found


def _carry(owned: list[Name | None], first: Name | None) -> list[Name | None]:
    """Each line's own module, or the last one before it; ``first`` if there is none."""
    carried = []
    for module in owned:
        first = first if module is None else module
        carried.append(first)
    return carried


class Reached(NamedTuple):
    """The last traced line of a function: its source line, its module, and the last module then known for sure."""

    line: int
    module: Name
    before: Name | None


def _by_source(
    bsym: BoundSymbol, model: ModuleMap, before: Name | None, after: Name | None, reached: dict[Scope, Reached]
) -> Name | None:
    """An instance of the class whose source the line comes from: one around the module of the last line that is sure,
    else around that of the next, else beside them.

    If the source position goes backwards, the function has been called again: then the next module is tried first.
    """
    line = bsym.source_positions.lineno if bsym.source_positions is not None else None
    if not bsym.source_filename or line is None:
        return None
    scopes = model.scopes.get(os.path.abspath(bsym.source_filename), ())
    around = sorted((s for s in scopes if s.first <= line <= s.last), key=lambda s: s.last - s.first)
    if not around:
        return None
    last = reached.get(around[0])
    if last is not None and line >= last.line and before == last.before:
        module: Name | None = last.module  # the same call
    else:
        near = (after, before) if last is not None and line < last.line else (before, after)
        module = _nearest(around[0].instances, [n for n in near if n is not None], model.order)
    if module is not None:
        reached[around[0]] = Reached(line, module, before)
    return module


def _nearest(instances: frozenset[Name], near: Sequence[Name], order: Mapping[Name, int]) -> Name | None:
    outer = next((m for n in near for m in ancestors(n) if m in instances), None)
    return outer if outer is not None else next((_beside(n, instances, order) for n in near), None)


def _beside(near: Name, instances: frozenset[Name], order: Mapping[Name, int]) -> Name:
    """The instances that share the most ancestors with ``near``: of these the next in order, else the last."""
    for outer in ancestors(near):
        inside = [m for m in instances if m.startswith(f"{outer}.") or not outer]
        if inside:
            return min(inside, key=lambda m: (order[m] < order[near], abs(order[m] - order[near])))
    raise AssertionError("every module is inside the model")


def ancestors(name: Name) -> Iterator[Name]:
    """The names of a module and of the modules around it: innermost first, the model ("") last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _around(names: Sequence[Name]) -> Name:
    """The innermost module that is, or contains, each of them."""
    first, *others = ([*ancestors(name)] for name in names)
    return next(a for a in first if all(a in other for other in others))


def _deepest(names: Iterable[Name | None]) -> Name | None:
    return max((n for n in names if n is not None), key=_depth, default=None)


def _depth(name: Name) -> int:
    return name.count(".") + bool(name)


# ---- folding ----


class Branch(NamedTuple):
    """A module, or a run of equal siblings ("h.0 … h.11"), with the branches inside the first of them."""

    names: tuple[Name, ...]
    children: tuple[Branch, ...]


def fold(names: Iterable[Name], form: Callable[[Name], object]) -> Branch:
    """The tree of modules. Consecutive siblings whose ``form`` and children are equal become one branch."""
    inside: dict[Name, list[Name]] = {}
    for name in dict.fromkeys(a for n in names for a in reversed(list(ancestors(n)))):
        if name:
            inside.setdefault(name.rpartition(".")[0], []).append(name)

    def branch(name: Name) -> tuple[Branch, object]:
        folded: list[tuple[Branch, object]] = []
        for child in inside.get(name, ()):
            one, shape = branch(child)
            if folded and folded[-1][1] == shape and _is_next(folded[-1][0].names[-1], child):
                folded[-1] = (folded[-1][0]._replace(names=(*folded[-1][0].names, child)), shape)
            else:
                folded.append((one, shape))
        shape = (form(name), tuple((len(b.names), b.names[0].rpartition(".")[2], s) for b, s in folded))
        return Branch((name,), tuple(b for b, _ in folded)), shape

    return branch("")[0]


def _is_next(name: Name, following: Name) -> bool:
    a, b = name.rpartition(".")[2], following.rpartition(".")[2]
    return a.isdigit() and b.isdigit() and int(b) == int(a) + 1
