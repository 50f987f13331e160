"""Thunder's provenance records, which tell where a value comes from: rewriting them for another module, and reading
what they lead to."""

from __future__ import annotations

import copy
from operator import attrgetter, itemgetter
from typing import Any

from passes.merge_checks import Steps, follow
from shardtrace.blocks.structure import PLAIN, CannotShare

from thunder.core.interpreter import ProvenanceRecord, PseudoInst


class Unknown(Exception):
    """A record that cannot be followed."""


def step_of(record: ProvenanceRecord) -> str:
    """The last step on the way to a value, such as "LOAD_ATTR": the name of an instruction, or Thunder's own."""
    return str(record.inst.value if isinstance(record.inst, PseudoInst) else record.inst.opname)


class Reach:
    """Which records lead to ``root``. Records share inputs, of which each is followed once."""

    def __init__(self, root: ProvenanceRecord) -> None:
        self.root = root
        self._known: dict[int, tuple[ProvenanceRecord, bool]] = {}  # the record keeps its id from being used again

    def has(self, record: ProvenanceRecord) -> bool:
        """True if ``record`` is that of the root's value or of something that is reached from it."""
        known = self._known.get(id(record))
        if known is None:
            leads = record == self.root or any(map(self.has, record.inputs))
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


def steps_to(record: ProvenanceRecord, root: ProvenanceRecord, value: Any) -> Steps:
    """The steps from ``root``, whose value is given, to the value of ``record``.

    A key that comes from ``root``, too, is that of this ``value``: it is a plain attribute that tracing has read, so
    that another block of the kind has the same.

    Raises:
        Unknown: if the record leads elsewhere, or through a call.
        CannotShare: if another block might have another key.
        AttributeError, KeyError, IndexError, TypeError (:data:`MISSING`): if a key is not there.
    """
    if record is root or record == root:
        return ()
    step = step_of(record)
    if step == "OPAQUE" and getattr(record.inputs[0].value, "__name__", "") == "__getitem__":
        step, (key, owner) = "BINARY_SUBSCR", record.inputs[1].inputs
    elif step in ("LOAD_ATTR", "BINARY_SUBSCR"):
        owner, key = record.inputs
    else:
        raise Unknown(f"a value that is reached by {step}")
    steps = steps_to(owner, root, value)  # first: the key of what leads elsewhere does not matter
    constant = step_of(key) == "CONSTANT"
    k = key.value if constant else follow(steps_to(key, root, value), value)
    if not constant and not (step_of(key) == "LOAD_ATTR" and isinstance(k, PLAIN)):
        raise CannotShare(f"has a key that is a {type(k).__name__} and no plain attribute")
    last = attrgetter(str(k)) if step == "LOAD_ATTR" else itemgetter(k)
    return (*steps, last)
