"""Which values are reached from a block, and how."""

from types import SimpleNamespace

from passes.merge_checks import follow
from shardtrace.blocks.provenance import Reach, Unknown, steps_to
from shardtrace.blocks.structure import CannotShare

import pytest
from thunder.core.interpreter import ProvenanceRecord, PseudoInst


def constant(value):
    return ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=value)


def attribute(owner, name):
    return ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[owner, constant(name)])


def item(owner, key):
    return ProvenanceRecord(PseudoInst.BINARY_SUBSCR, inputs=[owner, key])


def test_reach():
    root = attribute(constant("model"), "block")
    reach = Reach(root)
    assert reach.has(root)
    assert reach.has(attribute(attribute(root, "part"), "weight"))
    assert reach.has(attribute(attribute(constant("model"), "block"), "weight"))  # an equal record, made again
    assert not reach.has(attribute(constant("model"), "other"))


def test_shared_inputs_are_followed_once():
    record = constant("model")
    for _ in range(60):  # 2 ** 60 ways back
        record = ProvenanceRecord(PseudoInst.OPAQUE, inputs=[record, record])
    assert not Reach(constant("block")).has(record)


def test_steps():
    root = attribute(constant("model"), "block")
    block = SimpleNamespace(parts=["a", "b"], number=1)
    other = SimpleNamespace(parts=["c", "d"], number=1)
    for record, values in [
        (root, (block, other)),
        (attribute(root, "number"), (1, 1)),
        (item(attribute(root, "parts"), constant(0)), ("a", "c")),
        (item(attribute(root, "parts"), attribute(root, "number")), ("b", "d")),
        (item(attribute(root, "parts"), constant(slice(1))), (["a"], ["c"])),
    ]:
        steps = steps_to(record, root, block)
        assert (follow(steps, block), follow(steps, other)) == values


def test_what_has_no_steps():
    root = attribute(constant("model"), "block")
    block = SimpleNamespace(parts={None: 1}, key=object(), keys=[1])
    with pytest.raises(Unknown, match="reached by OPAQUE"):
        steps_to(ProvenanceRecord(PseudoInst.OPAQUE, inputs=[root, root]), root, block)
    with pytest.raises(CannotShare, match="a key that is a object and no plain attribute"):
        steps_to(item(attribute(root, "parts"), attribute(root, "key")), root, block)
    with pytest.raises(CannotShare, match="a key that is a int and no plain attribute"):  # nobody has compared it
        steps_to(item(attribute(root, "parts"), item(attribute(root, "keys"), constant(0))), root, block)
    with pytest.raises(Unknown, match="reached by CONSTANT"):
        steps_to(item(constant({1: 2}), item(attribute(root, "keys"), constant(0))), root, block)
    with pytest.raises(AttributeError):
        steps_to(item(attribute(root, "parts"), attribute(root, "gone")), root, block)
