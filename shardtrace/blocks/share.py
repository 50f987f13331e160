"""The call of a block: traced if it is the first of its kind, otherwise known from what the first one left.

From the second one on, each call is a line of the trace (:mod:`shardtrace.blocks.call`), and so is the first. A block
whose lines cannot stand in a function has them written again for each call.

Blocks that differ only in what is recomputed of them are traced once together: their lines differ only in a tag.

Note [Safe]. Two calls are of one kind if their modules have equal structures (:mod:`shardtrace.blocks.structure`),
their inputs and torch's modes are equal apart from the values of tensors, and every plain attribute that tracing read
has the same value in both. Tracing must have done nothing but add lines (:mod:`shardtrace.blocks.observe`). The
prologue checks the parameters, the buffers and these attributes of each instance. In doubt a block is traced by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from passes.compat import constraints, interpret
from shardtrace.blocks.call import CannotCall, Outlined, ParameterOf, call, make_block
from shardtrace.blocks.observe import Observer
from shardtrace.blocks.structure import CHECKPOINTED, CannotShare, inputs_key, recomputed, structure
from shardtrace.blocks.template import Template, fits, is_own, make_template, remarked, tensors_of, write_again

from thunder.core.compile_data import get_cache_option
from thunder.core.interpreter import INTERPRETER_SIGNALS, ProvenanceRecord, PseudoInst, unwrap, wrap
from thunder.core.jit_ext import get_jit_ctx, recursively_proxy
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.trace import TraceCtx
from torch import nn

Call = Callable[..., Any]


class TracedBlocks:
    """The blocks that one tracing has met. ``shared`` counts the calls that were not traced, by the name of the block
    that was; ``written`` says why the lines of such a block stand there for each call; ``alone`` says why others were
    traced."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self._outlined: dict[str, Outlined] = {}  # by the name of the block that was traced
        self.shared: Counter[str] = Counter()
        self.alone: dict[str, str] = {}
        self._templates: dict[Hashable, list[Template]] = {}
        self._unshareable: dict[Hashable, str] = {}
        self._first: dict[type, tuple[Any, ...]] = {}  # of each class: the name and the key
        self._other_kind: dict[str, str] = {}  # of a block that begins another kind: the first of its class
        self._inside = False

    def forget(self) -> None:
        """Lets go of the lines, once tracing is over."""
        self._templates.clear()
        self._outlined.clear()

    def __str__(self) -> str:
        parts = [
            f"{name} was traced once for {n + 1} calls{self._why_written(name)}" for name, n in self.shared.items()
        ]
        reasons: dict[str, list[str]] = {}
        for name, why in self.alone.items():
            if name not in self._other_kind or self._other_kind[name] in self.shared:  # two layers are no blocks
                reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            parts.append(f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''} traced too: {why}")
        return "; ".join(parts)

    def _why_written(self, name: str) -> str:
        return f" (its lines stand in the trace for each call: {self.written[name]})" if name in self.written else ""

    def call(
        self,
        name: str,
        function: Call,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        parameter_of: ParameterOf,
        obstacle: str = "",
    ) -> Any:
        """Calls a block in the running interpreter. ``module``, arguments and result are wrapped values.

        Args:
            name: the block's, for messages.
            function: what is to be traced, called with ``module`` and the arguments.
            parameter_of: gives the sharded parameter of a tensor, or None.
            obstacle: why this call's lines must stand in the trace; empty if one line may stand for them.
        """
        if self._inside or get_cache_option() is not CACHE_OPTIONS.CONSTANT_VALUES:
            # a block within a block is traced with it; symbolic shapes cannot be compared
            return interpret(function, module, *args, **kwargs)
        m, root = unwrap(module), module.provenance
        try:
            with suppress(ValueError):  # a value that cannot be a proxy; the key refuses it
                recursively_proxy(*args, **kwargs)
            flat, spec = _inputs(args, kwargs)
            key = structure(m), inputs_key(flat, spec), recomputed(m)
            tensors = tensors_of(flat)
            if is_own(tensors, m):
                raise CannotShare("takes one of its own parameters")
            hash(key)
        except (CannotShare, TypeError) as why:
            self.alone[name] = str(why)
            return interpret(function, module, *args, **kwargs)
        if key in self._unshareable:
            self.alone[name] = self._unshareable[key]
            return interpret(function, module, *args, **kwargs)
        template = self._fitting(key, name, m)
        if template is not None:
            outputs = self._again(
                template, get_jit_ctx().computation_trace, m, name, root, tensors, parameter_of, obstacle
            )
            if template.traced or template.name != name:  # else this call begins its kind
                self.shared[template.name] += 1
            self.alone.pop(name, None)
            return _wrapped(tree_unflatten(outputs, template.spec), root)
        first, *kind = self._first.setdefault(type(m), (name, *key))
        if key not in self._templates and first != name:
            what = "submodules or attributes" if kind[0] != key[0] else "inputs"
            self.alone[name] = f"its {what} differ from those of {first}"
            self._other_kind[name] = first
        return self._trace(key, name, function, module, args, kwargs, flat)

    def _fitting(self, key: tuple[Any, ...], name: str, module: nn.Module) -> Template | None:
        """The template of a kind of blocks. If there is none, it is made of one of a kind that differs only in what is
        recomputed."""
        for template in self._templates.get(key, ()):
            difference = fits(template, module)
            if not difference:
                return template
            self.alone[name] = f"its {difference} differs from that of {template.name}"
        if key in self._templates or any(recomputed(part) for part in module.modules() if part is not module):
            return None  # lines do not tell which mark is the block's and which that of a part
        others = (t for what in (None, *CHECKPOINTED) for t in self._templates.get((*key[:2], what), ()))
        for template in others:
            if not fits(template, module):
                self._templates[key] = [remarked(template, name, key[2])]
                return self._templates[key][0]
        return None

    def _again(
        self,
        template: Template,
        trace: TraceCtx,
        module: nn.Module,
        name: str,
        root: ProvenanceRecord,
        tensors: Sequence[TensorProxy],
        parameter_of: ParameterOf,
        obstacle: str,
    ) -> list[Any]:
        """Adds another call to the trace. Returns its outputs, flat."""
        if len(trace.scopes) > 1:
            obstacle = obstacle or "torch.utils.checkpoint or an autograd.Function calls it"
        outlined = self._outlined.get(template.name)
        if outlined is None and template.name not in self.written:
            try:
                if obstacle:
                    raise CannotCall(obstacle)
                outlined = make_block(template, trace, type(module).__name__, parameter_of)
                self._outlined[template.name] = outlined
            except CannotCall as why:
                self.written[template.name] = str(why)
        if outlined is None or obstacle:
            return write_again(template, trace, module, root, tensors)
        return call(outlined, template, trace, module, name, root, tensors)

    def _trace(
        self,
        key: Hashable,
        name: str,
        function: Call,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flat: list[Any],
    ) -> Any:
        """Traces a block and keeps what further ones need."""
        lines, checks = get_jit_ctx().computation_trace.scopes[-1], constraints()
        before, checked = len(lines), len(checks)
        observer = Observer()
        self._inside = True
        try:
            with observer.watching():
                result = interpret(function, module, *args, **kwargs)
        finally:
            self._inside = False
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        try:
            if not _same(_inputs(args, kwargs)[0], flat):
                raise CannotShare("changes a list or dict that it is given")
            template = make_template(
                name,
                unwrap(module),
                module.provenance,
                tensors_of(flat),
                lines[before:],
                unwrap(result),
                observer,
                checks[checked:],
            )
        except CannotShare as why:
            self._unshareable[key] = self.alone[name] = str(why)
            return result
        self._templates.setdefault(key, []).append(template)
        return result


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    flat, spec = tree_flatten((tuple(map(unwrap, args)), {name: unwrap(v) for name, v in kwargs.items()}))
    return flat, spec


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _wrapped(result: Any, root: ProvenanceRecord) -> Any:
    return wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[root]))
