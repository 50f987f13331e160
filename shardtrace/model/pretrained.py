"""``save_pretrained`` of Hugging Face's libraries, which writes the result of ``state_dict()``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from shardtrace.model.state import ShardedState, part_of, states_in

from torch import nn


def whole_only(save: Callable[..., Any]) -> Callable[..., Any]:
    """A ``save_pretrained`` that raises RuntimeError if it would write this rank's shards."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict", signature.bind(self, *args, **kwargs).arguments.get("state_dict"))
        if given is None and any(e.home.is_spread for s in _states(self) if not s.unsharded for e in s.entries):
            takes_values = "state_dict" in signature.parameters
            whole = "pass state_dict=shardtrace.full_state_dict(model), or " if takes_values else ""
            raise RuntimeError(
                f"save_pretrained would write this rank's shards of {type(self).__name__}: {whole}call it inside "
                "shardtrace.full_params(model), on one rank"
            )
        return save(self, *args, **kwargs)

    return save_pretrained


def _states(module: nn.Module) -> list[ShardedState]:
    """The states of the module, of its submodules, and of the sharded module that it is part of."""
    outer = part_of(module)
    return states_in(module) if outer is None else [*states_in(module), outer]
