"""Where parameters live: qualified names, the layers that own them, the repeated blocks that hold them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import nn


class Place(NamedTuple):
    """A parameter, its (first) qualified name, the name of the module that owns it and of the block around that.

    ``owners`` are all (module, attribute) that hold it.
    """

    name: str
    parameter: nn.Parameter
    layer: str
    block: str | None
    owners: list[tuple[nn.Module, str]]


def places(model: nn.Module, exclude: set[int]) -> list[Place]:
    """Each distinct parameter of ``model`` in the order of ``named_parameters``, without those whose id is excluded."""
    blocks = repeated_blocks(model)
    found: dict[int, Place] = {}
    for layer, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in exclude:
                continue
            if id(parameter) not in found:
                block = next((b for b in blocks if layer == b or layer.startswith(b + ".")), None)
                name = f"{layer}.{attribute}" if layer else attribute
                found[id(parameter)] = Place(name, parameter, layer, block, [])
            found[id(parameter)].owners.append((module, attribute))
    return list(found.values())


def repeated_blocks(model: nn.Module) -> list[str]:
    """Qualified names of the repeated blocks: the entries of the containers that hold them.

    A ModuleList holds blocks. A Sequential does if two of its entries with parameters are of one class, a ModuleDict if
    two that are made of modules are.
    An entry that is a stage of several blocks, themselves made of modules, is not one: its blocks are.
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
