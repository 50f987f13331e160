"""Thunder's provenance records, which tell where a value comes from: rewriting them for another module, and evaluating
them."""

from __future__ import annotations

import copy
from typing import Any

from thunder.core.interpreter import ProvenanceRecord, PseudoInst


class Unknown(Exception):
    """A record that cannot be evaluated."""


def step_of(record: ProvenanceRecord) -> str:
    """The last step on the way to a value, such as "LOAD_ATTR": the name of an instruction, or Thunder's own."""
    return str(record.inst.value if isinstance(record.inst, PseudoInst) else record.inst.opname)


class Reach:
    """Which records lead to ``root``. Records share inputs, of which each is followed once."""

    def __init__(self, root: ProvenanceRecord) -> None:
        self._root = root
        self._known: dict[int, tuple[ProvenanceRecord, bool]] = {}  # the record keeps its id from being used again

    def has(self, record: ProvenanceRecord) -> bool:
        """True if ``record`` is that of the root's value or of something that is reached from it."""
        known = self._known.get(id(record))
        if known is None:
            leads = record == self._root or any(map(self.has, record.inputs))
            known = self._known[id(record)] = (record, leads)
        return known[1]


def moved(record: ProvenanceRecord, old: ProvenanceRecord, new: ProvenanceRecord) -> ProvenanceRecord:
    """``record`` with ``new`` in the place of ``old``; the very same record if it does not lead there."""
    if record is old or record == old:
        return new
    inputs = [moved(i, old, new) for i in record.inputs]
    if all(a is b for a, b in zip(inputs, record.inputs, strict=True)):
        return record
    result = copy.copy(record)
    result.inputs = inputs
    result.__dict__.pop("proxy", None)  # of the other value
    return result


def attribute(owner: ProvenanceRecord, name: str) -> ProvenanceRecord:
    """The record of an attribute that is read."""
    constant = ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=name)
    return ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[owner, constant])


def value_of(record: ProvenanceRecord, root: ProvenanceRecord, value: Any) -> Any:
    """The value at the end of a record that starts from ``root``, whose own value is ``value``.

    Raises:
        Unknown: if it leads elsewhere, or through a call.
        AttributeError, KeyError, IndexError, TypeError: if there is nothing.
    """
    if record is root or record == root:
        return value
    step = step_of(record)
    if step == "CONSTANT":
        return record.value
    if step == "OPAQUE" and getattr(record.inputs[0].value, "__name__", "") == "__getitem__":
        key, owner = record.inputs[1].inputs
        return value_of(owner, root, value)[value_of(key, root, value)]
    if step not in ("LOAD_ATTR", "BINARY_SUBSCR"):
        raise Unknown(f"a value that is reached by {step}")
    owner, key = (value_of(i, root, value) for i in record.inputs)
    return getattr(owner, key) if step == "LOAD_ATTR" else owner[key]
