"""Calls of blocks on parts: the block is rewritten once for all calls whose arguments are split alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from passes.analysis.calls import Block, block_of, unique_name
from passes.plan.sequence import Split
from passes.sequence.splitter import Rules, Splitter, Value

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import tracectx


class Given(NamedTuple):
    """What a block is told about an argument: in which splits the caller has computed it, and whether the caller has
    the whole of it without gathering."""

    splits: tuple[Split, ...]
    whole: bool


class Made(NamedTuple):
    """A rewritten block: which arguments it takes, in which split (None: whole), and the splits of its results."""

    block: Block
    takes: tuple[tuple[int, Split | None], ...]
    splits: tuple[Split | None, ...]


class Blocks:
    """Rewrites blocks for the calls of one computation."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Made] = {}

    def call(self, to: Splitter, line: BoundSymbol) -> None:
        """Writes a call on parts."""
        block = block_of(line)
        assert block is not None
        args = [a for a in line.args if isinstance(a, TensorProxy)]
        given = tuple(Given(tuple(to.splits(a)), to.gather_cost(a) < to.values[a.name].bytes) for a in args)
        key = (id(block), given)
        if key not in self._made:
            name = unique_name(to.writer.trace, block.name)
            self._made[key] = _Inside(block, given, to).made(name, to.writer.trace.names)
        made = self._made[key]
        operands = [to.whole(args[i]) if split is None else to.part(args[i], split) for i, split in made.takes]
        found = to.writer.emit(line, lambda: made.block.symbol(*operands))
        for old, new, split in zip(line.flat_proxy_outs, found, made.splits, strict=True):
            if split is None:
                to.know_whole(old, new)
            else:
                to.know_part(old, split, new)


class _Inside(Splitter):
    """The lines of a block. Its arguments are taken as they are needed."""

    def __init__(self, block: Block, given: Sequence[Given], caller: Splitter) -> None:
        inexact = {p.name for p in block.inputs if dtypes.is_inexact_dtype(p.dtype)}
        rules = Rules(caller.rules.by_name, Blocks().call)
        super().__init__(block.trace, caller.plan, rules, caller.remarks, inexact)
        self._block = block
        self._given = {p.name: (i, g) for i, (p, g) in enumerate(zip(block.inputs, given, strict=True))}
        self._inputs: dict[tuple[int, Split | None], TensorProxy] = {}
        self.values |= {p.name: Value(p, is_split=bool(g.splits)) for p, g in zip(block.inputs, given, strict=True)}

    def made(self, name: str, taken: set[str]) -> Made:
        self.follow_lines()
        splits = tuple(next(iter(self.splits(o)), None) for o in self._block.outputs)
        outputs = [
            self.whole(o) if s is None else self.part(o, s) for o, s in zip(self._block.outputs, splits, strict=True)
        ]
        lines = self.writer.finished().bound_symbols
        inputs = tuple(self._inputs.values())
        final = [self.writer.final(o) for o in outputs]
        taken = taken | self.writer.trace.names
        return Made(Block(name, lines, inputs, final, taken, self._block.module), tuple(self._inputs), splits)

    def splits(self, proxy: TensorProxy) -> Sequence[Split]:
        if proxy.name in self._given:
            return self._given[proxy.name][1].splits
        return super().splits(proxy)

    def whole(self, proxy: TensorProxy) -> TensorProxy:
        if proxy.name in self._given and self._given[proxy.name][1].whole:
            return self._input(proxy, None)
        return super().whole(proxy)

    def part(self, proxy: TensorProxy, split: Split, fill: int | None = None) -> TensorProxy:
        if fill is None and proxy.name in self._given:
            splits = self.splits(proxy)
            if split in splits or not splits:
                return self._input(proxy, split)
        return super().part(proxy, split, fill)

    def gather_cost(self, proxy: TensorProxy, depth: int = 8) -> int:
        if proxy.name in self._given and self._given[proxy.name][1].whole:
            return 0
        return super().gather_cost(proxy, depth)

    def _input(self, proxy: TensorProxy, split: Split | None) -> TensorProxy:
        """An argument of the new block."""
        number, _ = self._given[proxy.name]
        if (number, split) not in self._inputs:
            shape = tuple(proxy.shape) if split is None else self.at(split).local_shape(tuple(proxy.shape))
            with tracectx(self.writer.trace):
                self._inputs[number, split] = TensorProxy(like=proxy, shape=shape)
        return self._inputs[number, split]
