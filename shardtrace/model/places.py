"""The places of parameters: qualified names, the modules that own them, the blocks that hold them."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Owner(NamedTuple):
    """A module that holds a parameter as ``attribute``, and the module's qualified name."""

    name: str
    module: nn.Module
    attribute: str


class Place(NamedTuple):
    """A parameter, its (first) qualified name, and the names of the module that owns it and of the block around that.

    ``owners`` are all that hold it: more than one if it is tied.
    """

    name: str
    parameter: nn.Parameter
    layer: str
    block: str | None
    owners: list[Owner]


def places(model: nn.Module, exclude: set[int], blocks: list[str]) -> list[Place]:
    """Each distinct parameter of ``model`` in the order of ``named_parameters``, without those whose id is excluded.

    Its block is the innermost of ``blocks`` (qualified names) that holds it.
    """
    inner_first = sorted(blocks, key=len, reverse=True)
    found: dict[int, Place] = {}
    for layer, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in exclude:
                continue
            if id(parameter) not in found:
                block = next((b for b in inner_first if layer == b or layer.startswith(b + ".")), None)
                name = f"{layer}.{attribute}" if layer else attribute
                found[id(parameter)] = Place(name, parameter, layer, block, [])
            found[id(parameter)].owners.append(Owner(layer, module, attribute))
    return list(found.values())


def sparse_embedding(model: nn.Module) -> str | None:
    """The name of a trainable embedding that was built with ``sparse=True``, if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            return f"{name or 'the model itself'} ({type(module).__name__}(sparse=True))"
    return None
