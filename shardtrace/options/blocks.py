"""Choosing blocks: the modules that become buckets, and those whose activations are recomputed."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from torch import nn


def repeated_blocks(model: nn.Module) -> list[str]:
    """Qualified names of the repeated blocks: the entries of the containers that hold them.

    A ModuleList holds blocks. A Sequential holds blocks if two of its entries with parameters have the same class. A
    ModuleDict holds blocks if two such entries also have submodules. An entry that is itself a container of blocks with
    submodules (a stage) is not a block, but its entries are.
    """
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name == b or name.startswith(b + ".") for b in blocks) or not _holds_blocks(module):
            continue
        entries = [(f"{name}.{child}" if name else child, entry) for child, entry in module.named_children()]
        blocks += [entry_name for entry_name, entry in entries if not _is_stage(entry)]
    return blocks


def _is_stage(module: nn.Module) -> bool:
    return _holds_blocks(module) and any(any(True for _ in child.children()) for child in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return True
    if not isinstance(module, (nn.Sequential, nn.ModuleDict)):
        return False
    entries = [child for child in module.children() if any(True for _ in child.parameters())]
    if isinstance(module, nn.ModuleDict):  # two embeddings are not blocks
        entries = [child for child in entries if any(True for _ in child.children())]
    return any(count > 1 for count in Counter(map(type, entries)).values())


Repeated = str | type[nn.Module] | Collection[type[nn.Module]]


def blocks_of_a_kind(model: nn.Module, chosen: Any, buckets: Collection[str]) -> dict[str, nn.Module]:
    """The modules that are traced once for all of their class, by their qualified names.

    ``chosen`` is "once" (the ``buckets``, which are names of blocks), "inline" (none), or a class or several. Raises
    ValueError for anything else, or for a class without instances.
    """
    if chosen == "inline":
        return {}
    if chosen != "once":
        if not _classes(chosen):
            raise ValueError(f'repeated_blocks={chosen!r}: pass "once", "inline", or the class of a block (or several)')
        buckets = chosen_blocks(model, chosen)
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: modules[name] for name in buckets}


Eager = str | type[nn.Module] | Collection[str | type[nn.Module]] | None


def eager_modules(model: nn.Module, chosen: Eager) -> list[nn.Module]:
    """The modules that PyTorch runs: those of the ``chosen`` classes and names; none for "auto" and None.

    A name may be a pattern. Raises ValueError for anything else, and for what no module matches.
    """
    if chosen is None or chosen == "auto":
        return []
    found: dict[nn.Module, None] = {}
    for one in [chosen] if isinstance(chosen, str | type) else chosen:
        if isinstance(one, str):
            matching = [m for name, m in model.named_modules() if name and fnmatchcase(name, one)]
        elif isinstance(one, type) and issubclass(one, nn.Module):
            matching = [m for name, m in model.named_modules() if name and isinstance(m, one)]
        else:
            raise ValueError(f'eager={one!r}: pass "auto", None, or names and classes of modules')
        if not matching:
            raise ValueError(f"{type(model).__name__} has no module that eager={one!r} chooses")
        found.update(dict.fromkeys(matching))
    return list(found)


Checkpointed = int | str | type[nn.Module] | Collection[type[nn.Module]] | Mapping[str, str] | Callable[..., Any] | None
RECOMPUTED = ("full", "cheap")  # what a block recomputes: all of its activations, or those that are cheap to compute
Wrap = type[nn.Module] | Collection[type[nn.Module]] | Callable[..., Any]


def is_wrap(value: Any) -> TypeGuard[Wrap]:
    """True if :func:`chosen_blocks` accepts ``value``."""
    return bool(_classes(value)) or (callable(value) and not isinstance(value, type))


def _classes(value: Any) -> tuple[type[nn.Module], ...]:
    """The class of modules that ``value`` is, or the several that it has. None if it is anything else."""
    found = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    return found if all(isinstance(c, type) and issubclass(c, nn.Module) for c in found) else ()


def chosen_blocks(model: nn.Module, wrap: Wrap) -> list[str]:
    """Qualified names of the modules that ``wrap`` makes blocks: the instances of a class or of several, or the modules
    that one of torch's auto_wrap policies would wrap.

    Raises ValueError if there is none.
    """
    blocks: list[str] = []
    if classes := _classes(wrap):
        blocks = [name for name, module in model.named_modules() if name and isinstance(module, classes)]
    elif hasattr(wrap, "_run_policy"):  # torch's policies that are objects
        wrapped = wrap._run_policy(model, ignored_modules=set(), root_kwargs={})
        blocks = [name for name, module in model.named_modules() if name and module in wrapped]
    elif callable(wrap):
        _apply_policy(wrap, model, "", blocks)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no module that {wrap!r} makes a bucket")
    return blocks


def _apply_policy(policy: Callable[..., Any], module: nn.Module, name: str, blocks: list[str]) -> int:
    """Asks a policy as torch's FSDP does: children first, then the module with the elements that they left over.

    Returns the elements of the module's parameters that are in a block.
    """
    numel = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    inside = sum(
        _apply_policy(policy, child, f"{name}.{child_name}" if name else child_name, blocks)
        for child_name, child in module.named_children()
    )
    if name and policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
        blocks.append(name)
        return numel
    return inside


def checkpointed_blocks(model: nn.Module, chosen: Any) -> dict[str, tuple[nn.Module, str]]:
    """The modules whose activations are recomputed, by their qualified names, and what they recompute: "full", "cheap".

    ``chosen`` is None or False (no module), True or "full" (each repeated block), "cheap" (the cheap activations of
    each), an int n (every n-th block), a class or several, a predicate on ``(module)`` or ``(name, module)``, or a
    mapping of patterns of names to "full", "cheap" or "none", of which the first that matches counts. Raises ValueError
    for anything else, or if it chooses nothing.
    """
    if chosen is None or chosen is False:
        return {}
    modules = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, str]]
    if isinstance(chosen, str) and chosen in RECOMPUTED:
        found = {name: (modules[name], chosen) for name in repeated_blocks(model)}
    elif isinstance(chosen, int) and chosen > 0:
        found = {name: (modules[name], "full") for name in repeated_blocks(model)[chosen - 1 :: chosen]}
    elif isinstance(chosen, Mapping):
        found = _by_pattern(model, modules, chosen)
    elif is_wrap(chosen):
        chooses = _predicate(chosen)
        found = {name: (module, "full") for name, module in modules.items() if chooses(name, module)}
    else:
        raise ValueError(
            f"activation_checkpointing={chosen!r}: pass the class of a block (or several), a predicate on modules, "
            'n for every n-th repeated block, "full" or "cheap", or a mapping of names of blocks to these'
        )
    if not found:
        raise ValueError(f"{type(model).__name__} has no module that activation_checkpointing={chosen!r} chooses")
    for name, (module, _) in found.items():
        if "forward" in module.__dict__:
            raise ValueError(f"module {name} has a forward set on the instance, which cannot be checkpointed")
    return found


def _by_pattern(
    model: nn.Module, modules: Mapping[str, nn.Module], chosen: Mapping[str, str]
) -> dict[str, tuple[nn.Module, str]]:
    known = (*RECOMPUTED, "none")
    for pattern, what in chosen.items():
        if what not in known:
            raise ValueError(
                f"activation_checkpointing[{pattern!r}]={what!r}: choose one of {', '.join(map(repr, known))}"
            )
    blocks = set(repeated_blocks(model))
    found, unused = {}, dict.fromkeys(chosen)
    for name, module in modules.items():
        # a pattern with a wildcard chooses among blocks, a plain name any module
        matching = next((p for p in chosen if p == name or (name in blocks and fnmatchcase(name, p))), None)
        if matching is not None:
            unused.pop(matching, None)
            if chosen[matching] != "none":
                found[name] = module, chosen[matching]
    if missing := [p for p in unused if p != "*"]:
        raise ValueError(f"no block of {type(model).__name__} matches {missing[0]!r} of activation_checkpointing")
    return found


def _predicate(chosen: Any) -> Callable[[str, nn.Module], bool]:
    if classes := _classes(chosen):
        return lambda name, module: isinstance(module, classes)
    takes_name = len(inspect.signature(chosen).parameters) > 1
    return chosen if takes_name else lambda name, module: bool(chosen(module))
