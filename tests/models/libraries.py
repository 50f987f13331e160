"""Models of libraries other than transformers, tiny, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from case import BATCH, Case
from torch import nn

FAMILIES = ["timm", "diffusers", "litgpt", "vit-pytorch", "x-transformers", "mambapy", "denoising-diffusion"]
WIDTH, TOKENS, VOCABULARY, CLASSES = 32, 16, 96, 5


def names(family: str) -> list[str]:
    """The models of a family."""
    return list(_makers(family))


def build(family: str, name: str) -> Case:
    """A model of a family, with its batch."""
    return _makers(family)[name]()


def _makers(family: str) -> dict[str, Callable[[], Case]]:
    makers: dict[str, Callable[[], dict[str, Callable[[], Case]]]] = {
        "timm": timm_models,
        "diffusers": diffusers_models,
        "litgpt": litgpt_models,
        "vit-pytorch": vit_pytorch_models,
        "x-transformers": x_transformers_models,
        "mambapy": mambapy_models,
        "denoising-diffusion": denoising_diffusion_models,
    }
    return makers[family]()


def _images(model: nn.Module, size: int = 32, channels: int = 3, **more: Any) -> Case:
    return Case(model, (torch.randn(BATCH, channels, size, size),), more)


def _words(model: nn.Module, **more: Any) -> Case:
    return Case(model, (torch.randint(0, VOCABULARY, (BATCH, TOKENS)),), more)


# ---------------------------------------------------------------------------------------------------------------------
# timm

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_SWIN = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}

# The size of the images and the options that make a model small.
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, _VIT),
    "vit_base_patch16_siglip_224": (32, _VIT),
    "vit_relpos_small_patch16_224": (32, _VIT),
    "deit_tiny_distilled_patch16_224": (32, _VIT),
    "deit3_small_patch16_224": (32, _VIT),
    "cait_xxs24_224": (32, _VIT),
    "beit_base_patch16_224": (32, _VIT),
    "eva02_tiny_patch14_224": (32, _VIT),
    "xcit_nano_12_p8_224": (32, {"embed_dim": 32, "depth": 2, "num_heads": 4}),
    "pit_ti_224": (64, {"img_size": 64, "base_dims": [8, 8, 8], "depth": [1, 1, 1]}),
    "levit_128s": (64, {"img_size": 64, "embed_dim": (16, 32, 48), "num_heads": (2, 3, 4), "depth": (1, 1, 1)}),
    "twins_svt_small": (
        64,
        {"img_size": 64, "embed_dims": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4]},
    ),
    "convit_tiny": (
        32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "local_up_to_layer": 2},
    ),
    "pvt_v2_b0": (64, {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64)}),
    "swin_tiny_patch4_window7_224": (32, _SWIN),
    "swinv2_tiny_window8_256": (32, _SWIN),
    "swinv2_cr_tiny_224": (32, _SWIN),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1), "stem_width": 8}),
    "maxvit_tiny_tf_224": (64, {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1), "stem_width": 8}),
    "coatnet_pico_rw_224": (
        64,
        {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1), "block_type": ("C", "T"), "stem_width": (32, 32)},
    ),
    "davit_tiny": (
        64,
        {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "num_groups": None},
    ),
    "hiera_tiny_224": (64, {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1), "q_pool": 1}),
    "tiny_vit_5m_224": (64, {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}),
    "edgenext_xx_small": (64, {"dims": (8, 16, 16, 32), "depths": (2, 2, 2, 2)}),
    "efficientformerv2_s0": (
        64,
        {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "mlp_ratios": 2, "img_size": 64},
    ),
    "efficientvit_b0": (64, {}),
    "fastvit_t8": (64, {"embed_dims": (8, 16, 16, 32), "layers": (1, 1, 1, 1)}),
    "sequencer2d_s": (
        32,
        {
            "img_size": 32,
            "layers": (1, 1),
            "embed_dims": (16, 32),
            "hidden_sizes": (8, 8),
            "patch_sizes": (4, 2),
            "mlp_ratios": (2, 2),
        },
    ),
    "convnext_atto": (32, {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}),
    "convnextv2_atto": (32, {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}),
    "inception_next_tiny": (64, {"depths": (1, 1, 1, 1), "dims": (32, 32, 32, 64)}),
    "mambaout_femto": (64, {"depths": (1, 1, 1, 1), "dims": (32, 32, 32, 64)}),
    "resnet10t": (64, {}),
    "resnet26d": (64, {"layers": (1, 1, 1, 1)}),
    "resnext26ts": (64, {}),
    "seresnet50": (64, {"layers": (1, 1, 1, 1)}),
    "ecaresnet26t": (64, {"layers": (1, 1, 1, 1)}),
    "skresnet18": (64, {"layers": (1, 1, 1, 1)}),
    "resnest14d": (64, {"layers": (1, 1, 1, 1)}),
    "res2net50_26w_4s": (64, {"layers": (1, 1, 1, 1)}),
    "resnetv2_50": (64, {"layers": (1, 1, 1, 1)}),
    "nf_resnet26": (64, {}),
    "regnetx_002": (64, {}),
    "regnety_002": (64, {}),
    "rexnet_100": (64, {}),
    "densenet121": (64, {"block_config": (2, 2, 2, 2), "growth_rate": 8}),
    "dla34": (64, {}),
    "dpn48b": (64, {}),
    "vovnet39a": (64, {}),
    "xception41": (64, {}),
    "inception_v3": (96, {}),
    "hrnet_w18_small": (64, {}),
    "ghostnet_050": (64, {}),
    "repvgg_a0": (64, {}),
    "cspresnet50": (64, {}),
    "efficientnet_b0": (64, {}),
    "efficientnetv2_rw_t": (64, {}),
    "tf_efficientnet_lite0": (64, {}),
    "mnasnet_small": (64, {}),
    "mobilenetv2_035": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small": (64, {}),
    "lcnet_035": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "eca_botnext26ts_256": (64, {"img_size": 64}),
    "lambda_resnet26t": (64, {"img_size": 64}),
    "visformer_tiny": (64, {"img_size": 64}),
    "starnet_s1": (64, {}),
    "repvit_m0_9": (64, {}),
}

# Models whose functions fix the sizes: the class is called instead.
TIMM_CLASSES: dict[str, tuple[int, dict[str, Any]]] = {
    "mlp_mixer.MlpMixer": (32, {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}),
    "metaformer.MetaFormer": (64, {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}),
    "convmixer.ConvMixer": (32, {"dim": 16, "depth": 2, "patch_size": 4}),
    "focalnet.FocalNet": (32, {"depths": (1, 1, 1, 1), "embed_dim": 16}),
    "nest.Nest": (32, {"img_size": 32, "embed_dims": (8, 16, 32), "depths": (1, 1, 1), "num_heads": (1, 2, 2)}),
}


def timm_models() -> dict[str, Callable[[], Case]]:
    from importlib import import_module

    import timm

    def maker(name: str) -> Callable[[], Case]:
        size, options = TIMM[name]
        return lambda: _images(timm.create_model(name, pretrained=False, num_classes=CLASSES, **options), size)

    def class_maker(name: str) -> Callable[[], Case]:
        size, options = TIMM_CLASSES[name]
        file, class_name = name.split(".")
        return lambda: _images(
            getattr(import_module(f"timm.models.{file}"), class_name)(num_classes=CLASSES, **options), size
        )

    return {**{name: maker(name) for name in TIMM}, **{name: class_maker(name) for name in TIMM_CLASSES}}


# ---------------------------------------------------------------------------------------------------------------------
# diffusers


def diffusers_models() -> dict[str, Callable[[], Case]]:
    import diffusers

    blocks = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    steps = torch.tensor([3, 141, 592, 653])
    text = torch.randn(BATCH, 6, WIDTH)
    pooled = torch.randn(BATCH, WIDTH)
    latents = torch.randn(BATCH, 4, 8, 8)

    def unet(down: str, up: str) -> Case:
        model = diffusers.UNet2DModel(
            sample_size=16,
            down_block_types=("DownBlock2D", down),
            up_block_types=(up, "UpBlock2D"),
            attention_head_dim=4,
            **blocks,
        )
        return Case(model, (torch.randn(BATCH, 3, 16, 16), steps))

    def unet_condition() -> Case:
        model = diffusers.UNet2DConditionModel(
            sample_size=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=WIDTH,
            attention_head_dim=2,
            **blocks,
        )
        return Case(model, (latents, steps, text))

    def controlnet() -> Case:
        model = diffusers.ControlNetModel(
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            cross_attention_dim=WIDTH,
            attention_head_dim=2,
            conditioning_embedding_out_channels=(8, 16),
            **blocks,
        )
        return Case(model, (latents, steps, text, torch.randn(BATCH, 3, 16, 16)))

    def autoencoder() -> Case:
        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        return Case(diffusers.AutoencoderKL(sample_size=16, **kinds, **blocks), (torch.randn(BATCH, 3, 16, 16),))

    def vq() -> Case:
        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        return Case(diffusers.VQModel(num_vq_embeddings=16, **kinds, **blocks), (torch.randn(BATCH, 3, 16, 16),))

    def tiny_autoencoder() -> Case:
        model = diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        )
        return Case(model, (torch.randn(BATCH, 3, 16, 16),))

    def dit() -> Case:
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            num_layers=2,
            sample_size=8,
            norm_num_groups=4,
            num_embeds_ada_norm=10,
        )
        return Case(model, (latents, steps, torch.randint(0, 10, (BATCH,))))

    def pixart() -> Case:
        model = diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            caption_channels=WIDTH,
            cross_attention_dim=WIDTH,
            norm_num_groups=4,
        )
        return Case(model, (latents, text, steps), {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}})

    def sd3() -> Case:
        model = diffusers.SD3Transformer2DModel(
            sample_size=8,
            in_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=WIDTH,
            out_channels=4,
        )
        return Case(model, (latents, text, pooled, steps))

    def flux() -> Case:
        model = diffusers.FluxTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
        )
        ids = {"img_ids": torch.randn(16, 3), "txt_ids": torch.randn(6, 3)}
        return Case(model, (torch.randn(BATCH, 16, 4), text, pooled, steps / 1000), ids)

    def wan() -> Case:
        model = diffusers.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            text_dim=WIDTH,
            freq_dim=16,
            ffn_dim=48,
            num_layers=2,
            rope_max_seq_len=32,
        )
        return Case(model, (torch.randn(BATCH, 4, 2, 8, 8), steps, text))

    def sana() -> Case:
        model = diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=WIDTH,
            caption_channels=WIDTH,
            sample_size=8,
        )
        return Case(model, (latents, text, steps))

    def unet1d() -> Case:
        model = diffusers.UNet1DModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            extra_in_channels=64,
            block_out_channels=(32, 32),
            down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
            up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
            mid_block_type="UNetMidBlock1D",
        )
        return Case(model, (torch.randn(BATCH, 4, 64), steps))

    return {
        "unet2d": lambda: unet("DownBlock2D", "UpBlock2D"),
        "unet2d_attention": lambda: unet("AttnDownBlock2D", "AttnUpBlock2D"),
        "unet2d_condition": unet_condition,
        "controlnet": controlnet,
        "autoencoder_kl": autoencoder,
        "autoencoder_tiny": tiny_autoencoder,
        "vq": vq,
        "dit": dit,
        "pixart": pixart,
        "sd3": sd3,
        "flux": flux,
        "wan": wan,
        "sana": sana,
        "unet1d": unet1d,
    }


# ---------------------------------------------------------------------------------------------------------------------
# litgpt

_SMALL = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "head_size": 16,
    "block_size": 32,
    "padded_vocab_size": VOCABULARY,
    "intermediate_size": 96,
}
LITGPT: dict[str, dict[str, Any]] = {
    "pythia-14m": {"n_query_groups": 4},
    "Llama-3.2-1B": {"n_query_groups": 2},
    "Llama-2-7b-hf": {"n_query_groups": 4},
    "Mistral-7B-v0.3": {"n_query_groups": 2},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "n_expert": 4},
    "Gemma-2b": {"n_query_groups": 1},
    "Gemma-2-2b": {"n_query_groups": 2, "sliding_window_size": 8},
    "Gemma-3-1b-it": {
        "n_query_groups": 1,
        "sliding_window_size": 8,
        "sliding_window_indices": [1, 0],
        "rope_indices": [1, 0],
    },
    "Qwen2.5-0.5B": {"n_query_groups": 2},
    "Qwen3-0.6B": {"n_query_groups": 2},
    "Qwen3-30B-A3B": {"n_query_groups": 2, "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32},
    "phi-2": {"n_query_groups": 4},
    "Phi-3-mini-4k-instruct": {"n_query_groups": 4},
    "falcon-7b": {"n_query_groups": 1},
    "stablelm-3b-4e1t": {"n_query_groups": 4},
    "OLMo-1B-hf": {"n_query_groups": 4},
    "OLMo-2-1124-7B": {"n_query_groups": 4},
    "SmolLM2-135M": {"n_query_groups": 2},
}


def litgpt_models() -> dict[str, Callable[[], Case]]:
    def maker(name: str, package: str, **more: Any) -> Callable[[], Case]:
        def make() -> Case:
            from importlib import import_module

            module = import_module(package)
            return _words(module.GPT(module.Config.from_name(name, **{**_SMALL, **LITGPT[name], **more})))

        return make

    lora = {"lora_r": 4, "lora_alpha": 8, "lora_query": True, "lora_value": True}
    return {
        **{name: maker(name, "litgpt.model") for name in LITGPT},
        "lora:pythia-14m": maker("pythia-14m", "litgpt.lora", **lora),
        "lora:Llama-3.2-1B": maker("Llama-3.2-1B", "litgpt.lora", **lora),
        "adapter:Llama-3.2-1B": maker("Llama-3.2-1B", "litgpt.adapter", adapter_start_layer=0),
        "adapter_v2:pythia-14m": maker("pythia-14m", "litgpt.adapter_v2", adapter_start_layer=0),
    }


# ---------------------------------------------------------------------------------------------------------------------
# vit-pytorch, x-transformers, mambapy, denoising-diffusion-pytorch


def vit_pytorch_models() -> dict[str, Callable[[], Case]]:
    from importlib import import_module

    usual = {
        "image_size": 32,
        "patch_size": 8,
        "num_classes": CLASSES,
        "dim": 32,
        "depth": 2,
        "heads": 4,
        "mlp_dim": 48,
    }
    simple = ("simple_vit", "SimpleViT")
    hierarchical = {"num_classes": CLASSES, "dim": 16, "dim_head": 8}
    models: dict[str, tuple[str, str, dict[str, Any]]] = {
        "vit": ("vit", "ViT", usual),
        "simple_vit": (*simple, usual),
        "deepvit": ("deepvit", "DeepViT", usual),
        "cait": ("cait", "CaiT", {**usual, "cls_depth": 1}),
        "vit_for_small_dataset": ("vit_for_small_dataset", "ViT", usual),
        "parallel_vit": ("parallel_vit", "ViT", usual),
        "rvt": ("rvt", "RvT", usual),
        "learnable_memory_vit": ("learnable_memory_vit", "ViT", usual),
        "normalized_vit": ("normalized_vit", "nViT", usual),
        "vit_with_patch_merger": ("vit_with_patch_merger", "ViT", {**usual, "patch_merge_layer": 0, "patch_merge_num_tokens": 4}),
        "simple_vit_with_qk_norm": ("simple_vit_with_qk_norm", "SimpleViT", usual),
        "simple_vit_with_register_tokens": ("simple_vit_with_register_tokens", "SimpleViT", usual),
        "simple_vit_with_fft": ("simple_vit_with_fft", "SimpleViT", {**usual, "freq_patch_size": 8}),
        "simple_vit_with_value_residual": ("simple_vit_with_value_residual", "SimpleViT", usual),
        "simple_vit_with_hyper_connections": ("simple_vit_with_hyper_connections", "SimpleViT", {**usual, "num_residual_streams": 2}),
        "jumbo_vit": ("jumbo_vit", "JumboViT", {**usual, "num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 2}),
        "vit_with_decorr": ("vit_with_decorr", "ViT", usual),
        "look_vit": ("look_vit", "LookViT", {k: v for k, v in usual.items() if k != "mlp_dim"} | {"highres_patch_size": 4, "mlp_factor": 2}),
        "xcit": ("xcit", "XCiT", {**usual, "cls_depth": 1}),
        "cct": ("cct", "CCT", {"img_size": 32, "embedding_dim": 32, "num_layers": 2, "num_heads": 4, "num_classes": CLASSES, "mlp_ratio": 2, "n_conv_layers": 1}),
        "pit": ("pit", "PiT", {**usual, "depth": (1, 1), "heads": 2}),
        "cvt": ("cvt", "CvT", {"num_classes": CLASSES, **{f"s{n}_emb_dim": 16 for n in (1, 2, 3)}, **{f"s{n}_depth": 1 for n in (1, 2, 3)}, **{f"s{n}_heads": 2 for n in (1, 2, 3)}}),
        "max_vit": ("max_vit", "MaxViT", {**hierarchical, "dim_conv_stem": 8, "depth": (1, 1), "window_size": 4}),
        "nest": ("nest", "NesT", {"image_size": 32, "patch_size": 4, "num_classes": CLASSES, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1)}),
        "mobile_vit": ("mobile_vit", "MobileViT", {"image_size": (64, 64), "dims": [16, 24, 32], "channels": [8, 8, 12, 12, 16, 16, 24, 24, 32, 32, 48], "num_classes": CLASSES}),
        "levit": ("levit", "LeViT", {"image_size": 64, "num_classes": CLASSES, "stages": 2, "dim": (16, 32), "depth": 1, "heads": (2, 2), "mlp_mult": 2}),
        "t2t": ("t2t", "T2TViT", {"image_size": 32, "num_classes": CLASSES, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48, "t2t_layers": ((3, 2), (3, 2))}),
        "regionvit": ("regionvit", "RegionViT", {"num_classes": CLASSES, "dim": (8, 8, 16, 16), "depth": (1, 1, 1, 1), "window_size": 2}),
    }  # fmt: skip
    sizes = {"mobile_vit": 64, "levit": 64, "cvt": 64, "regionvit": 64}

    def maker(name: str) -> Callable[[], Case]:
        file, class_name, options = models[name]
        return lambda: _images(
            getattr(import_module(f"vit_pytorch.{file}"), class_name)(**options), sizes.get(name, 32)
        )

    return {name: maker(name) for name in models}


def x_transformers_models() -> dict[str, Callable[[], Case]]:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "rotary": {"rotary_pos_emb": True},
        "rotary_xpos": {"rotary_xpos": True},
        "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
        "t5_bias": {"rel_pos_bias": True},
        "flash": {"attn_flash": True},
        "glu": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True},
        "rmsnorm": {"use_rmsnorm": True},
        "simple_rmsnorm": {"use_simple_rmsnorm": True},
        "scalenorm": {"use_scalenorm": True},
        "qk_norm": {"attn_qk_norm": True, "attn_qk_norm_groups": 2},
        "one_kv_head": {"attn_one_kv_head": True},
        "kv_heads": {"attn_kv_heads": 2},
        "sandwich": {"sandwich_norm": True},
        "macaron": {"macaron": True},
        "gate_residual": {"gate_residual": True},
        "shift_tokens": {"shift_tokens": 1},
        "memory_kv": {"attn_num_mem_kv": 4},
        "relu_squared": {"ff_relu_squared": True},
        "hyper_connections": {"num_residual_streams": 2},
        "polar": {"polar_pos_emb": True},
        "sparse_topk": {"attn_sparse_topk": 4},
        "on_attention": {"attn_on_attn": True},
    }

    def decoder(name: str) -> Case:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=WIDTH, depth=2, heads=4, attn_dim_head=8, **options[name])
        return _words(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers))

    def encoder() -> Case:
        from x_transformers import Encoder, TransformerWrapper

        model = TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=32, attn_layers=Encoder(dim=WIDTH, depth=2, heads=4, attn_dim_head=8)
        )
        return _words(model, mask=torch.arange(TOKENS)[None] < torch.tensor([[16], [9], [12], [16]]))

    def vision() -> Case:
        from x_transformers import Encoder, ViTransformerWrapper

        layers = Encoder(dim=WIDTH, depth=2, heads=4, attn_dim_head=8)
        return _images(ViTransformerWrapper(image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=layers))

    def translation() -> Case:
        from x_transformers import XTransformer

        sides = {
            f"{side}_{name}": value
            for side in ("enc", "dec")
            for name, value in (("num_tokens", VOCABULARY), ("depth", 1), ("heads", 4), ("max_seq_len", 32))
        }
        words = torch.randint(1, VOCABULARY, (2, BATCH, TOKENS))
        return Case(XTransformer(dim=WIDTH, tie_token_emb=True, **sides), (words[0], words[1]))

    def wrapped() -> Case:
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

        layers = Decoder(dim=WIDTH, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True)
        return _words(
            AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers))
        )

    return {
        **{name: (lambda name=name: decoder(name)) for name in options},
        "encoder_mask": encoder,
        "vision": vision,
        "translation": translation,
        "autoregressive": wrapped,
    }


def mambapy_models() -> dict[str, Callable[[], Case]]:
    def mamba(pscan: bool) -> Case:
        from mambapy.mamba import Mamba, MambaConfig

        return Case(
            Mamba(MambaConfig(d_model=WIDTH, n_layers=2, d_state=8, pscan=pscan)), (torch.randn(BATCH, TOKENS, WIDTH),)
        )

    def vision() -> Case:
        from mambapy.vim import MambaConfig, VMamba

        return Case(
            VMamba(MambaConfig(d_model=WIDTH, n_layers=2, d_state=8, pscan=False, bidirectional=True)),
            (torch.randn(BATCH, TOKENS, WIDTH),),
        )

    return {"mamba": lambda: mamba(False), "mamba_pscan": lambda: mamba(True), "vim": vision}


def denoising_diffusion_models() -> dict[str, Callable[[], Case]]:
    steps = torch.tensor([3, 141, 592, 653])

    def unet(**options: Any) -> Case:
        from denoising_diffusion_pytorch import Unet

        return Case(
            Unet(dim=8, dim_mults=(1, 2), full_attn=(False, True), **options), (torch.randn(BATCH, 3, 16, 16), steps)
        )

    def unet1d() -> Case:
        from denoising_diffusion_pytorch import Unet1D

        return Case(Unet1D(dim=8, dim_mults=(1, 2), channels=3), (torch.randn(BATCH, 3, 16), steps))

    def diffusion() -> Case:
        from denoising_diffusion_pytorch import GaussianDiffusion, Unet

        return Case(
            GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2)), image_size=16, timesteps=10),
            (torch.rand(BATCH, 3, 16, 16),),
        )

    def karras() -> Case:
        from denoising_diffusion_pytorch import KarrasUnet

        model = KarrasUnet(
            image_size=16,
            dim=8,
            dim_max=16,
            num_downsamples=1,
            num_blocks_per_stage=1,
            attn_res=(8,),
            attn_dim_head=4,
            fourier_dim=8,
        )
        return Case(model, (torch.randn(BATCH, 4, 16, 16), steps / 1000))

    return {
        "unet": unet,
        "unet_self_condition": lambda: unet(self_condition=True),
        "unet_learned_sinusoids": lambda: unet(learned_sinusoidal_cond=True),
        "unet1d": unet1d,
        "gaussian_diffusion": diffusion,
        "karras_unet": karras,
    }
