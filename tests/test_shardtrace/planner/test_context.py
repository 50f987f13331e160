"""``shardtrace.plan`` with sequences, or parameters, that are split over ranks."""

from dataclasses import replace

import shardtrace
from shardtrace import ContextParallel
from shardtrace.cli import main
from shardtrace.planner.planning import degrees
from shardtrace.planner.training_plan import NoPlanFitsError
from shardtrace.testing import fake_ranks

import pytest
import thunder
from contexts import Sparse, batch
from toy_gpt import RANKS, gpt, tokens

FIXED = {"prefetch": 1, "bucketing_strategy": "block", "sharding_strategy": "zero3"}
CLUSTER = {"world_size": RANKS, "device": "cpu", "link": "1gbit", "fixed": FIXED}


@pytest.fixture(scope="module")
def split():
    return shardtrace.plan(gpt(2), (tokens(), tokens()), memory="1GB", context=2, **CLUSTER)


@pytest.mark.parametrize("by", ["context", "tensor"])
def test_fsdp_takes_a_plan_that_splits(split, tmp_path, by):
    shape = (2, 2)
    if by == "tensor":
        split = shardtrace.plan(gpt(2), (tokens(), tokens()), memory="1GB", context=2, tensor=2, **CLUSTER)
        shape = (RANKS // 4, 2, 2)
    split.to_json(tmp_path / "plan.json")
    assert shardtrace.TrainingPlan.from_json(tmp_path / "plan.json") == split
    assert (split.mesh_shape, split.choices[f"{by}_parallel"]) == (shape, by)
    assert split.tokens == tokens().numel() * shape[0] // RANKS
    with fake_ranks(RANKS):
        cmodel = thunder.jit(shardtrace.fsdp(gpt(2), plan=tmp_path / "plan.json"))
        cmodel(tokens(), tokens()).backward()
        assert shardtrace.memory(cmodel, persistent=split.memory["optimizer"]).peak == split.peak


def test_fsdp_takes_a_plan_that_shares_experts(tmp_path):
    """Each rank has the inputs for itself."""
    inputs = batch(0, 7, rows=2)
    found = shardtrace.plan(Sparse(), inputs, memory="1GB", experts=2, **CLUSTER)
    assert (found.mesh_shape, found.choices["expert_parallel"]) == ((RANKS // 2, 2), "expert")
    assert found.tokens == inputs[0].numel()
    found.to_json(tmp_path / "plan.json")
    with fake_ranks(RANKS):
        cmodel = thunder.jit(shardtrace.fsdp(Sparse(), plan=tmp_path / "plan.json"))
        cmodel(*inputs).backward()
        assert shardtrace.memory(cmodel, persistent=found.memory["optimizer"]).peak == found.peak


def test_a_model_without_experts_shares_none():
    inside = {"device": "h100-sxm", "link": None, "node_ranks": 2}
    found = shardtrace.plan(gpt(), (tokens(), tokens()), memory="10GB", experts="auto", **CLUSTER | inside)
    assert "expert_parallel" not in found.choices
    with pytest.raises(RuntimeError, match="expert_parallel: no experts can be computed in 2 parts"):
        shardtrace.plan(gpt(), (tokens(), tokens()), memory="1GB", experts=2, **CLUSTER)


def test_inputs_are_whole_for_a_model_that_takes_parts(task):
    fixed = {"context_parallel": ContextParallel("context", arguments="part")}
    with fake_ranks(RANKS):
        step = task._replace(fixed=fixed, context=2).compile_function({"sharding_strategy": "zero3"})
    shown = shardtrace.inspect(step)
    assert "gather_parts" not in str(shown.stages[0].lines)
    of_blocks = [row for row in shown.collectives if row.issue == row.wait]
    assert {row.kind for row in of_blocks} == {"all_to_all_heads", "all_to_all_positions"}
    assert all(row.start < row.stop for row in of_blocks)
    assert sum(row.exposed for row in shown.collectives) == pytest.approx(shown.totals.exposed)


def test_no_hybrid_strategy_is_tried(task):
    task = task._replace(fixed={}, mesh_shape=(2, 2))
    assert list(task.strategies()) == ["zero", "hybrid", "secondary", "ddp"]
    assert list(task._replace(context=2).strategies()) == ["zero", "ddp"]


def test_auto_splits_what_does_not_fit():
    inputs, options = (tokens(), tokens()), CLUSTER | {"fixed": FIXED | {"activation_checkpointing": None}}
    with pytest.raises(NoPlanFitsError, match=r'or split sequences over ranks \(context="auto"\)') as error:
        shardtrace.plan(gpt(2), inputs, memory="100kB", **options)
    whole = error.value.least
    assert "context_parallel" not in whole.choices
    found = shardtrace.plan(gpt(2), inputs, memory=f"{whole.peak - 1}B", context="auto", **options)
    assert found.mesh_shape == (2, 2)
    assert found.notes[-1].startswith("context 1 does not fit: the least is ")


def test_degrees(task):
    task = task._replace(world_size=24, fixed={})
    assert list(degrees(task, "context", 3)) == [3]
    assert list(degrees(task, "context", "auto")) == [1, 2, 4, 8]  # sequences of 16 tokens
    assert list(degrees(task, "tensor", "auto")) == [1]  # one rank a machine
    inside = task.setting._replace(cost=replace(task.setting.cost, node_ranks=6))
    assert list(degrees(task._replace(setting=inside), "tensor", "auto")) == [1, 2, 4]
    assert list(degrees(task._replace(setting=inside, context=12), "tensor", "auto")) == [1, 2]
    assert list(degrees(task._replace(setting=inside, tensor=6), "experts", "auto")) == [1, 2, 4]
    part = ContextParallel("c", sequence_dim=0)
    assert list(degrees(task._replace(fixed={"context_parallel": part}), "context", "auto")) == [1, 2]  # 4 of them


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 3}, "context=3 does not divide the 4 ranks"),
        ({"context": 16, "world_size": 16}, "context=16 needs sequences of 32 positions: the inputs have 16"),
        ({"tensor": 3}, "tensor=3 does not divide the 4 ranks"),
        ({"tensor": 2, "context": 4}, "tensor=2 does not divide the 1 ranks"),
        ({"fixed": {"tensor_parallel": "t"}}, "tensor_parallel is fixed: say over how many ranks"),
        ({"context": "all"}, "context must be a number of ranks"),
        ({"context": 2, "mesh_shape": (2, 2)}, "mesh_shape is for hybrid strategies"),
        ({"fixed": {"context_parallel": "c"}}, "context_parallel is fixed: say over how many ranks"),
        ({"fixed": {"expert_parallel": "e"}}, "expert_parallel is fixed: say over how many ranks, with experts=8"),
        ({"context": 2, "experts": 2}, "context and experts both say which ranks have all tokens"),
        (
            {"context": 2, "fixed": {"sharding_strategy": "hybrid_zero3"}},
            'sharding_strategy="hybrid_zero3" cannot be combined with context=2',
        ),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        shardtrace.plan(gpt(), (tokens(), tokens()), **CLUSTER | options)


def test_on_the_command_line(capsys, monkeypatch, tmp_path):
    text = "from toy_gpt import gpt, tokens\n\ndef build():\n    return gpt(2), (tokens(), tokens())\n"
    (tmp_path / "toy.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    common = ["--world-size", "4", "--device", "cpu", "--link", "1gbit", "--sharding-strategy", "zero3"]
    assert main(["plan", "toy.py:build", "--context", "2", *common]) == 0
    text = capsys.readouterr().out
    assert "context_parallel = 'context'" in text
    assert "mesh_shape = (2, 2)" in text
