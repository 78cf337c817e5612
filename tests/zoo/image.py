"""Image transformers with one stream: text by cross-attention, or in the same sequence."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

from zoo.base import Made, entry, half, made, middle, normal, ones, positions

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


def picture(seed: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 1, 4, 8, 8),
        "encoder_hidden_states": normal(seed + 1, 1, 3, 8),
        "timestep": middle(),
    }


@entry("DiTTransformer2DModel")
def dit() -> Made:
    model = diffusers.DiTTransformer2DModel(
        **HEADS, sample_size=8, num_layers=2, patch_size=2, in_channels=4, num_embeds_ada_norm=10
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 8, 8),
            "timestep": middle(),
            "class_labels": torch.tensor([3]),
        },
    )


@entry("PixArtTransformer2DModel")
def pixart() -> Made:
    model = diffusers.PixArtTransformer2DModel(
        **HEADS,
        sample_size=8,
        num_layers=2,
        patch_size=2,
        caption_channels=8,
        in_channels=4,
        cross_attention_dim=16,
        use_additional_conditions=False,
    )
    none = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return made(model, lambda s: {**picture(s), **none})


@entry("SanaTransformer2DModel")
def sana() -> Made:
    model = diffusers.SanaTransformer2DModel(
        **HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        sample_size=8,
    )
    return made(model, picture)


@entry("HunyuanDiT2DModel")
def hunyuan_dit() -> Made:
    model = diffusers.HunyuanDiT2DModel(
        **HEADS,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=16,
        # The last two of six blocks take what the first two gave.
        num_layers=6,
        cross_attention_dim=8,
        cross_attention_dim_t5=8,
        pooled_projection_dim=8,
        text_len=3,
        text_len_t5=2,
    )
    return made(
        model,
        lambda s: {
            **picture(s),
            "timestep": torch.tensor([500.0]),
            "text_embedding_mask": ones(1, 3),
            "encoder_hidden_states_t5": normal(s + 2, 1, 2, 8),
            "text_embedding_mask_t5": ones(1, 2),
            "image_meta_size": torch.tensor([[64, 64, 64, 64, 0, 0]]),
            "style": torch.tensor([0]),
        },
    )


@entry("LuminaNextDiT2DModel")
def lumina() -> Made:
    model = diffusers.LuminaNextDiT2DModel(
        sample_size=8,
        hidden_size=16,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=2,
        multiple_of=8,
        cross_attention_dim=8,
    )
    rotary = get_2d_rotary_pos_embed_lumina(8, 8, 8, linear_factor=1.0, ntk_factor=1.0)
    given = {
        "timestep": half(),
        "encoder_mask": ones(1, 3),
        "image_rotary_emb": rotary,
        "cross_attention_kwargs": {},
    }
    return made(model, lambda s: {**picture(s), **given})


@entry("Lumina2Transformer2DModel")
def lumina2() -> Made:
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=2,
        multiple_of=8,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(16, 16, 16),
        cap_feat_dim=8,
    )
    mask = torch.ones(1, 3, dtype=torch.bool)
    return made(model, lambda s: {**picture(s), "timestep": half(), "encoder_attention_mask": mask})


@entry("ZImageTransformer2DModel")
def z_image() -> Made:
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=16,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=8,
        axes_dims=[4, 2, 2],
        axes_lens=[128, 16, 16],
    )
    return made(
        model,
        lambda s: {
            "x": [normal(s, 4, 1, 8, 8)],
            "t": half(),
            "cap_feats": [normal(s + 1, 3, 8)],
        },
    )


@entry("BriaFibo2Transformer2DModel")
def bria_fibo2() -> Made:
    model = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=16,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=8,
        injection_layer_ids=(1,),
        perceiver_num_layers=1,
        min_num_gist_tokens=2,
        max_num_gist_tokens=4,
        gist_step=2,
        gist_min_text_len=2,
        gist_max_text_len=4,
        axes_dims=(4, 2, 2),
        axes_lens=(16, 16, 16),
    )
    return made(
        model,
        lambda s: {
            **picture(s),
            "timestep": half(),
            "encoder_hidden_states": normal(s + 1, 1, 2, 3, 8),
        },
    )


@entry("ErnieImageTransformer2DModel")
def ernie() -> Made:
    model = diffusers.ErnieImageTransformer2DModel(
        hidden_size=16,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=16,
        in_channels=4,
        out_channels=4,
        text_in_dim=8,
        rope_axes_dim=(4, 2, 2),
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 4, 4),
            "timestep": middle(),
            "text_bth": normal(s + 1, 1, 3, 8),
            "text_lens": torch.tensor([3]),
        },
    )


@entry("Ideogram4Transformer2DModel")
def ideogram() -> Made:
    model = diffusers.Ideogram4Transformer2DModel(
        **HEADS,
        in_channels=4,
        num_layers=2,
        intermediate_size=16,
        adaln_dim=8,
        llm_features_dim=8,
        mrope_section=(2, 1, 1),
    )
    # Three tokens of text, 16 of the picture.
    indicator = torch.tensor([[3] * 3 + [2] * 16])
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 19, 4),
            "timestep": half(),
            "encoder_hidden_states": normal(s + 1, 1, 19, 8),
            "position_ids": positions(3, 4)[None].long(),
            "segment_ids": torch.zeros(1, 19, dtype=torch.int64),
            "indicator": indicator,
        },
    )


@entry("Krea2Transformer2DModel")
def krea2() -> Made:
    model = diffusers.Krea2Transformer2DModel(
        **HEADS,
        in_channels=4,
        num_layers=2,
        num_key_value_heads=1,
        intermediate_size=16,
        timestep_embed_dim=8,
        text_hidden_dim=8,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=8,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 16, 4),
            "encoder_hidden_states": normal(s + 1, 1, 3, 2, 8),
            "timestep": half(),
            "position_ids": positions(3, 4),
        },
    )


@entry("PRXTransformer2DModel")
def prx() -> Made:
    model = diffusers.PRXTransformer2DModel(
        in_channels=4, context_in_dim=8, hidden_size=16, num_heads=2, depth=2, axes_dim=[4, 4]
    )
    return made(model, lambda s: {**picture(s), "timestep": half()})


@entry("QwenImage21Transformer2DModel")
def qwen21() -> Made:
    model = diffusers.QwenImage21Transformer2DModel(
        **HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        context_in_dim=8,
        axes_dims_rope=(4, 2, 2),
    )
    # Three slots of text and four of the picture, four tokens each.
    slots = torch.tensor([[False] * 3 + [True] * 4])
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 16, 4),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "timestep": half(),
            "img_shapes": [[(1, 4, 4)]],
            "img_mask": slots,
        },
    )


@entry("NucleusMoEImageTransformer2DModel")
def nucleus() -> Made:
    model = diffusers.NucleusMoEImageTransformer2DModel(
        **HEADS,
        in_channels=16,
        out_channels=4,
        num_layers=3,
        joint_attention_dim=8,
        axes_dims_rope=(4, 2, 2),
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=8,
        capacity_factors=2.0,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 16, 16),
            "img_shapes": [(1, 4, 4)],
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "timestep": half(),
        },
    )


@entry("OmniGenTransformer2DModel")
def omnigen() -> Made:
    model = diffusers.OmniGenTransformer2DModel(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        num_layers=2,
        pad_token_id=0,
        vocab_size=16,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        rope_scaling={"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
        pos_embed_max_size=8,
        time_step_dim=8,
    )
    # Three tokens of text, one of time, 16 of the picture.
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 8, 8),
            "timestep": half(),
            "input_ids": torch.tensor([[1, 2, 3]]),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(1, 20, 20),
            "position_ids": torch.arange(20)[None],
        },
    )
