import subprocess
import sys

from passes import compat

import pytest
import torch


def test_nothing_is_missing_once_installed():
    assert compat.install() == ()


def test_stand_in_bears_its_name_and_raises(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "align_to", raising=False)
    assert compat.install() == ("align_to",)
    assert torch.Tensor.align_to.__name__ == "align_to"
    with pytest.raises(AttributeError, match=r"align_to was removed"):
        torch.ones(1).align_to("N")


def test_methods_that_exist_are_left_alone(monkeypatch):
    own = lambda self: "own"  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "rename", own, raising=False)
    compat.install()
    assert torch.Tensor.rename is own


@pytest.mark.parametrize("first", ["shardtrace", "passes"])
def test_thunder_imports_after_us(first):
    subprocess.run([sys.executable, "-c", f"import {first}, thunder"], check=True, capture_output=True)
