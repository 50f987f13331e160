"""Thunder with nvFuser on a machine without a GPU. Import this before anything that imports Thunder.

Thunder registers nvFuser if it sees CUDA when it is imported. From then on it forms regions for nvFuser, which can be
read. :func:`on_cpu` also runs them: torch runs their parts. A stub stands in for nvFuser's wheel if it is not here.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch

HERE = Path(__file__).parent
REAL = find_spec("nvfuser_direct") is not None  # then definitions can be built
sys.path[:0] = [str(HERE), str(HERE.parent), *([] if REAL else [str(HERE / "stub")])]
with mock.patch("torch.cuda.is_available", return_value=True), mock.patch("torch.cuda.device_count", return_value=1):
    import shardtrace  # noqa: F401

    import thunder  # noqa: F401
    import thunder.executors.nvfuserex_impl as implementation
    import thunder.executors.torch_compile as torch_compile
    from thunder.core.proxies import TensorProxy


_version = implementation.nvfuser_version  # needs CUDA
with mock.patch("torch.cuda.is_available", return_value=True):
    VERSION = _version()
implementation.nvfuser_version = lambda: VERSION
torch.backends.cuda.can_use_efficient_attention = lambda *args: True  # else attention is taken apart
runs = 0  # of regions


@contextmanager
def on_cpu():
    """Regions are formed of what runs on the CPU, and torch runs their parts."""

    def supported(tensor, *, allow_low_precision_floats=True):
        low = tensor.dtype in implementation._low_precision_floats
        return implementation.is_supported_dtype(tensor.dtype) and (allow_low_precision_floats or not low)

    def touches_tensors(self, bsym):
        return any(isinstance(p, TensorProxy) for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))

    executor = implementation.ex
    known = {key: value for key, value in executor.implmap.items() if "cross_entropy" not in str(key)}
    with (
        mock.patch.object(implementation, "is_supported_device", return_value=True),
        mock.patch.object(implementation, "is_supported_tensor", supported),
        mock.patch.object(implementation.nvFuserExecutor, "has_cuda_input_or_output", touches_tensors),
        mock.patch.object(implementation, "create_fusion_definition_wrapper", _region),
        mock.patch.object(executor, "_implmap", known),
    ):
        yield


def _region(lines, name, inputs, outputs):
    made = []

    def run(*args):
        global runs
        runs += 1
        if not made:
            with (
                mock.patch.object(torch, "compile", lambda function, **options: function),
                mock.patch.object(torch_compile, "get_compile_option", return_value=None),
            ):
                made.append(torch_compile.make_compiled(lines, inputs, outputs))
        return made[0](*args)

    return run
