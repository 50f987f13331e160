"""Which module of the model each line of a trace belongs to: the one whose forward asked for it.

The recorder tags traced lines with it, and autodiff and lowering hand the tags on (passes.analysis.recognise). A line
that calls a block belongs to the block. The lines of its function carry the names of the block's first call.

Lines without a tag belong to the module of their newest argument: autodiff's sums of gradients. Otherwise they are code
around the model, or of a model that is not sharded, and belong to the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from passes.analysis.calls import called_module
from passes.analysis.recognise import is_collective, is_offload, is_unpack, module_of

from thunder.core.symbol import BoundSymbol

Name = str  # a module's qualified name; "" is the model itself


def assign_modules(lines: Iterable[BoundSymbol], known: Mapping[str, Name], within: Name = "") -> list[Name | None]:
    """The module of each line; None for collectives, ``del`` and the like.

    ``known`` has the modules of values that other traces computed, by name. ``within`` is the module whose lines they
    are.
    """
    modules = dict(known)
    found: list[Name | None] = []
    for bsym in lines:
        module = _tagged(bsym)
        if module is None and _computes(bsym):
            newest = (a.name for a in reversed(bsym.flat_proxy_args))
            module = next((modules[name] for name in newest if name in modules), within)
        found.append(module)
        if module is not None:
            modules.update((o.name, module) for o in bsym.flat_proxy_outs)
    return found


def _tagged(bsym: BoundSymbol) -> Name | None:
    """The module that the tags of a line tell; for a fusion, the one around those of all its parts."""
    if not bsym.sym.is_fusion:
        called = called_module(bsym)
        return called if called is not None else module_of(bsym)
    found = [module for part in bsym.subsymbols if (module := module_of(part)) is not None]
    return _around(found) if found else None


def _computes(bsym: BoundSymbol) -> bool:
    return bool(bsym.flat_proxy_outs) and not (is_collective(bsym) or is_offload(bsym) or is_unpack(bsym))


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
