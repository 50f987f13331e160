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


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x, power=3):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return 5 * grad * ctx.saved_tensors[0] ** 2, None  # on purpose: not that of its forward


def test_apply_is_a_method_of_python(monkeypatch):
    """As Thunder reads it, with apply in C++ only, as torch 2.14 has it."""
    monkeypatch.setattr(versions, "APPLIES_IN_CPP", True)
    monkeypatch.setattr(torch.autograd.Function, "apply", torch._C._FunctionBase.__dict__["apply"])
    assert not hasattr(Cube.apply, "__func__")
    versions.install()
    assert Cube.apply.__func__ is torch.autograd.Function.apply.__func__
    x = torch.tensor([2.0], requires_grad=True)
    Cube.apply(x, 3).backward()
    assert x.grad.item() == 20


def test_what_to_do_without_nvfuser(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    assert versions.missing_nvfuser().startswith(
        "nvFuser is not built for torch 2.15 (the last was 2.10): Thunder's def"
    )
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert "pip install 'shardtrace[nvfuser]'" in versions.missing_nvfuser()


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
