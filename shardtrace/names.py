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
    """Qualified names of the repeated blocks: the entries of the outermost containers that hold them.

    A ModuleList or ModuleDict holds blocks; a Sequential does if two of its entries with parameters are of one class.
    """
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name == b or name.startswith(b + ".") for b in blocks):
            continue
        if _holds_blocks(module):
            blocks += [f"{name}.{child}" if name else child for child, _ in module.named_children()]
    return blocks


def _holds_blocks(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    if not isinstance(module, nn.Sequential):
        return False
    classes = Counter(type(child) for child in module if any(True for _ in child.parameters()))
    return any(count > 1 for count in classes.values())
