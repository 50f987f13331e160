"""Models without memory for their parameters, and meta-device models: one module at a time gets memory and values, then
keeps only its shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from shardtrace.ranks.failure import communicating

import torch
import torch.distributed as dist
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


InitFn = Callable[[nn.Module], None]


def has_meta(module: nn.Module, given: Collection[int] = ()) -> bool:
    """True if the module itself, not a child, owns a meta parameter or buffer, other than those whose id is ``given``:
    these get values from elsewhere."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None and t.is_meta and id(t) not in given for t in own)


def uninitializable(model: nn.Module, param_init_fn: InitFn | None, given: Collection[int] = ()) -> str | None:
    """The name of the first module on the meta device that cannot be initialized, if there is one."""
    if param_init_fn is not None:
        return None
    for name, module in model.named_modules():
        if has_meta(module, given) and not callable(getattr(module, "reset_parameters", None)):
            return f"{name or 'the model itself'} ({type(module).__name__})"
    return None


def materialized(
    module: nn.Module,
    device: torch.device,
    param_init_fn: InitFn | None,
    whole: Callable[[nn.Parameter], torch.Tensor],
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Give a module's own meta parameters and buffers memory and values. Yield each Parameter object and its values.

    ``whole`` returns the full values of a parameter that another module has initialized and sharded before (tied
    weights). As without sharding, the last module that initializes a tied parameter wins.
    """
    originals = {name: p for name, p in module._parameters.items() if p is not None}
    for name, p in originals.items():
        values = torch.empty_like(p, device=device) if p.is_meta else whole(p)
        module._parameters[name] = nn.Parameter(values, requires_grad=p.requires_grad)
    for name, b in module._buffers.items():
        if b is not None and b.is_meta:
            module._buffers[name] = torch.empty_like(b, device=device)
    try:
        with torch.no_grad():
            if param_init_fn is not None:
                param_init_fn(module)
            else:
                module.reset_parameters()  # type: ignore[operator]
        initialized = {name: module.get_parameter(name).detach() for name in originals}
    finally:
        module._parameters.update(originals)
    for name, p in originals.items():
        yield p, initialized.pop(name)


def set_data(parameter: nn.Parameter, values: torch.Tensor, name: str) -> None:
    """Give a Parameter other values, shape or device. It stays the same object, so that optimizers keep it."""
    if parameter.is_meta == values.is_meta:
        replace_data(parameter, values)
        return
    try:
        torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    except RuntimeError as error:
        raise RuntimeError(
            f"parameter {name!r} cannot leave or enter the meta device in place, because something holds a weak "
            "reference or an autograd graph of it: call fsdp() right after building the model"
        ) from error


def replace_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set ``parameter.data = values``, for values of another shape.

    An autograd graph that is still alive keeps the parameter's gradient accumulator, which expects gradients of the old
    shape. Autograd drops it when the dtype changes, but not when the shape does. Therefore the dtype changes briefly.
    """
    if values.is_floating_point() or values.is_complex():  # others have no gradient
        other = torch.float16 if values.dtype != torch.float16 else torch.float32
        parameter.data = torch.empty(0, dtype=other, device=values.device)
    parameter.data = values


def broadcast(tensor: torch.Tensor, source: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """Copy the values of global rank ``source`` into ``tensor``, unless it is None. Returns ``tensor``."""
    if source is not None and group.size() > 1 and tensor.numel():
        values = tensor.contiguous()
        with communicating(f"the values of rank {source}", group):
            dist.broadcast(values.view(-1).view(torch.uint8), src=source, group=group)  # as bytes: backends lack dtypes
        if values is not tensor:
            tensor.copy_(values)
    return tensor
