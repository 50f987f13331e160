"""Pass (fp16): a gradient that overflows on one rank makes all ranks skip the step.

    future = share_overflow(grads, overflow_0)      the last lines of a backward, for each model
    wait_share_overflow(future, overflow_0)         adds NaN to the gradients if any rank has an inf or NaN, else 0

Each rank holds only its shards, and finds an inf or NaN only in its own gradients. torch.amp.GradScaler would skip the
step and lower its scale on that rank, and not on the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from passes.analysis.recognise import bucket_of, is_backward, is_gather, is_return, names, waits_for_future
from passes.comm import symbols
from passes.plan import Axis, Bucket, OverflowFlag, Placement, Plan, Runtime

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx


def share_overflow(trace: TraceCtx) -> TraceCtx:
    """Returns a backward with these lines for each model that computes or reduces in fp16; any other trace as it is."""
    if not is_backward(trace):
        return trace
    *lines, last = trace.bound_symbols
    assert is_return(last)
    buckets: dict[Runtime, list[Bucket]] = {}  # by model
    grads: dict[Runtime, list[TensorProxy]] = {}
    returned = names(last.args)
    for bsym in filter(waits_for_future, lines):
        model = bucket_of(bsym).plan.runtime
        buckets.setdefault(model, []).append(bucket_of(bsym))
        if not is_gather(bsym):
            grads.setdefault(model, []).extend(o for o in bsym.flat_proxy_outs if o.name in returned)
    models = [model for model in grads if grads[model] and any(map(_is_fp16, buckets[model]))]
    plans = {model: _over_all_ranks([bucket.plan for bucket in buckets[model]]) for model in models}
    new = from_trace(trace)
    new.push_scope([])
    with tracectx(new):
        for i, model in enumerate(model for model in models if plans[model].world_size > 1):
            flag = OverflowFlag(f"overflow_{i}", plans[model])
            symbols.wait_share_overflow(symbols.share_overflow(tuple(grads[model]), flag), flag)
    added = new.pop_scope()
    new.bound_symbols = [*lines, *added, last]
    return new if added else trace


def _is_fp16(bucket: Bucket) -> bool:
    return dtypes.float16 in (bucket.dtype, bucket.rest_dtype, bucket.plan.param_dtype)


def _over_all_ranks(plans: Iterable[Plan]) -> Plan:
    """The plan of what all ranks of a model reduce together, from the plans of its buckets.

    A hybrid strategy has two of these: the plan of the shards knows how many copies of them there are.
    """
    plans = list(plans)
    widest = max(plans, key=_ranks)
    outer_rank = widest.outer.rank if widest.outer is not None else 0
    return replace(
        widest,
        axis=Axis.ALL,
        world_size=_ranks(widest),
        rank=outer_rank * widest.world_size + widest.rank,
        placement=Placement.REPLICATE,
        outer=None,
        host=next((plan.host for plan in plans if plan.host is not None), None),
    )


def _ranks(plan: Plan) -> int:
    return plan.world_size * (plan.outer.world_size if plan.outer is not None else 1)
