"""CUDA graphs: what ``CUDAGraphTransform`` of Thunder cannot hold is refused, by name.

The lines of a step become graphs. In the first step they run three times, and once more while CUDA notes their kernels.
Later steps launch these kernels and run no line. A graph reads parameters where they are, and copies its other inputs
into memory of its own. Therefore it cannot hold a line that acts in Python, keeps an object of Python for backward,
waits for the device, or writes into an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from passes.analysis.recognise import module_of
from passes.kernels.torch_call import call_of
from passes.plan import Gradients
from shardtrace.model.state import ShardedState
from shardtrace.record.eager import Eager

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from thunder.transforms.cudagraph import CUDAGraphTransform

OTHERWISE = "or call thunder.jit without CUDAGraphTransform"


def makes_graphs(transforms: Iterable[Transform]) -> bool:
    """True if the lines of a step become CUDA graphs."""
    return any(isinstance(t, CUDAGraphTransform) for t in transforms)


def refuse_graphs(state: ShardedState) -> None:
    """Raises RuntimeError if the steps of a model act in Python."""
    name, ranks = state.model_name, state.group.size()
    if any(p.host for p in state.plans.values()):
        raise RuntimeError(
            f"a CUDA graph cannot hold {name}, whose parameters are in host memory, because the program waits for "
            f"their copies: call fsdp() without offload_policy, {OTHERWISE}"
        )
    if ranks > 1:
        raise RuntimeError(
            f"a CUDA graph cannot hold {name} over {ranks} ranks, because the program looks at each collective whether "
            f"another rank has failed: run on one rank, {OTHERWISE}"
        )
    if state.runtime.gradients() in (Gradients.KEPT, Gradients.ADDED):
        raise RuntimeError(
            f"a CUDA graph cannot hold {name} inside or after no_sync, because the program adds up its gradients: call "
            f"no_sync(model, reduce_each=True), {OTHERWISE}"
        )


def refuse_lines(name: str, computation: TraceCtx) -> None:
    """Raises RuntimeError if a line of a model's computation, as it was traced, cannot be in a graph."""
    inputs = {a.name for a in computation.args}
    for bsym in computation.bound_symbols:
        if reason := _obstacle(bsym, inputs):
            raise RuntimeError(f"a CUDA graph cannot hold {name}, because {reason}, {OTHERWISE}")


def _obstacle(bsym: BoundSymbol, inputs: set[str]) -> str:
    call = call_of(bsym.sym)
    if call is not None:
        function = getattr(call.function, "__name__", call.name).removeprefix("eager_")
        module = module_of(bsym)
        where = f"{function} in {module}" if module else function
        if isinstance(call.function, Eager):
            return f"PyTorch runs {where}, which may read values of tensors: leave it out of the model"
        if call.returned and call.program is None:
            return (
                f"torch's own autograd differentiates {where}, and keeps objects of Python for backward: compute it "
                "with other functions"
            )
    for place in _written(bsym):
        if place in inputs:
            what = place.removeprefix("t_")
            return f"forward writes into {what!r}, of which a graph has a copy: write outside of forward"
    return ""


def _written(bsym: BoundSymbol) -> Iterator[str]:
    """The tensors into which a line copies."""
    if bsym.sym.id is PrimIDs.COPY_:
        yield bsym.args[1].name
    for part in bsym.subsymbols:
        yield from _written(part)
