"""The doctor: what is required, what is optional, and that it runs where Thunder cannot be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

from passes.compat.versions import LAST_OF_NVFUSER
from shardtrace import doctor
from shardtrace.cli import main
from shardtrace.doctor import EXTRAS, NVFUSER, PYTHON, THUNDER, TORCH, Finding

import pytest

ROOT = Path(__file__).parents[2]
CPU = {"version": "2.13.0+cpu", "cuda": None, "devices": [], "why": "Torch not compiled with CUDA enabled"}
GPU = {"version": "2.10.0", "cuda": "12.8", "devices": ["NVIDIA H100"], "why": ""}
BROKEN = {"error": "AttributeError: no __func__"}
LOADED = {"nvfuser": False, "machine": "NVIDIA H100", "folder": "/cache", "calibrated": True}


def state(finding):
    return str(finding).split()[0]


@pytest.mark.parametrize(
    ("finding", "expected", "part"),
    [
        (doctor.of_python((3, 11, 7)), "ok", "3.11.7"),
        (doctor.of_python((3, 9, 18)), "MISSING", "3.9.18: needs 3.10 to 3.13"),
        (doctor.of_python((3, 14, 0)), "MISSING", "needs 3.10 to 3.13"),
        (doctor.of_torch(CPU), "ok", "2.13.0+cpu, CPU build"),
        (doctor.of_torch(GPU), "ok", "2.10.0, CUDA 12.8"),
        (doctor.of_torch(BROKEN), "MISSING", "no __func__: pip install 'torch>=2.10,<2.16'"),
        (doctor.of_torch({**CPU, "version": "2.9.1"}), "MISSING", "2.9.1 is too old, needs 2.10 to 2.15: pip install"),
        (doctor.of_torch({**CPU, "version": "2.16.0a0"}), "MISSING", "2.16.0a0 is newer than 2.10 to 2.15"),
        (doctor.of_thunder(LOADED, THUNDER), "ok", "0.2.6; import shardtrace before thunder"),
        (doctor.of_thunder(LOADED, "0.2.5"), "MISSING", "0.2.5: pip install lightning-thunder==0.2.6"),
        (doctor.of_thunder(BROKEN, None), "MISSING", "not installed: pip install lightning-thunder==0.2.6"),
        (doctor.of_thunder(BROKEN, THUNDER), "MISSING", "0.2.6 cannot be imported: AttributeError: no __func__"),
        (doctor.of_nvfuser(GPU, {**LOADED, "nvfuser": True}), "ok", "Thunder uses it"),
        (doctor.of_nvfuser(GPU, LOADED), "-", "pip install 'shardtrace[nvfuser]'"),
        (doctor.of_nvfuser({**GPU, "version": "2.15.0"}, LOADED), "-", "not built for torch after 2.10; executors=["),
        (doctor.of_nvfuser(CPU, BROKEN), "-", "no CUDA device"),
        (doctor.of_nvfuser(BROKEN, BROKEN), "-", "no CUDA device"),
        (doctor.of_group("gloo", {}), "ok", "works"),
        (doctor.of_group("gloo", BROKEN), "MISSING", "a group of one rank fails: AttributeError"),
        (doctor.of_nccl(CPU, BROKEN), "-", "no CUDA device"),
        (doctor.of_nccl(GPU, BROKEN), "MISSING", "a group of one rank fails"),
        (doctor.of_device(GPU, "570.1"), "ok", "NVIDIA H100; driver 570.1"),
        (doctor.of_device(CPU, None), "ok", "CPU"),
        (doctor.of_device(CPU, "570.1"), "MISSING", "driver 570.1, but torch sees no CUDA device (Torch not compiled"),
        (doctor.of_device(BROKEN, "570.1"), "MISSING", "torch cannot be imported"),
        (doctor.of_calibration(LOADED), "ok", "of NVIDIA H100, in /cache"),
        (doctor.of_calibration({**LOADED, "calibrated": False}), "-", "-m shardtrace calibrate"),
        (doctor.of_calibration(BROKEN), "-", "unknown"),
    ],
)
def test_findings(finding, expected, part):
    assert state(finding) == expected
    assert part in str(finding)


def test_optional_packages(monkeypatch):
    monkeypatch.setattr(doctor, "installed", {"transformers": "4.51.3"}.get)
    assert str(doctor.of_extra("hf")).endswith("accelerate, tqdm missing: pip install 'shardtrace[hf]'")
    monkeypatch.setattr(doctor, "installed", {"scipy": "1.11"}.get)
    assert str(doctor.of_extra("plan")) == "ok       plan         scipy 1.11"
    monkeypatch.setattr(doctor.shutil, "which", {"google-chrome": "/bin/google-chrome"}.get)
    assert str(doctor.of_browser()).endswith("/bin/google-chrome")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert state(doctor.of_browser()) == "-"
    assert doctor.driver() is None


def test_a_look_that_fails(monkeypatch):
    assert doctor.look("found = {'a': 1}") == {"a": 1}
    assert doctor.look("import no_such_module") == {"error": "ModuleNotFoundError: No module named 'no_such_module'"}
    assert doctor.look("import os; os._exit(3)") == {"error": "the process ended with 3"}
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    assert doctor.look("import time; time.sleep(9)") == {"error": "no answer within 0.01 s"}


def test_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("torch", True, "2.13.0"), Finding("hf", None, "none")])
    assert main(["doctor"]) == 0
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("torch", False, "too old")])
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "MISSING  torch        too old"


def test_where_thunder_cannot_be_imported(tmp_path):
    """The whole report, by the command, with a Thunder that raises."""
    (tmp_path / "thunder").mkdir()
    (tmp_path / "thunder" / "__init__.py").write_text("raise AttributeError('no __func__')\n")
    command = "import sys, shardtrace_command; sys.argv = ['shardtrace', 'doctor']; sys.exit(shardtrace_command.main())"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert (done.returncode, done.stderr) == (1, "")
    assert "0.2.6 cannot be imported: ImportError: Thunder cannot be imported on torch" in lines["thunder"]
    assert "(no __func__): `shardtrace doctor` says which releases work" in lines["thunder"]
    assert [state(lines[name]) for name in ("Python", "torch", "gloo", "device")] == 4 * ["ok"]
    assert lines.keys() >= {"nvFuser", "nccl", "calibration", "chromium", *EXTRAS}


def test_releases_and_packages_are_those_of_the_project():
    """In pyproject.toml, the README, the Makefile and the page of versions."""
    project = (ROOT / "pyproject.toml").read_text()
    (first, last), (oldest, newest) = PYTHON, TORCH
    assert f'requires-python = ">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"' in project
    assert f'"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"' in project
    assert f'"lightning-thunder=={THUNDER}"' in project
    assert NVFUSER == LAST_OF_NVFUSER
    assert f'nvfuser = ["torch=={NVFUSER[0]}.{NVFUSER[1]}.*"' in project
    extras = dict(re.findall(r"^(\w+) = \[(.*)\]", project, re.MULTILINE))
    for name, packages in EXTRAS.items():
        assert set(re.findall(r'"([\w-]+)', extras[name])) == set(packages), name
    releases = [f"2.{minor}" for minor in range(oldest[1], newest[1] + 1)]
    assert f"VERSIONS ?= {' '.join(releases)}\n" in (ROOT / "Makefile").read_text()
    install = f"Python 3.{first[1]} to 3.{last[1]}, torch {releases[0]} to {releases[-1]}, lightning-thunder {THUNDER}"
    assert install in (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| 3\.\d+\.\d+ \| (2\.\d+)\.\d", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
    assert set(rows) == set(releases)
