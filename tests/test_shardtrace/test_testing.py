from shardtrace.testing import compile_fake, fake_ranks, stage, text

import pytest
import torch
from torch import nn


def test_a_stage_as_text():
    with fake_ranks(2):
        cmodel = compile_fake(lambda: nn.Linear(4, 4), torch.ones(2, 4), backward=False)
    assert "(t0, t1) = synchronize((t_weight, t_bias), b_root)" in text(stage(cmodel, "insert_synchronize"))
    assert "del" in text(stage(cmodel, "schedule"))
    assert "del" not in text(stage(cmodel, "schedule"), dels=False)


def test_a_stage_that_is_not_there_is_told_with_those_that_are():
    with fake_ranks(2):
        cmodel = compile_fake(lambda: nn.Linear(4, 4), torch.ones(2, 4), backward=False, sharding_strategy="zero2")
    with pytest.raises(ValueError, match=r"no pass 'regather' .* only shard_parameters, insert_synchronize, schedule"):
        stage(cmodel, "regather")
