"""PyTorch's own tools around a sharded model. (GradScaler: tests/test_strategies.py.)"""

import step_workers as workers


def test_optimizers_and_schedules(two_ranks):
    two_ranks.run(workers.optimizers)


def test_autocast(two_ranks):
    two_ranks.run(workers.autocast)
