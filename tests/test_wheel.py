"""The wheel: built, installed in a clean environment, used from another directory."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USE = """
import os, sys
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import shardtrace, passes
import thunder, torch
assert os.path.dirname(shardtrace.__file__).startswith(sys.prefix), shardtrace.__file__
assert os.path.dirname(passes.__file__).startswith(sys.prefix), passes.__file__
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
cmodel = thunder.jit(shardtrace.fsdp(torch.nn.Linear(2, 2)))
cmodel(torch.ones(1, 2)).sum().backward()
print("trained")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


def test_contents(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in files if ".dist-info" not in name}
    assert packages == {"shardtrace", "passes", "shardtrace_command.py"}
    assert {"shardtrace/py.typed", "passes/py.typed"} <= set(files)
    assert {"shardtrace/inspector/page.css", "shardtrace/inspector/page.js"} <= set(files)
    assert any(name.endswith("LICENSE") for name in files)


def test_installed_and_used(wheel, tmp_path):
    venv.create(tmp_path / "env")
    python = str(tmp_path / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", f"--prefix={tmp_path}/env"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    # torch and Thunder are borrowed from the environment of the tests; packages installed there in place are not
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # may lead to the checkout
    done = subprocess.run([python, "-c", USE], cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120)
    assert "trained" in done.stdout, done.stderr
