"""Tests on ranks: where their bodies run, and how they fail."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_script


@on_ranks(2)
@pytest.mark.parametrize("numbers", [[3, 4]])
def test_the_body_runs_on_each_rank(numbers, tmp_path):
    (tmp_path / f"{dist.get_rank()}").touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    total = torch.tensor(numbers[dist.get_rank()])
    dist.all_reduce(total)
    assert total == sum(numbers)


def first_rank_fails():
    found = dist.get_rank() + 5
    assert found == 6
    return found


def test_a_failing_assert_shows_its_rank_its_line_and_its_values(two_ranks):
    (fine, text), second = two_ranks.outcomes(first_rank_fails)
    assert not fine
    assert second == (True, 6)
    assert text.startswith("AssertionError: assert 5 == 6\n")
    assert "\n    assert found == 6\n" in text
    with pytest.raises(pytest.fail.Exception, match=r"^rank 0: AssertionError: assert 5 == 6"):
        two_ranks.run(first_rank_fails)


def test_one_rank_of_a_script_proves_and_the_other_one_in_the_next(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom passes.proof import prove\nif prove.prove.__name__ == 'prove': print(os.environ['RANK'])\n"
    )
    assert {run_script(script, [], 2).strip() for _ in range(2)} == {"0", "1"}
