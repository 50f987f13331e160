"""Pass: proves that the step which is about to run computes the unsharded program (``Checks(prove=True)``)."""

from __future__ import annotations

from collections.abc import Sequence

from passes.analysis.recognise import is_backward
from passes.plan import TracedParameters
from passes.proof.prove import Proof, Record, prove
from passes.split_sequence import Context

from thunder.core.trace import TraceCtx, TraceTag


class UnprovenStepError(AssertionError):
    """A compiled step could not be shown to be the unsharded program. The message has the differences."""


def prove_step(
    trace: TraceCtx,
    *,
    record: Record | None,
    parameters: TracedParameters,
    proofs: list[Proof],
    forwards: list[TraceCtx],
    proving: Sequence[str],
    context: Context | None,
) -> TraceCtx:
    """Proves that the step computes the unsharded program.

    Takes: a final forward, then its backward, and the computation as it was recorded. ``proving`` has the names of the
    models that ask for it.
    Gives: the same trace. Adds the result to ``proofs``. Raises :class:`UnprovenStepError`.
    No-op when: no model asks for it.
    """
    if not proving or record is None:
        return trace
    forward, backward = trace, None
    if is_backward(trace):
        forward, backward = forwards[-1], trace
    elif TraceTag.AUGMENTED_FORWARD in trace.tags:
        forwards[:] = [trace]
        return trace
    proof = prove(record, parameters, forward, backward, context)
    proofs.append(proof)
    if proof.verdict == "unproven":
        raise UnprovenStepError(
            f"the compiled step of {' and '.join(proving)} could not be proven to be the unsharded program:\n{proof}"
        )
    return trace
