"""The proofs of `make gpu`, rehearsed on the CPU: over a backend that behaves like nccl, with fake ranks, without CUDA."""

import importlib.util
import json
import re
from pathlib import Path

import on_gpus
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
    kinds = "broadcast, reduce" if strategy == "owner" else "all_gather, all_reduce, reduce_scatter"
    assert re.fullmatch(rf"\d\d collectives ran \({kinds}\); losses of 3 steps differ by \d\.\de[+-]\d\d", result)


def test_collectives_that_do_not_run_prove_nothing(single_rank, monkeypatch):
    monkeypatch.setattr(proof, "issued", lambda group: 0)
    with pytest.raises(AssertionError, match="0 collectives ran in 3 steps of 4"):
        proof.numbers_over_a_group_of_one(dist.group.WORLD, CPU, "ddp")


def test_traces_and_memory(fake_ranks, monkeypatch):
    monkeypatch.setattr(proof, "WIDTH", 256)
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


# ---- several GPUs: tests/gpu/test_several_gpus.py ----


def test_ranks_of_a_gpu_each(two_ranks):
    two_ranks.run(on_gpus.trains_as_one_process, device="cpu", strategy="zero3")
    assert two_ranks.run(on_gpus.gathers_beside_products, device="cpu") == [0, 0]


def test_gpus_that_are_missing():
    assert proof.missing_gpus(2, 2) == ""
    assert proof.missing_gpus(2, 0) == "needs 2 GPUs, torch sees 0"
    assert proof.missing_gpus(1, 0) == "needs 1 GPU, torch sees 0"


def test_time_in_which_a_gather_and_a_product_run_at_once():
    gather = ("ncclDevKernel_AllGather_RING_LL", 100, 200)
    products = [("sm90_xmma_gemm", 50, 120), ("vectorized_elementwise", 110, 130), ("ampere_gemm", 190, 300)]
    others = [("Memcpy HtoD", 130, 190), ("ncclDevKernel_ReduceScatter", 130, 190), ("shardtrace::all_gather", 0, 300)]
    assert on_gpus.together([gather, *products, *others]) == 30 + 10
    assert on_gpus.together([gather, *others]) == 0
    assert on_gpus.together(products) == 0


# ---- all parts: tests/gpu/run.py ----


@pytest.fixture
def run():
    spec = importlib.util.spec_from_file_location("gpu_run", Path(__file__).parent / "gpu" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_nothing_runs(run, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 0
    assert capsys.readouterr().out == "make gpu: torch sees no CUDA device, so nothing was run\n"


def test_a_part_that_fails_stops_no_other(run, capfd, monkeypatch):
    def part(name, code, contenders, failed=()):
        results = {"settings": [{"contenders": dict.fromkeys(contenders), "failed": dict.fromkeys(failed)}]}
        write = f"open({'{out}/results.json'!r}, 'w').write({json.dumps(results)!r})"
        return run.Part(name, ["-c", f"import sys\n{write}\n{code}"], run.of_benchmark)

    parts = [
        part("good", "sys.exit(0)", "abc"),
        part("bad", "sys.exit(1)", "ab", "c"),
        run.Part("broken", ["-c", "raise SystemExit(3)"], run.of_tests),
        part("last", "sys.exit(0)", "a"),
    ]
    monkeypatch.setattr(run, "gpus", lambda: 1)
    monkeypatch.setattr(run, "parts", lambda nvfuser: parts)
    assert run.main([]) == 1
    table = capfd.readouterr().out.split("\n\n")[-1]
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        ["good", "3", "0"],
        ["bad", "2", "1"],
        ["broken", "0", "1"],
        ["last", "1", "0"],
    ]
    assert "exit status 3" in table
    assert run.main(["--only=good,last"]) == 0
    slow = run.Part("slow", ["-c", "import time; time.sleep(600)"], run.of_benchmark)
    assert run.run(slow, 0.5, None, nvfuser=False)[:3] == ("slow", 0, 1)


def test_parts_that_exist(run, tmp_path):
    assert [part.name for part in run.parts(nvfuser=True)] == ["tests", "nvFuser", "bench", "bf16", "8B"]
    assert [part.name for part in run.parts(nvfuser=False)] == ["tests", "bench", "bf16", "8B"]
    for part in run.parts(nvfuser=True):
        assert all(Path(word).exists() for word in part.command if word.startswith("/"))
    suite = '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10"/></testsuites>'
    (tmp_path / "tests.xml").write_text(suite)
    assert run.of_tests(tmp_path) == (4, 3)
