"""``shardtrace.plan``: what it returns, writes and refuses, and how ``fsdp`` takes it."""

import json
import os
import subprocess
import sys
from html import escape
from pathlib import Path

import shardtrace
from passes.plan import CostModel, Device, Link, Placement
from shardtrace.cli import main
from shardtrace.inspector.step_data import duration, size
from shardtrace.model.state import state_of
from shardtrace.planner.training_plan import choices_of, gib, ms, options_of
from shardtrace.testing import fake_ranks

import pytest
import thunder
import torch
import toy_gpt
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from toy_gpt import GPT, RANKS, GPTConfig, gpt, plan_rounded, tokens


def test_a_plan_is_data(planned, tmp_path):
    text = planned.to_json(tmp_path / "plan.json")
    assert shardtrace.TrainingPlan.from_json(tmp_path / "plan.json") == planned
    assert shardtrace.TrainingPlan.from_json(text).hash == planned.hash
    assert planned.peak <= 1e9
    assert planned.seconds == pytest.approx(planned.forward + planned.backward + planned.optimizer)
    assert planned.tokens == tokens().numel()
    assert planned.choices["sharding_strategy"] == "ddp"  # there is memory enough, and it sends the least
    assert planned.memory["optimizer"] == 2 * sum(p.nbytes for p in gpt(2).parameters())


def test_what_it_prints(planned):
    text = str(planned)
    assert f"GPT on {RANKS} ranks of cpu, 1gbit between ranks (modelled rates)" in text
    for word in ("sharding_strategy", "tokens/s", "MFU", "optimizer", "limit", "\n> "):
        assert word in text


def test_the_first_sentence(planned, tmp_path):
    """Text, page and JSON begin with the answer: it fits, with what, how fast, the limit, what would help."""
    answer = str(planned).partition("\n")[0]
    speed = f"{planned.tokens / planned.seconds:,.0f} tokens/s a rank"
    assert answer.startswith(f"Fits with {planned.chosen.words}, {speed}: a step takes {ms(planned.seconds)}")
    assert answer.endswith(f"the limit is {planned.binding}; what would help most is {planned.helps[0]}.")
    assert next(iter(json.loads(planned.to_json()).items())) == ("answer", answer)
    assert f'</h2><p class="answer">{escape(answer)}</p>' in planned.to_html(tmp_path / "plan.html").read_text()


def test_the_optimizer_and_mfu_are_named(planned, tmp_path):
    assert planned.update == json.loads(planned.to_json())["update"] == "AdamW (for-loop)"
    assert f"AdamW (for-loop) {ms(planned.optimizer)}" in str(planned)
    assert "AdamW (for-loop)" in planned.to_html(tmp_path / "plan.html").read_text()
    assert planned.mfu < planned.mfu_all_scores
    assert f"MFU {planned.mfu:.1%} ({planned.mfu_all_scores:.1%} with all scores of causal attention)" in str(planned)


