"""The examples as a user runs them, in one process and on ranks, with few steps; their errors for bad arguments."""

import gzip
import importlib
import importlib.util
import json
import os
import re
import runpy
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import shardtrace

import pytest
import torch
from ranks import run_restarted, run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = [
    f"gpt2/{name}.py" for name in ("train", "single_device", "ddp", "fsdp", "owner", "muon", "ema", "plugin", "compare")
]
SCRIPTS += ["mnist/train.py", "huggingface.py", "long_context.py", "litgpt_finetune.py"]
STEPS = 30  # of a training that is interrupted
TINY = ["--layers=1", "--batch-size=4", "--seq-len=32"]
PACKAGES = {
    "huggingface.py": "transformers",
    "long_context.py": "transformers",
    "lightning_pretrain.py": "litgpt",
    "litgpt_finetune.py": "litgpt",
    "mnist/train.py": "sklearn",
}


def needs(script):
    package = PACKAGES.get(script)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'shardtrace[examples]'")


def run_on_two_ranks(script, *arguments):
    """Runs a script on two ranks without torchrun, which is faster; returns what it printed."""
    needs(script)
    return run_script(EXAMPLES / script, arguments, world_size=2)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs a script in this process, which saves the time of importing Thunder; returns what it printed."""

    def run_here(script, *arguments, ranks=1):
        needs(script)
        monkeypatch.syspath_prepend((EXAMPLES / script).parent)
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run_here


@pytest.fixture
def exit_of(run_here, capsys):
    """Runs a script that ends itself; returns its exit code or last words, and what it printed."""

    def exit_of(script, *arguments, ranks=1):
        with pytest.raises(SystemExit) as stopped:
            run_here(script, *arguments, ranks=ranks)
        printed = capsys.readouterr()
        return stopped.value.code, printed.out + printed.err

    return exit_of


# ---- gpt2 ----


class Trained(NamedTuple):
    """A training on two ranks."""

    options: list[str]
    sharding_and_saving: list[str]
    checkpoints: Path
    report: dict[str, Any]
    printed: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    options = [*TINY, f"--text={folder}/text", f"--steps={STEPS}", "--eval-batches=1", "--sample-bytes=4"]
    sharding = ["--sharding-strategy=zero2", "--bucketing-strategy=0.5"]
    saving = ["--save-every=5", "--resume"]
    checkpoints = folder / "checkpoints"
    files = [f"--checkpoint-dir={checkpoints}", f"--json={folder}/json"]
    printed = run_on_two_ranks("gpt2/train.py", *options, *sharding, *saving, *files)
    return Trained(options, [*sharding, *saving], checkpoints, json.loads((folder / "json").read_text()), printed)


def test_any_number_of_ranks_gives_the_same_losses(tmp_path, run_here, trained):
    found, two = trained.report, trained.printed
    one = run_here("gpt2/train.py", *trained.options, f"--json={tmp_path}/json")
    expected = json.loads((tmp_path / "json").read_text())
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert len(found["losses"]) == STEPS
    assert len(found["parameter_bytes"]) == 2
    assert re.search(r"none +0 +0", one)
    assert "reduce_scatter, backward" in two
    assert "all_gather, backward" not in two


def test_compare_ends_at_the_same_loss_four_ways(tmp_path, run_here, monkeypatch):
    def start(command, **_):
        """By forks, where Thunder is imported already, in the place of torchrun."""
        place = next(i for i, word in enumerate(command) if isinstance(word, Path))
        ranks = [int(word.partition("=")[2]) for word in command[:place] if word.startswith("--nproc_per_node")]
        run_script(command[place], command[place + 1 :], world_size=max([1, *ranks]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", start)
    options = [*TINY, "--steps=3", "--optimizer=sgd", "--weight_decay=0.01", "--lr=0.1"]
    printed = run_here("gpt2/compare.py", *options, "--ranks=2", f"--json={tmp_path}/json")
    single, ddp, owner, fsdp = reports = list(json.loads((tmp_path / "json").read_text()).values())
    for report in reports:
        assert report["losses"] == pytest.approx(single["losses"], rel=1e-5)
    (whole,) = single["parameter_bytes"]
    assert ddp["parameter_bytes"] == [whole, whole]
    assert sum(owner["parameter_bytes"]) == pytest.approx(whole, rel=0.01)
    assert fsdp["parameter_bytes"] == [pytest.approx(whole / 2, rel=0.01)] * 2
    for report in reports:  # momentum: as much as parameters
        assert report["optimizer_bytes"] == pytest.approx(report["parameter_bytes"], rel=0.01)
    assert all(name in printed for name in ("single_device", "ddp", "owner", "fsdp"))
    assert "final losses differ by" in printed


def test_rounded_communication_ends_at_the_same_loss(tmp_path):
    options = [*TINY, "--steps=10", "--optimizer=sgd", f"--picture={tmp_path}/curves.svg"]
    only = [f"--only={name}" for name in ("int8 both", "int4 reductions, error feedback")]
    out = run_on_two_ranks("gpt2/rounding.py", *options, *only)
    off = {
        name: abs(float(percent)) for name, percent in re.findall(r"^(int.*?)  +[\d.]+ +(\S+) %$", out, re.MULTILINE)
    }
    assert off["int8 both"] < 0.3
    assert off["int4 reductions, error feedback"] < 1
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_muon_beside_adamw(run_here):
    out = run_here("gpt2/muon.py", *TINY, "--steps=3", "--eval-batches=0")
    adamw, muon = re.findall(r"^(?:AdamW|Muon and AdamW) +([\d.]+) ", out, re.MULTILINE)
    assert float(adamw) == pytest.approx(float(muon), rel=0.1)


def test_a_moving_average_beside_the_model(tmp_path, run_here):
    out = run_here("gpt2/ema.py", *TINY, "--steps=3", "--eval-batches=1", "--decay=0", f"--save={tmp_path}/both")
    model, average = re.findall(r"^(?:model|average) +([\d.]+)$", out, re.MULTILINE)
    assert model == average  # of the last step only
    assert shardtrace.latest_checkpoint(tmp_path / "both")


def test_a_killed_rank_changes_no_loss(tmp_path, trained):
    """torchrun restarts both ranks, and every loss is that of the undisturbed run, to the bit."""
    options = [
        *trained.options,
        *trained.sharding_and_saving,
        "--eval-batches=0",
        "--sample-bytes=0",
        f"--checkpoint-dir={tmp_path}",
        f"--json={tmp_path}/json",
    ]
    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill, tmp_path / "rank 0", when=lambda: last_step(tmp_path) >= 5)
        run_restarted(EXAMPLES / "gpt2/train.py", options, 2, tmp_path)
    before = killed.result()
    assert before != int((tmp_path / "rank 0").read_text())
    assert json.loads((tmp_path / "json").read_text())["losses"] == trained.report["losses"]
    assert last_step(tmp_path) == STEPS


def test_resumed_after_the_last_step_it_prints_the_result(tmp_path, trained):
    """As after a kill in the final evaluation."""
    options = [*trained.options, *trained.sharding_and_saving, f"--checkpoint-dir={trained.checkpoints}"]
    out = run_on_two_ranks("gpt2/train.py", *options, f"--json={tmp_path}/json")
    assert f"all {STEPS} steps were done before" in out
    found, finished = json.loads((tmp_path / "json").read_text()), trained.report
    same = ("losses", "val_loss", "parameter_bytes", "optimizer_bytes", "step_bytes", "collectives")
    assert {key: found[key] for key in same} == {key: finished[key] for key in same}
    (line,) = (line for line in out.splitlines() if line.endswith(f"{finished['val_loss']:.4f}"))
    assert line.startswith("train ")
    assert "--- sample ---" in out
    assert "reduce_scatter, backward" in out


def last_step(folder):
    last = shardtrace.latest_checkpoint(folder)
    return 0 if last is None else int(last.name.removeprefix("step-"))


def kill(rank, when):
    """Sends SIGKILL to a process as soon as ``when`` is true; ``rank`` is a file that has its id. Returns the id."""
    deadline = time.monotonic() + 100
    while not when():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    pid = int(rank.read_text())
    os.kill(pid, signal.SIGKILL)
    return pid


# ---- mnist ----


def test_mnist_reaches_95_percent_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "mnist")
    out = run_on_two_ranks("mnist/train.py", "--epochs=3", f"--save-model={tmp_path}/net.pt")
    accuracy = float(re.findall(r"([\d.]+)%", out)[-1])
    assert accuracy >= 95

    net = importlib.import_module("net").Net().eval()
    net.load_state_dict(torch.load(tmp_path / "net.pt"))
    _, test = importlib.import_module("digits").load_digits()
    with torch.no_grad():
        right = (net(test.images).argmax(dim=1) == test.labels).float().mean()
    assert 100 * right == pytest.approx(accuracy, abs=0.5)


def write_mnist(folder, n=40, end="", images=None):
    """Files in MNIST's format: each image is filled with its label, times ten."""
    labels = bytes(i % 10 for i in range(n))
    pixels = b"".join(bytes([10 * label]) * 784 for label in labels) if images is None else images
    for part in ("train", "t10k"):
        for name, dims, data in (("images-idx3", (n, 28, 28), pixels), ("labels-idx1", (n,), labels)):
            content = bytes([0, 0, 8, len(dims)]) + struct.pack(f">{len(dims)}I", *dims) + data
            (folder / f"{part}-{name}-ubyte{end}").write_bytes(gzip.compress(content) if end else content)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_mnist_files(tmp_path, monkeypatch, end):
    monkeypatch.syspath_prepend(EXAMPLES / "mnist")
    digits = importlib.import_module("digits")
    write_mnist(tmp_path, end=end)
    train, test = digits.load_digits(tmp_path)
    assert train.images.shape == (40, 1, 28, 28)
    assert train.images[3].unique().tolist() == pytest.approx([(30 / 255 - 0.1307) / 0.3081])
    assert test.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] * 4
    filled = test.filled_up(25)
    assert len(filled.images) == 50
    assert filled.labels[40:].tolist() == [digits.NOBODY] * 10


