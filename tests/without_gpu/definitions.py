"""Builds, but does not run, the definition of each nvFuser region of a matrix of sharded models: nvFuser's wheel without
a GPU. (``make nvfuser-check`` installs it.)"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import fused  # Thunder registers nvFuser when it is imported, and fused makes it see CUDA then

# isort: split

from passes.analysis.verify import verify
from passes.compat.jit import function_of
from shardtrace import CompilePolicy

import matrix
import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

Case = dict[str, Any]

FACTORS: dict[str, list[Any]] = {
    "sharding_strategy": ["zero2", "zero3", "ddp", "owner", "hybrid_zero3"],
    "mp_policy": [
        None,
        "bf16",
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "fp16",
    ],
    "activation_checkpointing": [False, matrix.Block],
    "gradients": ["", "kept", "added"],
    "offload_policy": [None, CPUOffloadPolicy()],
    "train": [True, False],  # with and without dropout
    "compile_policy": [CompilePolicy(repeated_blocks=how) for how in ("once", "inline")],
}


def main() -> int:
    failed: Counter[str] = Counter()
    built, cases = 0, list(pairs())
    for case in cases:
        for trace in matrix.compile_step(**case):
            verify(trace)
            regions = {id(function_of(b)): b for b in matrix.all_lines(trace) if b.sym.is_fusion}
            for region in regions.values():
                built += 1
                if problem := build(region):
                    failed[problem] += 1
                    print(f"{case}\n{region}\n{problem}", file=sys.stderr)
    print(f"nvFuser {fused.VERSION}, {len(cases)} cases: built {built - failed.total()} of {built} definitions")
    return 1 if failed or not built else 0


def pairs() -> Iterator[Case]:
    """Cases in which each two values of different factors meet at least once, greedily chosen."""
    cases = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    cases = [c for c in cases if not (c["sharding_strategy"] == "ddp" and c["offload_policy"])]  # refused
    met = [set(combinations(((name, str(value)) for name, value in case.items()), 2)) for case in cases]
    missing = set().union(*met)
    while missing:
        best = max(range(len(cases)), key=lambda i: len(met[i] & missing))
        missing -= met[best]
        yield cases[best]


def build(region: BoundSymbol) -> str:
    """Builds the definition for the shapes and dtypes of the trace. Returns what went wrong, or nothing."""
    function: Any = function_of(region)
    try:
        function.get_fd(function.to_descriptors(tuple(map(_argument, region.args))))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _argument(value: Any) -> Any:
    if isinstance(value, TensorProxy):
        return torch.empty(tuple(map(int, value.shape)), dtype=to_torch_dtype(value.dtype), device="meta")
    return value.value if isinstance(value, NumberProxy) else value


if __name__ == "__main__":
    if not fused.REAL:
        sys.exit("nvFuser's wheel is not installed: run make nvfuser-check")
    sys.exit(main())
