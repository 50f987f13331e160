"""nvFuser without a GPU: what Thunder fuses for it in sharded models, and training through its regions, run by torch.

With nvFuser's wheel: make nvfuser-check. On a GPU: tests/gpu.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from expecttest import assert_expected_inline


@pytest.fixture(scope="module")
def found():
    """What tests/without_gpu/matrix.py prints, in a process of its own: Thunder registers nvFuser when it is imported."""
    script = Path(__file__).parent / "without_gpu" / "matrix.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_collective_is_in_a_region(found):
    """Strategies, precision, checkpointing, dropout, offload and no_sync compile for nvFuser, and are verified."""
    cases = found["compiled"]
    assert [wrong for case in cases.values() for wrong in case["wrong"]] == []
    assert all(min(case["regions"]) > 0 for case in cases.values())


def test_how_much_sharding_cuts_regions(found):
    """A synchronize before the first norm of a block cuts the region of the addition before it: Thunder fuses only lines
    that stand together. ``thunder.jit(model, fusion_type="dataflow")`` fuses more than it does in the plain model."""
    assert found["plain"] == [7, 12]
    assert found["compiled"]["zero3"]["regions"] == found["compiled"]["zero3, inline"]["regions"] == [10, 13]
    assert all(a <= b for a, b in zip(found["compiled"]["zero3, dataflow"]["regions"], found["plain"], strict=True))


def test_regions_and_collectives_of_a_forward(found):
    code = found["compiled"]["zero3, inline"]["text"]
    order = [a or b for a, b in re.findall(r"(nvFusion\d+)\(|= wait_all_gather\(\w+, (\w+)\)", code)]
    assert_expected_inline(
        "\n".join(order),
        """\
b_embedding
nvFusion0
b_blocks_0
nvFusion1
nvFusion2
nvFusion3
nvFusion4
b_blocks_1
nvFusion5
nvFusion6
nvFusion7
nvFusion8
b_norm
nvFusion9""",
    )


def test_wheels_have_only_nvfuser_direct(found):
    """A region that runs for the first time imports from ``nvfuser``."""
    assert found["named"]


def test_two_ranks_train_through_regions(found):
    """The parameters after three steps are those of eager PyTorch on the whole batch."""
    assert len(found["trained"]) == 2
    for apart, regions in found["trained"]:
        assert apart < 1e-5
        assert regions > 50
