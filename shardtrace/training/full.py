"""Whole parameters: full state dicts, ``full_params``, and generation; and buffers, which each rank holds whole."""

from __future__ import annotations

import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from passes.compat.versions import all_gather_single
from passes.plan import Shape
from shardtrace.model.shards import Entry, broadcast
from shardtrace.model.state import ShardedState, sharded_states
from shardtrace.model.tracing import recorded
from shardtrace.ranks.consensus import RankMismatchError, compare
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import thunder
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys


def sharded_entries(model: nn.Module) -> tuple[nn.Module, list[ShardedState], dict[int, Entry]]:
    """The module itself (not jitted), the sharded states in it, and each shard's entry by the shard's id."""
    module, states = sharded_states(model)
    for state in states:
        state.reshard()
    if any(state.unsharded for state in states):
        raise RuntimeError("inside full_params the parameters are whole: use model.state_dict() there")
    for state in states:
        state.adopt()
    return module, states, {id(e.shard): e for state in states for e in state.entries}


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Any]:
    """The state dict of the unsharded model: equal, key by key, to the single-process ``state_dict()``.

    A collective: every rank of the model's group must call it. Parameters are gathered one at a time, and stay on the
    device of their shards. (With ``offload_policy`` that is host memory: one whole model for each rank that keeps it.)
    All values are copies, also those of buffers: later steps do not change them.

    Args:
        model: a sharded module, a module that contains sharded modules, or either one after ``thunder.jit``.
        rank0_only: only the first rank of the group keeps the values; the others return an empty dict.
        cpu: move each value to host memory as it is gathered, so that the device never holds more than one.
    """
    module, states, entries = sharded_entries(model)
    warn_of_differing_buffers(module, states[0].group)
    keep = not rank0_only or states[0].group.rank() == 0
    state = module.state_dict(keep_vars=True)
    whole: dict[int, torch.Tensor] = {}  # tied weights stay one tensor
    for key, value in _whole_tensors(state, entries):
        if keep and id(state[key]) not in whole:
            moved = value.cpu() if cpu else value.to(state[key].device)
            live = moved is value and id(state[key]) not in entries  # a buffer, or on a single rank
            whole[id(state[key])] = moved.clone() if live else moved
    return OrderedDict((key, whole.get(id(value), value)) for key, value in state.items()) if keep else OrderedDict()


