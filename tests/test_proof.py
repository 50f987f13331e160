"""The proofs of `make gpu`, rehearsed on the CPU: over a backend that behaves like nccl, with fake ranks, without CUDA."""

import re

import proof
import pytest
import thunder
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from late import late_groups
from proof import Proof

CPU = torch.device("cpu")


@pytest.mark.parametrize(("strategy", "precision"), [("zero3", None), ("zero2", "bf16"), ("owner", None)])
def test_collectives_of_a_model_run_in_a_group_of_one(single_rank, strategy, precision):
    with late_groups() as group:
        result = proof.numbers_over_a_group_of_one(group, CPU, strategy, precision=precision)
        assert {"all_gather_single", "reduce_scatter_single"} <= set(group.issued)
    kinds = "broadcast, reduce" if strategy == "owner" else "all_gather, reduce_scatter"
    assert re.fullmatch(rf"\d\d collectives ran \({kinds}\); losses of 3 steps differ by \d\.\de[+-]\d\d", result)


def test_collectives_that_do_not_run_prove_nothing(single_rank, monkeypatch):
    monkeypatch.setattr(proof, "issued", lambda group: 0)
    with pytest.raises(AssertionError, match="0 collectives ran in 3 steps of 4"):
        proof.numbers_over_a_group_of_one(dist.group.WORLD, CPU, "ddp")


def test_traces_and_memory(fake_ranks):
    fake_ranks(8)
    lines, memory = proof.traces_and_memory(CPU, "zero3")
    assert lines.endswith(" lines verified, 9 collectives")
    measured, promised = map(float, re.findall(r"([\d.]+) MB", memory))
    assert measured == pytest.approx(promised, rel=0.01)


def test_nvfuser_that_was_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr(thunder, "nvfuser_executor", None)
    assert "does not import here" in proof.missing_nvfuser(asked=False)
    with pytest.raises(AssertionError, match="make gpu NVFUSER=1 asks for nvFuser"):
        proof.missing_nvfuser(asked=True)


def test_the_table():
    def row(*seconds):
        return {"seconds": seconds, "step_s": {"median": sorted(seconds)[1]}}

    rows = {"shardtrace zero3 nvfuser": row(0.1, 0.2, 0.3), "fsdp2 reshard": row(0.2, 0.4, 0.6)}
    rows |= {"single compiled": row(0.1, 0.1, 0.1)}
    proofs = [
        Proof("traces", "zero3, one of 8 ranks", "108 lines verified, 9 collectives"),
        *proof.step_times([{"contenders": rows}]),
        Proof("traces", "zero2, one of 8 ranks", "100 lines verified, 6 collectives"),
    ]
    assert_expected_inline(
        proof.table(proofs),
        """\
traces     zero3, one of 8 ranks     108 lines verified, 9 collectives
traces     zero2, one of 8 ranks     100 lines verified, 6 collectives
step time  shardtrace zero3 nvfuser  200.0 ms: 0.50 of FSDP2 eager, 2.00 of torch.compile, one process""",
    )
