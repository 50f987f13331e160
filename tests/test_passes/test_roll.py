"""Thunder sees three calls of many."""

import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from torch import nn

WIDTH = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def blocks(count):
    return lambda: nn.Sequential(*(Block() for _ in range(count)))


def test_golden(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(blocks(7), torch.ones(2, WIDTH))
    rolled = stage(cmodel, "roll")
    assert "unroll writes the other 3" in str(rolled.get_provenance())
    assert [p.name for p in rolled.args] == ["input", *(f"t_{i}_linear_weight" for i in (0, 1, 2, 6))]
    lines = [line for line in text(rolled).splitlines() if "ync" in line or "Block" in line or "return" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
(t0,) = synchronize((t_0_linear_weight,), b_0)
(t1,) = Block(input, t0)
(t2,) = synchronize((t_1_linear_weight,), b_1)
(t3,) = Block_2(t1, t2)
(t4,) = synchronize((t_2_linear_weight,), b_2)
(t5,) = Block_2(t3, t4)
(t6,) = synchronize((t_6_linear_weight,), b_6)
(t7,) = Block_2(t5, t6)
return {'output': (t7,), 'flat_args': [input, t_0_linear_weight, t_1_linear_weight, t_2_linear_weight, t_6_linear_weight]}""",
    )


def between(cmodel):
    """The numbers of lines of the stages after roll and before unroll."""
    stages = [(str(t.get_provenance()), len(t.bound_symbols)) for t in thunder.last_traces(cmodel)]
    first, last = (
        next(i for i, (name, _) in enumerate(stages) if f"shardtrace: {p} " in name) for p in ("roll", "unroll")
    )
    return [count for _, count in stages[first:last]]


def test_thunder_has_no_more_lines_for_more_blocks(fake_ranks):
    fake_ranks(2)
    few, many = (between(compile_fake(blocks(n), torch.ones(2, WIDTH))) for n in (6, 20))
    assert few == many
