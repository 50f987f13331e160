from passes.kernels import executor
from passes.kernels.registration import fuses

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.executors.torch_compile import torch_compile_ex, torch_compile_xentropy_ex
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x, y):
        x = self.linear(self.norm(x))
        heads = x.view(2, 3, 2, 4).transpose(1, 2)
        return F.cross_entropy(F.scaled_dot_product_attention(heads, heads, heads).reshape(-1, 8), y)


def kernels(executors, monkeypatch):
    """The names of the kernels in both traces of a step whose fusions run uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    jitted = thunder.jit(Net(), executors=executors)
    jitted(torch.randn(2, 3, 8), torch.zeros(6, dtype=torch.int64)).backward()
    traces = (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1])
    return {b.sym.name for trace in traces for b in trace.bound_symbols if b.sym.executor is executor}


ENTROPY = {"log_softmax", "log_softmax_backward", "nll_loss", "nll_loss_backward"}
ATTENTION = {"scaled_dot_product_attention", "scaled_dot_product_attention_backward"}
FUSIBLE = {"rms_norm", "rms_norm_backward"}
LINEAR = {"linear", "linear_backward_input", "linear_backward_weight", "linear_backward_bias"}


@pytest.mark.parametrize("named", [executor, "torch_kernels"])
def test_all_functions_without_a_fusing_executor(monkeypatch, named):
    assert kernels(["sdpa", named], monkeypatch) == ENTROPY | ATTENTION | FUSIBLE | LINEAR


def test_fusible_functions_are_left_to_a_fusing_executor(monkeypatch):
    assert kernels(["sdpa", executor, "torchcompile"], monkeypatch) == ENTROPY | ATTENTION


def test_executors_that_fuse():
    assert fuses(torch_compile_ex)
    assert not any(map(fuses, (executor, torch_compile_xentropy_ex, *thunder.get_always_executors())))
