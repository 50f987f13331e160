"""A function under Thunder with torch's own kernels, held against eager PyTorch."""

from contextlib import AbstractContextManager
from unittest import mock

from passes.compat.jit import function_of, symbol_that_calls
from passes.kernels import executor

import thunder
import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.trace import from_trace
from thunder.core.transform_common import Transform

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def uncompiled() -> AbstractContextManager[object]:
    """Fusions of torchcompile are made and run, and not compiled, which takes seconds for each."""
    return mock.patch("torch.compile", lambda function, **options: function)


class CheckedMetadata(Transform):
    """Makes each line of a kernel check that its results are what the trace says. ``names`` are those of the kernels."""

    def __init__(self):
        self.names = []

    def transform_trace_post_optimization(self, trace, **kwargs):
        new = from_trace(trace)
        new.bound_symbols = [self.checked(b) if b.sym.executor is executor else b for b in trace.bound_symbols]
        return new

    def checked(self, bsym):
        self.names.append(bsym.sym.name)
        fn, expected = function_of(bsym), bsym.output if isinstance(bsym.output, tuple) else (bsym.output,)

        def run(*args):
            results = fn(*args)
            for proxy, result in zip(expected, results if isinstance(results, tuple) else (results,), strict=True):
                if isinstance(proxy, TensorProxy):
                    assert (tuple(result.shape), result.dtype) == (tuple(proxy.shape), to_torch_dtype(proxy.dtype)), (
                        f"{bsym.sym.name} returned {tuple(result.shape)} {result.dtype} for {proxy}"
                    )
            return results

        symbol = symbol_that_calls(bsym.sym.name, bsym.sym.meta, run, id=bsym.sym.id, is_prim=True, executor=executor)
        return symbol.bind(*bsym.args, output=bsym.output)


def compare(function, *inputs, kernels, exact=True):
    """Asserts that results and gradients are those of eager PyTorch, and that the compiled step has just ``kernels``.

    ``exact`` demands equal bits; otherwise they differ by rounding of the inputs' dtype. Returns the jitted function.
    """
    results = []
    check = CheckedMetadata()
    jitted = thunder.jit(function, executors=[executor], transforms=[check])
    for run in (function, jitted):
        arguments = [a.detach().clone().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in inputs]
        torch.manual_seed(0)
        out = run(*arguments)
        weights = torch.linspace(0.5, 1.5, max(out.numel(), 1), dtype=torch.float64).to(out.dtype)[: out.numel()]
        out.backward(weights.reshape(out.shape))
        grads = [a.grad for a in arguments if torch.is_tensor(a) and a.requires_grad]
        results.append([out.detach(), *grads])
    assert sorted(check.names) == sorted(kernels)
    for expected, found in zip(*results, strict=True):
        if exact:
            assert torch.equal(found, expected), (found - expected).abs().max()
        else:
            tolerance = TOLERANCE[found.dtype]
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    return jitted
