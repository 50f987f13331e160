"""The predicted cost of a step: its seconds by the cost model, its bytes by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from passes.analysis.calls import parts_in
from passes.analysis.liveness import KINDS, LineMemory, on_host, step_liveness
from passes.analysis.recognise import (
    bucket_of,
    is_deletion,
    is_issue,
    is_return,
    is_sequence_issue,
    is_unpack,
    names,
    part_at,
)
from passes.plan import CostModel
from passes.plan.hardware import HOST_MEMORY, Hardware
from shardtrace.inspector.timeline import predicted
from shardtrace.planner.compose import ComposedStep
from shardtrace.planner.optimizer import OptimizerCost

from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx


class Estimate(NamedTuple):
    """A training step of one rank.

    ``seconds`` is the sum of ``forward``, ``backward`` and ``optimizer``, the first two of which include the
    ``exposed`` seconds in which compute waits for communication. ``memory`` has the bytes at the peak by kind, and
    ``peak`` is their sum; ``tensors`` are those that PyTorch would count. ``host``: bytes in the memory of the host.
    """

    seconds: float
    forward: float
    backward: float
    optimizer: float
    exposed: float
    peak: int
    tensors: int
    memory: Mapping[str, int]
    host: int


class Setting(NamedTuple):
    """The machine and the training on it, apart from what a plan decides."""

    cost: CostModel
    hardware: Hardware
    optimizer: OptimizerCost
    accumulation: int = 1


def estimate(step: ComposedStep, setting: Setting, facts: dict[Any, Any] | None = None) -> Estimate:
    """Predicts a step from its executed traces. ``facts``: as in ``step_liveness``."""
    cost, optimizer, count = setting.cost, setting.optimizer, setting.accumulation
    forward, backward = predicted(step, cost)
    words, elsewhere = _trained_words(step.forward)
    state = int(optimizer.state * words)
    sums = 4 * words if count > 1 else 0  # gradients of earlier calls
    memory = step_liveness(*step, persistent=state + sums, facts=facts)
    parts = [part.peak for part in memory if part is not None]
    at = max(parts, key=lambda row: row.during)
    kinds = {kind: getattr(at, kind) for kind in KINDS} | {"optimizer": state}
    kinds["gradients"] += sums
    kinds["activations"] += at.during - at.total
    updating = _while_updating((memory.backward or memory.forward).lines[-1], words, setting)
    if updating > at.during:
        kinds |= {"activations": 0, "saved": 0, "unsharded": 0, "in_flight": 0}
        kinds["gradients"] = 4 * words
        kinds["temporary"] = updating - sum(kinds.values())
    tensors = sum(kinds.values())
    reserved = _reserved(step, tensors, setting.hardware)
    update = optimizer.moved * (words / cost.device.bandwidth + elsewhere / HOST_MEMORY)
    last = backward.end
    return Estimate(
        seconds=count * last + update,
        forward=count * forward.end,
        backward=count * (last - forward.end),
        optimizer=update,
        exposed=count * (forward.exposed + backward.exposed),
        peak=tensors + sum(reserved.values()),
        tensors=tensors,
        memory=kinds | reserved,
        host=int((8 + optimizer.state) * elsewhere),  # shards and gradients too
    )


def _while_updating(last: LineMemory, words: int, setting: Setting) -> int:
    """Bytes while the optimizer works, which on a GPU treats all parameters at once."""
    temporary = 0.0 if setting.hardware.name == "cpu" else setting.optimizer.temporary
    return last.inputs + int((setting.optimizer.state + 4 + temporary) * words)


def _reserved(step: ComposedStep, tensors: int, hardware: Hardware) -> dict[str, int]:
    groups = {bucket_of(b).plan.axis for t in step for b in t.bound_symbols if is_issue(b)}
    traces = [*step, *(part.trace for t in step for part in parts_in(t))]
    groups |= {part_at(b).plan.axis for t in traces for b in t.bound_symbols if is_sequence_issue(b)}
    found = {
        "context": hardware.context,
        "communicators": len(groups) * hardware.communicator,
        "allocator": hardware.allocator * tensors,
    }
    return {name: int(nbytes) for name, nbytes in found.items()}


def _trained_words(forward: TraceCtx) -> tuple[int, int]:
    """The 4-byte words of this rank's trained parameters, to whose dtype an optimizer's state keeps: those on the
    device, and those in host memory."""
    lines = (b for b in forward.bound_symbols if not (is_unpack(b) or is_return(b) or is_deletion(b)))
    read = names([b.flat_proxy_args for b in lines])  # of a parameter's several names only one is
    given = [a for a in forward.args if isinstance(a, TensorProxy) and a.name in read]
    trained = [a for a in given if a.requires_grad and ProxyTag.STATIC_MEMORY_LOCATION in a.tags]
    away = on_host(forward)
    there = sum(a.numel * a.dtype.bytes for a in trained if a.name in away)
    return sum(a.numel * a.dtype.bytes for a in trained) // 4 - there // 4, there // 4
