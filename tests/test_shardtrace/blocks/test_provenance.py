"""Which values are reached from a block."""

from shardtrace.blocks.provenance import Reach, attribute

from thunder.core.interpreter import ProvenanceRecord, PseudoInst


def constant(value):
    return ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=value)


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