def iter_full_params(
    model: nn.Module, *, dtype: torch.dtype | None = None, names: Literal["model", "hf"] = "model"
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and persistent buffers of the unsharded model, one at a time, by name. In memory are the one that
    the script has got last, and the next one. For copies to an inference engine such as vLLM, and exports. ::

        engine.load_weights(shardtrace.iter_full_params(model, dtype=torch.bfloat16, names="hf"))

    A collective: every rank of the model's group must go through all of them. Each is on the device that computes.
    Write into none of them: buffers, and on a single rank parameters, are those of the model.

    Args:
        model: a sharded module, a module that contains sharded modules, or either one after ``thunder.jit``.
        dtype: of floating-point parameters, which are cast before they are gathered; None: their own.
        names: "model": those of ``model.state_dict()``, where tied weights have several, which come one after the
            other. "hf": as ``save_pretrained`` of Hugging Face writes them, each parameter under its first name.

    Raises:
        ValueError: for other ``names``.
    """
    if names not in ("model", "hf"):
        raise ValueError(f'names must be "model" or "hf", not {names!r}')
    module, _, entries = sharded_entries(model)
    return _whole_tensors(module.state_dict(keep_vars=True), entries, dtype, all_names=names == "model")


def _whole_tensors(
    state: Mapping[str, Any], entries: Mapping[int, Entry], dtype: torch.dtype | None = None, *, all_names: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers the tensors of a state dict, each once."""
    keys: dict[int, list[str]] = {}  # of each tensor, which has several if it is tied
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            keys.setdefault(id(value), []).append(key)
    for number, same in keys.items():
        value = state[same[0]].detach()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        whole = entries[number].whole(value) if number in entries else value
        for key in same if all_names else same[:1]:
            yield key, whole
        del whole  # before the next one is gathered


def full_gradients(model: nn.Module, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, torch.Tensor]:
    """The whole gradients, by the names of their parameters: of the parameters' full shapes, averaged over ranks as
    those of the shards are. FSDP2's ``p.grad.full_tensor()`` for all parameters that have a gradient.

    A collective: every rank of the model's group must call it. Gradients are gathered one at a time.

    Args:
        model: a sharded module, a module that contains sharded modules, or either one after ``thunder.jit``.
        rank0_only, cpu: as for :func:`full_state_dict`.
    """
    module, states, entries = sharded_entries(model)
    group, parameters = states[0].group, dict(module.named_parameters())
    device = next((entry.device for entry in entries.values()), None)
    have = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.uint8, device=device)
    with communicating("which parameters have gradients", group):
        dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    keep = not rank0_only or group.rank() == 0
    result: dict[str, torch.Tensor] = {}
    for (name, p), has in zip(parameters.items(), have.tolist(), strict=True):
        if not has:
            continue
        mine, entry = torch.zeros_like(p) if p.grad is None else p.grad.detach(), entries.get(id(p))
        full = entry.whole(mine) if entry else mine.clone()
        if keep:
            result[name] = full.cpu() if cpu else full.to(p.device)
    return result


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True, broadcast_from: int | None = None
) -> _IncompatibleKeys:
    """Load an unsharded state dict. Each rank copies its rows into its shards; buffers are copied whole.

    Args:
        state_dict: whole values by the original names, as ``full_state_dict`` or a single process saved them.
        strict: raise if keys are missing or unexpected.
        broadcast_from: the global rank that has the state dict; others may pass an empty one. Default: all ranks have
            it.

    Returns:
        The missing and the unexpected keys, like ``nn.Module.load_state_dict``.

    Raises:
        RuntimeError: on every rank, naming the keys and shapes that do not fit; nothing has been loaded then.
    """
    module, states, entries = sharded_entries(model)
    group, options = states[0].group, states[0].options
    expected = module.state_dict(keep_vars=True)
    targets = {k: v for k, v in expected.items() if isinstance(v, torch.Tensor)}
    shapes = {k: entries[id(v)].full_shape if id(v) in entries else tuple(v.shape) for k, v in targets.items()}
    has_values = broadcast_from is None or dist.get_rank() == broadcast_from

    keys, error = _IncompatibleKeys([], []), ""
    if has_values:
        keys, problems = _compared(expected, shapes, state_dict, strict=strict)
        error = f"cannot load the state dict into {type(module).__name__}: {'; '.join(problems)}" if problems else ""
    try:
        compare(group, "a state dict to load", [], timeout=options.checks.timeout, error=error)
    except RankMismatchError as mismatch:
        raise RuntimeError(error or str(mismatch)) from None

    extra = {k: state_dict[k] for k in expected if k not in targets and k in state_dict}
    if broadcast_from is not None:
        said: list[Any] = [keys, extra]
        with communicating("the keys of a state dict", group):
            dist.broadcast_object_list(said, src=broadcast_from, group=group)
        keys, extra = said
    for key, value in extra.items():
        module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)
    with torch.no_grad():
        for key, target in targets.items():
            if key in keys.missing_keys:
                continue
            entry = entries.get(id(target))
            if broadcast_from is None:
                values = state_dict[key]
            else:
                device = entry.device if entry else target.device
                values = torch.empty(shapes[key], dtype=target.dtype, device=device)
                if has_values:
                    values.copy_(state_dict[key])
                broadcast(values, broadcast_from, group)
            target.copy_(entry.part(values) if entry else values)
    return keys


def _compared(
    expected: Mapping[str, Any], shapes: Mapping[str, Shape], found: Mapping[str, Any], *, strict: bool
) -> tuple[_IncompatibleKeys, list[str]]:
    """The missing and the unexpected keys, and everything in ``found`` that cannot be loaded."""
    keys = _IncompatibleKeys([k for k in expected if k not in found], [k for k in found if k not in expected])
    problems = []
    for key in (k for k in shapes if k in found):
        shape = getattr(found[key], "shape", None)
        if shape is None:
            problems.append(f"{key} is a {type(found[key]).__name__}, not a tensor")
        elif tuple(shape) != shapes[key]:
            problems.append(f"{key} has shape {tuple(shape)}, the model's is {shapes[key]}")
    if strict:
        problems += [f"missing key {k}" for k in keys.missing_keys]
        problems += [f"unexpected key {k}" for k in keys.unexpected_keys]
    return keys, problems


