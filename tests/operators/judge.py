"""A case under fsdp in a group of one rank, held against eager PyTorch; float64 decides what is rounding."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import passes
import shardtrace

import thunder
import torch
from cases import Case, Step
from torch import nn
from torch.utils import _pytree as pytree

SEED = 7
TOLERANCE = 1e-5  # of what is equal without a question, for numbers of 32 bits
FACTOR = 4  # how many times as far from float64 as eager's a number may be
Row = dict[str, Any]
Seen = dict[str, Any]


class TimeOut(BaseException):
    pass


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    def stop(*args: Any) -> None:
        raise TimeOut

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(case: Case, seconds: float = 30.0, **options: Any) -> Row:
    """The outcome of a case. ``options`` are those of fsdp."""
    row: Row = {"case": case.name}
    try:
        with limit(seconds):
            return row | _judge(case, options)
    except TimeOut:
        return row | {"outcome": "timeout"}


def _judge(case: Case, options: dict[str, Any]) -> Row:
    try:
        expected = _run(case, lambda module: module)
    except Exception as error:
        return {"outcome": "unsupported", "error": _text(error)}
    compiled: list[Any] = []

    def jit(module: nn.Module) -> Any:
        compiled.append(thunder.jit(shardtrace.fsdp(module, **options)))
        return compiled[0]

    try:
        found = _run(case, jit, expected)
    except Exception as error:
        return {"outcome": "refused" if is_refusal(error) else "internal error", **_described(error)}
    lines = sorted({b.sym.name for b in thunder.last_traces(compiled[0])[0].bound_symbols} - NO_LINES)
    for number, (mine, torchs) in enumerate(zip(found, expected, strict=True)):
        difference = _difference(mine, torchs)
        if difference and not _is_rounding(case, number, mine, torchs):
            if _difference(_run(case, lambda module: module)[number], torchs):
                return {"outcome": "unsupported", "error": "eager PyTorch gives other values each time"}
            return {"outcome": "wrong", "error": f"call {number + 1}: {difference}", "lines": lines}
    return {"outcome": "equal", "lines": lines}


NO_LINES = {"python_return", "unpack_trivial", "python_del"}


# ---- what a call shows ----


def _run(case: Case, prepare: Callable[[nn.Module], Any], like: list[Seen] | None = None, precise: bool = False) -> Any:
    torch.default_generator.manual_seed(SEED)
    module = case.build(precise)
    call = prepare(module)
    return [
        _take(module, call, step, like[number]["requires_grad"] if like else None)
        for number, step in enumerate(case.steps(precise))
    ]


def _take(module: nn.Module, call: Callable[..., Any], step: Step, into: list[bool] | None) -> Seen:
    """One call. ``into``: through which of its results gradients flow, by default those that require them."""
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, value in (step.state or {}).items():
            own[name].copy_(value)
        for p in module.parameters():
            p.grad = None
    args, kwargs = pytree.tree_map_only(torch.Tensor, _copy, (step.args, step.kwargs))
    torch.default_generator.manual_seed(SEED)
    result = step.process(call(*args, **kwargs))
    leaves, spec = pytree.tree_flatten(result)
    outs = [t for t in leaves if isinstance(t, torch.Tensor)]
    requires = [t.requires_grad for t in outs]
    into = requires if into is None else into
    losses = [_loss(t, i) for i, t in enumerate(outs) if into[i : i + 1] == [True]]
    if losses and all(loss.requires_grad for loss in losses):
        sum(losses).backward()
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return {
        "structure": (str(spec), [v for v in leaves if not isinstance(v, torch.Tensor)]),
        "requires_grad": requires,
        "result": [t.detach() for t in outs],
        "gradient": {name: _gradient(p) for name, p in module.named_parameters() if p.requires_grad},
        "gradient of argument": [_gradient(t) for t in inputs if t.requires_grad],
        "argument afterwards": [t.detach() for t in inputs],
        "buffer afterwards": {name: b.detach().clone() for name, b in module.named_buffers()},
    }


def _copy(t: torch.Tensor) -> torch.Tensor:
    if t.layout != torch.strided or t.is_contiguous():
        return t.detach().clone().requires_grad_(t.requires_grad)
    strided = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)  # where elements overlap, they are equal
    return strided.copy_(t.detach()).requires_grad_(t.requires_grad)


def _loss(t: torch.Tensor, number: int) -> torch.Tensor:
    t = t.to_dense() if t.layout != torch.strided else t
    flat = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    wide = flat.double()
    return (wide * torch.linspace(0.5, 1.5 + number, wide.numel(), dtype=wide.dtype).view(wide.shape)).sum()


def _gradient(t: torch.Tensor) -> torch.Tensor | None:
    found = t.grad
    return found.detach().to_dense() if found is not None and found.layout != torch.strided else found


# ---- what differs ----


def _difference(mine: Seen, torchs: Seen) -> str:
    """What differs first; empty if nothing does."""
    for key in torchs:
        a, b = mine[key], torchs[key]
        if key == "structure":
            if repr(a) != repr(b):
                return f"{key}: {a} in the place of {b}"
        elif key == "requires_grad":
            if a != b:
                return f"{key}: {a} in the place of {b}"
        else:
            for name, x, y in _pairs(a, b):
                if text := _tensors_differ(x, y):
                    return f"{key} {name}: {text}"
    return ""


def _pairs(a: Any, b: Any) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    if isinstance(b, dict):
        return [(name, a[name], b[name]) for name in b]
    return [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]


def _tensors_differ(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    if a is None or b is None:  # which is not zero
        return (
            "" if a is b else f"{'None' if a is None else 'a tensor'} in the place of {'None' if b is None else 'one'}"
        )
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return f"{a.dtype} {list(a.shape)} in the place of {b.dtype} {list(b.shape)}"
    if not b.numel():
        return ""
    x, y = _wide(a), _wide(b)
    if torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * min(_scale(y), 1.0), equal_nan=True):
        return ""
    return f"off by {_distance(x, y):.2g} of {_scale(y):.2g}"


def _is_rounding(case: Case, number: int, mine: Seen, torchs: Seen) -> bool:
    """Whether numbers are about as far from those of float64 as eager's are, and all else is equal."""
    if mine["structure"][0] != torchs["structure"][0]:
        return False
    try:
        precise = _run(case, lambda module: module, precise=True)[number]
    except Exception:
        return False
    for key in torchs:
        if key in ("structure", "requires_grad"):
            continue
        for (_, x, y), (_, _, z) in zip(
            _pairs(mine[key], torchs[key]), _pairs(precise[key], precise[key]), strict=True
        ):
            if not _tensors_differ(x, y):
                continue
            if x is None or y is None or z is None:
                return False
            inexact = x.is_floating_point() or x.is_complex()
            if not inexact or (x.dtype, x.shape) != (y.dtype, y.shape) or z.shape != y.shape:
                return False
            eps = max(torch.finfo(x.dtype).eps, case.eps if key.startswith("gradient") else 0.0)
            floor = 4 * eps * _scale(_wide(z))
            if not _distance(_wide(x), _wide(z)) <= FACTOR * _distance(_wide(y), _wide(z)) + floor:
                return False
    return True


def _wide(t: torch.Tensor) -> torch.Tensor:
    t = t.to_dense() if t.layout != torch.strided else t
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _scale(t: torch.Tensor) -> float:
    finite = t.abs()[torch.isfinite(t.abs())]
    return float(finite.max()) if finite.numel() else 0.0


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference; infinity if others are infinite or not a number."""
    same = (x == y) | (torch.isnan(x) & torch.isnan(y))
    far = torch.where(same, 0.0, (x - y).abs())
    return float("inf") if not bool(torch.isfinite(far).all()) else float(far.max())


# ---- errors ----


def is_refusal(error: BaseException) -> bool:
    """Whether one of our lines raised an error on purpose, or explained one of torch's."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = any(Path(last.filename).is_relative_to(Path(p.__file__).parent) for p in (shardtrace, passes))
    return "cannot be recorded" in str(error) or (ours and (last.line or "").startswith("raise "))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _described(error: BaseException) -> Row:
    frames = traceback.extract_tb(error.__traceback__)
    here = [f for f in frames if "/shardtrace/" in f.filename or "/passes/" in f.filename]
    places = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in (*here[-2:], frames[-1])]
    return {"error": _text(error), "place": " ".join(places)}
