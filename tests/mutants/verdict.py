"""Whether a mutant is found, and what it computes if it is not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from passes.analysis.verify import VerificationError, verify

import torch
from simulate import Simulation, tensors_in
from steps import Step, random_like

Prove = Callable[[Step], tuple[str, str]]  # the verdict ("proven", "rounding" or "unproven"), and why
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Verdict(NamedTuple):
    """Who found a mutant, or what running it showed: "verify", "prove", "equivalent" or "missed"."""

    outcome: str
    why: str = ""


def judge(mutant: Step, right: Step, prove: Prove | None, *, runs: bool = True) -> Verdict:
    """Asks the verifier, then the prover, then runs the mutant beside the right step.

    ``runs``: False if running it shows nothing, as for a wait that is left out.
    """
    try:
        warnings.simplefilter("ignore")
        for trace in (mutant.forward, mutant.backward):
            if trace is not None:
                verify(trace)
    except VerificationError as error:
        return Verdict("verify", str(error).splitlines()[0])
    if prove is not None:
        verdict, why = prove(mutant)
        if verdict == "unproven":
            return Verdict("prove", why)
        if verdict == "raises":
            return Verdict("missed", f"the prover raises {why}")
    if not runs:
        return Verdict("missed", "a lost wait does not show when it runs")
    difference = _apart(lambda: compare(mutant, right))
    return Verdict("missed", difference) if difference else Verdict("equivalent")


def _apart(text: Callable[[], str]) -> str:
    """The text, which a process of its own makes: a wrong step may end it."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writes, text().encode()[:4000])
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    return found if os.WIFEXITED(status) else f"ends the process by signal {os.WTERMSIG(status)}"


def compare(mutant: Step, right: Step) -> str:
    """What differs between the results of a mutant and of the right step; empty if nothing does."""
    expected = results(right)
    try:
        found = results(mutant)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}".splitlines()[0]
    for what, values in expected.items():
        others = found[what]
        if len(values) != len(others):
            return f"{len(others)} {what}, not {len(values)}"
        for i, (a, b) in enumerate(zip(values, others, strict=True)):
            if a is None or b is None:
                if a is not b:
                    return f"{what} {i}: only one is None"
            elif a.shape != b.shape or a.dtype != b.dtype:
                return f"{what} {i}: {b.dtype} of {tuple(b.shape)}, not {a.dtype} of {tuple(a.shape)}"
            elif not close(a, b):
                return f"{what} {i}: differs by {(a.double() - b.double()).abs().max().item():.1e}"
    return ""


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for rounding."""
    if not a.numel() or torch.equal(a, b):
        return True
    a, b, tolerance = a.double(), b.double(), ROUNDING.get(a.dtype, 0.0)
    scale = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)


_KNOWN: list[tuple[Step, dict[str, list[Any]]]] = []  # the results of the step that was run last


def results(step: Step) -> dict[str, list[Any]]:
    """What a step returns and leaves behind, for each rank: outputs, gradients, arguments, kept gradients."""
    if _KNOWN and _KNOWN[0][0] is step:
        return _KNOWN[0][1]
    ranks = Simulation(step.world)
    args = [[a.clone() if isinstance(a, torch.Tensor) else a for a in given] for given in step.args]
    for rank, kept in zip(ranks.ranks, step.kept, strict=True):
        rank.kept.by_place.update({place: k._replace(total=k.total.clone()) for place, k in kept.items()})
    forwards = ranks.run(step.forward, args)
    found: dict[str, list[Any]] = {"output": [], "gradient": []}
    if step.backward is None:
        found["output"] = tensors_in(forwards)
    else:
        proxies = step.forward.bound_symbols[-1].args[0]["flat_output"]
        given = []
        for rank, (result, (saved, others)) in enumerate(forwards):
            outputs = list(result["flat_output"])
            found["output"] += [o.clone() for o in tensors_in(outputs)]
            cotangents = [
                random_like(o, f"cotangent {i}", rank // step.world.tensors)
                for i, (o, p) in enumerate(zip(outputs, proxies, strict=True))
                if isinstance(o, torch.Tensor) and o.is_floating_point()
            ]
            given.append([[list(saved), list(others)], cotangents])
        given = [g[: len(step.backward.args)] for g in given]
        for gradients in ranks.run(step.backward, given):
            found["gradient"] += list(gradients)
    found["argument"] = [a for given in args for a in tensors_in(given)]
    found["kept gradient"] = [
        kept.total for rank in ranks.ranks for _, kept in sorted(rank.kept.by_place.items(), key=lambda k: str(k[0]))
    ]
    return found


def remember(step: Step) -> None:
    """Keeps the results of the right step for the mutants that follow."""
    _KNOWN[:] = []
    _KNOWN[:] = [(step, results(step))]


def is_sound(step: Step) -> bool:
    """Whether results of the right step are finite."""
    return all(bool(t.isfinite().all()) for values in results(step).values() for t in values if t is not None)
