"""Functions that Thunder cannot interpret, and what it traces in their place. They are in models of transformers.

transformers 4.53 and later build attention masks by ``torch.vmap``, and leave a mask out if no token is padded, which
depends on values. The replacements compute the same masks by broadcasting indices, and never read values: an attention
mask that is given is always used.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from passes.compat import interpret, line_that_makes

import torch
from thunder.core.interpreter import unwrap, wrap_const
from thunder.core.jit_ext import register_general_jit_lookaside
from thunder.core.proxies import TensorProxy
from torch import nn
from torch.nn import functional as F

# modules of losses, their functions, and the arguments that both have with the same defaults
LOSSES: dict[Any, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    nn.CrossEntropyLoss: (F.cross_entropy, ("ignore_index", "reduction", "label_smoothing")),
    nn.BCEWithLogitsLoss: (F.binary_cross_entropy_with_logits, ("reduction",)),
}
VIEWS = ("unsqueeze", "expand", "to", "add")  # keep the steps between positions


def register_lookasides() -> None:
    """Let Thunder trace the replacements. Those for transformers only if it is imported."""
    _register_losses()
    if "transformers.configuration_utils" in sys.modules:
        _register_config(sys.modules["transformers.configuration_utils"])
    if "transformers.integrations.sdpa_attention" in sys.modules:
        _register_attention(sys.modules["transformers.integrations.sdpa_attention"])
    if "transformers.utils.output_capturing" in sys.modules:
        _register_output_capturing(sys.modules["transformers.utils.output_capturing"])
    if "transformers.masking_utils" in sys.modules:
        _register_masks(sys.modules["transformers.masking_utils"])


@functools.cache
def _register_losses() -> None:
    """Modules of losses that a forward builds: Thunder takes their buffers for changes of the model."""
    for cls, (function, options) in LOSSES.items():

        def build(*args: Any, cls: Any = cls, function: Any = function, options: Any = options, **kwargs: Any) -> Any:
            if args or kwargs.keys() - set(options):  # weights, which are tensors
                return interpret(type(cls.__name__, (cls,), {}), *args, **kwargs)
            return wrap_const(functools.partial(function, **{name: unwrap(value) for name, value in kwargs.items()}))

        register_general_jit_lookaside(cls)(build)


@functools.cache
def _register_config(configuration: Any) -> None:
    """Configs are constants. ``get_text_config`` uses generators, which Thunder cannot count."""
    config = getattr(configuration, "PreTrainedConfig", None) or configuration.PretrainedConfig
    if (function := getattr(config, "get_text_config", None)) is not None:

        def get_text_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = function(unwrap(self), *map(unwrap, args), **{name: unwrap(v) for name, v in kwargs.items()})
            return self if found is unwrap(self) else wrap_const(found)

        register_general_jit_lookaside(function)(get_text_config)


@functools.cache
def _register_attention(attention: Any) -> None:
    """Heads of keys and values are repeated, because Thunder's attention has no ``enable_gqa``."""
    if (function := getattr(attention, "use_gqa_in_sdpa", None)) is not None:
        register_general_jit_lookaside(function)(lambda *args, **kwargs: wrap_const(False))
    if (function := getattr(attention, "create_position_bias_mask", None)) is not None:
        _replace(function, _position_bias_mask)


