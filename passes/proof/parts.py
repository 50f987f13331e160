"""The proof that a computation on parts of sequences, or of parameters, is the recorded one.

Each value of the new computation has a form: it is the *whole* of a recorded value, this rank's *part* in some split,
or on the way from one to the other. The laws of the collectives of sequences are, with ``n`` for a recorded value,

    cut(whole n) = part n                     gather(part n) = whole n
    sum(sum n) = whole n                      exchange_heads(part n) = heads n, and back
    scatter(sum n) = part n

A line on parts is the part of the recorded line with the same operands that it would have if the table of dims
(:mod:`passes.analysis.dims`) computed that line on parts. Attention, losses and slices have laws of their own. The bias
of a product may be added to the whole product.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from passes.analysis.calls import block_of
from passes.analysis.dims import (
    TorchLine,
    attention_arguments,
    follow,
    lead,
    loss_arguments,
    of_each_dim,
    product_of,
    resized,
    torch_line,
    without_bias,
)
from passes.analysis.recognise import changes_values, is_random, is_return, is_unpack, names
from passes.comm import sequence as comm
from passes.kernels.aten import OF_MEMORY
from passes.kernels.parts import NUMBERS, CausalAttention, LossOfParts, PartOfEmbedding, PartOfLoss
from passes.kernels.torch_call import call_of
from passes.plan import Axis
from passes.plan.dims import is_linear
from passes.plan.plan import ContextPlan, Split
from passes.proof.program import Numbers, constant, text_of
from passes.sequence import Context
from passes.split import given_parts
from passes.writer import place

import torch
from thunder.core import dtypes
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

ATTENTION, LOSS, SLICE = "nn.functional.scaled_dot_product_attention", "nn.functional.cross_entropy", "getitem"


class Form(NamedTuple):
    """What a value of the new computation is of the recorded value ``number``.

    ``kind``: "whole", "part", "heads", "sum" and "mean" (what ranks have to add up), "border" (a result for the user,
    or an argument with a gradient), "own" (likewise, of a rank with a batch of its own), "drawn" (with this rank's
    random numbers), or one of the steps of a loss. ``split`` is that of a part.
    """

    kind: str
    number: int
    split: Any = None


@dataclass
class Known:
    """A recorded line: as a call of torch, its constants, and the numbers of its results."""

    call: TorchLine | None
    constants: Hashable
    results: tuple[int, ...]
    random: bool
    used: bool = False


VOCABULARY = PartOfEmbedding, PartOfLoss, LossOfParts
PARTIAL = {  # what ranks have to add up, in words
    "sum": "a sum over this rank's positions",
    "mean": "a mean over this rank's positions",
    "loss": "the sum of the losses of this rank's rows",
    "rows of rank": "the number of this rank's rows",
    "drawn": "drawn by this rank",
}


class UnknownForm(Exception):
    """No law tells what a line computes."""


def unproven(recorded: TraceCtx, new: TraceCtx, context: Context) -> Iterator[str]:
    """Why a computation on parts is not shown to be the recorded one; nothing if it is."""
    proof = _Proof(context.plan)
    of = f"on parts of {'sequences' if context.plan.axis is Axis.CONTEXT else 'parameters'}"
    group = context.plan.runtime.group(context.plan.axis)
    if group is not None and (context.plan.ranks, context.plan.rank) != (found := (group.size(), group.rank())):
        yield f"{of}, rank {context.plan.rank} of {context.plan.ranks} is planned, the group has {found}"
    inputs = {p.name: proof.numbers.of("input", i) for i, p in enumerate(recorded.args)}
    values = dict(inputs)
    expected = proof.record(recorded, values)
    forms = {
        p.name: Form("border" if p.name in context.differentiated else "whole", number)
        for p, number in zip(new.args, inputs.values(), strict=True)
    }
    for name, gather in given_parts(recorded).items() if context.plan.axis is Axis.CONTEXT else ():
        kind = "own" if name in context.differentiated else "part"
        forms[name] = Form(kind, values[gather.output.name], gather.args[1].split)
    try:
        results = proof.follow(new, forms)
    except UnknownForm as error:
        yield f"{of}, {error}"
        return
    if proof.writes != proof.recorded_writes:
        yield f"{of}, other values are written"
    for i, (number, form, proxy) in enumerate(zip(expected, results, _results(new), strict=True)):
        if form is None:
            continue
        if form.number != number:
            yield f"{of}, output {i} is of another value"
        inexact = isinstance(proxy, TensorProxy) and dtypes.is_inexact_dtype(proxy.dtype)
        part = "own" if context.experts and inexact else "part"
        allowed = {"border", part} if context.returns_parts else {"border"}
        if form.kind not in allowed | ({"whole"} if proxy.name in inputs or not inexact else set()):
            yield f"{of}, output {i} is {form.kind}, not {' or '.join(sorted(allowed))}"


@dataclass
class _Proof:
    plan: ContextPlan
    numbers: Numbers = field(default_factory=Numbers)
    known: dict[tuple[Hashable, tuple[int, ...]], list[Known]] = field(default_factory=dict)
    recorded_writes: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    dtypes: dict[int, Any] = field(default_factory=dict)  # of the recorded values
    biased: dict[tuple[int, ...], int] = field(default_factory=dict)  # by a product without its bias, and that: the sum
    draws: int = 0

    # ---- the recorded computation ----

    def record(self, trace: TraceCtx, values: dict[str, int]) -> list[int | None]:
        """Numbers the values of a recorded trace. Returns those of its results."""
        for line in trace.bound_symbols:
            if is_unpack(line) or is_return(line):
                continue
            block = block_of(line)
            if block is not None:
                inside = {p.name: values[a.name] for p, a in zip(block.inputs, line.args, strict=True)}
                for o, number in zip(line.flat_proxy_outs, self.record(block.trace, inside), strict=True):
                    values[o.name] = number  # type: ignore[assignment]
                continue
            self._record_line(line, values)
        return [values.get(o.name) if isinstance(o, Proxy) else None for o in _results(trace)]

    def _record_line(self, line: BoundSymbol, values: dict[str, int]) -> None:
        call = torch_line(line)
        operands = tuple(values[a.name] for a in _operands(line, call) if a.name in values)
        if changes_values(line):
            self.recorded_writes.append(tuple(values[a.name] for a in line.flat_proxy_args[:2]))  # type: ignore[arg-type]
        name, constants = _name(line, call), _constants(line, call)
        self.draws += is_random(line)
        expression = (constants, self.draws) if is_random(line) else constants
        number = self.numbers.of(name, expression, operands)
        outs = line.flat_proxy_outs
        results = tuple(self.numbers.of("result", i, (number,)) for i in range(len(outs)))
        entry = Known(call, constants, results, is_random(line))
        self.known.setdefault((name, operands), []).append(entry)
        self._record_without_bias(call, values, results)
        for o, result in zip(outs, results, strict=True):
            values.setdefault(o.name, result)
            self.dtypes[result] = getattr(o, "dtype", None)

    def _record_without_bias(self, call: TorchLine | None, values: dict[str, int], results: tuple[int, ...]) -> None:
        """Of a product with a bias, the product too, to which ranks add the bias when they have added up its parts."""
        product = product_of(call)
        if call is None or product is None or product.bias is None or not values.keys() >= names(call.operands):
            return
        plain = without_bias(call, product)
        operands = tuple(values[o.name] for o in plain.operands)
        constants = constant((plain.args, plain.kwargs), []), _detached(plain)
        number = self.numbers.of("without bias", (plain.name, constants), operands)
        self.known.setdefault((plain.name, operands), []).append(Known(plain, constants, (number,), random=False))
        self.biased[number, values[product.bias.name]] = results[0]

    # ---- the new one ----

    def follow(self, trace: TraceCtx, values: dict[str, Form]) -> list[Form | None]:
        """The forms of the values of a new trace. Returns those of its results."""
        for line in trace.bound_symbols:
            if is_unpack(line) or is_return(line):
                continue
            block = block_of(line)
            if block is not None:
                inside = {p.name: values[a.name] for p, a in zip(block.inputs, line.args, strict=True)}
                found: Sequence[Any] = self.follow(block.trace, inside)
            else:
                found = self._forms(line, values)
            for o, form in zip(line.flat_proxy_outs, found, strict=True):
                values[o.name] = form
        return [values.get(o.name) if isinstance(o, Proxy) else None for o in _results(trace)]

    def _forms(self, line: BoundSymbol, values: dict[str, Form]) -> Sequence[Form]:
        if (law := LAWS.get(line.sym.id)) is not None and line.args[1].plan.axis is self.plan.axis:
            if line.args[1].plan is not self.plan:
                raise UnknownForm(f"{printed(line)} is for another rank{place(line)}")
            form = law(values[line.args[0].name], line.args[1])
            if form is None:
                raise UnknownForm(f"{printed(line)} is given {values[line.args[0].name].kind}{place(line)}")
            return [form]
        call = torch_line(line)
        operands = [values[a.name] for a in _operands(line, call) if a.name in values]
        if changes_values(line):
            source, target = (values[a.name] for a in line.flat_proxy_args[:2])
            if source.kind != "whole":
                raise UnknownForm(f"{printed(line)} writes {source.kind}{place(line)}")
            self.writes.append((source.number, target.number))
        if call is not None and call.name in OF_MEMORY:
            raise UnknownForm(
                f"{printed(line)} picks elements by where they lie, and parts that are put together may lie otherwise"
                f"{place(line)}"
            )
        if (result := self._with_bias(call, operands)) is not None:
            return [operands[0]._replace(number=result)]
        found = self._vocabulary(line, call, operands) or self._loss(line, call, operands)
        found = found or self._attention(line, call, operands)
        if found is not None:
            return found
        for entry in self.known.get((_name(line, call), tuple(f.number for f in operands)), ()):
            if entry.used and entry.random:
                continue
            found = self._match(line, call, entry, operands)
            if found is not None:
                entry.used = True
                return found
        share = call is not None and call.name == "mul" and call.args[1] == 1.0 / self.plan.ranks
        if share and [f.kind for f in operands] == ["whole"]:  # ranks add up to it
            return [operands[0]._replace(kind="sum")]
        raise self._unknown(line, call, operands, values)

    def _unknown(
        self, line: BoundSymbol, call: TorchLine | None, operands: Sequence[Form], values: dict[str, Form]
    ) -> UnknownForm:
        """Why a line computes nothing that was recorded."""
        text, where = printed(line), place(line)
        for a in _operands(line, call):
            if (form := values.get(a.name)) is not None and form.kind in PARTIAL:
                return UnknownForm(f"{text} takes {a.name} for a value of all ranks, it is {PARTIAL[form.kind]}{where}")
        own = _own_attention(line)
        name = ATTENTION if own is not None else _name(line, call)
        found = self.known.get((name, tuple(f.number for f in operands)))
        if call is not None and found and name == ATTENTION and operands[0].kind == "part":
            (*_, mask, _, causal, _) = attention_arguments(*call.args, **call.kwargs)
            if own is not None and own != (right := CausalAttention(self.plan, operands[0].split.length)):
                rows = [f"rank {f.plan.rank} of {f.plan.ranks} and {f.length} positions" for f in (own, right)]
                return UnknownForm(f"{text} masks for {rows[0]}, not for {rows[1]}{where}")
            if own is None and causal and mask is None:
                return UnknownForm(f"{text} masks as if this rank's queries were the first of the sequence{where}")
        kinds = ", ".join(f.kind for f in operands) or "nothing"
        if found and found[-1].call is not None:
            return UnknownForm(f"{text}, on {kinds}, is not the recorded {_call_text(found[-1].call)}{where}")
        return UnknownForm(f"no recorded line is {text}, on {kinds}{where}")

    def _match(
        self, line: BoundSymbol, call: TorchLine | None, entry: Known, operands: Sequence[Form]
    ) -> list[Form] | None:
        """The forms of a line's results if it computes a recorded line, or its parts."""
        kinds = {f.kind for f in operands}
        if kinds <= {"whole", "drawn"} and _constants(line, call) == entry.constants:
            kind = "drawn" if entry.random or "drawn" in kinds else "whole"
            return [Form(kind, n) for n in entry.results]
        if call is None or entry.call is None:
            return None
        if "sum" in kinds <= {"sum", "whole"} and _constants(line, call) == entry.constants:
            given = [i for i, f in enumerate(operands) if f.kind == "sum"]
            sums = *call.results, *(call.operands[i] for i in given)
            inexact = all(dtypes.is_inexact_dtype(o.dtype) for o in sums)
            linear = inexact and not entry.random and is_linear(call.name, len(operands), given)
            return [Form("sum", n) for n in entry.results] if linear else None
        if not kinds <= {"whole", "part"}:
            return None
        if call.name == SLICE and "part" in kinds and (found := self._slice(call, entry, operands)) is not None:
            return found
        for placed in self._placements(call, entry.call, operands):
            if placed is None or any(
                (f.split if f.kind == "part" else None) != s for f, s in zip(operands, placed.operands, strict=True)
            ):
                continue
            shapes = [
                tuple(r.shape) if s is None else comm.Part(self.plan, s).local_shape(tuple(r.shape))
                for r, s in zip(entry.call.results, placed.results, strict=True)
            ]
            args = constant(resized(entry.call, shapes), [])
            if args != constant((call.args, call.kwargs), []) or _detached(call) != _detached(entry.call):
                continue
            if placed.combine is not None:
                return [Form(placed.combine, n) for n in entry.results]
            pairs = zip(entry.results, placed.results, strict=True)
            return [Form("whole", n) if s is None else Form("part", n, s) for n, s in pairs]
        return None

    def _placements(self, call: TorchLine, recorded: TorchLine, operands: Sequence[Form]) -> Iterator[Any]:
        for i, form in enumerate(operands):
            if form.kind == "part":
                yield follow(recorded, i, form.split)
        if all(f.kind == "whole" for f in operands) and len(call.results) == len(recorded.results) == 1:
            small, large = (tuple(c.results[0].shape) for c in (call, recorded))
            for d, (a, b) in enumerate(zip(small, large, strict=False)):
                if a != b:
                    yield lead(recorded, 0, Split.along(d, b))

    def _slice(self, call: TorchLine, entry: Known, operands: Sequence[Form]) -> list[Form] | None:
        assert entry.call is not None
        split, x = operands[0].split, entry.call.args[0]
        recorded, index = (of_each_dim(c.args[1], x.ndim) for c in (entry.call, call))
        if recorded is None or index is None or split != Split.along(split.dim, split.length):
            return None
        taken, rest = recorded[split.dim], [i for d, i in enumerate(recorded) if d != split.dim]
        start, stop, step = taken.indices(split.length) if isinstance(taken, slice) else (1, 0, 1)
        same_chunks = stop > 0 and self.plan.chunk(stop) == self.plan.chunk(split.length)
        same = [i for d, i in enumerate(index) if d != split.dim] == rest and index[split.dim] == slice(None)
        if start != 0 or step != 1 or not same_chunks or not same:
            return None
        dim = split.dim - sum(isinstance(i, int) for i in recorded[: split.dim])
        return [Form("part", entry.results[0], Split.along(dim, stop))]

    def _with_bias(self, call: TorchLine | None, operands: Sequence[Form]) -> int | None:
        """The recorded product with a bias, if a line adds the bias to the product of all ranks, or to rows of it."""
        if call is None or call.name != "add" or [f.kind for f in operands] not in (["whole"] * 2, ["part", "whole"]):
            return None
        if operands[0].kind == "part" and operands[0].split.dim >= call.operands[0].ndim - call.operands[1].ndim:
            return None
        alpha = [*call.args[2:], *call.kwargs.values()]
        return self.biased.get(tuple(f.number for f in operands)) if alpha in ([], [1]) else None

    # ---- attention and losses ----

    def _attention(self, line: BoundSymbol, call: TorchLine | None, operands: Sequence[Form]) -> list[Form] | None:
        own = _own_attention(line)
        if call is None or not (own or call.name == ATTENTION):
            return None
        for entry in self.known.get((ATTENTION, tuple(f.number for f in operands)), ()):
            if entry.call is None or (entry.used and entry.random):
                continue
            split = self._split_of_attention(call, entry.call, operands, own)
            if split is not None:
                entry.used = True
                return [Form(operands[0].kind, entry.results[0], split)]
        return None

    def _split_of_attention(
        self, call: TorchLine, recorded: TorchLine, operands: Sequence[Form], own: CausalAttention | None
    ) -> Split | None:
        """The split of the queries, if this is the attention that was recorded. ``own``: the function of this rank's
        queries that masks what comes after them."""
        (*_, mask, dropout, causal, options) = attention_arguments(*recorded.args, **recorded.kwargs)
        (*_, new_mask, new_dropout, new_causal, others) = attention_arguments(*call.args, **call.kwargs)
        query, key, value, *rest = operands
        split: Split = query.split
        if (dropout, options) != (new_dropout, others) or (causal != new_causal and own is None):
            return None
        if own is not None and own != CausalAttention(self.plan, split.length):
            return None
        if query.kind == "heads":
            same = [(f.kind, f.split) for f in (key, value)] == [("heads", split)] * 2
            return split if same and mask is new_mask is None else None
        if query.kind != "part" or key.kind != "whole" or value.kind != "whole":
            return None
        if split != Split.along(recorded.operands[0].ndim - 2, split.length) or (own is not None) != bool(causal):
            return None
        if rest and rest[0].kind == "part":
            return split if rest[0].split == Split.along(mask.ndim - 2, split.length) else None
        return split if not rest or mask.ndim < 2 or mask.shape[-2] == 1 else None

    def _vocabulary(self, line: BoundSymbol, call: TorchLine | None, operands: Sequence[Form]) -> list[Form] | None:
        """The results of functions of parts of a vocabulary; None if they are not those of the recorded one."""
        made = call_of(line.sym)
        function = made.function if made is not None else None
        if (
            call is None
            or not isinstance(function, VOCABULARY)
            or getattr(function, "plan", self.plan) is not self.plan
        ):
            return None
        kinds, numbers = [(f.kind, f.split) for f in operands], tuple(f.number for f in operands)
        if isinstance(function, PartOfLoss) and kinds[0][0] == "part" and kinds[1][0] == "whole":
            equal = Split(1, 1, self.plan.ranks, call.operands[0].shape[1])
            of = (numbers[1], function.ignored)
            return [Form("numbers", numbers[0], of)] if kinds[0][1] == equal else None
        for entry in self.known.get((call.name, numbers), ()):
            assert entry.call is not None
            same = constant((entry.call.args, entry.call.kwargs), []) == constant((call.args, call.kwargs), [])
            same &= _detached(entry.call) == _detached(call)
            if isinstance(function, PartOfEmbedding) and same and kinds[0][0] == "whole":
                table = Split(0, 1, self.plan.ranks, entry.call.operands[1].shape[0] // self.plan.ranks)
                return [Form("sum", entry.results[0])] if kinds[1] == ("part", table) else None
            if isinstance(function, LossOfParts) and same:
                of = (numbers[1], loss_arguments(*call.args, **call.kwargs)[4])
                right = dtypes.to_torch_dtype(self.dtypes[entry.results[0]]) is function.dtype
                right &= kinds == [("all numbers", of), ("whole", None)]
                return [Form("whole", entry.results[0])] if right else None
        return None

    def _loss(self, line: BoundSymbol, call: TorchLine | None, operands: Sequence[Form]) -> list[Form] | None:
        if call is None:
            return None
        kinds = [f.kind for f in operands]
        if call.name == LOSS and kinds[0] == "part":
            return self._rows_of_loss(line, call, operands)
        if call.name == "ne" and kinds[0] in ("part", "filled") and not isinstance(call.args[1], TensorProxy):
            form = operands[0]
            split, fill = form.split if kinds[0] == "filled" else (form.split, None)
            recorded = self.known.get((_name(line, call), (form.number,)))  # by the model itself
            counted = not recorded or (form.number, call.args[1]) in self._ignored()
            if counted and (self._even(split) or fill == call.args[1]):
                return [Form("counts", form.number, call.args[1])]
        if call.name in ("to", "sum") and kinds[0] in ("counts", "rows of rank") and self._can_count(call):
            return [operands[0]._replace(kind="rows of rank" if call.name == "sum" else kinds[0])]
        if call.name == "true_divide" and kinds == ["total", "rows"]:
            total, rows = operands
            return [Form("quotient", total.number)] if total.split == (rows.number, rows.split) else None
        if call.name == "to" and kinds[0] == "quotient" and call.results[0].dtype == self.dtypes[operands[0].number]:
            return [Form("whole", operands[0].number)]
        if call.name == "mul" and kinds[0] == "mean of ranks" and call.args[1] == 1.0 / self.plan.ranks:
            return [Form("whole", operands[0].number)]
        return None

    def _ignored(self) -> set[tuple[int, Any]]:
        """The labels of the recorded losses, by number, and the label that each leaves out."""
        losses = ((key[1], entry.call) for key, entries in self.known.items() if key[0] == LOSS for entry in entries)
        return {(of[1], loss_arguments(*call.args, **call.kwargs)[4]) for of, call in losses if call and len(of) > 1}

    def _can_count(self, call: TorchLine) -> bool:
        """Whether the dtype of a result has each number of rows that ranks may count."""
        dtype = dtypes.to_torch_dtype(call.results[0].dtype)
        rows = call.operands[0].numel * self.plan.ranks
        if dtype is torch.bool:
            return rows <= 1
        return rows <= (2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max)

    def _rows_of_loss(self, line: BoundSymbol, call: TorchLine, operands: Sequence[Form]) -> list[Form] | None:
        """A loss of this rank's rows: ``split`` has what its sum is divided by."""
        _, _, weight, *_, ignored, _, reduction, smoothing = loss_arguments(*call.args, **call.kwargs)
        rows = operands[1]
        split, fill = rows.split if rows.kind == "filled" else (rows.split, None)
        if reduction != "sum" or weight is not None or split != operands[0].split or split.dim != 0:
            return None
        if rows.kind not in ("part", "filled") or not (self._even(split) or fill == ignored):
            return None
        for entry in self.known.get((_name(line, call), tuple(f.number for f in operands)), ()):
            assert entry.call is not None
            _, _, recorded_weight, *_, same, _, how, smooth = loss_arguments(*entry.call.args, **entry.call.kwargs)
            if recorded_weight is None and (same, smooth) == (ignored, smoothing) and how in ("mean", "sum"):
                of = None if how == "sum" else (rows.number, ignored)
                return [Form("loss", entry.results[0], of)]
        return None

    def _even(self, split: Split) -> bool:
        return self.plan.local(split.length) * self.plan.ranks == split.length


# ---- the laws of collectives ----


def _cut(form: Form, part: comm.Part) -> Form | None:
    first = form.kind == "drawn" and part.split.length == 1  # the others have padding
    if form.kind != "whole" and not first:
        return None
    if part.fill is not None:
        return Form("filled", form.number, (part.split, part.fill))
    return Form("part", form.number, part.split)


def _gather(form: Form, part: comm.Part) -> Form | None:
    if form.kind == "numbers":
        return form._replace(kind="all numbers") if part.split == Split(1, 1, part.plan.ranks, NUMBERS) else None
    return Form("whole", form.number) if form.kind == "part" and form.split == part.split else None


def _gather_output(form: Form, part: comm.Part) -> Form | None:
    return Form("border", form.number) if _gather(form, part) else None


def _sum(form: Form, part: comm.Part) -> Form | None:
    if form.kind == "loss" and form.split is not None:
        return form._replace(kind="total")
    if form.kind in ("sum", "loss"):
        return Form("whole", form.number)
    if form.kind == "mean":
        return Form("mean of ranks", form.number)
    return form._replace(kind="rows") if form.kind == "rows of rank" else None


def _scatter(form: Form, part: comm.Part) -> Form | None:
    return Form("part", form.number, part.split) if form.kind == "sum" else None


def _exchange(before: str, after: str) -> Any:
    def law(form: Form, part: comm.Part) -> Form | None:
        same = form.kind == before and form.split == part.split
        return Form(after, form.number, part.split) if same else None

    return law


def _across(before: str, after: str) -> Any:
    return lambda form, part: Form(after, form.number) if form.kind == before else None


def _own(before: str, after: str) -> Any:
    return lambda form, part: form._replace(kind=after) if (form.kind, form.split) == (before, part.split) else None


LAWS = {
    comm.cut.id: _cut,
    comm.gather_parts.id: _gather,
    comm.gather_output.id: _gather_output,
    comm.sum_parts.id: _sum,
    comm.scatter_parts.id: _scatter,
    comm.exchange_heads.id: _exchange("part", "heads"),
    comm.exchange_positions.id: _exchange("heads", "part"),
    comm.to_output.id: _across("whole", "border"),
    comm.from_input.id: _across("border", "whole"),
    comm.to_own_output.id: _own("part", "own"),
    comm.from_own_input.id: _own("own", "part"),
}


# ---- lines ----


def _operands(line: BoundSymbol, call: TorchLine | None) -> Sequence[Any]:
    return call.operands if call is not None else line.flat_proxy_args


def _name(line: BoundSymbol, call: TorchLine | None) -> Hashable:
    made = call_of(line.sym)
    if made is not None and isinstance(made.function, VOCABULARY):
        return call.name if call is not None else "", made.function
    if call is not None and call.name:
        return call.name
    return ("calls", id(made.function)) if made is not None else line.sym.id


def _constants(line: BoundSymbol, call: TorchLine | None) -> Hashable:
    args = (call.args, call.kwargs) if call is not None else (line.args, line.kwargs)
    return constant(args, []), _detached(call)


def _detached(call: TorchLine | None) -> tuple[bool, ...]:
    return tuple(ProxyTag.DETACHED_AUTOGRAD_GRAPH in r.tags for r in call.results) if call is not None else ()


def _results(trace: TraceCtx) -> list[Any]:
    last = trace.bound_symbols[-1].args[0]
    if isinstance(last, dict):
        last = last["output"]
    return list(tree_flatten(last)[0])


def _own_attention(line: BoundSymbol) -> CausalAttention | None:
    """The attention of one rank's queries that a line calls."""
    made = call_of(line.sym)
    return made.function if made is not None and isinstance(made.function, CausalAttention) else None


def printed(line: BoundSymbol) -> str:
    """A line as a trace prints it, and the arguments of a call of torch, which it does not print."""
    call = torch_line(line)
    if call is None or not call.name or call_of(line.sym) is None:
        return text_of(line)
    return f"{', '.join(o.name for o in line.flat_proxy_outs)} = {_call_text(call)}"


def _call_text(call: TorchLine) -> str:
    args = [getattr(a, "name", None) or repr(a) for a in call.args]
    args += [f"{name}={getattr(value, 'name', None) or repr(value)}" for name, value in call.kwargs.items()]
    return f"{call.name.rpartition('.')[2]}({', '.join(args)})"
