"""Models and scripts put together at random from what people write: as in eager PyTorch, or refused.

``make fuzz`` tries 500 new ones. A failure prints the program, which belongs into FOUND once it is mended.
"""

import os

import pytest
import torch
from grammar import ACTIONS, LINES, Trainer, options, programs, scripts
from hypothesis import HealthCheck, Phase, given, settings

PROGRAMS = int(os.environ.get("PROGRAMS", "0"))  # new ones; otherwise 20, the same each time
FOUND = [
    (["running_mean", "second_input"], [], {}),  # arguments that are parts of one tensor
    (["reads_values", "cuts_the_gradient", "anneals"], ["replace_state", "anneal"], {}),  # read, then recorded again
]


def run(lines, script, fsdp_options):
    """Runs a program both ways, with what changes global state one after the other."""
    seen = []
    for sharded in (False, True):
        trainer = Trainer(lines, sharded, fsdp_options)
        for number, action in enumerate(["step", *script, "step"]):
            trainer.act(action, 10 * number)
        seen.append(trainer.seen)
    expected, found = seen
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", range(8))
def test_each_line(single_rank, first):
    run([*list(LINES)[first::8], "linear"], [], {})


@pytest.mark.parametrize("action", ACTIONS)
def test_each_action(single_rank, action):
    run(["all_blocks", "running_mean", "drop"], [action], {})


@pytest.mark.parametrize("program", FOUND)
def test_found(single_rank, program):
    run(*program)


@settings(
    deadline=None,
    max_examples=PROGRAMS or 20,
    derandomize=not PROGRAMS,
    phases=[Phase.generate, *([Phase.shrink] if PROGRAMS else [])],
    suppress_health_check=list(HealthCheck),
)
@given(lines=programs, script=scripts, fsdp_options=options)
def test_programs(single_rank, lines, script, fsdp_options):
    run(lines, script, fsdp_options)
