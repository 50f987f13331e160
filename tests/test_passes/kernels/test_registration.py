import shardtrace
from passes.kernels import executor
from passes.kernels.aten import executor as aten
from passes.kernels.executors import fuses
from passes.kernels.torch_call import executor as torch_calls

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.executors.torch_compile import torch_compile_ex, torch_compile_xentropy_ex
from torch import nn


def lines_of(executors, monkeypatch):
    """The names of torch's own functions, and of kernels, in a forward whose fusions run uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 8)

        def forward(self, x, y):
            x = F.dropout(self.linear(self.norm(x)), 0.1)
            heads = x.view(2, 3, 2, 4).transpose(1, 2)
            return F.cross_entropy(F.scaled_dot_product_attention(heads, heads, heads).reshape(-1, 8), y)

    jitted = thunder.jit(shardtrace.fsdp(Net()), executors=executors)
    jitted(torch.randn(2, 3, 8), torch.zeros(6, dtype=torch.int64)).backward()
    lines = thunder.last_traces(jitted)[-1].bound_symbols
    return {b.sym.name for b in lines if b.sym.executor in (executor, torch_calls, aten)}


UNFUSED = {"aten__scaled_dot_product_flash_attention_for_cpu", "aten__log_softmax", "aten_nll_loss_forward"}


@pytest.mark.parametrize("named", [executor, "torch_kernels"])
def test_all_functions_without_a_fusing_executor(monkeypatch, single_rank, named):
    assert {"torch_linear_0", "dropout_mask", "dropout", *UNFUSED} <= lines_of(["sdpa", named], monkeypatch)


def test_all_of_them_are_in_regions_of_torch_compile(monkeypatch, single_rank):
    assert not lines_of(["sdpa", executor, "torchcompile"], monkeypatch)


def test_executors_that_fuse():
    assert fuses(torch_compile_ex)
    assert not any(map(fuses, (executor, torch_compile_xentropy_ex, *thunder.get_always_executors())))
