"""The benchmarks as a user runs them, with models too small for a measurement; their meter and targets."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import Fork

FOLDER = Path(__file__).parent.parent / "examples" / "benchmarks"
TINY = ["--layers=1", "--width=16", "--batch=2", "--seq=8", "--rounds=1", "--steps-per-round=1"]
ONE = ["shardtrace zero3", "fsdp2 reshard", "single eager"]
RECORDS_LISTS = hasattr(torch._C._autograd._KinetoEvent, "structured_input_shapes")  # not torch 2.10


def compare(out, *arguments, **environment):
    return subprocess.run(
        [sys.executable, FOLDER / "compare.py", *arguments, f"--out={out}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def module(monkeypatch):
    """Imports a file of the benchmarks, which are scripts and not a package."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def here(module, monkeypatch):
    """Runs ``compare.py`` in this process and its ranks in forks, all of which have imported Thunder already."""

    def start(command, env, stdout, **_):
        *_, script, job = command
        del env["BENCHMARK_TERMINAL"]  # a file that this process has opened
        return Fork(Path(script), [job], env, [stdout.name] * 2)

    def run(out, *arguments):
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, f"--out={out}"])
        return module("compare").main()

    monkeypatch.setattr(module("launch"), "subprocess", SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return run


def rank_script(monkeypatch):
    """The script of a rank as a module. (``ranks`` is another module of the tests.)"""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER.parent / "gpt2")])
    spec = importlib.util.spec_from_file_location("rank_script", FOLDER / "ranks.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # what runs here is no process of its own
    return found


def test_predictions_beside_what_was_measured(module):
    predictions = module("predictions")

    def row(plan, seconds, predicted):
        figures = {"noise": 0.01, "peak": 2**20, "predicted_peak": 2**20}
        return {"plan": plan, "seconds": seconds, "predicted_seconds": predicted, **figures}

    rows = [row("a", 1.0, 0.9), row("b", 2.0, 1.9), row("c", 2.01, 1.0), row("planned", 1.1, 1.2)]
    assert predictions.tau(rows) == pytest.approx((4 - 1) / 5)  # b and c differ by less than their noise
    assert "the choice takes 10.0% longer than the best" in predictions.report("two ranks", rows)
    assert predictions.summary(rows).startswith(
        "4 plans; seconds: median error 9.55%, worst 50.25%; peak: median error 0"
    )
    found = predictions.plans(4)
    assert found["half zero2"]["sharding_strategy"] == {"h.2.*": "zero2", "h.3.*": "zero2", "*": "zero3"}


def test_a_mixture_of_experts_trains_as_in_eager(single_rank, module, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER.parent / "gpt2")
    training, job = module("training"), module("job")
    sizes = job.Sizes(layers=1, width=16, heads=1, batch=2, seq=8, experts=4)
    batch = torch.arange(16).view(2, 8)
    losses, gradients = [], []
    for how in (lambda model: model, lambda model: thunder.jit(shardtrace.fsdp(model))):
        model = how(training.make_model(sizes, torch.device("cpu")))
        loss = model(batch, batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_loopback_prints_tables_and_writes_figures(tmp_path, here, capsys):
    only = "|".join(f"^{name}$" for name in ONE)
    assert here(tmp_path, "loopback", *TINY, f"--only={only}") == 0
    printed = capsys.readouterr().out
    for name in ONE:
        assert any(line.startswith(name) for line in printed.splitlines())
    assert "communication alone, shardtrace zero3" in printed
    assert "speed of shardtrace zero3 over fsdp2 reshard" in printed

    figures = json.loads((tmp_path / "results.json").read_text())
    (result,) = figures["settings"]
    rows = result["contenders"]
    assert list(rows) == ONE
    ours, theirs, alone = rows.values()
    assert ours["speed_of_peer"] == pytest.approx(theirs["seconds"][0] / ours["seconds"][0])
    assert ours["bytes"] == theirs["bytes"]  # gathered twice, reduced once
    assert alone["collectives"] == alone["bytes"] == 0
    assert ours["peak_bytes"] == pytest.approx(ours["predicted_peak_bytes"], rel=0.1)
    assert 0 < ours["passes_s"] < ours["compile_s"]
    assert {t["met"] for t in figures["targets"]} <= {True, False}
    assert len(figures["targets"]) == 4  # speed, memory (2), passes
    assert (tmp_path / "steps.svg").exists() or "no plot: matplotlib is not installed" in printed


def test_each_rank_is_a_process_with_the_variables_of_torchrun(tmp_path, module):
    launch, script = module("launch"), tmp_path / "script.py"
    sizes = module("job").Sizes(layers=1, width=16, heads=1, batch=2, seq=8)
    job = module("job").Job("loopback", "gloo", 2, "cpu", sizes, 1, 1, "")
    script.write_text(
        "import json, os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS')\n"
        "if os.environ['RANK'] == '0':\n"
        "    with open(json.load(open(sys.argv[1]))['result'], 'w') as file:\n"
        "        json.dump([os.environ[name] for name in names], file)\n"
    )
    assert launch.run_ranks(job, script=script) == ["0", "2", "127.0.0.1", "1"]
    script.write_text(
        "import os, sys, time\nsys.exit('no such rank') if os.environ['RANK'] == '1' else time.sleep(600)"
    )
    with pytest.raises(launch.RankFailed, match="rank 1 ended with exit code 1:\nno such rank"):
        launch.run_ranks(job, script=script)


def test_slow_link(tmp_path, module):
    reason = module("slow_link").obstacle()
    if reason is not None:
        pytest.skip(f"no slow link here: {reason}")
    done = compare(tmp_path, "slow-link", *TINY, "--only=^single eager$|^ddp$", "--rates=0.5,1")
    if "cannot run" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    slower, faster = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert slower["measured_gbit"] < 0.55 < faster["measured_gbit"] < 1.1
    assert slower["contenders"]["ddp"]["wire_bytes"] > slower["contenders"]["single eager"]["wire_bytes"]
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "shardtrace-" not in left


def test_slow_link_says_why_it_cannot_run(tmp_path, module, monkeypatch):
    done = compare(tmp_path, "slow-link", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "slow-link: cannot run: ip and tc not found: install iproute2" in done.stderr
    slow_link = module("slow_link")
    monkeypatch.setattr(slow_link.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(slow_link.os, "geteuid", lambda: 1000)
    with pytest.raises(module("job").CannotRun, match="only root may do"), slow_link.two_namespaces():
        pass


def test_cuda_says_why_it_cannot_run(module, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["compare.py", "cuda", f"--out={tmp_path}"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert module("compare").main() == 1
    assert "cuda: cannot run: torch sees no CUDA device" in capsys.readouterr().err


CUDA = ["shardtrace zero3", "shardtrace zero3 int8", "fsdp2 reshard", "ddp", "single eager"]


@pytest.fixture
def cuda_on_cpu(module, monkeypatch, tmp_path):
    """Runs ``compare.py cuda`` in this process, on the CPU in the place of a GPU and gloo in that of nccl. Returns the
    exit status and the results."""
    compare, ranks = module("compare"), rank_script(monkeypatch)
    init = dist.init_process_group

    def init_process_group(backend, **options):
        if backend == "nccl":
            backend, options["store"] = "gloo", dist.HashStore()
            options |= {"rank": 0, "world_size": 1}
        init(backend, **options)

    def run_ranks(job):
        assert job.device == "cuda"
        file = tmp_path / "job"
        file.write_text(json.dumps(dataclasses.replace(job, result=str(tmp_path / "result")).as_json()))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["ranks.py", str(file)])
            ranks.main()
        return json.loads((tmp_path / "result").read_text())

    def run(only):
        # large enough for rounding on one of 8 ranks
        arguments = ["cuda", *TINY, "--width=64", "--worlds=1,8", f"--only={only}", f"--out={tmp_path}"]
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        return compare.main(), json.loads((tmp_path / "results.json").read_text())["settings"]

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)
    monkeypatch.setattr(ranks, "device_of", lambda job: torch.device("cpu"))
    monkeypatch.setattr(compare, "gpus", lambda: 1)
    monkeypatch.setattr(compare, "run_ranks", run_ranks)
    return run


def test_cuda_takes_every_step_on_the_cpu(cuda_on_cpu):
    status, (alone, of_many) = cuda_on_cpu("|".join(f"^{name}$" for name in CUDA))
    assert status == 0
    assert list(of_many["contenders"]) == CUDA
    assert list(alone["contenders"]) == [name for name in CUDA if "int8" not in name]  # nothing to round
    assert [result["world_size"] for result in (alone, of_many)] == [1, 8]
    assert of_many["contenders"]["shardtrace zero3"]["speed_of_peer"] > 0


def test_a_contender_that_fails_leaves_the_others(cuda_on_cpu, module, monkeypatch, capsys):
    def fail(model, world):
        raise ValueError("no such kernel")

    monkeypatch.setattr(module("contenders"), "use_ddp", fail)
    status, results = cuda_on_cpu("^ddp$|^single eager$")
    assert status == 1
    assert [list(result["contenders"]) for result in results] == [["single eager"]] * 2
    assert [result["failed"] for result in results] == [{"ddp": "ValueError: no such kernel"}] * 2
    assert "failed: ddp: ValueError: no such kernel" in capsys.readouterr().out


def test_each_rank_of_cuda_has_a_gpu(module, monkeypatch):
    compare, ranks, used = module("compare"), rank_script(monkeypatch), []
    monkeypatch.setattr(sys, "argv", ["compare.py", "cuda", "--worlds=1,8"])
    jobs = compare.cuda_jobs(compare.parse_args(), real=4)
    assert [(job.backend, job.world_size, job.processes) for job in jobs] == [
        ("nccl", 4, 4),
        ("nccl", 1, 1),
        ("fake", 8, 1),
    ]
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [ranks.device_of(jobs[0])] == used == [torch.device("cuda", 3)]


def test_a_llama_in_bf16(module, monkeypatch, tmp_path, capsys):
    """The benchmark of Llamas, with one gloo rank in this process."""
    ranks = rank_script(monkeypatch)
    bf16, contenders = module("bf16"), module("contenders")

    def run_ranks(job):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return ranks.run(job, contenders.World(dist.group.WORLD, torch.device("cpu")))
        finally:
            dist.destroy_process_group()

    only = "--only=^single eager$|^shardtrace zero3$"
    monkeypatch.setattr(bf16, "run_ranks", run_ranks)
    monkeypatch.setattr(bf16, "gpus", lambda: 1)
    monkeypatch.setattr(
        bf16,
        "jobs",
        lambda args, ranks, jobs=bf16.jobs: [dataclasses.replace(j, device="cpu") for j in jobs(args, ranks)],
    )
    monkeypatch.setattr(
        sys, "argv", ["bf16.py", "--tiny", "--rounds=1", "--steps-per-round=1", only, f"--out={tmp_path}"]
    )
    assert bf16.main() == 0
    (result,) = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert (result["sizes"]["model"], result["sizes"]["dtype"]) == ("Llama", "bfloat16")
    ours, eager = (result["contenders"][name] for name in ("shardtrace zero3", "single eager"))
    assert ours["peak_bytes"] < 1.1 * eager["peak_bytes"]
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[:5] == ["shardtrace", "zero3", "single", "eager", f"{ours['seconds'][0] / eager['seconds'][0]:.3f}"]
    parameters = sum(
        p.numel() for p in module("hf_llama").make_llama(bf16.MODELS["1B"], torch.device("meta")).parameters()
    )
    assert parameters == pytest.approx(1.04e9, rel=0.01)


def test_one_of_many_ranks(module, tmp_path, capsys):
    """The contenders that a GPU runs with 8 billion parameters."""
    assert module("one_of_many").main(["--tiny", "--device=cpu", "--steps=1", f"--out={tmp_path}"]) == 0
    (result,) = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert len(result["contenders"]) == 3
    assert result["failed"] == {}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--rounds=0", "'0' is not a positive whole number"),
        ("--only=(", "'(' is not a regular expression"),
        ("--rates=fast", "'fast' is not a list of rates"),
        ("--worlds=8,none", "'none' is not a positive whole number"),
        ("--heads=7", "width 384 is not divisible by 7 heads"),
    ],
)
def test_bad_arguments(module, monkeypatch, capsys, tmp_path, argument, message):
    monkeypatch.setattr(sys, "argv", ["compare.py", argument, f"--out={tmp_path}"])
    with pytest.raises(SystemExit) as stopped:
        sys.exit(module("compare").main())
    assert stopped.value.code != 0
    assert message in f"{stopped.value.code} {capsys.readouterr().err}"


def test_a_name_that_matches_no_contender(module, monkeypatch):
    rank_script(monkeypatch)  # finds what contenders are made of
    with pytest.raises(SystemExit, match="no contender matches 'nobody'"):
        module("contenders").chosen("nobody", "cpu", experts=0, world_size=2)


def test_memory_meter_sees_every_allocation(module):
    memory, cpu = module("memory"), torch.device("cpu")
    mb = 1 << 20

    def build():
        held = torch.empty(3 * mb, dtype=torch.uint8)
        torch.empty(5 * mb, dtype=torch.uint8)
        return held

    held, built = memory.metered(build, cpu)
    assert (built.kept, built.peak) == (3 * mb, 8 * mb)

    def step():
        grown = torch.empty(1 * mb, dtype=torch.uint8)
        storage = held.untyped_storage()
        storage.resize_(0)  # like FSDP2 frees gathered parameters: seen, because the meter saw the allocation
        storage.resize_(2 * mb)
        product = torch.ones(256, 1024) @ torch.ones(1024, 256)  # 1 MB, 1 MB and a quarter
        del grown, product

    _, stepped = memory.metered(step, cpu)
    assert stepped.kept == -1 * mb
    assert 1 * mb < stepped.peak < 3 * mb


def test_traffic_of_collectives(module, single_rank):
    memory = module("memory")

    def step():
        dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(2))  # too small to be a gradient
        dist.all_gather_into_tensor(torch.ones(50), torch.ones(50))
        dist.reduce_scatter_tensor(torch.ones(30), torch.ones(30))

    _, metered = memory.metered(step, torch.device("cpu"))
    assert memory.traffic(metered.events) == ((3, 2 * 400 + 200 + 120) if RECORDS_LISTS else (None, None))


def test_memory_of_a_gpu_is_that_of_its_allocator(module, monkeypatch):
    memory, calls, allocated = module("memory"), [], iter([100, 130])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda n=name: calls.append(n))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 170)
    result, metered = memory.metered(lambda: calls.append("run"), torch.device("cuda", 0))
    assert result is None
    assert (metered.kept, metered.peak) == (30, 70)
    assert calls == ["synchronize", "reset_peak_memory_stats", "run", "synchronize"]


