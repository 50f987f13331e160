"""Where a value comes from: Thunder's provenance records, led from one module to another and evaluated."""

from __future__ import annotations

import copy
from typing import Any

from thunder.core.interpreter import ProvenanceRecord, PseudoInst


class Unknown(Exception):
    """A record that cannot be evaluated."""


def leads_to(record: ProvenanceRecord, root: ProvenanceRecord) -> bool:
    """True if ``record`` is that of ``root``'s value or of something that is reached from it."""
    return record == root or any(leads_to(i, root) for i in record.inputs)


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
    """What a record stands for that leads to ``root``, whose value is given.

    Raises:
        Unknown: if it leads elsewhere, or through a call.
        AttributeError, KeyError, IndexError, TypeError: if there is nothing.
    """
    if record is root or record == root:
        return value
    inst = record.inst
    name = inst.value if isinstance(inst, PseudoInst) else inst.opname
    if name == "CONSTANT":
        return record.value
    if name == "OPAQUE" and getattr(record.inputs[0].value, "__name__", "") == "__getitem__":
        key, owner = record.inputs[1].inputs
        return value_of(owner, root, value)[value_of(key, root, value)]
    if name not in ("LOAD_ATTR", "BINARY_SUBSCR"):
        raise Unknown(f"a value that is reached by {name}")
    owner, key = (value_of(i, root, value) for i in record.inputs)
    return getattr(owner, key) if name == "LOAD_ATTR" else owner[key]
