"""The examples of trainers: two ranks continue what one process has begun, and end where it ends."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from ranks import run_script
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parent.parent / "examples/trainers"


def needs(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'shardtrace[examples]'")


def assert_equal(mine, expected):
    """Numbers and tensors in nested containers, to 1e-5."""
    if isinstance(expected, dict):
        assert mine.keys() == expected.keys()
        for key in expected:
            assert_equal(mine[key], expected[key])
    elif isinstance(expected, list):
        assert len(mine) == len(expected)
        for one, other in zip(mine, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    elif isinstance(expected, float):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-5)
    else:
        assert mine == expected


# ---- Hugging Face ----

PLAIN = ["--use_cpu", "--report_to=none", "--disable_tqdm=true", "--learning_rate=1e-2", "--adam_epsilon=1e-2"]


def history(folder):
    """The losses and norms that the Trainer has logged."""
    kept = ("step", "loss", "grad_norm", "eval_loss", "learning_rate")
    rows = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{name: row[name] for name in kept if name in row} for row in rows]


def test_the_trainer_of_hugging_face(tmp_path):
    needs("transformers", "accelerate")
    script, one, two = EXAMPLES / "hf_trainer.py", tmp_path / "one", tmp_path / "two"
    options = [*PLAIN, "--max_steps=4", "--save_steps=2", "--eval_strategy=steps", "--eval_steps=4"]
    options += ["--logging_steps=1", "--max_grad_norm=0.5", "--per_device_train_batch_size=4"]
    run_script(script, [*options, f"--output_dir={one}", "--gradient_accumulation_steps=4"], world_size=1)
    resume = [f"--output_dir={two}", f"--resume_from_checkpoint={one}/checkpoint-2", "--save_total_limit=1"]
    run_script(script, [*options, *resume, "--gradient_accumulation_steps=2"], world_size=2)

    assert [folder.name for folder in two.glob("checkpoint-*")] == ["checkpoint-4"]
    assert_equal(history(two / "checkpoint-4"), history(one / "checkpoint-4"))
    for file in ("model.safetensors", "checkpoint-4/model.safetensors"):
        assert_equal(load_file(two / file), load_file(one / file))
    for file in ("optimizer.pt", "scheduler.pt"):
        assert_equal(*(torch.load(folder / "checkpoint-4" / file) for folder in (two, one)))


def test_adapters_of_peft_and_smoothed_labels(tmp_path):
    needs("transformers", "accelerate", "peft")
    script, one, two = EXAMPLES / "hf_trainer.py", tmp_path / "one", tmp_path / "two"
    options = [*PLAIN, "--lora", "--label_smoothing_factor=0.1", "--max_steps=2", "--save_strategy=no"]
    options.append("--average_tokens_across_devices=false")  # transformers 4.57 would multiply this loss by the ranks
    for ranks, folder in enumerate((one, two), 1):
        run_script(
            script,
            [*options, f"--output_dir={folder}", f"--per_device_train_batch_size={8 // ranks}"],
            world_size=ranks,
        )
    assert_equal(*(load_file(folder / "adapter_model.safetensors") for folder in (two, one)))


# ---- accelerate ----


def test_a_loop_with_accelerate(tmp_path):
    needs("transformers", "accelerate")
    script, one, two = EXAMPLES / "accelerate_loop.py", tmp_path / "one", tmp_path / "two"
    options = ["--cpu", "--dropout=0"]
    run_script(script, [*options, "--epochs=1", f"--save={tmp_path}/begun"], world_size=1)
    resume = [*options, "--epochs=2", "--first-epoch=1", f"--load={tmp_path}/begun/state"]
    expected, printed = (
        run_script(script, [*resume, f"--save={folder}"], world_size=ranks)
        for ranks, folder in enumerate((one, two), 1)
    )
    assert_equal(*([float(number) for number in re.findall(r"-?\d\.\d+", text)] for text in (printed, expected)))
    for file in ("model/model.safetensors", "state/model.safetensors"):
        assert_equal(load_file(two / file), load_file(one / file))
    assert_equal(*(torch.load(folder / "state/optimizer.bin") for folder in (two, one)))


# ---- Lightning ----


def test_the_trainer_of_lightning(tmp_path):
    needs("lightning", "transformers")
    script, one, two = EXAMPLES / "lightning_trainer.py", tmp_path / "one", tmp_path / "two"
    options = ["--accelerator=cpu", "--dropout=0", "--epochs=2", "--average=0.5"]
    expected = run_script(script, [*options, f"--folder={one}"], world_size=1)
    resume = ["--devices=2", f"--folder={two}", f"--resume={one}/epoch=0.ckpt"]
    printed = run_script(script, [*options, *resume], world_size=2)
    results = [re.findall(r"'(\w+)': ([\d.]+)", text) for text in (printed, expected)]
    assert_equal(*({name: float(value) for name, value in result} for result in results))
    states = [torch.load(folder / "last.ckpt", weights_only=True) for folder in (two, one)]
    for key in (
        "state_dict",
        "current_model_state",
        "averaging_state",
        "optimizer_states",
        "lr_schedulers",
        "epoch",
        "global_step",
    ):
        assert_equal(*(state[key] for state in states))