def test_mnist_with_ddp_on_files(tmp_path):
    write_mnist(tmp_path)
    options = [f"--data={tmp_path}", "--sharding-strategy=ddp", "--epochs=2", "--batch-size=8", "--test-batch-size=24"]
    out = run_on_two_ranks("mnist/train.py", *options)
    assert len(re.findall(r"[\d.]+%", out)) == 2


# ---- huggingface, litgpt ----


def test_huggingface_saves_what_from_pretrained_loads(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[examples]'")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=257, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "before")
    folders = [f"--from-pretrained={tmp_path}/before", f"--save={tmp_path}/after"]
    out = run_on_two_ranks("huggingface.py", *folders, "--batch-size=4", "--seq-len=32", "--steps=3")
    sharded, loaded = re.findall(r"validation loss, .* ([\d.]+)", out)
    assert float(sharded) == pytest.approx(float(loaded), rel=1e-3)
    assert "reduce_scatter, backward" in out
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("before", "after"))
    assert type(after) is transformers.GPT2LMHeadModel
    assert before.state_dict().keys() == after.state_dict().keys()
    assert not torch.equal(before.transformer.wte.weight, after.transformer.wte.weight)


def test_long_context_shares_sequences():
    out = run_on_two_ranks("long_context.py", "--seq-len=64", "--steps=3")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "15 collectives of sequences" in out


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "phi3", "qwen3", "qwen3_moe"])
def test_huggingface_configs_are_small(name, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[examples]'")
    monkeypatch.syspath_prepend(EXAMPLES)
    huggingface = importlib.import_module("huggingface")
    config = transformers.AutoConfig.for_model(name, num_hidden_layers=1, **huggingface.SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < (600_000 if name == "qwen3_moe" else 300_000)


def test_litgpt_reduces_only_adapters(tmp_path):
    out = run_on_two_ranks("litgpt_finetune.py", *TINY, "--steps=3", f"--save={tmp_path}/adapters.pth")
    assert "with gradients of 10 adapters, 0 frozen parameters" in out
    adapters, reduced = (
        re.search(rf"{name} +\d+ +([\d,]+)", out)[1] for name in ("adapters", "reduce_scatter, backward")
    )
    assert adapters == reduced
    assert all("lora_" in name for name in torch.load(tmp_path / "adapters.pth")["model"])


def test_litgpts_own_loop_with_fabric(tmp_path):
    out = run_on_two_ranks(
        "lightning_pretrain.py", *TINY, "--steps=10", "--accumulate=1", f"--save={tmp_path}/checkpoint"
    )
    first, *_ = re.findall(r"loss train: ([\d.]+)", out)
    assert float(first) < 5.5  # of 256 bytes
    whole, mine = re.findall(r"parameters, .* ([\d,]+)", out)
    assert int(whole.replace(",", "")) == 2 * int(mine.replace(",", ""))
    assert shardtrace.latest_checkpoint(tmp_path / "checkpoint")


MUSEUM = [  # what the proof says about each exhibit
    "divides by 1, the plan of its members by 2: ft0 = all_reduce(",
    "divides by 1, the plan of its members by 2: ft0 = reduce_scatter(",
    "the step computes aten.mm.default(aten.t.default(",
    "the step computes shardtrace.cut(torch_causal_attention_part_backward(",
    "for a value of all ranks, it is a mean over this rank's positions",
    "label_smoothing=0.2), on part, part, is not the recorded cross_entropy(",
    "'sum', 0.0), on whole, whole, is not the recorded cross_entropy(",
    "for a value of all ranks, it is the number of this rank's rows",
    "masks as if this rank's queries were the first of the sequence",
    "on nothing, is not the recorded arange(8, ",
]


def test_each_bug_of_the_museum_is_found(run_here):
    right, *found, own = run_here("museum.py").strip().split("\n\n")
    assert "proven: " in right
    assert "proven: " in own
    for number, (exhibit, message) in enumerate(zip(found, MUSEUM, strict=True), 1):
        assert exhibit.startswith(f"{number}. ")
        assert message in re.sub(r"\bft\d+\b", "ft0", exhibit)
        seconds = re.search(r"^ +unproven \((.*) s\)$", exhibit, re.MULTILINE)
        assert float(seconds[1]) < 1  # of CPU time


def test_traces_of_two_ranks():
    sections = run_on_two_ranks("traces.py", "zero3").split("\n\n\n")
    titles = [section.splitlines()[0] for section in sections if section]
    assert [title.partition(",")[0] for title in titles[:4]] == [
        "Parameters are gathered for their use", "Forward and backward in one", "Forward", "Backward",
    ]  # fmt: skip
    gathered, joint, forward, backward = sections[:4]
    assert re.search(r'\(t\d,\) = synchronize\(\(t_0_weight,\), b_0\)  # t\d: "cpu f32\[64, 64\]"\n', gathered)
    for trace, gathers, reduces in ((joint, 3, 2), (forward, 2, 0), (backward, 1, 2)):
        assert trace.count(" = all_gather(") == gathers
        assert trace.count(" = reduce_scatter(") == reduces
        assert "# b_2: ZeRO-3 over 2 ranks, 4,096 f32, 16,384 bytes: 2.weight\n" in trace


@pytest.mark.parametrize("script", sorted({*SCRIPTS} - {"gpt2/single_device.py", "gpt2/plugin.py"}))
def test_examples_do_as_the_readme_does(script):
    """They call the sharded model. One page and two notebooks have ``thunder.jit`` around it, and say when."""
    assert "thunder.jit" not in (EXAMPLES / script).read_text()


# ---- the command line ----


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, exit_of):
    code, printed = exit_of(script, "--help")
    assert code == 0
    assert f"examples/{script}" in printed  # how it is run
    assert "--batch-size N" in printed


@pytest.mark.parametrize(
    ("script", "argument", "message"),
    [
        ("gpt2/train.py", "--batch-size=3", "not divisible by 2 ranks"),
        ("gpt2/train.py", "--seq-len=999", "longer than the 256 positions"),
        ("gpt2/train.py", "--bucketing-strategy=blocks", "not auto, none, layer, block, model or a size in MB"),
        ("gpt2/train.py", "--sharding-strategy=zero4", "invalid choice: 'zero4'"),
        ("gpt2/train.py", "--text=/nowhere", "no file '/nowhere'"),
        ("gpt2/train.py", f"--text={__file__}/../conftest.py", "no file"),
        ("gpt2/train.py", "--resume", "--resume needs --checkpoint-dir"),
        ("gpt2/train.py", f"--checkpoint-dir={__file__}/folder", "no folder can be made"),
        ("gpt2/fsdp.py", "--steps=0", "'0' is not a whole number of at least 1"),
        ("gpt2/fsdp.py", "--lr=-1", "'-1' is not a number of at least 0"),
        ("gpt2/fsdp.py", "--json=/nowhere/json", "no file can be written at '/nowhere/json'"),
        ("gpt2/fsdp.py", "--device=cuda", "torch sees no GPU"),
        ("gpt2/single_device.py", "--steps=1", "runs in 1 process, not in 2"),
        ("gpt2/muon.py", "--optimizer=sgd", "this script compares Muon with adamw"),
        ("gpt2/compare.py", "--ranks=two", "'two' is not a whole number of at least 1"),
        ("gpt2/compare.py", "--batch-size=3", "not divisible by 2 ranks"),
        ("gpt2/compare.py", "--optimizer=adam", "invalid choice: 'adam'"),
        ("mnist/train.py", "--data=/nowhere", "no folder '/nowhere'"),
        ("mnist/train.py", f"--data={EXAMPLES}", "has no file train-images-idx3-ubyte"),
        ("mnist/train.py", "--batch-size=2000", "more than the 1500 digits"),
        ("mnist/train.py", "--test-batch-size=3", "--test-batch-size 3 is for all ranks"),
        ("huggingface.py", "--config=opt", "invalid choice: 'opt'"),
        ("huggingface.py", f"--from-pretrained={EXAMPLES}", "config.json"),
        ("huggingface.py", f"--save={__file__}/model", "no folder can be made"),
        ("litgpt_finetune.py", "--model=gpt5", "'gpt5' is not a supported config name"),
        ("litgpt_finetune.py", f"--checkpoint={EXAMPLES}", "no tokenizer in it"),
    ],
)
def test_bad_arguments(script, argument, message, exit_of):
    if argument == "--device=cuda" and torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    code, printed = exit_of(script, argument, ranks=2)
    assert code not in (0, None)
    assert message in f"{code} {printed}"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-1], "holds 31,359 bytes, its header says 31,360"),
        (lambda data: b"\x89PNG" + data[4:], "is not an idx file of bytes in 3 dimensions"),
        (lambda data: data[:4] + struct.pack(">3I", 40, 56, 14) + data[16:], "expected images of 28 x 28"),
        (lambda data: data[:4] + struct.pack(">3I", 20, 28, 28) + data[16 : 16 + 20 * 784], "20 x 28 x 28, 40 labels"),
    ],
)
def test_spoilt_mnist_files(tmp_path, exit_of, spoil, message):
    write_mnist(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte"
    images.write_bytes(spoil(images.read_bytes()))
    code, _ = exit_of("mnist/train.py", f"--data={tmp_path}")
    assert message in code
    assert str(tmp_path) in code
