"""Models without memory for their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules that are built inside have their parameters on the meta device, without memory or values. Buffers are
    real, because many are not in a state dict, such as the frequencies of rotary embeddings. ::

        with shardtrace.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        shardtrace.fsdp(model, init_policy=shardtrace.InitPolicy(weights=folder))

    A layer's parameter has memory only until the layer registers it. ``torch.device("meta")`` puts buffers on the meta
    device as well. Accelerate has a function of this name.
    """
    empty: WeakIdKeyDictionary = WeakIdKeyDictionary()  # one parameter in two places stays one

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None  # unchanged
        if parameter not in empty:
            meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            meta.__dict__.update(parameter.__dict__)
            empty[parameter] = meta
        return empty[parameter]

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
