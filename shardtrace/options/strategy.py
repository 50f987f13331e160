"""The values of ``sharding_strategy``, and of the options that choose blocks."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, TypeGuard

from passes.plan import Placement

from torch import nn

# ---- strategies ----


class ShardingStrategy(Enum):
    """The layout of parameters, gradients and optimizer state, in the terms of ZeRO (Rajbhandari et al., 2020).

    DDP (PyTorch's NO_SHARD): whole on every rank; gradients are all-reduced.
    ZERO1, ZERO2 (PyTorch's SHARD_GRAD_OP): sharded at rest; gathered once in forward and kept until backward has used
    them. Both compile to the same traces: :func:`shardtrace.no_sync` decides whether accumulated gradients are whole or
    sharded.
    ZERO3 (PyTorch's FULL_SHARD): sharded at rest; freed after use in forward and gathered again in backward.
    HYBRID_ZERO2, HYBRID_ZERO3 (PyTorch's HYBRID_SHARD): the same over the inner dimension of a mesh. The outer
    dimension replicates the shards and all-reduces their gradients.
    ZERO3_SECONDARY: ZeRO-3 over all ranks of a mesh, except that backward gathers over its inner dimension only, from a
    second shard that forward keeps there (hpZ of ZeRO++, Wang et al., 2023).
    OWNER: each tensor is whole on one rank, which broadcasts it in forward and again in backward, and receives its
    gradient.
    """

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    HYBRID_ZERO2 = "hybrid_zero2"
    HYBRID_ZERO3 = "hybrid_zero3"
    ZERO3_SECONDARY = "zero3_secondary"
    OWNER = "owner"

    @property
    def needs_mesh(self) -> bool:
        """True if it needs a mesh of two dimensions."""
        return self.is_hybrid or self is ShardingStrategy.ZERO3_SECONDARY

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_ZERO2, ShardingStrategy.HYBRID_ZERO3)

    @property
    def replicates(self) -> bool:
        """True if several ranks hold the same values at rest."""
        return self.is_hybrid or self is ShardingStrategy.DDP

    @property
    def regathers(self) -> bool:
        """True if parameters are freed after forward and gathered again in backward."""
        kept = (ShardingStrategy.DDP, ShardingStrategy.ZERO1, ShardingStrategy.ZERO2, ShardingStrategy.HYBRID_ZERO2)
        return self not in kept

    @property
    def placement(self) -> Placement:
        special = {ShardingStrategy.DDP: Placement.REPLICATE, ShardingStrategy.OWNER: Placement.OWNER}
        return special.get(self, Placement.SHARD)


Pattern = str | Callable[[str, nn.Parameter], bool]  # of parameters: by name, or a predicate on name and parameter
Names = Mapping[str, Sequence[str]]  # all names of tied parameters, by the first
Rules = tuple[tuple[Pattern, ShardingStrategy], ...]  # the first that matches counts

_ALIASES = {
    **{strategy.value: strategy for strategy in ShardingStrategy},
    "no_shard": ShardingStrategy.DDP,
    "shard_grad_op": ShardingStrategy.ZERO2,
    "shard_grad": ShardingStrategy.ZERO2,
    "full_shard": ShardingStrategy.ZERO3,
    "hybrid_shard": ShardingStrategy.HYBRID_ZERO3,
    "hybrid_shard_zero2": ShardingStrategy.HYBRID_ZERO2,
}

BUCKETING_STRATEGIES = ("auto", "none", "layer", "block", "model")


def parse_sharding_strategy(value: Any) -> ShardingStrategy:
    """Accepts members, their names in any case, and the equivalent members of Thunder's and PyTorch's enums.

    Raises ValueError that lists the names.
    """
    if isinstance(value, ShardingStrategy):
        return value
    name = value.name if isinstance(value, Enum) else value
    found = _ALIASES.get(name.lower().strip("_")) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(repr(alias) for alias in _ALIASES)
        raise ValueError(f"unknown sharding_strategy {value!r}: choose one of {known}")
    return found


def parse_rules(value: Any) -> Rules:
    """Accepts one strategy for all parameters, or a mapping of name patterns or predicates to strategies."""
    if not isinstance(value, Mapping):
        return (("*", parse_sharding_strategy(value)),)
    if not value or not all(isinstance(pattern, str) or callable(pattern) for pattern in value):
        raise ValueError(
            f"sharding_strategy={value!r}: a mapping is of patterns such as 'embed.*', or predicates on "
            "(name, parameter), to strategies"
        )
    return tuple((pattern, parse_sharding_strategy(strategy)) for pattern, strategy in value.items())


def assign(
    rules: Rules, parameters: Mapping[str, nn.Parameter], names: Names = MappingProxyType({})
) -> dict[str, ShardingStrategy]:
    """The strategy of the first pattern that matches any of a parameter's names, by its first name, or of the first
    predicate on that one. The parameters are whole. ``names`` are those of parameters that have several.

    Raises ValueError that names the patterns that match nothing, a parameter that no pattern matches, or one whose
    names match patterns of different strategies.
    """
    found: dict[str, ShardingStrategy] = {}
    unused = [pattern for pattern, _ in rules]
    for name, parameter in parameters.items():
        every = names.get(name, (name,))
        matches = partial(_matches, parameter=parameter, first=name)
        matching = [(p, strategy) for p, strategy in rules if any(matches(p, n) for n in every)]
        refuse_conflict("sharding_strategy", every, rules, matches)
        if not matching:
            raise ValueError(f"no pattern of sharding_strategy matches parameter {name!r}: add '*' as the last one")
        unused = [pattern for pattern in unused if all(pattern != matched for matched, _ in matching)]
        found[name] = matching[0][1]
    if unused and (found or unused != ["*"]):
        patterns = ", ".join(repr(p) if isinstance(p, str) else f"the predicate {_name(p)}" for p in unused)
        raise ValueError(f"no parameter matches {patterns} of sharding_strategy; there are: {_some(found)}")
    return found


def refuse_conflict(
    option: str, names: Sequence[str], rules: Iterable[tuple[Any, Any]], matches: Callable[[Any, str], bool]
) -> None:
    """Raises ValueError if two names of a tied parameter match patterns, other than "*", of different values."""
    rules = [rule for rule in rules if rule[0] != "*"]
    firsts = {name: next((rule for rule in rules if matches(rule[0], name)), None) for name in names}
    found = [(name, rule) for name, rule in firsts.items() if rule is not None]
    for name, (pattern, value) in found[1:]:
        first, (other, chosen) = found[0]
        if value != chosen:
            raise ValueError(
                f"{option}: {first!r} and {name!r} are one tied parameter, and the patterns {other!r} and {pattern!r} "
                f"choose differently for it: list both names first, with one choice"
            )


def _matches(pattern: Pattern, name: str, parameter: nn.Parameter, first: str) -> bool:
    """Predicates see the ``first`` name of a parameter only, as in ``split_parameters``."""
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return name == first and bool(pattern(name, parameter))


def _name(predicate: Callable[..., Any]) -> str:
    return getattr(predicate, "__qualname__", type(predicate).__name__)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def parse_bucketing_strategy(value: Any) -> str | float:
    """One of ``BUCKETING_STRATEGIES`` in any case (or an enum member of that name), or a positive size in MB."""
    name = value.name if isinstance(value, Enum) else value
    if isinstance(name, str) and name.lower() in BUCKETING_STRATEGIES:
        return name.lower()
    if isinstance(name, (int, float)) and not isinstance(name, bool) and name > 0:
        return float(name)
    known = ", ".join(repr(s) for s in BUCKETING_STRATEGIES)
    raise ValueError(
        f"unknown bucketing_strategy {value!r}: choose one of {known}, a size in MB greater than 0, "
        "the class of a block (or several), or one of torch's auto_wrap policies"
    )


# ---- blocks ----


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
WAYS = (*RECOMPUTED, "host", "cheap+host", "full+host")  # and whether what it saves is in host memory
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
    """The modules whose activations are recomputed or kept in host memory, by their qualified names, and the way.

    ``chosen`` is None or False (no module), True or "full" (each repeated block), another one of ``WAYS`` (likewise),
    an int n (every n-th block), a class or several, a predicate on ``(module)`` or ``(name, module)``, or a mapping of
    patterns of names to ways or "none", of which the first that matches counts. Raises ValueError for anything else, or
    if it chooses nothing.
    """
    if chosen is None or chosen is False:
        return {}
    modules = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, str]]
    if isinstance(chosen, str) and chosen in WAYS:
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
            f"n for every n-th repeated block, one of {', '.join(map(repr, WAYS))}, or a mapping of names of blocks to "
            "these"
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
    known = (*WAYS, "none")
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
