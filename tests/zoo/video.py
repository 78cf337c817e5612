"""Video transformers with one stream, which looks at the text by cross-attention."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from zoo.base import Made, entry, half, made, middle, normal, ones

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
CHANNELS = {"in_channels": 4, "out_channels": 4}
WAN = {
    **HEADS,
    **CHANNELS,
    "num_layers": 3,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 16,
    "rope_max_seq_len": 32,
}


def video(seed: int, channels: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 1, channels, 2, 4, 4),
        "encoder_hidden_states": normal(seed + 1, 1, 3, 8),
        "timestep": middle(),
    }


@entry("WanTransformer3DModel")
def wan() -> Made:
    return made(diffusers.WanTransformer3DModel(**WAN), video)


@entry("WanVACETransformer3DModel")
def wan_vace() -> Made:
    model = diffusers.WanVACETransformer3DModel(**WAN, vace_layers=[0, 2], vace_in_channels=4)
    return made(
        model,
        lambda s: {
            **video(s),
            "control_hidden_states": normal(s + 2, 1, 4, 2, 4, 4),
            "control_hidden_states_scale": torch.tensor([1.0, 0.7]),
        },
    )


@entry("WanAnimateTransformer3DModel")
def wan_animate() -> Made:
    model = diffusers.WanAnimateTransformer3DModel(
        **{**WAN, "in_channels": 12, "num_layers": 4},
        latent_channels=4,
        image_dim=8,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes={"4": 4, "8": 4, "16": 4},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    return made(
        model,
        lambda s: {
            **video(s, 12),
            "hidden_states": normal(s, 1, 12, 3, 4, 4),
            "encoder_hidden_states_image": normal(s + 2, 1, 3, 8),
            "pose_hidden_states": normal(s + 3, 1, 4, 2, 4, 4),
            "face_pixel_values": normal(s + 4, 1, 3, 5, 16, 16),
        },
    )


@entry("WanAnimate2Transformer3DModel")
def wan_animate2() -> Made:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    model = diffusers.WanAnimate2Transformer3DModel(
        text_len=4,
        in_dim=8,
        dim=24,
        ffn_dim=16,
        freq_dim=16,
        text_dim=8,
        out_dim=4,
        num_heads=2,
        num_layers=2,
    )
    # Else the model compiles the making of its mask, for half a minute.
    with torch.compiler.set_stance("force_eager"):
        model.block_masks[1, 4] = model.create_mask(1, 4, torch.device("cpu"))

    def inputs(seed: int) -> dict[str, Any]:
        # The reference pass fills the cache once a run; the generation passes only read it.
        kv_cache = WanAnimate2KVCache(2)
        for layer in range(2):
            kv_cache.get(layer).store(normal(seed, 1, 4, 2, 12), normal(seed + 1, 1, 4, 2, 12))
        return {
            "hidden_states": [normal(seed, 4, 1, 4, 4)],
            "timestep": middle(),
            "encoder_hidden_states": [normal(seed + 1, 3, 8)],
            "condition_latents": [normal(seed + 2, 4, 1, 4, 4)],
            "kv_cache": kv_cache,
            "kv_cache_mode": "cached",
            "seq_len": 4,
            "encoder_hidden_states_image": normal(seed + 3, 1, 3, 1280),
            "reference_grid_sizes": torch.tensor([[1, 2, 2]]),
            "origin_len": 1,
            "origin_area": (32, 32),
        }

    return made(model, inputs)


@entry("SkyReelsV2Transformer3DModel")
def skyreels() -> Made:
    return made(diffusers.SkyReelsV2Transformer3DModel(**WAN), video)


@entry("ChronoEditTransformer3DModel")
def chrono_edit() -> Made:
    return made(diffusers.ChronoEditTransformer3DModel(**WAN), video)


@entry("HeliosTransformer3DModel")
def helios() -> Made:
    config = {k: v for k, v in WAN.items() if k != "rope_max_seq_len"}
    model = diffusers.HeliosTransformer3DModel(**config, rope_dim=(4, 4, 4))
    return made(
        model,
        lambda s: {
            **video(s),
            "indices_hidden_states": torch.arange(2)[None],
            "indices_latents_history_short": torch.arange(2, 3)[None],
            "latents_history_short": normal(s + 2, 1, 4, 1, 4, 4),
        },
    )


@entry("AnyFlowTransformer3DModel")
def anyflow() -> Made:
    return made(
        diffusers.AnyFlowTransformer3DModel(**WAN),
        lambda s: {
            **video(s),
            "hidden_states": normal(s, 1, 2, 4, 4, 4),
            "timestep": torch.full((1, 2), 500.0),
            "r_timestep": torch.full((1, 2), 400.0),
        },
    )


@entry("AnyFlowFARTransformer3DModel")
def anyflow_far() -> Made:
    return made(
        diffusers.AnyFlowFARTransformer3DModel(**WAN, full_chunk_limit=3, chunk_partition=(1, 1)),
        lambda s: {
            **video(s),
            "hidden_states": normal(s, 1, 2, 4, 4, 4),
            "timestep": torch.full((1, 2), 500.0),
            "r_timestep": torch.full((1, 2), 400.0),
            "chunk_partition": [1, 1],
        },
    )


@entry("LTXVideoTransformer3DModel")
def ltx() -> Made:
    model = diffusers.LTXVideoTransformer3DModel(
        **HEADS, **CHANNELS, cross_attention_dim=24, num_layers=2, caption_channels=8
    )
    return made(
        model,
        lambda s: {
            **video(s),
            "hidden_states": normal(s, 1, 8, 4),
            "encoder_attention_mask": ones(1, 3),
            "num_frames": 2,
            "height": 2,
            "width": 2,
        },
    )


@entry("AllegroTransformer3DModel")
def allegro() -> Made:
    model = diffusers.AllegroTransformer3DModel(
        **HEADS,
        **CHANNELS,
        num_layers=2,
        cross_attention_dim=24,
        sample_height=4,
        sample_width=4,
        sample_frames=2,
        caption_channels=8,
    )
    table = get_1d_rotary_pos_embed(4, 2, use_real=True, repeat_interleave_real=False)
    axis = torch.arange(2)
    places = torch.cartesian_prod(axis, axis, axis).T[:, None]
    rotary = ((table, table, table), tuple(places))
    return made(model, lambda s: {**video(s), "image_rotary_emb": rotary})


@entry("LatteTransformer3DModel")
def latte() -> Made:
    model = diffusers.LatteTransformer3DModel(
        **HEADS,
        **CHANNELS,
        num_layers=2,
        cross_attention_dim=24,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=8,
        video_length=2,
    )
    return made(model, video)


@entry("SanaVideoTransformer3DModel")
def sana_video() -> Made:
    model = diffusers.SanaVideoTransformer3DModel(
        **HEADS,
        **CHANNELS,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=8,
        sample_size=4,
    )
    return made(model, video)


@entry("SanaWMTransformer3DModel")
def sana_wm() -> Made:
    model = diffusers.SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        linear_head_dim=16,
        caption_channels=8,
        chunk_plucker_channels=6,
        chunk_plucker_post_attn_blocks=4,
        image_size=64,
    )
    return made(
        model,
        lambda s: {
            **video(s),
            "timestep": torch.full((1, 1, 2), 500.0),
            "encoder_hidden_states": normal(s + 1, 1, 1, 3, 8),
            "encoder_attention_mask": ones(1, 3),
        },
    )


@entry("CosmosTransformer3DModel")
def cosmos() -> Made:
    model = diffusers.CosmosTransformer3DModel(
        **HEADS,
        **CHANNELS,
        num_layers=2,
        text_embed_dim=8,
        adaln_lora_dim=4,
        max_size=(4, 8, 8),
        # The mask is resized with torchvision, which this package does not need.
        concat_padding_mask=False,
    )
    return made(model, video)


@entry("Kandinsky5Transformer3DModel")
def kandinsky5() -> Made:
    model = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=8,
        in_text_dim2=8,
        time_dim=8,
        out_visual_dim=4,
        model_dim=16,
        ff_dim=16,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 2, 2),
    )
    return made(
        model,
        lambda s: {
            **video(s),
            "hidden_states": normal(s, 1, 2, 4, 4, 4),
            "timestep": half(),
            "pooled_projections": normal(s + 2, 1, 8),
            "visual_rope_pos": [torch.arange(2)] * 3,
            "text_rope_pos": torch.arange(3),
        },
    )


@entry("Kandinsky6SRTransformer3DModel")
def kandinsky6_sr() -> Made:
    model = diffusers.Kandinsky6SRTransformer3DModel(
        in_visual_dim=2,
        out_visual_dim=2,
        time_dim=8,
        model_dim=16,
        ff_dim=16,
        num_visual_blocks=2,
        axes_dims=(4, 2, 2),
        nabla_window=(1, 1, 1),
    )
    return made(model, lambda s: {"hidden_states": normal(s, 1, 1, 16, 16, 5), "timestep": half()})
