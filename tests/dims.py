"""Computes calls of torch on the parts of two ranks, and compares with the whole, as the table of dims says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from passes.analysis.dims import Placed, TorchLine, follow, lead, name_of, resized
from passes.plan.dims import known
from passes.plan.dims.table import relation, tensors
from passes.plan.plan import Split

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LEAST = 2  # positions of a sequence of which both ranks have some
SHAPES_ONLY = ("empty", "empty_like", "new_empty")  # memory as it is
COMBINE = {
    "sum": lambda parts, weights: sum(parts),
    "mean": lambda parts, weights: sum(p * w for p, w in zip(parts, weights, strict=True)) / sum(weights),
    "max": lambda parts, weights: torch.maximum(*parts),
    "min": lambda parts, weights: torch.minimum(*parts),
    "any": lambda parts, weights: torch.logical_or(*parts).to(parts[0].dtype),
    "all": lambda parts, weights: torch.logical_and(*parts).to(parts[0].dtype),
    "prod": lambda parts, weights: parts[0] * parts[1],
}


class Made(NamedTuple):
    """A call of torch that was made, and what it returned."""

    function: Callable[..., Any]
    line: TorchLine


class Calls(TorchFunctionMode):
    """Notes the calls of functions in the table. Their arguments are copies, so that they may write into them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(function)
        if not known(name):
            return function(*args, **(kwargs or {}))
        kept = _copies((args, kwargs or {}))
        result = run(function, *_copies(kept))
        self.made.append(Made(function, TorchLine(name, *kept, tensors(kept), tensors(result))))
        return result


def _copies(values: Any) -> Any:
    return pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, values)


def run(function: Any, args: Any, kwargs: Any) -> Any:
    torch.default_generator.manual_seed(0)
    result = function(*args, **kwargs)
    return args[0] if getattr(function, "__name__", "") == "__setitem__" else result


def again(made: Made, operands: Sequence[torch.Tensor]) -> Any:
    """The result of a call on other operands."""
    given, line = iter(operands), made.line
    args, kwargs = pytree.tree_map(
        lambda t: next(given).clone() if isinstance(t, torch.Tensor) else t, (line.args, line.kwargs)
    )
    return run(made.function, args, kwargs)


def calls_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Made]:
    with torch.no_grad(), Calls() as calls:
        function(*args, **kwargs)
    return calls.made


def positions(length: int, rank: int) -> torch.Tensor:
    """Those in the chunks of a rank of two."""
    chunk = torch.arange(length) * 4 // length
    return torch.nonzero((chunk == rank) | (chunk == 3 - rank)).flatten()


def part(t: torch.Tensor, split: Split | None, rank: int) -> torch.Tensor:
    if split is None:
        return t
    counts = split.sections or (1,) * split.outer
    numbers = torch.cat([torch.arange(split.length).repeat_interleave(count * split.inner) for count in counts])
    return t.index_select(split.dim, torch.isin(numbers, positions(split.length, rank)).nonzero().flatten())


def splits(shape: Any, dim: int) -> Iterator[Split]:
    """A dim as the sequence, and as one with other dims around it."""
    size = shape[dim]
    if size >= LEAST:
        yield Split.along(dim, size)
    for outer, inner in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 4)):
        length, rest = divmod(size, outer * inner)
        if outer * inner > 1 and rest == 0 and length >= LEAST:
            yield Split(dim, outer, length, inner)
    for sections in ((2, 1), (1, 2, 1)):
        length, rest = divmod(size, sum(sections))
        if rest == 0 and length >= LEAST:
            yield Split(dim, sum(sections), length, 1, sections)


def is_random(made: Made) -> bool:
    if made.line.name in ("bernoulli", "normal"):  # of a probability that may be 0 or 1, of a deviation that may be 0
        return True
    if not any(word in made.line.name for word in ("rand", "dropout", "rrelu", "gumbel", "attention")):
        return False
    found = []
    for seed in (1, 2):
        torch.default_generator.manual_seed(seed)
        found.append(tensors(made.function(*_copies(made.line.args), **_copies(made.line.kwargs))))
    return any(not _close(a, b) for a, b in zip(*found, strict=True))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


def compare(made: Made, placed: Placed, *, values: bool) -> None:
    """Raises AssertionError if the parts do not make the whole."""
    line, found = made.line, []
    split = next(s for s in (*placed.operands, *placed.results) if s is not None)
    for rank in (0, 1):
        wanted = [part(t, s, rank) for t, s in zip(line.results, placed.results, strict=True)]
        args, kwargs = resized(line, [tuple(t.shape) for t in wanted])
        given = [part(t, s, rank) for t, s in zip(line.operands, placed.operands, strict=True)]
        found.append(tensors(again(Made(made.function, line._replace(args=args, kwargs=kwargs)), given)))
        if placed.combine is None:
            assert [t.shape for t in found[-1]] == [t.shape for t in wanted]
            assert not values or all(map(_close, found[-1], wanted))
    if placed.combine is not None:
        weights = [len(positions(split.length, rank)) for rank in (0, 1)]
        for whole, *parts in zip(line.results, *found, strict=True):
            assert not values or _close(COMBINE[placed.combine](parts, weights), whole)


def check(made: Made) -> int:
    """Compares for each dim of an operand or a result that may be split. Returns how many there were."""
    line = made.line
    values = not (line.name in SHAPES_ONLY or is_random(made))
    found = (
        tell(line, number, split)
        for tell, given in ((follow, line.operands), (lead, line.results))
        for number, t in enumerate(given)
        for dim in range(t.dim())
        for split in splits(t.shape, dim)
    )
    ways = dict.fromkeys(placed for placed in found if placed is not None)
    for placed in ways:
        _explained(compare, made, placed, values=values)
    _assert_mixed(line)
    return len(ways)


def _explained(compare: Any, made: Made, placed: Placed, **options: Any) -> None:
    try:
        compare(made, placed, **options)
    except Exception as error:
        shapes = [tuple(t.shape) for t in made.line.operands], [tuple(t.shape) for t in made.line.results]
        others = [a for a in pytree.tree_leaves((made.line.args, made.line.kwargs)) if not isinstance(a, torch.Tensor)]
        raise AssertionError(f"{made.line.name} of {shapes} with {others} cannot compute as {placed}") from error


def _assert_mixed(line: TorchLine) -> None:
    if line.name == "repeat_interleave":  # whose repeated dim may be split
        return
    found = relation(line.name, line.args, line.kwargs, [tuple(t.shape) for t in line.results])
    for number, labels in enumerate(found.operands if found else ()):
        for dim, label in enumerate(labels):
            if label in found.mixed and not line.kwargs.get("enable_gqa"):  # which shares heads
                assert follow(line, number, Split.along(dim, line.operands[number].shape[dim])) is None