@contextmanager
def full_params(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Make the model's parameters whole on every rank inside the context, and shards again when it is left.

    A collective when entered; the device that computes then holds the whole model. The model itself may be called
    inside, without Thunder, but not the jitted one. PyTorch's name for this is ``summon_full_params``.

    Gradients of shards are set aside inside; gradients that are computed inside are dropped at the end.

    Args:
        writeback: keep changes made inside, of which each rank takes its own rows. They are not kept if an exception
            leaves the context.
    """
    _, states, entries = sharded_entries(model)
    kept = [entry.shard for entry in entries.values() if entry.home.mesh is not None]  # not in the modules inside
    versions = [p._version for p in kept]
    whole: list[tuple[Entry, Callable[[], torch.Tensor]]] = []
    done = False
    try:
        for entry in entries.values():
            whole.append((entry, entry.unshard()))
        for state in states:
            state.unsharded = True
        yield
        done = True
    finally:
        for state in states:
            state.unsharded = False
        values = [(entry, reshard()) for entry, reshard in whole]
    if done and writeback:
        if versions != [p._version for p in kept]:
            raise RuntimeError(
                "a parameter that the script has kept from outside of full_params was written inside: take it from the "
                "model again inside, where it is whole. Nothing was written back"
            )
        _write_back(values)


def _write_back(whole: list[tuple[Entry, torch.Tensor]]) -> None:
    for entry, values in whole:
        if tuple(values.shape) != entry.full_shape:
            raise RuntimeError(
                f"parameter {entry.name!r} was given shape {tuple(values.shape)} inside full_params, its shape is "
                f"{entry.full_shape}: nothing after it was written back"
            )
        entry.shard.data.copy_(entry.part(values))


# ---- buffers ----


def sync_buffers(model: nn.Module) -> None:
    """Make buffers equal on all ranks: a floating-point buffer becomes the ranks' mean, any other the first rank's.

    Each rank updates its buffers from its own part of the batch. After a step, for example, the running means and
    variances of batch normalization differ. Call this before evaluation and before saving. A collective. (PyTorch's DDP
    broadcasts the first rank's buffers before each forward.)

    Raises ValueError if the model is not sharded.
    """
    module, states = sharded_states(model)
    group = states[0].group
    if is_alone(group):
        return
    first = dist.get_process_group_ranks(group)[0]
    for buffer in module.buffers():
        if buffer.is_floating_point() and buffer.numel():
            mean = buffer.detach().double() / group.size()
            with communicating("the mean of a buffer", group):
                dist.all_reduce(mean, group=group)
            buffer.copy_(mean)
        else:
            broadcast(buffer, first, group)


def warn_of_differing_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Warn if the ranks would save different buffers. A collective."""
    if differ := _differing_buffers(module, group):
        others = " and others" if len(differ) > 1 else ""
        warnings.warn(
            f"{len(differ)} buffers differ between ranks ({differ[0]!r}{others}): each rank has its own in its state "
            "dict, and a checkpoint gets the first rank's; call shardtrace.sync_buffers(model) before",
            stacklevel=3,
        )


def _differing_buffers(module: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """The names of the buffers in ``module.state_dict()`` that are not equal on all ranks. A collective."""
    persistent = module.state_dict(keep_vars=True)
    held = {name: buffer for name, buffer in module.named_buffers() if name in persistent and buffer.numel()}
    if not held or is_alone(group):
        return []
    sums = torch.tensor([_checksum(b) for b in held.values()], device=next(iter(held.values())).device)
    everyones = sums.new_empty(group.size() * len(sums))
    with communicating("the checksums of buffers", group):
        all_gather_single(everyones, sums, group=group)
    everyones = everyones.view(group.size(), -1)
    differ = (everyones != everyones[0]).any(0).tolist()
    return [name for name, differs in zip(held, differ, strict=True) if differs]


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# ---- generation ----


class Generator:
    """Generates tokens with a sharded causal language model of Hugging Face, which stays sharded. ::

        generate = shardtrace.Generator(model)
        tokens = generate(prompts, max_new_tokens=20, eos_token_id=tokenizer.eos_token_id)

    Keys and values are kept in tensors of a fixed size, so that Thunder compiles one step for a shape of prompts and
    one for all tokens that follow. Each step gathers the parameters of the model, bucket by bucket. Where the whole
    model fits, ``with shardtrace.full_params(model): model.generate(...)`` is faster and does more.

    Args:
        model: the sharded model, whose attention sees all tokens before (no sliding window). Not jitted, or the result
            of ``thunder.jit``, whose module is taken.
        options: of ``thunder.jit``.

    Raises:
        ValueError: the model is not sharded, is not a causal language model of Hugging Face, or has a sliding window or
            no static cache (in transformers 4.51, GPT-2 and GPT-NeoX).
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model: Any
        self.model, states = sharded_states(model)
        self.state = states[0]
        self.config: Any = getattr(self.model, "config", None)
        if not hasattr(self.model, "generate") or not hasattr(self.config, "num_hidden_layers"):
            raise ValueError(
                f"{type(self.model).__name__} is no causal language model of Hugging Face: write your own loop, in "
                "which every rank calls the jitted model equally often"
            )
        window = getattr(self.config, "sliding_window", None) and getattr(self.config, "use_sliding_window", True)
        supports = getattr(self.model, "_supports_static_cache", getattr(self.model, "_can_compile_fullgraph", True))
        if window or not supports:
            what = "has a sliding window" if window else "takes no static cache"
            raise ValueError(
                f"{type(self.model).__name__} {what}: call model.generate inside shardtrace.full_params(model)"
            )
        self._cache = _cache_class()
        self._step = thunder.jit(self._forward, **options)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        pad_token_id: int = 0,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Appends the most likely tokens, one after the other. A collective: every rank must call it, each with prompts
        of its own. A rank that is done goes on with the others until all are done.

        Args:
            input_ids: prompts, (batch, length) int64. Pad shorter ones on the left.
            max_new_tokens: equal on all ranks.
            eos_token_id: ends a sequence. Its place and those after it hold it and ``pad_token_id``.
            attention_mask: (batch, length), 0 where a prompt is padded.

        Returns:
            Prompts and new tokens, (batch, length + new), where new is at most ``max_new_tokens``.
        """
        training, rows, length = self.model.training, *input_ids.shape
        device, total = input_ids.device, length + max_new_tokens
        visible = torch.ones(rows, total, dtype=torch.bool, device=device)
        if attention_mask is not None:
            visible[:, :length] = attention_mask.bool()
        keys, values = self._empty(rows, total, device)
        tokens, done = input_ids, torch.zeros(rows, dtype=torch.bool, device=device)
        slots = torch.arange(total, device=device)
        self.model.eval()
        try:
            inputs, places = input_ids, slots[:length]
            for step in range(max_new_tokens):
                mask = (slots <= places[:, None]) & visible[:, None, None, :]  # (rows, 1, inputs, total)
                positions = (visible.cumsum(-1) - 1).clamp(min=0)[:, places]
                logits, keys, values = self._step(inputs, positions, places, self._additive(mask), keys, values)
                new = torch.where(done, pad_token_id, logits.argmax(-1))
                tokens = torch.cat([tokens, new[:, None]], 1)
                done = done | (new == eos_token_id) if eos_token_id is not None else done
                if eos_token_id is not None and self._all_done(done):
                    break
                inputs, places = new[:, None], slots[length + step : length + step + 1]
        finally:
            self.model.train(training)
        return tokens

    def _forward(self, *tensors: Any) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        return _forward(self.model, self._cache, *tensors)

    def _empty(self, rows: int, total: int, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = rows, heads, total, size
        made = [torch.zeros(shape, dtype=self._dtype, device=device) for _ in range(2 * config.num_hidden_layers)]
        return made[: config.num_hidden_layers], made[config.num_hidden_layers :]

    @property
    def _dtype(self) -> torch.dtype:
        policy = self.state.options.precision
        return policy.param_dtype if policy is not None and policy.param_dtype is not None else self.model.dtype

    def _additive(self, mask: torch.Tensor) -> torch.Tensor:
        smallest = torch.finfo(self._dtype).min
        return torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill(~mask, smallest)

    def _all_done(self, done: torch.Tensor) -> bool:
        left = (~done).sum()
        if not is_alone(self.state.group):
            with communicating("the number of texts to be continued", self.state.group):
                dist.all_reduce(left, group=self.state.group)
        return not left.item()


@recorded
def _forward(
    model: Any,
    cache_class: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    mask: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    cache = cache_class(keys, values, places)
    output = model(
        input_ids=input_ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        cache_position=places,
        use_cache=True,
    )
    return output.logits[:, -1], cache.keys, cache.values


def _cache_class() -> Any:
    """A cache of transformers whose tensors are arguments and results of a step."""
    from transformers.cache_utils import Cache

    class Tensors(Cache):
        def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], places: torch.Tensor) -> None:
            self.keys, self.values, self.places = [*keys], [*values], places
            self.layers: list[Any] = []  # of transformers 4.56 and later, which have no tensors here

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, cache_kwargs: Any = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.keys[layer_idx] = torch.index_copy(self.keys[layer_idx], 2, self.places, key_states)
            self.values[layer_idx] = torch.index_copy(self.values[layer_idx], 2, self.places, value_states)
            return self.keys[layer_idx], self.values[layer_idx]

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

    return Tensors