def test_targets_are_ratios_of_rounds(module):
    def row(*seconds, **more):
        return {"seconds": list(seconds), "step_s": {"median": sorted(seconds)[1]}, "peak_bytes": 90, **more}

    ours = {"passes_s": 1.0, "compile_s": 11.0, "predicted_peak_bytes": 100}
    rows = {"shardtrace zero3": row(1, 2, 3, **ours, bytes=100), "fsdp2 reshard": row(2, 3.8, 9)}
    rows |= {"single eager": row(1, 1, 1), "shardtrace zero3 int8": row(0.8, 1.2, 3, bytes=26)}
    moved = {"shardtrace zero3": {"raw_s": 2.0}}
    result = {"setting": "slow", "rate_gbit": 1, "contenders": rows, "communication": moved, "host_overhead": None}
    found = module("targets").targets([result])
    assert [(t.value, t.met) for t in found] == [
        (2.0, True),  # the median of 2, 1.9 and 3
        (1.0, True),  # over the slower of compute and communication
        (0.26, True),  # rounded: bytes, speed, over compute
        (3.0, True),
        (1.2, False),
        (1.0, True),
        (pytest.approx(0.1), True),
        (pytest.approx(0.1), True),
    ]


def test_one_process(module, monkeypatch, single_rank):
    one = module("one_process")
    config = one.GPTConfig(vocab_size=one.WORDS, block_size=one.TOKENS, n_layer=1, n_head=2, n_embd=16)
    monkeypatch.setitem(one.MODELS, "GPT", lambda: one.GPT(config))
    ((name, row),) = one.rows("GPT", rounds=1)
    assert (name, row.equal, row.peak) == ("GPT", row.parameters, pytest.approx(1, abs=0.02))
