"""Every causal, masked, sequence-to-sequence and image classification model of transformers, tiny, with random weights.

A configuration is made from the class's defaults: each size that has a known name becomes tiny, and so do the sizes of
nested configurations. Lists with one item for each layer keep one layer of each kind. ``SPECIAL`` has what this does
not get right.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from case import BATCH, Case

LAYERS, WIDTH, INNER, HEADS, HEAD_DIM, EXPERTS, VOCABULARY, TOKENS, IMAGE, LABELS = 2, 64, 96, 4, 16, 4, 128, 16, 32, 5
FIRST_WORD, LAST_WORD = 8, 100  # special tokens lie outside

MAPPINGS = {
    "hf-causal": "CAUSAL_LM",
    "hf-masked": "MASKED_LM",
    "hf-seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "hf-image": "IMAGE_CLASSIFICATION",
}


def _same(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# Integers by their names.
SIZES: dict[str, int] = {
    **_same(
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers depth num_blocks num_self_attends_per_block num_transformer_layers num_global_layers "
        "encoder_num_hidden_layers decoder_num_hidden_layers",
    ),
    **_same(
        WIDTH,
        "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim d_latents d_embed emb_dim "
        "hidden_size_global encoder_hidden_size input_size out_hidden_size attention_hidden_size mamba_hidden_size "
        "adapter_hidden_size pooler_hidden_size pooler_output_size",
    ),
    **_same(
        INNER,
        "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff ffn_hidden_size intermediate_size_mlp d_inner "
        "feed_forward_size speech_encoder_intermediate_size dense_intermediate_size",
    ),
    **_same(
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size projection_dim "
        "adapter_out_dim downsample_hidden_size neck_hidden_size code_dim codebook_dim audio_vocab_size codebook_size "
        "output_dim hidden_size_per_layer_input lru_width vision_feature_dim num_mel_bins d_embed_out proj_dim",
    ),
    **_same(
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_key_heads "
        "linear_num_value_heads linear_num_heads index_n_heads num_self_attention_heads num_cross_attention_heads "
        "num_kda_heads speech_encoder_attention_heads",
    ),
    **_same(2, "num_kv_heads num_global_key_value_heads"),
    **_same(
        HEAD_DIM,
        "head_dim d_kv kv_channels dim_head v_head_dim qk_rope_head_dim qk_nope_head_dim index_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim global_head_dim mamba_head_dim "
        "mamba_d_head kv_lora_rank q_lora_rank o_lora_rank rotary_dim laurel_rank attention_head_dim "
        "swa_v_head_dim",
    ),
    **_same(EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    **_same(2, "num_experts_per_tok moe_topk num_experts_per_token moe_k moe_top_k n_group num_expert_group"),
    **_same(1, "topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace"),
    **_same(
        8, "state_size mamba_d_state ssm_state_size sliding_window sliding_window_size attention_window local_attention"
    ),
    **_same(8, "mamba_n_heads mamba_num_heads chunk_size mamba_chunk_size attention_chunk_size block_size window_size"),
    **_same(4, "index_topk time_step_rank mamba_dt_rank num_random_blocks"),
    **_same(
        64,
        "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions seq_length "
        "max_sequence_length model_max_length context_length max_2d_position_embeddings max_length",
    ),
    **_same(
        VOCABULARY,
        "vocab_size n_words vocab_size_per_layer_input src_vocab_size tgt_vocab_size entity_vocab_size "
        "decoder_vocab_size t2u_vocab_size",
    ),
    "image_size": IMAGE,
    "patch_size": 8,
}
KEY_VALUE_HEADS = {"num_key_value_heads": "num_attention_heads", "swa_num_key_value_heads": "swa_num_attention_heads"}
LISTS: dict[str, Callable[[Any], Any]] = {
    "depths": lambda values: [1 for _ in values],
    "hidden_sizes": lambda values: [16 * value // min(values) for value in values],
    "image_size": lambda values: [IMAGE for _ in values],
}

# What the class's defaults and the tables above do not get right, by the type of the model, or by family and type. A
# name that begins with "!" is needed to make the defaults themselves.
_TINY_HEADS = {"head_dim": HEAD_DIM}
_T5 = {"decoder_start_token_id": 0}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "intermediate_size": INNER,
}
_LEVIT = {"image_size": 64, "patch_size": 16, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4]}
_SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
_SMALL_PERCEIVER = {"num_self_attention_heads": 2, "num_cross_attention_heads": 1}
SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "bit": {"hidden_sizes": [16, 32, 48, 64], "embedding_size": 16, "num_groups": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cvt": {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH},
    },
    "dots3_note_text": {
        "num_key_value_heads": HEADS,
        "q_lora_rank": 16,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": HEAD_DIM,
    },
    "donut-swin": _SWIN,
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "encoder-decoder": {
        "!encoder": {"model_type": "bert"},
        "!decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
    },
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": HEADS, "vocab_size": VOCABULARY},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": HEAD_DIM},
    "gemma3n": {"text_config": _SHARED_KV, "vision_config": {"architecture": "mobilenetv3_small_050"}},
    "gemma3n_text": _SHARED_KV,
    "gemma4": {"text_config": {"global_head_dim": 32}},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified": {"text_config": {"global_head_dim": 32}},
    "gemma4_unified_text": {"global_head_dim": 32},
    "hgnet_v2": {
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 16, 32, 32],
        "stage_mid_channels": [8, 8, 16, 16],
        "stage_out_channels": [16, 32, 32, 64],
        "stage_numb_of_layers": [2, 2, 2, 2],
        "hidden_sizes": [16, 32, 32, 64],
        "embedding_size": 16,
    },
    "hunyuan_v1_dense": _TINY_HEADS,
    "hunyuan_v1_moe": _TINY_HEADS,
    "levit": _LEVIT,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": {"num_key_value_heads": 2},
    "longt5": _T5,
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM},
    "ministral": _TINY_HEADS,
    "mobilevit": {"hidden_sizes": [48, 64, 80], "image_size": 64, "neck_hidden_sizes": [16, 16, 24, 32, 48, 64, 128]},
    "mobilevitv2": {"image_size": 64},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "nemo_speechlm": {"head_config": {"audio_hidden_size": WIDTH}},
    "nemotron": {**_TINY_HEADS, "num_key_value_heads": 2},
    "perceiver": _SMALL_PERCEIVER,
    "hf-masked/perceiver": {"max_position_embeddings": TOKENS},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [4, 4],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
    },
    "hf-causal/reformer": {"is_decoder": True},
    "hf-masked/reformer": {"is_decoder": False},
    "roc_bert": {"shape_vocab_size": VOCABULARY, "pronunciation_vocab_size": VOCABULARY, "shape_embed_dim": 32},
    "shieldgemma2": {"yes_token_index": 10, "no_token_index": 11},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "switch_transformers": _T5,
    "t5": _T5,
    "textnet": {"stem_out_channels": 16, "hidden_sizes": [16, 16, 32, 32, 64]},
    "timm_wrapper": {"architecture": "resnet10t"},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {"num_filters": 2},
        "semantic_tokenizer_encoder_config": {"num_filters": 2},
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "num_mem_blocks": 1},
}
# BatchNorm needs more than a few values for each channel: with two, gradients explode.
IMAGE_SIZES = {
    **{"levit": 64, "mobilevit": 64, "mobilevitv2": 64},
    **dict.fromkeys(["cvt", "efficientnet", "hgnet_v2", "mobilenet_v1", "mobilenet_v2", "pp_lcnet", "regnet"], 96),
    **dict.fromkeys(["resnet", "swiftformer", "textnet", "timm_wrapper", "bit"], 96),
}


def _words() -> torch.Tensor:
    return torch.randint(FIRST_WORD, LAST_WORD, (BATCH, TOKENS))


def _patches() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(BATCH, 16, 3 * 8 * 8),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.int32),
        "spatial_shapes": torch.full((BATCH, 2), 4),
    }


# Inputs beside or instead of the usual ones; None leaves one out.
EXTRA_INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "hf-image/imagegpt": lambda: {"input_ids": _words(), "pixel_values": None},
    "hf-image/perceiver": lambda: {"input_ids": None},
    "hf-image/shieldgemma2": lambda: {"input_ids": _words(), "pixel_values": None, "labels": None},
    "hf-image/siglip2": _patches,
    "musicgen": lambda: {"labels": _words()[..., None]},
    "musicgen_melody": lambda: {"labels": _words()[..., None]},
    "git": lambda: {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE)},
}


def names(family: str) -> list[str]:
    """The types of the models of a family."""
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, f"MODEL_FOR_{MAPPINGS[family]}_MAPPING_NAMES")
    return [
        kind if number == 0 else f"{kind}:{number + 1}"
        for kind, classes in mapping.items()
        for number in range(1 if isinstance(classes, str) else len(classes))
    ]


def build(family: str, name: str) -> Case:
    """The model of a type, such as ``llama``, or ``perceiver:2`` for the second class of the type."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind, _, number = name.partition(":")
    classes = getattr(modeling_auto, f"MODEL_FOR_{MAPPINGS[family]}_MAPPING_NAMES")[kind]
    class_name = classes if isinstance(classes, str) else classes[int(number or 1) - 1]
    model_class = getattr(transformers, class_name)
    config = configuration(family, kind)
    if not isinstance(config, model_class.config_class):  # a model of texts in a type that has images, too
        nested = (value for value in vars(config).values() if isinstance(value, model_class.config_class))
        config = next(nested, config)
    model = model_class(config).float()
    return Case(model, kwargs=inputs(family, kind, model))


