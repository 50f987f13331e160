"""Which parameters ranks compute with a part of.

From a product whose factor can be cut along the dim that is summed, the lines are followed backward to the parameters
of the products that make this factor. The region between them is cut if no other line reads its values. See
``split_parameters`` in :mod:`passes.split`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Set
from typing import Any, Literal, NamedTuple

from passes.analysis.calls import block_of
from passes.analysis.dims import (
    Placed,
    TorchLine,
    follow,
    in_sections,
    is_plain_embedding,
    lead,
    loss_arguments,
    product_of,
    slice_along,
    torch_line,
    without_bias,
)
from passes.analysis.recognise import is_return, is_unpack, readers_of
from passes.analysis.recognise import names as names_of
from passes.plan.dims import VIEWS
from passes.plan.dims.products import GROUPED
from passes.plan.plan import Split

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

How = Literal["colwise", "rowwise", "whole"]
EMBEDDING, LOSS = "nn.functional.embedding", "nn.functional.cross_entropy"
LINEAR = "nn.functional.linear"


def table_of(call: TorchLine | None) -> TensorProxy | None:
    """The table from which a line takes rows, if it is a plain embedding."""
    if call is None or call.name != EMBEDDING or len(call.operands) != 2 or len(call.args) < 2:
        return None
    table: TensorProxy = call.args[1]
    return table if table.ndim == 2 and is_plain_embedding(*call.args, **call.kwargs) else None


def takes_classes(call: TorchLine) -> bool:
    """Whether a line is a loss of logits (rows, classes) and labels (rows,) that ranks can compute of their classes."""
    if call.name != LOSS or len(call.operands) != 2 or len(call.args) < 2:
        return False
    logits, labels, *others, smoothing = loss_arguments(*call.args, **call.kwargs)
    plain = others[0] is others[1] is others[3] is None and smoothing == 0
    return plain and logits.ndim == 2 and labels.ndim == 1 and dtypes.is_exact_dtype(labels.dtype)


class _Region(NamedTuple):
    """The values upstream of a product that are computed in parts, the lines that compute them, and the parameters that
    they need. ``columns``: how many products compute a part of their columns."""

    values: dict[str, Split]
    lines: set[int]
    parameters: dict[str, Split]
    columns: int


class _Factors(NamedTuple):
    """A product without its bias: the ``parameter`` of one factor, the number of the other one, ``x``, and the dims of
    both that are summed."""

    call: TorchLine
    parameter: str
    x: int
    inner_of_x: int
    inner: int

    @property
    def weight(self) -> TensorProxy:
        return self.call.operands[1 - self.x]


class Search:
    """Finds which inputs of a trace, and of the blocks that it calls, are cut.

    Args:
        trace: as it was recorded.
        hows: for each input that is a parameter, what the user says of it; None: nothing.
        ranks: over which they are cut.
        names: the qualified names of the parameters, for messages.
        grouped: whether only products of groups of rows, such as those of experts, are looked at.
    """

    def __init__(
        self,
        trace: TraceCtx,
        hows: Mapping[str, How | None],
        ranks: int,
        names: Mapping[str, str],
        *,
        grouped: bool = False,
    ) -> None:
        vectors = {p.name for p in trace.args if isinstance(p, TensorProxy) and p.ndim < 2}  # are cut as their matrices
        self.hows = {p: None if p in vectors and how != "whole" else how for p, how in hows.items()}
        self.ranks, self.names, self.grouped = ranks, names, grouped
        self.lines = [b for b in trace.bound_symbols if not is_unpack(b)]
        self.calls = {id(b): torch_line(b) for b in self.lines if not is_return(b) and block_of(b) is None}
        self.makers = {o.name: b for b in reversed(self.lines) if id(b) in self.calls for o in b.flat_proxy_outs}
        self.factors = {key: self._factors(call) for key, call in self.calls.items()}
        self.readers = readers_of(self.lines)
        self.returned = names_of([b.args for b in self.lines if is_return(b)])
        self.found: dict[str, Split] = {}
        self.matrices: dict[str, None] = {}  # the inputs with which products are computed
        self._blocks: dict[Hashable, Search] = {}

    def run(self) -> dict[str, Split]:
        """The split of each input that is cut, by its name."""
        for line in self.lines:
            if block_of(line) is not None:
                self._inside(line)
            call = self.calls.get(id(line))
            if (factors := self.factors.get(id(line))) is not None:
                self._product(line, factors)
            elif call is not None and not self.grouped and takes_classes(call):
                self._share(line, call.args[0], self._equal(call.args[0], 1), self.returned)
        for proxy, how in self.hows.items():
            if how in ("colwise", "rowwise") and proxy in self.readers and proxy not in self.found:
                raise RuntimeError(
                    f"tensor_parallel: parameter {self.names[proxy]!r} is to be {how}, and is not the matrix of a "
                    'product such as nn.Linear: leave it out of the mapping, or choose "whole"'
                )
        return self.found

    def _inside(self, line: BoundSymbol) -> None:
        """A call of a block, which is the same for all calls with the same choices."""
        block = block_of(line)
        assert block is not None
        pairs = [(p.name, a.name) for p, a in zip(block.inputs, line.args, strict=True) if a.name in self.hows]
        hows = {inside: self.hows[outside] for inside, outside in pairs}
        key = id(block), tuple(hows.items())
        if key not in self._blocks:
            named = {inside: self.names[outside] for inside, outside in pairs}
            self._blocks[key] = Search(block.trace, hows, self.ranks, named, grouped=self.grouped)
            self._blocks[key].run()
        search = self._blocks[key]
        outside = dict(pairs)
        self.matrices |= {outside[inside]: None for inside in search.matrices}
        self.found |= {outside[inside]: split for inside, split in search.found.items()}

    def _factors(self, call: TorchLine | None) -> _Factors | None:
        """The factors of a product, if one of them comes from a parameter: the right one, or else the left one."""
        product = product_of(call)
        if call is None or product is None or (self.grouped and call.name != GROUPED):
            return None
        plain = call if product.bias is None else without_bias(call, product)
        left, right = plain.operands[:2]
        if (of := self._origin(right)) is not None:
            return _Factors(plain, of[0], 0, left.ndim - 1, product.inner)
        if plain.name == LINEAR or (of := self._origin(left)) is None:
            return None
        return _Factors(plain, of[0], 1, right.ndim - 2, left.ndim - 1)

    def _origin(self, value: TensorProxy, split: Split | None = None) -> tuple[str, Split | None] | None:
        """The parameter that a value is a view of, or has rows of, and its split if this is the value's; None: none."""
        while value.name not in self.hows:
            line = self.makers.get(value.name)
            call = self.calls[id(line)] if line is not None else None
            if call is None or call.name not in VIEWS:
                return None
            if split is not None:
                placed = lead(call, 0, split)
                split = placed.operands[0] if placed is not None else None
                if split is None:
                    return None
            value = call.operands[0]
        return value.name, split

    def _product(self, line: BoundSymbol, factors: _Factors) -> None:
        how = self.hows[factors.parameter]
        self.matrices[factors.parameter] = None
        x = factors.call.operands[factors.x]
        if how in ("colwise", "rowwise"):
            self._asked_for(factors, how)
            return
        split = self._equal(x, factors.inner_of_x) if how is None and factors.parameter not in self.found else None
        placed = follow(factors.call, factors.x, split) if split is not None else None
        if split is None or placed is None or placed.combine != "sum":
            return
        own = self._origin(factors.weight, placed.operands[1 - factors.x])
        if own is not None and own[1] is not None and self._share(line, x, split):
            self.found[own[0]] = own[1]

    def _share(self, line: BoundSymbol, x: TensorProxy, split: Split | None, outside: Set[str] = frozenset()) -> bool:
        """Cuts the parameters of products that compute parts of ``x``, which ``line`` reads. False if there are none.
        Values ``outside`` stay whole."""
        region = self._closed_region(line, x, split, outside) if split is not None else None
        if region is None or not region.columns:
            return False
        self.found |= region.parameters
        return True

    def _equal(self, x: TensorProxy, dim: int) -> Split | None:
        """Parts of a dim of equal size; None if it does not divide."""
        inner, rest = divmod(x.shape[dim], self.ranks)
        return Split(dim, 1, self.ranks, inner) if inner and not rest else None

    def find_tables(self, sequences: int) -> set[str]:
        """Cuts tables of embeddings by rows, and returns their names, where that sends less: the rows of tokens are
        added up in forward, and their gradients in backward; a whole table is gathered, and its gradient reduced.
        Tokens are split over so many ranks of ``sequences``."""
        tokens, tables = Counter[str](), dict[str, TensorProxy]()
        for call in self.calls.values():
            if call is not None and (table := table_of(call)) is not None:
                tokens[table.name] += call.args[0].numel
                tables[table.name] = table
        few = {name for name, table in tables.items() if 2 * tokens[name] < table.shape[0] * sequences}
        for name, table in tables.items():
            split, chosen = self._equal(table, 0), self.hows.get(name, "whole") is None
            others = any(table_of(self.calls.get(id(line))) is None for line in self._readers(name))
            if name in few and split is not None and chosen and not others:
                self.found.setdefault(name, split)
        return few

    def _readers(self, name: str) -> list[BoundSymbol]:
        """The lines that read a value, except for the last one: what is returned is gathered."""
        return [b for b in self.readers.get(name, ()) if not is_return(b)]

    def _asked_for(self, factors: _Factors, how: How) -> None:
        weight, inner = factors.weight, factors.inner
        dim = inner if how == "rowwise" else 2 * weight.ndim - 3 - inner
        if (size := weight.shape[dim]) % self.ranks:
            raise RuntimeError(
                f"tensor_parallel: parameter {self.names[factors.parameter]!r} is to be {how}, and its dim {dim} of "
                f'{size} does not divide by {self.ranks} ranks: choose "whole" for it, or fewer ranks'
            )
        own = self._origin(weight, Split(dim, 1, self.ranks, size // self.ranks))
        if own is not None and own[1] is not None:
            self.found[own[0]] = own[1]

    def _closed_region(self, line: BoundSymbol, x: TensorProxy, split: Split, outside: Set[str]) -> _Region | None:
        """The region upstream of a value whose values only lines of the region and ``line`` read."""
        while (region := self._region(x, split, outside)) is not None:
            own = region.lines | {id(line)}
            read = {name for name in region.values if any(id(b) not in own for b in self._readers(name))}
            if not read:
                break
            outside = outside | read
        return region

    def _region(self, x: TensorProxy, split: Split, outside: Set[str]) -> _Region | None:
        """None: a parameter would have to be cut in two ways, or is to be cut otherwise."""
        region, columns, todo = _Region({}, set(), {}, 0), 0, [(x, split)]
        while todo:
            value, s = todo.pop()
            if value.name in self.hows:
                known = region.parameters.get(value.name, self.found.get(value.name, s))
                if self.hows[value.name] is not None or known != s:
                    return None
                region.parameters[value.name] = s
                continue
            if value.name in region.values and region.values[value.name] != s:
                return None
            line = self.makers.get(value.name)
            if value.name in region.values or line is None:
                continue
            if any(o.name in outside for o in line.flat_proxy_outs):
                continue
            call = self.calls[id(line)]
            number = next((i for i, r in enumerate(call.results) if r.name == value.name), None) if call else None
            placed = None
            if call is not None and number is not None:
                placed = self._one_of_several(call, s) or lead(call, number, s)
            if call is None or placed is None or placed.combine is not None:
                continue
            region.values[value.name] = s
            region.lines.add(id(line))
            pairs: list[tuple[Any, Split | None]] = [*zip(call.results, placed.results, strict=True)]
            pairs += zip(call.operands, placed.operands, strict=True)
            todo += [(v, of) for v, of in pairs if of is not None and v.name != value.name]
            factors = self.factors[id(line)]
            columns += factors is not None and any(v is factors.weight and of is not None for v, of in pairs)
        return region._replace(columns=columns)

    def _one_of_several(self, call: TorchLine, split: Split) -> Placed | None:
        """A slice of a dim that slices of several sizes make up, such as queries in front of keys and values."""
        if call.name != "getitem":
            return None
        readers = [self.calls.get(id(b)) for b in self._readers(call.operands[0].name)]
        found = {slice_along(c, split.dim) if c is not None else None for c in readers}
        slices = sorted(ends for ends in found if ends is not None)
        if len(slices) != len(found):
            return None
        ends = [0, *(stop for _, stop in slices)]
        if [start for start, _ in slices] != ends[:-1] or ends[-1] != call.operands[0].shape[split.dim]:
            return None
        sizes = [stop - start for start, stop in slices]
        whole = in_sections(split.dim, sizes, split.length) if len(set(sizes)) > 1 else None
        placed = follow(call, 0, whole) if whole is not None else None
        return placed if placed is not None and placed.results == (split,) else None