def test_what_helps_if_nothing_fits():
    """A step that is too large by a tenth of what is sharded would fit on more ranks."""
    fixed = {"sharding_strategy": "zero3", "activation_checkpointing": None, "prefetch": 1}
    fixed["bucketing_strategy"], model = "block", gpt(2)

    def plan(memory, ranks=RANKS):
        options = {"world_size": ranks, "device": "cpu", "memory": f"{memory}B", "fixed": fixed}
        return shardtrace.plan(model, (tokens(), tokens()), **options)

    least = plan(10**9).pareto[0].memory
    with pytest.raises(shardtrace.NoPlanFitsError) as raised:
        plan(budget := least - sum(p.nbytes for p in model.parameters()) // (2 * RANKS))
    found = raised.value.least
    assert found.answer.startswith(f"Does not fit with {found.chosen.words}")
    assert f"the limit is memory: {size(least - budget)} are missing; what would help most is " in found.answer
    ranks = next(int(text.partition(" ")[0]) for text in found.helps if "ranks" in text)
    assert plan(budget, ranks=ranks + 1).peak <= budget  # about so many


def test_the_front_as_a_table(planned):
    table = planned.pareto.to_pandas()
    assert list(table.memory) == sorted(table.memory)
    assert planned.pareto.to_csv().count("\n") == len(table) + 1
    assert planned.choices in [row.options for row in planned.pareto]


def test_as_a_page(planned, tmp_path):
    """A table of the whole front, a point for each row (drawn for a desk and for a phone), and a part of the bar for
    each kind of memory."""
    page = planned.to_html(tmp_path / "plan.html").read_text()
    part = planned._repr_mimebundle_()["text/html"]
    assert page.startswith("<!doctype html>")
    assert part in page
    assert part.count("<tr") - 1 == part.count("<circle") / 2 == len(planned.pareto)
    assert part.count('class="chosen"') == 3  # a row, and a point of each drawing
    assert f"a step takes {ms(planned.seconds)} and needs {gib(planned.peak)} of" in part
    assert part.count("<li>") == len(planned.memory)
    assert f"{planned.tokens / planned.seconds:,.0f} tokens/s a rank" in part


def test_fsdp_takes_it(planned, tmp_path):
    planned.to_json(tmp_path / "plan.json")
    with fake_ranks(RANKS):
        model = shardtrace.fsdp(gpt(2), plan=tmp_path / "plan.json")
        state = state_of(model)
        assert state.cost == planned.cost
        assert {p.prefetch for p in state.plans.values() if p.placement is Placement.SHARD} <= {
            planned.choices.get("prefetch")
        }
        cmodel = thunder.jit(model)
        cmodel(tokens(), tokens()).backward()
        persistent = planned.memory["optimizer"]
        assert shardtrace.memory(cmodel, persistent=persistent).peak == planned.peak


def test_smaller_buckets_where_compute_waits_for_large_ones():
    def model():
        return GPT(GPTConfig(n_layer=2, n_embd=256, n_head=4, block_size=16, vocab_size=48))

    fixed = {"sharding_strategy": "zero2", "activation_checkpointing": None, "prefetch": 1}
    inputs = tokens(), tokens()
    cost = CostModel(Link(1e8, 1e-5), Device(1e10, 1e10, 1e10, 1e-6))
    plan = shardtrace.plan(model(), inputs, world_size=RANKS, device="cpu", memory=1e9, cost_model=cost, fixed=fixed)
    assert plan.choices["bucketing_strategy"] == "layer"
    assert {row.strategy for row in plan.pareto} <= {"zero2", "zero2 by layer"}
    with fake_ranks(RANKS):
        cmodel = thunder.jit(shardtrace.fsdp(model(), plan=plan))
        cmodel(*inputs).backward()
        assert shardtrace.memory(cmodel, persistent=plan.memory["optimizer"]).peak == plan.peak


def test_larger_buckets_where_compute_waits_for_latencies():
    def model():
        return GPT(GPTConfig(n_layer=4, n_embd=32, n_head=4, block_size=16, vocab_size=48))

    fixed = {"sharding_strategy": "zero2", "activation_checkpointing": None, "prefetch": 1}
    inputs = tokens(), tokens()
    cost = CostModel(Link(1e10, 5e-3), Device(1e10, 1e10, 1e10, 1e-6))
    plan = shardtrace.plan(model(), inputs, world_size=RANKS, device="cpu", memory=1e9, cost_model=cost, fixed=fixed)
    assert plan.chosen.strategy == "zero2 by two blocks"
    with fake_ranks(RANKS):
        cmodel = thunder.jit(shardtrace.fsdp(model(), plan=plan))
        cmodel(*inputs).backward()
        sent = [row for row in shardtrace.inspect(cmodel).collectives if row.phase == "forward"]
        assert len(sent) <= 2 + 2  # for four blocks, and what is outside
        assert shardtrace.memory(cmodel, persistent=plan.memory["optimizer"]).peak == plan.peak


def test_what_fsdp_refuses(planned, tmp_path):
    with fake_ranks(RANKS):
        with pytest.raises(shardtrace.PlanError, match="for a GPT with other parameters than this Linear"):
            shardtrace.fsdp(nn.Linear(2, 2), plan=planned)
        with pytest.raises(shardtrace.PlanError, match="the plan decides sharding_strategy"):
            shardtrace.fsdp(gpt(2), plan=planned, sharding_strategy="zero2")
        (tmp_path / "broken.json").write_text("{}")
        with pytest.raises(shardtrace.PlanError, match=r"broken.json is no plan of shardtrace"):
            shardtrace.fsdp(gpt(2), plan=tmp_path / "broken.json")
        with pytest.raises(shardtrace.PlanError, match="there is no plan in"):
            shardtrace.fsdp(gpt(2), plan=tmp_path / "nothing.json")
        old = json.loads(planned.to_json()) | {"version": 0}
        with pytest.raises(shardtrace.PlanError, match="is of version 0, not 1"):
            shardtrace.TrainingPlan.from_json(json.dumps(old))
    with fake_ranks(RANKS + 1), pytest.raises(shardtrace.PlanError, match=f"for {RANKS} ranks, not {RANKS + 1}"):
        shardtrace.fsdp(gpt(2), plan=planned)


class Net(nn.Module):
    """No blocks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).sum()


def small(**options):
    return shardtrace.plan(Net(), torch.zeros(2, 8), **{"world_size": 2, "device": "cpu", **options})


def test_a_model_without_blocks_and_the_same_plan_again():
    first, second = small(), small()
    assert first == second
    assert first.choices["sharding_strategy"] in ("ddp", "zero2", "zero3")


def test_the_same_plans_in_a_process_that_hashes_otherwise(planned, rounded, tmp_path):
    """Sets of names are in another order there. There is no calibration."""
    paths = os.pathsep.join([str(Path(toy_gpt.__file__).parent), *sys.path])
    other = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "0", "SHARDTRACE_CACHE": str(tmp_path)}
    text = "import toy_gpt; print(toy_gpt.plan_blocks().to_json() + toy_gpt.plan_rounded().to_json())"
    there = subprocess.run([sys.executable, "-c", text], env=other, stdout=subprocess.PIPE, text=True, check=True)
    assert planned.to_json() + rounded["1gbit"].to_json() == there.stdout[:-1]
    assert planned.pareto


def test_nothing_to_train():
    with pytest.raises(ValueError, match="nothing to train: no parameter of Net"):
        shardtrace.plan(Net().requires_grad_(False), torch.zeros(2, 8), world_size=2, device="cpu")


def test_what_is_fixed_stays():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = small(fixed={"sharding_strategy": "zero2", "prefetch": 2, "mp_policy": policy})
    assert found.choices["sharding_strategy"] == "zero2"
    assert found.options["compile_policy"].prefetch == 2
    assert found.options["mp_policy"] == policy


def test_options_as_json():
    options = {"mp_policy": "bf16", "offload_policy": CPUOffloadPolicy(pin_memory=False), "prefetch": 1}
    assert options_of(json.loads(json.dumps(choices_of(options)))) == options
    with pytest.raises(TypeError, match=r"fixed option bucketing_strategy=.* cannot be written"):
        choices_of({"bucketing_strategy": nn.Linear})


def test_a_mesh_of_one_replica_or_one_shard_needs_no_hybrid_strategy():
    for shape in ((2, 1), (1, 2)):
        assert small(world_size=None, mesh_shape=shape).choices["sharding_strategy"] in ("ddp", "zero2", "zero3")


def test_a_jitted_model():
    with pytest.raises(TypeError, match="plan takes a module that is not sharded or jitted, not ThunderModule"):
        shardtrace.plan(thunder.jit(Net()), torch.zeros(2, 8), world_size=2)


def test_junk_in_a_file():
    good = json.loads(small().to_json())
    for junk in (
        {"choices": 3},
        {"choices": {"mp_policy": {"param_dtype": "torch.nope"}}},
        {"cost": 3},
        {"memory": 3},
        {"budget": None},
        {"seconds": "short"},
        {"world_size": "2"},
        {"mesh_shape": [2]},
    ):
        with pytest.raises(shardtrace.PlanError, match="the text is no plan of shardtrace"):
            shardtrace.TrainingPlan.from_json(json.dumps(good | junk))


def test_a_hybrid_strategy_makes_its_mesh(tmp_path):
    found = small(world_size=4, mesh_shape=(2, 2), fixed={"sharding_strategy": "hybrid_zero2"})
    assert found.mesh_shape == (2, 2)
    with fake_ranks(4):
        model = shardtrace.fsdp(Net(), plan=found)
        assert state_of(model).groups.outer.size() == 2


@pytest.fixture(scope="module")
def rounded():
    """Plans by the link between ranks, and one for the slow link that may round nothing."""
    slow, fast, exact = plan_rounded(), plan_rounded(link="400gbit"), plan_rounded(allowed={})
    return {"1gbit": slow, "400gbit": fast, "exact": exact}


def test_messages_are_rounded_where_that_is_allowed_and_faster(rounded, tmp_path):
    slow, fast, exact = rounded["1gbit"], rounded["400gbit"], rounded["exact"]
    assert slow.choices["reduce_wire"] == "int8"
    assert "reduce_wire" not in fast.choices
    assert "gather_dtype" not in fast.choices
    assert not exact.choices.keys() & {"gather_dtype", "reduce_wire"}
    assert exact.rounding == ""
    assert slow.seconds < 0.5 * exact.seconds
    assert fast.seconds < slow.seconds
    allowed = "(allowed: gather_dtype int8, fp8; reduce_wire int8)"
    for text in (str(slow), slow.to_html(tmp_path / "plan.html").read_text()):
        assert "gradients to int8 on their way between ranks" in text
        assert allowed in text
        assert f"The fastest step that rounds nothing takes {duration(exact.seconds)}: {exact.chosen.words}." in text
    assert f"nothing {allowed}" in str(fast)
    assert slow.chosen.strategy.endswith("int8 reductions") or slow.chosen.strategy.endswith("int8 both")
    assert shardtrace.TrainingPlan.from_json(slow.to_json()) == slow
    older = json.loads(fast.to_json())
    del older["allowed"]
    assert shardtrace.TrainingPlan.from_json(json.dumps(older)).allowed == {}


def test_more_memory_is_never_slower_with_rounded_steps(rounded):
    for plan in rounded.values():
        assert [row.memory for row in plan.pareto] == sorted(row.memory for row in plan.pareto)
        seconds = [row.seconds for row in plan.pareto]
        assert seconds == sorted(seconds, reverse=True)


def test_fsdp_rounds_as_planned():
    options = {"world_size": 4, "device": "cpu", "link": "1gbit", "fixed": {"sharding_strategy": "zero3"}}
    options["fixed"]["error_feedback"] = True
    found = shardtrace.plan(
        nn.Linear(256, 256), torch.zeros(2, 256), allowed={"gather_dtype": "int8", "reduce_wire": "int4"}, **options
    )
    assert {name: found.choices[name] for name in ("gather_dtype", "reduce_wire", "error_feedback")} == {
        "gather_dtype": "int8",
        "reduce_wire": "int4",
        "error_feedback": True,
    }
    with fake_ranks(4):
        cmodel = thunder.jit(shardtrace.fsdp(nn.Linear(256, 256), plan=found))
        cmodel(torch.zeros(2, 256)).sum().backward()
        assert {row.dtype for row in shardtrace.collectives(cmodel)} == {"int8", "int4"}
        assert shardtrace.memory(cmodel, persistent=found.memory["optimizer"]).peak == found.peak


def test_nothing_fits():
    with pytest.raises(shardtrace.NoPlanFitsError, match=r"fits into 100 B: the least is .* with .*strategy") as caught:
        small(memory="100B")
    assert caught.value.least.peak > 100


def test_the_memory_of_the_host_if_that_of_the_device_is_too_small():
    """A slower step than any on the device, but it fits."""
    options = {"world_size": 2, "device": "l40s", "fixed": {"activation_checkpointing": None}}
    model, x = nn.Linear(512, 512), torch.zeros(2, 512)
    roomy = shardtrace.plan(model, x, **options)
    least = roomy.pareto[0]
    tight = shardtrace.plan(model, x, memory=least.memory - 500_000, **options)
    assert roomy.options.get("offload_policy") is None
    assert tight.options["offload_policy"] == CPUOffloadPolicy()
    assert tight.peak <= least.memory - 500_000
    assert tight.seconds > least.seconds
    words = (512 * 512 + 512) // 2
    assert f"holds {16 * words / 2**20:.3g} MiB of each rank" in str(tight)  # weights, gradients, and AdamW's two
    assert tight.pareto[-1].seconds == roomy.pareto[-1].seconds
    assert shardtrace.plan(model, x, memory=least.memory, **options).seconds < tight.seconds


def test_inside_a_process_group():
    with (
        fake_ranks(2),
        pytest.raises(RuntimeError, match=r"plan before init_process_group, or once by `shardtrace plan"),
    ):
        small()


def test_the_largest_batch():
    found = small(memory="20kB", fixed={"sharding_strategy": "zero3"})
    batch = found.largest_batch()
    assert batch > 2
    x = torch.zeros(batch, 8)
    assert shardtrace.plan(Net(), x, world_size=2, device="cpu", fixed=found.options).peak <= 20_000
    with pytest.raises(shardtrace.PlanError, match="a plan from a file has no model"):
        shardtrace.TrainingPlan.from_json(found.to_json()).largest_batch()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "h1000"}, ValueError, "there is no device 'h1000': choose one of a100-40"),
        ({"link": "string"}, ValueError, "there is no link 'string': choose one of nvlink3"),
        ({"memory": "lots"}, ValueError, "write it as 80GB"),
        ({"memory": -1}, ValueError, "memory=-1: write it as 80GB"),
        ({"memory": "8.0.0GB"}, ValueError, "memory='8.0.0GB': write it as 80GB"),
        ({"memory": "80"}, ValueError, "memory='80' would be 80 bytes: write 80GB, or 80B if that is meant"),
        ({"memory": 80}, ValueError, "memory=80 would be 80 bytes: write 80GB"),
        ({"memory": [80]}, ValueError, r"memory=\[80\]: write it as 80GB"),
        ({"link": 5}, ValueError, "there is no link 5: choose one of"),
        ({"optimizer": 5}, ValueError, "no optimizer 5"),
        ({"fixed": "bf16"}, TypeError, "fixed must be options of fsdp"),
        ({"world_size": 2.5}, ValueError, "world_size must be a number of ranks, 1 or more, not 2.5"),
        ({"mesh_shape": 8, "world_size": None}, ValueError, r"mesh_shape must be \(replicas, shards\), .* not 8"),
        ({"mesh_shape": (2.0, 1)}, ValueError, r"mesh_shape must be two numbers of ranks, .* not 2\.0"),
        ({"mesh_shape": (8, 1), "world_size": 1}, ValueError, "has 8 ranks, not world_size=1"),
        ({"node_ranks": 2.5}, ValueError, "node_ranks must be the number of ranks of a machine, .* not 2.5"),
        ({"accumulation": 2.5}, ValueError, "accumulation must be a number of backwards, 1 or more, not 2.5"),
        ({"world_size": None}, TypeError, "needs world_size"),
        ({"mesh_shape": (2, 3), "world_size": 4}, ValueError, "has 6 ranks, not world_size=4"),
        ({"fixed": {"sharding_strategy": "hybrid_zero3"}}, ValueError, "needs mesh_shape"),
        ({"fixed": {"sharding": "zero3"}}, TypeError, "sharding"),
        ({"fixed": {"sharding_strategy": "zero3_secondary"}}, ValueError, "needs mesh_shape"),
        ({"allowed": {"prefetch": 1}}, ValueError, "a plan may choose gather_dtype and reduce_wire"),
        ({"allowed": {"gather_dtype": ["int8", "int3"]}}, ValueError, "unknown gather_dtype 'int3'"),
        ({"allowed": {"reduce_wire": "fp8"}}, ValueError, "unknown reduce_wire 'fp8'"),
        ({"allowed": {"gather_dtype": [None]}}, ValueError, "exact steps are always tried"),
        ({"allowed": {"reduce_wire": "int8"}, "fixed": {"reduce_wire": "int4"}}, ValueError, "is fixed and allowed"),
        ({"accumulation": 0}, ValueError, "accumulation must be a number of backwards, 1 or more"),
        ({"optimizer": "Adamw"}, ValueError, "no optimizer 'Adamw'"),
    ],
)
def test_bad_input(options, error, message):
    with pytest.raises(error, match=message):
        small(**options)


def test_the_command(tmp_path, capsys):
    (tmp_path / "factory.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.zeros(2, 4)\n"
    )
    out = tmp_path / "plan.json"
    target = f"{tmp_path}/factory.py:build"
    assert main(["plan", target, "--world-size", "2", "--device", "cpu", "--memory", "1GB", "--out", str(out)]) == 0
    assert "Linear on 2 ranks of cpu" in capsys.readouterr().out
    assert shardtrace.TrainingPlan.from_json(out).world_size == 2
    assert main(["plan", target, "--world-size", "2", "--device", "cpu", "--allow", "gather-dtype=int8,fp8"]) == 0
    assert "rounds   nothing (allowed: gather_dtype int8, fp8)" in capsys.readouterr().out
    assert main(["plan", target, "--world-size", "2", "--device", "cpu", "--memory", "10B"]) == 1
    assert "fits into 10 B" in capsys.readouterr().err


SCRIPT = """
import sys
import shardtrace, thunder, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x, *, scale):
        return scale * self.down(torch.relu(self.up(x))).sum()