def configuration(family: str, kind: str) -> Any:
    """The tiny configuration of a type of models."""
    from transformers import CONFIG_MAPPING

    special = {**SPECIAL.get(kind, {}), **SPECIAL.get(f"{family}/{kind}", {})}
    config = CONFIG_MAPPING[kind](**tiny(CONFIG_MAPPING[kind], special))
    config.num_labels = LABELS
    if family == "hf-causal" and config.model_type not in ("reformer",):
        config.is_decoder = True
    return config


def tiny(config_class: Any, special: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make a configuration tiny. ``special`` has the values that are known, nested ones as dicts."""
    from transformers import PreTrainedConfig

    start = {key: value for key, value in special.items() if key.startswith("!")}  # needed to make the defaults
    special = {key: value for key, value in special.items() if not key.startswith("!")}
    default = config_class(**{key[1:]: value for key, value in start.items()})
    own = {field.name for field in dataclasses.fields(config_class)} | set(vars(default))
    values: dict[str, Any] = {key[1:]: value for key, value in start.items()}
    for name in sorted(own):
        value = _default(default, name)
        if name in special and not isinstance(value, PreTrainedConfig):
            continue
        if isinstance(value, PreTrainedConfig):
            nested = special.get(name, {})
            if value.model_type:
                known = SPECIAL.get(value.model_type, {})
                values[name] = {"model_type": value.model_type, **tiny(type(value), {**known, **nested})}
            else:
                values[name] = nested
        elif isinstance(value, bool):
            if name == "use_cache":
                values[name] = False
        elif "drop" in name and isinstance(value, float):
            values[name] = 0.0
        elif "drop" in name and isinstance(value, list | tuple):
            values[name] = [0.0 for _ in value]
        elif name in KEY_VALUE_HEADS and isinstance(value, int):
            values[name] = HEADS if value == _default(default, KEY_VALUE_HEADS[name]) else 2
        elif name in ("initializer_range", "init_std"):
            values[name] = 0.15
        elif isinstance(value, int) and name in SIZES:
            values[name] = min(value, SIZES[name])
        elif isinstance(value, int) and name.endswith(("token_id", "token_index")) and value >= VOCABULARY:
            values[name] = LAST_WORD + sum(map(ord, name)) % (VOCABULARY - LAST_WORD)
        elif isinstance(value, list | tuple) and name in LISTS:
            values[name] = type(value)(LISTS[name](value))
    values.update({key: value for key, value in special.items() if key not in values or not isinstance(value, dict)})
    return {**values, **_chosen_layers(default, values, special)}


def _default(config: Any, name: str) -> Any:
    """A value of a configuration, or the class's if it differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # AmbiguousGlobalPerLayerAttributeError
        return next(field.default for field in dataclasses.fields(config) if field.name == name)


def _chosen_layers(default: Any, values: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """The lists that have an item for each layer, cut to one layer of each kind, and the number of layers."""
    count = next(
        (n for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if isinstance(values.get(n), int)), None
    )
    if count is None or count in special:
        return {}
    layers = _default(default, count)
    lists = {
        name: list(value)
        for name, value in vars(default).items()
        if isinstance(value, list | tuple) and len(value) == layers > 2 and name not in special
    }
    seen: set[tuple[str, str]] = set()
    chosen: list[int] = []
    for layer in range(layers):
        kinds = {(name, repr(items[layer])) for name, items in lists.items()}
        if kinds - seen and len({key for key in seen if key[0] == "layer_types"}) < 6:
            chosen.append(layer)
            seen |= kinds
    if len(chosen) > 6:  # each layer has values of its own
        chosen = chosen[:LAYERS]
    while len(chosen) < min(LAYERS, layers):
        chosen.append(next(layer for layer in range(layers) if layer not in chosen))
    chosen.sort()
    return {**{name: [items[layer] for layer in chosen] for name, items in lists.items()}, count: len(chosen)}


def inputs(family: str, kind: str, model: Any) -> dict[str, Any]:
    """One batch. Half of it is the input of one of two ranks."""
    accepted = inspect.signature(model.forward).parameters
    if family == "hf-image":
        size = IMAGE_SIZES.get(kind, IMAGE)
        made = {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, LABELS, (BATCH,))}
    else:
        words = torch.randint(FIRST_WORD, LAST_WORD, (BATCH, TOKENS))
        made = {"input_ids": words, "labels": words.flip(1) if family == "hf-seq2seq" else words.clone()}
        if family == "hf-seq2seq" and not model.config.is_encoder_decoder:
            made["labels"] = words.clone()
    made = {name: value for name, value in made.items() if name in accepted or name == "input_ids"}
    for key in (kind, f"{family}/{kind}"):
        if key in EXTRA_INPUTS:
            made.update(EXTRA_INPUTS[key]())
    return {name: value for name, value in made.items() if value is not None}
