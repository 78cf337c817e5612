"""Image transformers that keep text and image as two streams, or join them half-way."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import torch

from zoo.base import Made, entry, grid, half, made, middle, normal, ones

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
TWO_LISTS = {**HEADS, "num_layers": 2, "num_single_layers": 2}
FLUX = {
    **TWO_LISTS,
    "patch_size": 1,
    "in_channels": 4,
    "joint_attention_dim": 8,
    "axes_dims_rope": (2, 2, 4),
}


def flux_inputs(seed: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 1, 16, 4),
        "encoder_hidden_states": normal(seed + 1, 1, 3, 8),
        "timestep": half(),
        "img_ids": grid(4),
        "txt_ids": torch.zeros(3, 3),
    }


@entry("FluxTransformer2DModel")
def flux() -> Made:
    model = diffusers.FluxTransformer2DModel(**FLUX, pooled_projection_dim=8)
    return made(model, lambda s: {**flux_inputs(s), "pooled_projections": normal(s + 2, 1, 8)})


@entry("ChromaTransformer2DModel")
def chroma() -> Made:
    approximator = {f"approximator_{k}": v for k, v in (("num_channels", 8), ("hidden_dim", 8))}
    return made(
        diffusers.ChromaTransformer2DModel(**FLUX, **approximator, approximator_layers=1),
        flux_inputs,
    )


@entry("OvisImageTransformer2DModel")
def ovis() -> Made:
    return made(diffusers.OvisImageTransformer2DModel(**FLUX), flux_inputs)


@entry("LongCatImageTransformer2DModel")
def longcat_image() -> Made:
    return made(diffusers.LongCatImageTransformer2DModel(**FLUX), flux_inputs)


@entry("BriaTransformer2DModel")
def bria() -> Made:
    return made(diffusers.BriaTransformer2DModel(**FLUX), flux_inputs)


@entry("BriaFiboTransformer2DModel")
def bria_fibo() -> Made:
    def inputs(seed: int) -> dict[str, Any]:
        layers = [normal(seed + 2 + i, 1, 3, 6) for i in range(4)]
        return {**flux_inputs(seed), "text_encoder_layers": layers}

    return made(diffusers.BriaFiboTransformer2DModel(**FLUX, text_encoder_dim=6), inputs)


@entry("Flux2Transformer2DModel")
def flux2() -> Made:
    model = diffusers.Flux2Transformer2DModel(
        **{**FLUX, "axes_dims_rope": (2, 2, 2, 2)}, timestep_guidance_channels=8
    )
    ids = {"img_ids": grid(4, 4), "txt_ids": torch.zeros(3, 4)}
    return made(model, lambda s: {**flux_inputs(s), **ids, "guidance": torch.tensor([4.0])})


@entry("Flux3Transformer2DModel")
def flux3() -> Made:
    model = diffusers.Flux3Transformer2DModel(
        **TWO_LISTS,
        in_channels=4,
        cond_in_channels=4,
        joint_attention_dim=8,
        timestep_channels=8,
        axes_dims_rope=(2, 2, 2, 2),
    )
    ids = {"img_ids": grid(4, 4), "txt_ids": torch.zeros(3, 4)}

    def inputs(seed: int) -> dict[str, Any]:
        condition = {"image_cond_hidden_states": normal(seed + 2, 1, 4, 4)}
        return {**flux_inputs(seed), **ids, **condition, "image_cond_ids": grid(2, 4)}

    return made(model, inputs)


@entry("SD3Transformer2DModel")
def sd3() -> Made:
    model = diffusers.SD3Transformer2DModel(
        **HEADS,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        caption_projection_dim=16,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=16,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 8, 8),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "pooled_projections": normal(s + 2, 1, 8),
            "timestep": middle(),
        },
    )


@entry("QwenImageTransformer2DModel")
def qwen() -> Made:
    model = diffusers.QwenImageTransformer2DModel(
        **HEADS,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 2, 2),
    )
    takes = inspect.signature(type(model).forward).parameters
    # Older releases ask for the prompts' lengths.
    lengths = {"txt_seq_lens": [3]} if "txt_seq_lens" in takes else {}
    return made(
        model,
        lambda s: {
            **lengths,
            "hidden_states": normal(s, 1, 16, 16),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "encoder_hidden_states_mask": ones(1, 3),
            "timestep": half(),
            "img_shapes": [(1, 4, 4)],
        },
    )


@entry("HunyuanImageTransformer2DModel")
def hunyuan_image() -> Made:
    model = diffusers.HunyuanImageTransformer2DModel(
        **TWO_LISTS,
        in_channels=4,
        out_channels=4,
        num_refiner_layers=1,
        text_embed_dim=8,
        rope_axes_dim=(4, 4),
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 4, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "encoder_attention_mask": ones(1, 3),
        },
    )


COG = {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": 8}
COG_SIZES = {"time_embed_dim": 16, "condition_dim": 8}


def cog_inputs(seed: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 1, 4, 8, 8),
        "encoder_hidden_states": normal(seed + 1, 1, 3, 8),
        "timestep": middle(),
        "target_size": torch.tensor([[64.0, 64.0]]),
        "crop_coords": torch.zeros(1, 2),
    }


@entry("CogView3PlusTransformer2DModel")
def cogview3() -> Made:
    model = diffusers.CogView3PlusTransformer2DModel(
        **COG, **COG_SIZES, pos_embed_max_size=8, sample_size=8
    )
    size = {"original_size": torch.tensor([[64.0, 64.0]])}
    return made(model, lambda s: {**cog_inputs(s), **size})


@entry("CogView4Transformer2DModel")
def cogview4() -> Made:
    model = diffusers.CogView4Transformer2DModel(
        **COG, **COG_SIZES, sample_size=8, rope_axes_dim=(8, 8)
    )
    size = {"original_size": torch.tensor([[64.0, 64.0]])}
    return made(model, lambda s: {**cog_inputs(s), **size})


@entry("GlmImageTransformer2DModel")
def glm_image() -> Made:
    model = diffusers.GlmImageTransformer2DModel(
        **COG, **COG_SIZES, prior_vq_quantizer_codebook_size=8
    )
    prior = {
        "prior_token_id": torch.arange(16)[None] % 8,
        "prior_token_drop": torch.zeros(1, 16, dtype=torch.bool),
    }
    return made(model, lambda s: {**cog_inputs(s), **prior})


@entry("AuraFlowTransformer2DModel")
def auraflow() -> Made:
    model = diffusers.AuraFlowTransformer2DModel(
        **HEADS,
        sample_size=8,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pos_embed_max_size=16,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 8, 8),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "timestep": half(),
        },
    )


@entry("HiDreamImageTransformer2DModel")
def hidream() -> Made:
    model = diffusers.HiDreamImageTransformer2DModel(
        **TWO_LISTS,
        patch_size=2,
        in_channels=4,
        caption_channels=[8, 6],
        text_emb_dim=8,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(8, 8),
        llama_layers=[0, 1, 2, 3],
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 8, 8),
            "timesteps": middle(),
            "encoder_hidden_states_t5": normal(s + 1, 1, 3, 8),
            "encoder_hidden_states_llama3": normal(s + 2, 4, 1, 3, 6),
            "pooled_embeds": normal(s + 3, 1, 8),
        },
    )


JOY = {
    "in_channels": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "text_dim": 8,
    "num_layers": 2,
    "rope_dim_list": [2, 2, 4],
}


@entry("JoyImageEditTransformer3DModel")
def joy_image() -> Made:
    return made(
        diffusers.JoyImageEditTransformer3DModel(**JOY),
        lambda s: {
            "hidden_states": normal(s, 1, 2, 4, 1, 4, 4),
            "timestep": middle(),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
        },
    )


@entry("JoyImageEditPlusTransformer3DModel")
def joy_image_plus() -> Made:
    return made(
        diffusers.JoyImageEditPlusTransformer3DModel(**JOY),
        lambda s: {
            "hidden_states": normal(s, 1, 8, 4, 1, 2, 2),
            "timestep": middle(),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "encoder_hidden_states_mask": torch.ones(1, 3),
            "shape_list": [[(1, 2, 2), (1, 2, 2)]],
        },
    )
