"""Losses. A mean over all positions is the mean of the means of equal parts, if every position counts the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes.plan.dims.relation import Draft, Labels, Operand, Rule, Shapes, Unknown, aligned, broadcast, counted

# the parameters of each; in all of these, every result before a reduction is of one position of the operands
PARAMETERS = {
    "mse_loss": "input target size_average reduce reduction weight",
    "l1_loss": "input target size_average reduce reduction weight",
    "smooth_l1_loss": "input target size_average reduce reduction beta",
    "huber_loss": "input target reduction delta weight",
    "binary_cross_entropy": "input target weight size_average reduce reduction",
    "binary_cross_entropy_with_logits": "input target weight size_average reduce reduction pos_weight",
    "kl_div": "input target size_average reduce reduction log_target",
    "poisson_nll_loss": "input target log_input full size_average eps reduce reduction",
    "soft_margin_loss": "input target size_average reduce reduction",
    "gaussian_nll_loss": "input target var full eps reduction",
    "hinge_embedding_loss": "input target margin size_average reduce reduction",
    "margin_ranking_loss": "input1 input2 target margin size_average reduce reduction",
}
OF_ROWS = {
    "multilabel_soft_margin_loss": "input target weight size_average reduce reduction",
    "triplet_margin_loss": "anchor positive negative margin p eps swap size_average reduce reduction",
}
OF_CLASSES = {
    "nll_loss": "input target weight size_average ignore_index reduce reduction",
    "cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing",
}
WEIGHTED = ("mse_loss", "l1_loss", "huber_loss")  # their mean is weighted


def _bound(parameters: str, args: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    names = parameters.split()
    if len(args) > len(names) or not set(named) <= set(names[len(args) :]):
        raise Unknown
    found = dict(zip(names, args, strict=False)) | named
    if found.get("size_average") is not None or found.get("reduce") is not None:
        raise Unknown
    return found


def total(rows: dict[Operand, Labels], terms: Labels, reduction: Any, mixed: frozenset[int] = frozenset()) -> Draft:
    """A loss with a term for each position of ``terms``; they are kept, summed or averaged."""
    if reduction == "none":
        return Draft(rows, [terms], mixed=mixed)
    if reduction not in ("sum", "mean"):
        raise Unknown
    return Draft(rows, [()], {label: reduction for label in terms if label is not None}, mixed)


def of_positions(name: str, parameters: str) -> Any:
    def rule(results: Shapes, *args: Any, **named: Any) -> Draft:
        given = _bound(parameters, args, named)
        tensors = {key: x for key, x in given.items() if isinstance(x, Operand)}
        reduction = given.get("reduction", "mean")
        if reduction == "mean" and name in WEIGHTED and "weight" in tensors:
            raise Unknown
        if name == "gaussian_nll_loss" and "var" in tensors and tensors["var"].dims != tensors["input"].dims:
            raise Unknown
        shape = broadcast(x.shape for x in tensors.values())
        rows: dict[Operand, Labels] = {x: aligned(x.shape, len(shape)) for x in tensors.values()}
        return total(rows, counted(len(shape)), reduction)

    return rule


def of_rows(parameters: str) -> Any:
    """A term for each row, whose elements are mixed."""

    def rule(results: Shapes, *args: Any, **named: Any) -> Draft:
        given = _bound(parameters, args, named)
        tensors = [x for key, x in given.items() if isinstance(x, Operand) and key != "weight"]
        dims = tensors[0].dims
        weight = given.get("weight")
        if (
            dims < 1
            or (isinstance(weight, Operand) and weight.dims > 1)
            or any(x.shape != tensors[0].shape for x in tensors)
        ):
            raise Unknown
        rows: dict[Operand, Labels] = {x: counted(dims) for x in tensors}
        return total(rows, counted(dims - 1), given.get("reduction", "mean"), frozenset({dims - 1}))

    return rule


def of_classes(parameters: str) -> Any:
    """Scores (N, C, ...), with labels (N, ...) or probabilities (N, C, ...). Positions may be ignored or weighted, so
    that a mean is not one of means."""

    def rule(results: Shapes, *args: Any, **named: Any) -> Draft:
        given = _bound(parameters, args, named)
        scores, target = given["input"], given["target"]
        reduction = given.get("reduction", "mean")
        if reduction == "mean" or not scores.dims:
            raise Unknown
        every = counted(scores.dims)
        classes = min(1, scores.dims - 1)
        terms = tuple(d for d in every if d != classes)
        rows: dict[Operand, Labels] = {scores: every, target: every if target.dims == scores.dims else terms}
        return total(rows, terms, reduction, frozenset({classes}))

    return rule


def cosine_embedding_loss(
    results: Shapes,
    input1: Operand,
    input2: Operand,
    target: Operand,
    margin: Any = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Draft:
    if size_average is not None or reduce is not None or input1.dims != 2 or input2.dims != 2 or target.dims != 1:
        raise Unknown
    rows: dict[Operand, Labels] = {input1: (0, 1), input2: (0, 1), target: (0,)}
    return total(rows, (0,), reduction, frozenset({1}))


F = "nn.functional."

RULES: dict[str, Rule] = {
    **{F + name: of_positions(name, parameters) for name, parameters in PARAMETERS.items()},
    **{F + name: of_rows(parameters) for name, parameters in OF_ROWS.items()},
    **{F + name: of_classes(parameters) for name, parameters in OF_CLASSES.items()},
    F + "cosine_embedding_loss": cosine_embedding_loss,
}