def _position_bias_mask(
    position_bias: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """A bias for scores of attention that hides what the mask hides. (The original asks for ``dtype == torch.bool``,
    which Thunder answers with False, whatever the dtype.)"""
    if attention_mask is None and is_causal:
        queries, keys = torch.arange(query.shape[2], device=key.device), torch.arange(key.shape[2], device=key.device)
        attention_mask = queries[:, None] >= keys[None, :]
    if attention_mask is None:
        return position_bias
    if attention_mask.is_floating_point():
        return position_bias + attention_mask
    return torch.where(attention_mask, position_bias, torch.finfo(key.dtype).min)


@functools.cache
def _register_output_capturing(capturing: Any) -> None:
    """transformers 5 passes the list of hidden states to hooks in a context variable, which Thunder cannot set."""
    variable = capturing.CompileableContextVar

    def set_(self: Any, value: Any) -> Any:
        if unwrap(value):
            names = ", ".join(f"output_{name}" for name in unwrap(value))
            raise RuntimeError(
                f"Thunder cannot trace {names}, which transformers {sys.modules['transformers'].__version__} collects "
                "in hooks: call the model without, or inside shardtrace.full_params without Thunder"
            )
        return wrap_const(None)

    register_general_jit_lookaside(variable.set)(set_)
    register_general_jit_lookaside(variable.get)(lambda self: wrap_const(None))
    register_general_jit_lookaside(variable.reset)(lambda self, token: wrap_const(None))


@functools.cache
def _register_masks(masking: Any) -> None:
    if (is_tracing := getattr(masking, "is_tracing", None)) is not None:
        register_general_jit_lookaside(is_tracing)(lambda *args, **kwargs: wrap_const(True))
    for name, replacement in (
        ("_ignore_causal_mask_sdpa", _skips(getattr(masking, "_ignore_causal_mask_sdpa", None))),
        ("_ignore_bidirectional_mask_sdpa", _skips(getattr(masking, "_ignore_bidirectional_mask_sdpa", None))),
        ("sdpa_mask_recent_torch", _mask_of_positions(masking)),
    ):
        if (function := getattr(masking, name, None)) is not None:
            _replace(function, replacement)
    packed = masking.find_packed_sequence_indices
    copied = _copy(packed)

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        if _counts_up(unwrap(position_ids)):
            return wrap_const(None)
        return interpret(copied, position_ids)

    register_general_jit_lookaside(packed)(find_packed_sequence_indices)


def _replace(function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Let Thunder interpret ``replacement`` where a model calls ``function``."""
    register_general_jit_lookaside(function)(functools.partial(interpret, replacement))


def _copy(function: Any) -> Any:
    """The same function as another object, which has no replacement."""
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def _skips(original: Callable[..., bool] | None) -> Callable[..., bool]:
    """Whether a mask can be left out. One that is given may hide tokens."""
    copied = _copy(original) if original is not None else None

    def skips(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        return False if padding_mask is not None else copied(padding_mask, *args, **kwargs)  # type: ignore[misc]

    return skips


def _mask_of_positions(masking: Any) -> Callable[..., Any]:
    def mask_of_positions(
        batch_size: int,
        cache_position: torch.Tensor,
        kv_length: int,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] = masking.causal_mask_function,
        attention_mask: torch.Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        **_: Any,
    ) -> torch.Tensor | None:
        """A mask of shape (batch_size, 1, queries, kv_length): True where a query sees a key."""
        queries, device = cache_position.shape[0], cache_position.device
        whole = queries in (1, kv_length) and (local_size is None or kv_length < local_size)
        if allow_is_causal_skip and attention_mask is None and whole:
            return None  # attention is causal by itself
        batch = torch.arange(batch_size, device=device)[:, None, None, None]
        head = torch.arange(1, device=device)[None, :, None, None]
        keys = torch.arange(kv_length, device=device)[None, None, None, :] + kv_offset
        mask = mask_function(batch, head, cache_position[None, None, :, None], keys)
        if attention_mask is not None:
            missing = kv_length + kv_offset - attention_mask.shape[-1]
            padded = torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
            mask = mask & padded[:, kv_offset : kv_offset + kv_length][:, None, None, :]
        return mask.expand(batch_size, 1, queries, kv_length)

    return mask_of_positions


def _counts_up(position_ids: Any) -> bool:
    """True if a model has made positions by itself, 0, 1, 2 and so on, so that rows are not packed."""
    line = line_that_makes(position_ids)
    while line is not None and line.sym.name in VIEWS and not any(isinstance(a, TensorProxy) for a in line.args[1:]):
        line = line_that_makes(line.args[0])
    return line is not None and line.sym.name == "arange" and line.kwargs.get("step", 1) == 1 and len(line.args) < 3
