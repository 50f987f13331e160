"""Mixed precision: the parameters that keep their dtype, and casts of inputs and outputs, of a model and its blocks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _NormBase

INPUTS = "_shardtrace_inputs"  # of a block: the dtype to which its floating-point inputs are cast


def keeps_dtype(module: nn.Module) -> bool:
    """True if the parameters of a module are used in their own dtype, whatever the policy.

    This holds for batch and instance norms with running statistics. The statistics are buffers, which keep their dtype,
    and ``torch.nn.functional.batch_norm`` requires the same dtype for the parameters. The input may have a lower
    precision. (PyTorch's first FSDP also kept batch norms in full precision.)
    """
    if not isinstance(module, _NormBase) or module.running_mean is None or module.weight is None:
        return False
    return module.running_mean.dtype == module.weight.dtype


def with_casts(forward: Callable[..., Any], precision: MixedPrecisionPolicy | None) -> Callable[..., Any]:
    """``forward`` with floating-point inputs and outputs cast as ``precision`` says; itself if none are cast.

    Thunder traces these casts.
    """
    if precision is None:
        return forward
    given = precision.param_dtype if precision.cast_forward_inputs else None
    returned = precision.output_dtype
    if given is None and returned is None:
        return forward

    def cast_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return cast(forward(module, *cast(args, given), **cast(kwargs, given)), returned)

    return cast_forward


def inputs_of_blocks(
    model: nn.Module, blocks: Iterable[str], cast_layers: Collection[str], policy: MixedPrecisionPolicy | None
) -> dict[nn.Module, torch.dtype]:
    """The dtype to which each block casts its inputs, as in FSDP2: that of its parameters. ``cast_layers``: the names
    of the modules whose own parameters are cast."""
    if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
        return {}
    chosen = (b for b in blocks if any(f"{layer}.".startswith(f"{b}.") for layer in cast_layers))
    return {model.get_submodule(block): policy.param_dtype for block in chosen}


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors in nested tuples, lists and dicts to ``dtype``. Keep everything else, and the
    containers in which nothing is cast: the caller may look into them afterwards."""
    if dtype is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        items = {key: cast(entry, dtype) for key, entry in value.items()}
        if all(items[key] is entry for key, entry in value.items()):
            return value
        return items if type(value) is dict else type(value)(**items)  # such as a ModelOutput
    if isinstance(value, (list, tuple)):
        entries = [cast(entry, dtype) for entry in value]
        if all(map(operator.is_, entries, value)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value
