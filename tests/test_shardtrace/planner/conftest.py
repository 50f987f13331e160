"""A toy GPT, compiled once for all tests of the planner."""

from passes.plan.cost import cluster, hardware
from shardtrace.options.policies import parse_allowed
from shardtrace.planner.estimate import Setting, Task, optimizer_cost
from shardtrace.planner.search import make_family
from shardtrace.testing import fake_ranks

import pytest
from toy_gpt import RANKS, gpt, plan_blocks, tokens


@pytest.fixture(scope="session")
def task():
    cost = cluster(hardware("cpu"), inside=None, between="1gbit", node_ranks=1)
    setting = Setting(cost, hardware("cpu"), optimizer_cost("AdamW"))
    return Task(gpt(), (tokens(), tokens()), RANKS, None, setting, {"sharding_strategy": {"*": "zero3"}}, {}, {})


@pytest.fixture(scope="session")
def family(task):
    """The steps with sharded parameters: each block compiled in three variants."""
    with fake_ranks(RANKS):
        allowed = parse_allowed({"gather_dtype": "int8", "reduce_wire": ["int8", "int4"]}, {})
        free = task._replace(fixed={}, allowed=allowed)
        return make_family(free, "zero")


@pytest.fixture(scope="session")
def planned():
    return plan_blocks()
