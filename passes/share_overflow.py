"""Pass (fp16): a gradient that is not finite on one rank is not finite on any.

Each rank holds its shards alone, and so finds an inf or NaN in its own gradients alone. torch.amp.GradScaler, which
skips the step and lowers its scale for one, would do so on that rank and not on the others. A line at the end of
backward adds 0 to a gradient of each rank, or NaN if there is one on any.
"""

from __future__ import annotations

from typing import Any

from passes.analysis.recognise import bucket_of, is_backward, is_gather, is_return, names, waits_for_future
from passes.comm.symbols import symbol
from passes.plan import Axis

import torch
import torch.distributed as dist
from thunder.core import dtypes
from thunder.core.codeutils import ContextObject
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace


def share_overflow(trace: TraceCtx) -> TraceCtx:
    """Returns a backward whose gradients are reduced in fp16, or computed in it, with that line; others as they are."""
    if not is_backward(trace):
        return trace
    returned = names(trace.bound_symbols[-1].args)
    grads: list[TensorProxy] = []
    groups: list[Any] = []
    for bsym in trace.bound_symbols:
        if waits_for_future(bsym) and not is_gather(bsym):
            bucket = bucket_of(bsym)
            if dtypes.float16 in (bucket.dtype, bucket.plan.param_dtype):
                grads += [g for g in bsym.flat_proxy_outs if g.name in returned]
                host = bucket.plan.host
                groups.append((bucket.plan.runtime.group(Axis.ALL), host.device if host is not None else None))
    if not grads:
        return trace
    new = from_trace(trace)
    *lines, last = trace.bound_symbols
    assert is_return(last)
    line = _share_overflow.bind(tuple(grads), ContextObject("ranks", groups[0]), output=None)
    new.bound_symbols = [*lines, line, last]
    return new


def _add_nan_if_any(grads: tuple[torch.Tensor, ...], ranks: Any) -> None:
    mine = [g for g in grads if g.numel()]
    norms = torch._foreach_norm(mine, float("inf")) if mine else [torch.zeros(())]
    # 0 * inf and 0 * NaN are NaN, which a sum keeps; a maximum of some backends does not
    flag = torch.stack([n.to(norms[0].device) for n in norms]).sum().float() * 0  # some may be on the host
    group, device = ranks.obj
    flag = flag.reshape(1).to(device or grads[0].device)
    dist.all_reduce(flag, group=group)
    if mine:
        mine[0].view(-1)[:1].add_(flag.to(mine[0].device))


_share_overflow = symbol("share_overflow", lambda grads, ranks: None, _add_nan_if_any, tags=[OpTags.DONT_DCE])