model = shardtrace.fsdp(Net(), sharding_strategy="zero2", mp_policy="bf16")
outer = model if sys.argv[1] == "whole" else nn.Sequential(model)
if sys.argv[1] == "function":
    thunder.jit(lambda x: model(x, scale=2.0))(torch.zeros(2, 8)).backward()
jitted = thunder.jit(outer)
with torch.set_grad_enabled(sys.argv[1] == "part"):
    jitted(torch.zeros(3, 8), scale=1.0)
jitted(torch.zeros(2, 8), scale=2.0).backward()
sys.exit("the step has run")
"""


def test_a_script_as_target(tmp_path, capsys):
    """The plan is for the model before it was sharded, with the precision and the inputs of its first training step."""
    script, out, page = tmp_path / "train.py", tmp_path / "plan.json", tmp_path / "plan.html"
    script.write_text(SCRIPT)
    arguments = ["plan", str(script), "--world-size", "2", "--device", "cpu", "--out", str(out)]
    assert main([*arguments, "--page", str(page), "--", "whole"]) == 0
    assert "Net on 2 ranks of cpu" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    found = shardtrace.TrainingPlan.from_json(out)
    assert found.options["mp_policy"] == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert "ddp" in {row.strategy for row in found.pareto}  # although the script has chosen another
    assert main([*arguments, "--", "part"]) == 1
    assert "shards Net inside the Sequential that it jits" in capsys.readouterr().err
    assert main([*arguments, "--", "function"]) == 1
    assert "trained no jitted model" in capsys.readouterr().err


def test_second_shards_inside_machines():
    """Two machines with a slow link between them: as fast as any step without the memory of hybrid strategies."""
    with torch.device("meta"):  # large, because second shards need the buffers of another group
        model, x = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(6))), torch.zeros(16, 8192)
    fixed = {"activation_checkpointing": None, "offload_policy": None}
    options = {"world_size": 16, "device": "h100-sxm", "link": "1gbit", "fixed": fixed}
    found = shardtrace.plan(model, x, memory=3.6e9, **options)
    assert found.choices["sharding_strategy"] == "zero3_secondary"
    assert found.mesh_shape == (2, 8)
    rows = [row for row in found.pareto if row.memory < found.peak]
    assert rows[0].strategy == "zero3"
    assert rows[0].seconds > 1.4 * found.seconds  # backward gathers half as much again between machines
    assert rows[-1].seconds > 1.1 * found.seconds
    assert shardtrace.plan(model, x, memory=3.4e9, **options).chosen.strategy == "zero3 and zero2"
    fast = shardtrace.plan(model, x, memory=3.6e9, world_size=8, device="h100-sxm", fixed=fixed)
    assert "zero3_secondary" not in {row.strategy for row in fast.pareto}  # in one machine
