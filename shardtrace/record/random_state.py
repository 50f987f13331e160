"""Find what the Python of a forward does to generators of random numbers, which no step would do again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch

SEEDS = 0x5EED << 32  # from here on: the seeds of torch's generators during a recording, which no script uses
REMEDY = "or move that into a submodule that takes and returns tensors, which PyTorch can then run"


class RandomStates:
    """Context around a recording or a trial. All generators that the forward may reach are put back at the end.

    A draw on fake tensors advances no generator of torch. Each has a seed of ours meanwhile, and another one after each
    draw. A forward that seeds a generator, or restores what it was before a draw, leaves a seed that is not the last
    one. Generators of Python and numpy are compared by their states.

    Args:
        known: what the forward may reach, each with a name, and generators among it.
    """

    def __init__(self, known: Iterable[tuple[str, object]] = ()) -> None:
        self._known = list(known)
        self._before: dict[int, tuple[Any, str, Any]] = {}  # of a generator: itself, its name, its state
        self._expected: dict[int, Any] = {}
        self._seeds, self._set = count(SEEDS), ""

    def __enter__(self) -> RandomStates:
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        for generator in (torch.default_generator, *cuda):
            self._add("torch's own generator", generator)
        for module in filter(None, map(sys.modules.get, ("random", "numpy.random"))):
            self._add(module.__name__, module)
        for name, value in self._known:
            if _is_generator(value):
                self._add(name, value)
        return self

    def __exit__(self, *error: object) -> None:
        for generator, _, state in self._before.values():
            _access(generator)[1](state)

    def see_draw(self, generator: torch.Generator | None, device: torch.device) -> None:
        """Is told of each draw on fake tensors."""
        if not self._before:
            return
        if generator is None and device.type == "cuda" and torch.cuda.is_initialized():
            number = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[number]
        generator = torch.default_generator if generator is None else generator
        self._add("a torch.Generator", generator)
        if _now(generator) != self._expected[_key(generator)]:
            self._set = self._before[_key(generator)][1]
        self._advance(generator)

    def check(self) -> None:
        """Raises RuntimeError if the forward has drawn from a generator of Python or numpy, or set one of torch."""
        changed = {name: g for i, (g, name, _) in self._before.items() if _now(g) != self._expected[i]}
        of_torch = [self._set] if self._set else [n for n, g in changed.items() if isinstance(g, torch.Generator)]
        if of_torch:
            raise RuntimeError(
                f"forward seeds {of_torch[0]}, or sets its state, which no step would do again: do it outside of "
                f"forward, {REMEDY}"
            )
        if changed:
            raise RuntimeError(
                f"forward draws numbers from {' and '.join(changed)}, which each step would have to draw anew: use "
                "torch's random functions (torch.rand, torch.randint), draw outside of forward and pass the numbers "
                f"as arguments, {REMEDY}"
            )

    def _add(self, name: str, generator: Any) -> None:
        if _key(generator) not in self._before:
            self._before[_key(generator)] = generator, name, _access(generator)[0]()
            self._advance(generator)

    def _advance(self, generator: Any) -> None:
        """Gives a generator a state that no script has given it."""
        if isinstance(generator, torch.Generator):
            generator.manual_seed(next(self._seeds))
        else:
            (getattr(generator, "random_raw", None) or generator.random)()
        self._expected[_key(generator)] = _now(generator)


def _key(generator: Any) -> int:
    """The same for all that share a state: wrappers of one of torch, a module and its hidden generator, those of numpy
    and their bits."""
    reads = getattr(generator, "getstate", None) or getattr(generator, "get_state", None)
    owner = getattr(reads, "__self__", generator)
    bits = getattr(owner, "bit_generator", None) or getattr(owner, "_bit_generator", owner)
    return getattr(owner, "_cdata", id(bits))


def _is_generator(value: object) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator))


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The functions that read and set the state of a generator."""
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = getattr(generator, "bit_generator", generator)
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _now(generator: Any) -> Any:
    """What tells two states of a generator apart."""
    return generator.initial_seed() if isinstance(generator, torch.Generator) else _plain(_access(generator)[0]())


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else tuple(map(_plain, state)) if type(state) is tuple else state
