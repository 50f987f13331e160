import subprocess
import sys

from passes.compat import versions

import pytest
import torch


def test_nothing_is_missing_once_installed():
    assert versions.install() == ()


def test_stand_in_bears_its_name_and_raises(monkeypatch):
    monkeypatch.setattr(versions, "REMOVED_METHODS", ("made_up",))
    monkeypatch.setattr(torch.Tensor, "made_up", None, raising=False)
    del torch.Tensor.made_up  # restored, that is removed, by monkeypatch
    assert versions.install() == ("made_up",)
    assert torch.Tensor.made_up.__name__ == "made_up"  # Thunder checks it
    with pytest.raises(AttributeError, match=r"made_up was removed"):
        torch.ones(1).made_up("N")


def test_methods_that_exist_are_left_alone(monkeypatch):
    own = lambda self: "own"  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "rename", own, raising=False)
    versions.install()
    assert torch.Tensor.rename is own


def test_thunder_imports_after_us():
    """Without a warning. After shardtrace, too: each process of these tests does that."""
    command = [sys.executable, "-c", "import passes, thunder, shardtrace"]
    done = subprocess.run(command, check=True, capture_output=True)
    assert done.stderr == b""
