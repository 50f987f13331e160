"""PyTorch's own tools around a sharded model. (GradScaler: tests/test_strategies.py.)"""

import pytest
import step_workers as workers


@pytest.mark.parametrize("kind", ["fused", "foreach", "sgd"])
def test_optimizers_and_schedules(two_ranks, kind):
    two_ranks.run(workers.optimizers, kind=kind)


def test_autocast(two_ranks):
    two_ranks.run(workers.autocast)
