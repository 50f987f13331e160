"""Assignment of parameters to owner ranks, so that all ranks own about the same number of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Owned(NamedTuple):
    """A parameter that needs an owner, and the module that holds it."""

    name: str
    module: str
    bytes: int


def assign_owners(parameters: Iterable[Owned], ranks: int, evenness: float) -> dict[str, int]:
    """The owner rank of each parameter, by its name.

    Parameters that are kept together go, the largest first, to the rank that has the fewest bytes. No rank then has
    more than 4/3 of the optimum (Graham, 1969, "Bounds on multiprocessing timing anomalies").

    Args:
        evenness: 1 assigns each tensor by itself, 0 keeps the tensors of a module together. In between, a module is
            kept together if it has at most ``1 - evenness`` of a rank's even share of all bytes.
    """
    parameters = list(parameters)
    share = sum(p.bytes for p in parameters) / ranks
    modules: dict[str, list[Owned]] = {}
    for p in parameters:
        modules.setdefault(p.module, []).append(p)
    parts: list[list[Owned]] = []
    for members in modules.values():
        together = evenness == 0 or sum(p.bytes for p in members) <= (1 - evenness) * share
        parts += [members] if together else [[p] for p in members]
    load = [0] * ranks
    owners: dict[str, int] = {}
    for part in sorted(parts, key=lambda part: -sum(p.bytes for p in part)):  # stable: the same on every rank
        rank = load.index(min(load))
        load[rank] += sum(p.bytes for p in part)
        owners.update((p.name, rank) for p in part)
    return owners
