"""Pass: each rank computes on its part of the sequence (context parallelism). The model stays as it is.

The recorded computation is that of the whole sequence. From the inputs that are cut, this pass follows the lines:

    h = embedding(tokens, w)            tokens are cut, and so is h: nothing is sent
    p = arange(16)                      the same on all ranks; where h needs it, its part is computed
    y = attention(q, k, v)              mixes positions: k and v are gathered
    loss = cross_entropy(h, labels)     a sum over positions: the sums of all ranks are added up

A value may be there as a whole, or in one or several splits. Lines of whole values are written only when a line needs
them, and for a part of a result, if the table of dims (:mod:`passes.analysis.dims`) tells how to compute it. A line for
which there is no rule is computed on whole operands, as without this pass. See Note [Gradients] in
:mod:`passes.comm.sequence`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from passes.analysis.calls import unique_name
from passes.analysis.dims import Placed, TorchLine, follow, lead, resized, torch_line
from passes.analysis.recognise import changes_values, is_random, is_return, is_unpack, names
from passes.analysis.symbols import properties
from passes.comm.properties import Property
from passes.comm.sequence import Part, cut, from_input, gather_output, gather_sequence, sum_sequence, to_output
from passes.compat.jit import compile_data_and_stats, exempt_from_autocast
from passes.compat.lines import renamed
from passes.compat.versions import Fakes
from passes.kernels.sequence_attention import CausalAttention
from passes.kernels.torch_call import Meta, TorchCall, add_executor, call_of
from passes.outline import differentiated
from passes.plan.sequence import ContextPlan, Split

import torch
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.devices import to_torch_device
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.transforms import is_constant_for_vjp
from thunder.core.trace import TraceCtx, from_trace, tracectx
from torch.utils import _pytree as pytree


@dataclass
class Context:
    """What this pass is told: the ranks that hold the parts of a sequence, the dimension of the inputs that is the
    sequence, the histories of inputs that are not arguments of the model, and whether the model returns parts."""

    plan: ContextPlan
    dim: int = 1
    kept: list[Any] = field(default_factory=list)
    returns_parts: bool = False
    remarks: dict[str, None] = field(default_factory=dict)


def split_sequence(computation: TraceCtx, *, context: Context | None) -> TraceCtx:
    """Lets each rank compute on its part of the sequence.

    Takes: a computation as it was recorded, on whole sequences.
    Gives: the lines on parts, with collectives where positions mix.
    No-op when: no sequence is split over ranks.

    Raises:
        RuntimeError: if random numbers would have to be the same on all ranks.
    """
    if context is None or context.plan.ranks == 1:
        return computation
    return _Splitter(computation, context).run()


@dataclass
class _Value:
    """A value of the recorded computation: the line that makes it, and where it is in the new one."""

    proxy: TensorProxy
    line: BoundSymbol | None = None
    whole: TensorProxy | None = None
    parts: dict[Split, TensorProxy] = field(default_factory=dict)


class _Splitter:
    """One run of the pass. Values are identified by their names in the recorded computation."""

    def __init__(self, computation: TraceCtx, context: Context) -> None:
        self.old, self.context, self.plan = computation, context, context.plan
        self.new = from_trace(computation)
        self.values: dict[str, _Value] = {}
        self.parts: dict[tuple[Split, int | None], Part] = {}
        self.named: dict[Any, TensorProxy] = {}  # new values by the names that they have in the recorded computation
        self.taken: set[str] = set()  # these names
        self.gathered: set[str] = set()  # new values that are gathered, and copies of them
        self.differentiated = differentiated(computation)
        self.torch_lines: dict[int, TorchLine | None] = {}

    def run(self) -> TraceCtx:
        add_executor(compile_data_and_stats()[0])
        with exempt_from_autocast(compile_data_and_stats()[0]), langctx(Languages.TORCH):
            for i, line in enumerate(self.old.bound_symbols):
                if is_unpack(line):
                    self._input(line)
                elif is_return(line):
                    self._return(line)
                else:
                    self._line(line, i)
        self.new.bound_symbols = [b.from_bsym_swap_proxies(self.named) for b in self.new.bound_symbols]
        return self.new

    # ---- lines ----

    def _input(self, line: BoundSymbol) -> None:
        self.new.bound_symbols.append(line)
        p = line.output
        if not isinstance(p, TensorProxy):
            return
        value = self.values[p.name] = _Value(p, whole=p)
        self.taken.add(p.name)
        dim = self.context.dim
        if any(p.history is h for h in self.context.kept) or p.ndim <= dim or p.shape[dim] < 2 * self.plan.ranks:
            return
        split = Split.along(dim, p.shape[dim])
        given = p
        if p.requires_grad:
            (given,) = self._emit(line, lambda: from_input(p, self._part(split)))
            value.whole = given
        (value.parts[split],) = self._emit(line, lambda: cut(given, self._part(split)))

    def _line(self, line: BoundSymbol, number: int) -> None:
        call = self._torch(line)
        outs = [o for o in line.flat_proxy_outs if isinstance(o, TensorProxy)]
        if changes_values(line) or not outs:
            self._finish_pending(number)
            self._as_whole(line)
            return
        for o in outs:
            if o.name not in self.values:  # a line may return its argument
                self.values[o.name] = _Value(o, line)
        if call is None:
            if not all(isinstance(a, TensorProxy) for a in line.flat_proxy_args) or any(
                self._is_split(a) for a in line.flat_proxy_args
            ):
                self._as_whole(line)
            return
        if not any(map(self._is_split, call.operands)):
            return  # written when it is needed
        rule = RULES.get(call.name)
        if rule is not None and rule(self, line, call):
            return
        if not self._on_parts(line, call):
            self._mixed(line, call)

    def _on_parts(self, line: BoundSymbol, call: TorchLine) -> bool:
        """Writes a line on parts as the table of dims says; False if it cannot be."""
        choices = []
        for i, operand in enumerate(call.operands):
            for split in self.values[operand.name].parts:
                placed = follow(call, i, split)
                if placed is not None and self._is_possible(placed, split):
                    choices.append((self._bytes_to_gather(call, placed), len(choices), placed, split))
        if not choices:
            return False
        *_, placed, split = min(choices)
        operands = [
            self.whole(o) if s is None else self.part(o, s)
            for o, s in zip(call.operands, placed.operands, strict=True)
        ]
        self._write(line, call, placed, operands)
        return True

    def _is_possible(self, placed: Placed, split: Split) -> bool:
        if placed.combine is None:
            return True
        even = self.plan.local(split.length) * self.plan.ranks == split.length  # else parts have positions to leave out
        return even and placed.combine in ("sum", "mean")

    def _bytes_to_gather(self, call: TorchLine, placed: Placed) -> int:
        return sum(
            self._gather_cost(o) for o, s in zip(call.operands, placed.operands, strict=True)
            if s is None or (s not in self.values[o.name].parts and self._is_split(o))
        )  # fmt: skip

    def _write(self, line: BoundSymbol, call: TorchLine, placed: Placed, operands: Sequence[TensorProxy]) -> None:
        """Writes a line on parts, and the sum of its results if they are parts of sums."""
        shapes = [
            tuple(r.shape) if s is None else self._part(s).local_shape(tuple(r.shape))
            for r, s in zip(call.results, placed.results, strict=True)
        ]
        found = self._call(line, call, operands, shapes)
        for old, new, split in zip(call.results, found, placed.results, strict=True):
            value = self.values[old.name]
            if placed.combine is not None:
                value.whole = self._combined(line, new, placed.combine)
            elif split is None:
                value.whole = new
            else:
                value.parts[split] = new
            self._name(new if placed.combine is None else value.whole, old)

    def _combined(self, line: BoundSymbol, x: TensorProxy, how: str) -> TensorProxy:
        def combine() -> Any:
            total = sum_sequence(x, self._part(Split.along(0, 1)))
            return total if how == "sum" else ltorch.mul(total, 1.0 / self.plan.ranks)

        (found,) = self._emit(line, combine)
        return found

    def _mixed(self, line: BoundSymbol, call: TorchLine) -> None:
        """Computes a line on whole operands. A result of the same sequence is cut again."""
        splits = [s for o in call.operands for s in self.values[o.name].parts]
        self._as_whole(line)
        for result in call.results:
            value = self.values[result.name]
            split = next((s for s in splits if s.dim < result.ndim and result.shape[s.dim] == s.size), None)
            if split is not None and value.whole is not None:
                value.parts[split] = self._cut(value.whole, self._part(split), line)
        sent = [o for o in call.operands if self._is_split(o)]
        if any(dtypes.is_float_dtype(o.dtype) for o in sent):
            self.context.remarks[f"{call.name} is computed on whole sequences{_at(line)}"] = None

    def _as_whole(self, line: BoundSymbol) -> None:
        """Writes a line on whole operands."""
        if is_random(line):
            raise RuntimeError(
                f"{line.sym.name} draws random numbers for a value that all ranks of a sequence hold as a whole, and "
                f"they would differ{_at(line)}: apply it to a value that is computed from the split inputs, or leave it out"
            )
        swap = {
            variableify(a): self.whole(a)
            for a in line.flat_proxy_args
            if isinstance(a, TensorProxy) and a.name in self.values
        }
        for o in line.flat_proxy_outs:
            if o.name in self.taken and variableify(o) not in swap:  # the name of a part
                swap[variableify(o)] = renamed(o, self.new.make_name())
        self.new.bound_symbols.append(line.from_bsym_swap_proxies(swap))
        if self._moves(line) and not self.gathered.isdisjoint(names(list(swap.values()))):
            self._regather(self.new.bound_symbols[-1])
        for old in line.flat_proxy_outs:
            self.taken.add(old.name)
            if isinstance(old, TensorProxy):
                value = self.values.setdefault(old.name, _Value(old, line))
                if value.whole is None:
                    value.whole = swap.get(variableify(old), old)

    def _finish_pending(self, number: int) -> None:
        """Writes what later lines read and is not written yet: a line is about to change one of its operands."""
        for later in self.old.bound_symbols[number + 1 :]:
            for a in later.flat_proxy_args:
                value = self.values.get(a.name)
                if value is not None and value.whole is None and not value.parts:
                    self.whole(a)

    def _return(self, line: BoundSymbol) -> None:
        results = line.args[0]

        def returned(x: Any) -> Any:
            if not isinstance(x, TensorProxy) or x.name not in self.values:
                return x
            return self._output(self.values[x.name], line)

        args = ({**results, "output": tree_map(returned, results["output"])},)
        self.new.bound_symbols.append(line.from_bsym(args=args))

    def _output(self, value: _Value, line: BoundSymbol) -> TensorProxy:
        known = {v.name for v in self.old.args}
        if value.proxy.name in known and value.line is None:
            return value.proxy
        if value.parts and value.whole is None:
            split, x = next(iter(value.parts.items()))
            if self.context.returns_parts:
                return x
            return self._emit(line, lambda: gather_output(x, self._part(split)))[0]
        whole = self.whole(value.proxy)
        if not dtypes.is_inexact_dtype(whole.dtype):
            return whole
        return self._emit(line, lambda: to_output(whole, self._part(Split.along(0, 1))))[0]

    # ---- values ----

    def whole(self, proxy: TensorProxy) -> TensorProxy:
        """The whole of a value: as it is, computed again from whole operands if less has to be sent, or gathered."""
        value = self.values[proxy.name]
        if value.whole is None and (not value.parts or self._recomputes(value)):
            assert value.line is not None
            self._as_whole(value.line)
        if value.whole is None:
            split, x = next(iter(value.parts.items()))
            (value.whole,) = self._emit(value.line, lambda: gather_sequence(x, self._part(split)))
            self._regather(self.new.bound_symbols[-1])
        return value.whole

    def part(self, proxy: TensorProxy, split: Split, fill: int | None = None) -> TensorProxy:
        """A part of a value: as it is, computed from parts of the operands, or cut."""
        value = self.values[proxy.name]
        if fill is None and split in value.parts:
            return value.parts[split]
        if fill is None and value.whole is None and not value.parts and self._lead(value, split):
            return value.parts[split]
        found = self._cut(self.whole(proxy), self._part(split, fill), value.line)
        if fill is None:
            value.parts[split] = found
        return found

    def _lead(self, value: _Value, split: Split) -> bool:
        """Computes only a part of a value that is not written yet; False if it cannot be."""
        line = value.line
        call = self._torch(line) if line is not None else None
        if call is None or line is None or is_random(line) or len(call.results) != 1:
            return False
        placed = lead(call, 0, split)
        if placed is None or placed.combine is not None:
            return False
        operands = [
            self.whole(o) if s is None else self.part(o, s)
            for o, s in zip(call.operands, placed.operands, strict=True)
        ]
        self._write(line, call, placed, operands)
        return True

    def _recomputes(self, value: _Value) -> bool:
        return self._gather_cost(value.proxy) < value.proxy.numel * value.proxy.dtype.bytes

    def _moves(self, line: BoundSymbol) -> bool:
        """True for a line that computes nothing."""
        moves = Property.VIEW | Property.INDEX | Property.COPY | Property.CAST
        call = self._torch(line)
        return bool(properties(line.sym) & moves) or (call is not None and call.name in EXPANDS)

    def _regather(self, line: BoundSymbol) -> None:
        """Lets backward gather again what a line takes from other ranks, so that no rank saves whole sequences."""
        line.tags = line.tags | {BoundSymbolTag.RECOMPUTE_IN_BACKWARD}
        self.gathered |= names(line.flat_proxy_outs)

    def _gather_cost(self, proxy: TensorProxy, depth: int = 8) -> int:
        """Bytes that have to be gathered for a whole value."""
        value = self.values[proxy.name]
        if value.whole is not None or not value.parts:
            return 0
        bytes = proxy.numel * proxy.dtype.bytes
        line = value.line
        if line is None or depth == 0 or is_random(line):
            return bytes
        call = self._torch(line)
        if call is None or (dtypes.is_inexact_dtype(proxy.dtype) and not self._moves(line)):
            return bytes
        return min(bytes, sum(self._gather_cost(o, depth - 1) for o in call.operands))

    def _is_split(self, proxy: Any) -> bool:
        return isinstance(proxy, TensorProxy) and proxy.name in self.values and bool(self.values[proxy.name].parts)

    # ---- writing ----

    def _part(self, split: Split, fill: int | None = None) -> Part:
        return self.parts.setdefault((split, fill), Part(self.plan, split, fill))

    def _cut(self, whole: TensorProxy, part: Part, line: BoundSymbol | None) -> TensorProxy:
        return self._emit(line, lambda: cut(whole, part))[0]

    def _torch(self, line: BoundSymbol) -> TorchLine | None:
        if id(line) not in self.torch_lines:
            self.torch_lines[id(line)] = torch_line(line)
        return self.torch_lines[id(line)]

    def _call(
        self, line: BoundSymbol, call: TorchLine, operands: Sequence[TensorProxy], shapes: Sequence[tuple[int, ...]]
    ) -> list[TensorProxy]:
        """Writes a line on other operands. ``shapes``: those of its results."""
        args, kwargs = resized(call, shapes)
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_proxy)
        given = iter(operands)
        flat = [next(given) if isinstance(x, TensorProxy) else x for x in flat]
        args, kwargs = pytree.tree_unflatten(flat, spec)
        made = call_of(line.sym)
        if made is None:
            found = self._emit(line, lambda: line.sym(*args, **kwargs))
        else:
            found = self.torch(line, made.function, args, kwargs, grads=[m.grad for m in made.inputs], like=made)
        for new, shape in zip(found, shapes, strict=True):
            if tuple(new.shape) != tuple(shape):
                raise RuntimeError(f"{call.name} has a result of shape {tuple(new.shape)} for a part, not {shape}{_at(line)}")
        return found

    def torch(
        self, line: BoundSymbol, function: Callable[..., Any], args: Any, kwargs: Any, *, grads: Sequence[bool],
        like: TorchCall | None = None,
    ) -> list[TensorProxy]:  # fmt: skip
        """Writes a line that calls torch's function, in the modes of the call ``like``. ``grads``: which of its tensors
        need a gradient."""
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_proxy)
        places = [i for i, x in enumerate(flat) if isinstance(x, TensorProxy)]
        operands = [flat[i] for i in places]
        devices = (to_torch_device(p.device) for p in operands)
        absent = next((d for d in devices if d.type == "cuda" and not torch.cuda.is_available()), None)
        inputs = [_meta(p, grad, absent) for p, grad in zip(operands, grads, strict=True)]
        for i in places:
            flat[i] = None
        name = getattr(function, "__name__", "call").strip("_")
        options = {} if like is None else {"written": like.written, "autocast": like.autocast}
        random = like.random if like is not None else is_random(line)
        call = TorchCall(
            name=unique_name(self.new, f"torch_{name}_part"), function=function, flat=flat, spec=spec, places=places,
            inputs=inputs, results=(), random=random, absent=absent, **options,
        )  # fmt: skip
        with Fakes(allow_non_fake_inputs=True), torch.set_grad_enabled(any(grads)):
            call.results = [Meta.of(t) for t in call._call([m.empty().requires_grad_(m.grad) for m in inputs])]
        return self._emit(line, lambda: call.symbol(*operands))

    def grads(self, line: BoundSymbol, call: TorchLine) -> list[bool]:
        """Which operands of a line need a gradient."""
        flows = not is_constant_for_vjp(line)
        return [flows and o.name in self.differentiated and dtypes.is_inexact_dtype(o.dtype) for o in call.operands]

    def _emit(self, line: BoundSymbol | None, write: Callable[[], Any]) -> list[TensorProxy]:
        """Runs ``write`` and adds the lines that it makes, with the tags and the place in the source of ``line``."""
        self.new.push_scope([])
        with tracectx(self.new):
            result = write()
        lines = self.new.pop_scope()
        for bsym in lines:
            if line is not None:
                bsym.tags |= line.tags
                bsym.source_filename, bsym.source_positions = line.source_filename, line.source_positions
        self.new.bound_symbols += lines
        return [p for p in tree_flatten(result)[0] if isinstance(p, Proxy)]

    def _name(self, new: TensorProxy | None, old: TensorProxy) -> None:
        """Gives a new value the name, and the tags, of the recorded one, if no other has it."""
        if new is not None and old.name not in self.taken:
            self.taken.add(old.name)
            named = self.named[variableify(new)] = renamed(new, old.name)
            named.tags.update(old.tags)


def _is_proxy(value: Any) -> bool:
    return isinstance(value, Proxy)


def _meta(p: TensorProxy, grad: bool, absent: torch.device | None) -> Meta:
    """The metadata of a value. ``absent``: the device of the step, if the CPU stands for it."""
    shape = tuple(p.shape)
    stride = torch.empty(shape, device="meta").stride()
    device = torch.device("cpu") if absent is not None else to_torch_device(p.device)
    return Meta(shape, stride, dtypes.to_torch_dtype(p.dtype), device, grad)


def _at(line: BoundSymbol) -> str:
    if line.source_filename is None or line.source_positions is None:
        return ""
    return f" ({line.source_filename}:{line.source_positions.lineno})"


# ---- rules of lines that mix positions ----


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, **options: Any
) -> tuple[Any, ...]:
    return query, key, value, attn_mask, dropout_p, is_causal, options


def _split_attention(self: _Splitter, line: BoundSymbol, call: TorchLine) -> bool:
    """Queries stay split; keys and values are gathered."""
    query, key, value, mask, dropout, causal, options = _attention(*call.args, **call.kwargs)
    split = next((s for s in self.values[query.name].parts if s == Split.along(query.ndim - 2, s.length)), None)
    if split is None:
        return False
    q, k, v = self.part(query, split), self.whole(key), self.whole(value)
    if causal:
        if key.shape[-2] != split.length:
            return False
        function: Any = CausalAttention(self.plan, split.length)
        found = self.torch(line, function, (q, k, v), {"dropout_p": dropout, **options}, grads=self.grads(line, call))
    else:
        if isinstance(mask, TensorProxy) and mask.ndim > 1 and mask.shape[-2] != 1:
            mask = self.part(mask, Split.along(mask.ndim - 2, split.length))
        elif isinstance(mask, TensorProxy):
            mask = self.whole(mask)
        options = {"attn_mask": mask, "dropout_p": dropout, "is_causal": False, **options}
        made = call_of(line.sym)
        if made is None:
            found = self._emit(line, lambda: line.sym(q, k, v, **options))
        else:
            found = self.torch(line, made.function, (q, k, v), options, grads=self.grads(line, call), like=made)
    (result,) = call.results
    self.values[result.name].parts[split] = found[0]
    self._name(found[0], result)
    return True


def _losses(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> tuple[Any, ...]:  # fmt: skip
    return input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing


def _split_loss(self: _Splitter, line: BoundSymbol, call: TorchLine) -> bool:
    """The loss of the rows of each rank, summed over ranks, over the number of rows that count."""
    input, target, weight, average, ignored, reduce, reduction, smoothing = _losses(*call.args, **call.kwargs)
    split = next((s for s in self.values[input.name].parts if s.dim == 0 and input.ndim == 2), None)
    plain = weight is None and average is None and reduce is None and reduction in ("mean", "sum")
    if split is None or not plain or target.ndim != 1 or dtypes.is_inexact_dtype(target.dtype):
        return False
    even = self.plan.local(split.length) * self.plan.ranks == split.length
    x, t = self.part(input, split), self.part(target, split, None if even else ignored)
    options = {"ignore_index": ignored, "reduction": "sum"}
    if smoothing:
        options["label_smoothing"] = smoothing
    made = call_of(line.sym)
    if made is None:
        (local,) = self._emit(line, lambda: line.sym(x, t, **options))
    else:
        (local,) = self.torch(line, made.function, (x, t), options, grads=self.grads(line, call), like=made)
    group = self._part(Split.along(0, 1))

    def total() -> Any:
        loss = sum_sequence(local, group)
        if reduction == "sum":
            return loss
        rows = sum_sequence(ltorch.sum(ltorch.to(ltorch.ne(t, ignored), torch.float32)), group)
        return ltorch.to(ltorch.true_divide(loss, rows), loss.dtype)

    (found,) = self._emit(line, total)
    self.values[call.results[0].name].whole = found
    self._name(found, call.results[0])
    return True


def _split_slice(self: _Splitter, line: BoundSymbol, call: TorchLine) -> bool:
    """A slice that only leaves out the last positions keeps every rank's part as it is."""
    x, index = call.args[0], call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    split = next((s for s in self.values[x.name].parts if s == Split.along(s.dim, s.length)), None)
    if split is None or any(i is None or isinstance(i, TensorProxy) for i in index):
        return False
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.ndim - len(index) + 1), *index[at + 1 :])
    index = (*index, *[slice(None)] * (x.ndim - len(index)))
    taken = index[split.dim]
    if not isinstance(taken, slice) or any(not isinstance(i, (slice, int)) for i in index):
        return False
    start, stop, step = taken.indices(split.length)
    if start != 0 or step != 1 or not 0 < stop < split.length or self.plan.chunk(stop) != self.plan.chunk(split.length):
        return False
    rest = tuple(slice(None) if d == split.dim else i for d, i in enumerate(index))
    dim = split.dim - sum(isinstance(i, int) for i in index[: split.dim])
    part = self.part(x, split)
    (found,) = self._emit(line, lambda: ltorch.getitem(part, rest))
    self.values[call.results[0].name].parts[Split.along(dim, stop)] = found
    self._name(found, call.results[0])
    return True


EXPANDS = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "reshape"})
RULES: dict[str, Callable[[_Splitter, BoundSymbol, TorchLine], bool]] = {
    "nn.functional.scaled_dot_product_attention": _split_attention,
    "nn.functional.cross_entropy": _split_loss,
    "__getitem__": _split_slice,
}
