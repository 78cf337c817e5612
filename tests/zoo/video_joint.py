"""Video transformers that keep text (or sound) and video as two streams, or join them half-way."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from zoo.base import Made, entry, half, made, middle, normal, ones

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
CHANNELS = {"in_channels": 4, "out_channels": 4}


def text(seed: int) -> dict[str, Any]:
    return {"encoder_hidden_states": normal(seed + 1, 1, 3, 8)}


def text_and_mask(seed: int) -> dict[str, Any]:
    return {**text(seed), "encoder_attention_mask": ones(1, 3)}


def video(seed: int, frames: int = 2) -> dict[str, Any]:
    return {"hidden_states": normal(seed, 1, 4, frames, 4, 4), "timestep": middle()}


HUNYUAN = {
    **HEADS,
    **CHANNELS,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 8,
    "rope_axes_dim": (4, 2, 2),
}


def hunyuan_inputs(seed: int) -> dict[str, Any]:
    pooled = {"pooled_projections": normal(seed + 2, 1, 8), "guidance": torch.tensor([6000.0])}
    return {**video(seed), **text_and_mask(seed), **pooled}


@entry("HunyuanVideoTransformer3DModel")
def hunyuan_video() -> Made:
    model = diffusers.HunyuanVideoTransformer3DModel(
        **HUNYUAN, num_single_layers=2, pooled_projection_dim=8
    )
    return made(model, hunyuan_inputs)


@entry("HunyuanVideoFramepackTransformer3DModel")
def hunyuan_framepack() -> Made:
    model = diffusers.HunyuanVideoFramepackTransformer3DModel(
        **HUNYUAN,
        num_single_layers=2,
        pooled_projection_dim=8,
        has_image_proj=True,
        image_proj_dim=8,
        has_clean_x_embedder=True,
    )

    def inputs(seed: int) -> dict[str, Any]:
        history = {
            "latents_clean": normal(seed + 4, 1, 4, 1, 4, 4),
            "latents_history_2x": normal(seed + 5, 1, 4, 2, 4, 4),
            "latents_history_4x": normal(seed + 6, 1, 4, 4, 8, 8),
        }
        indices = {
            "indices_latents": torch.arange(2),
            "indices_latents_clean": torch.arange(2, 3),
            "indices_latents_history_2x": torch.arange(3, 5),
            "indices_latents_history_4x": torch.arange(5, 9),
        }
        image = {"image_embeds": normal(seed + 3, 1, 2, 8)}
        return {**hunyuan_inputs(seed), **image, **history, **indices}

    return made(model, inputs)


@entry("HunyuanVideo15Transformer3DModel")
def hunyuan_video_15() -> Made:
    model = diffusers.HunyuanVideo15Transformer3DModel(
        **HUNYUAN, text_embed_2_dim=6, image_embed_dim=6
    )
    return made(
        model,
        lambda s: {
            **video(s),
            **text_and_mask(s),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states_2": normal(s + 2, 1, 2, 6),
            "encoder_attention_mask_2": ones(1, 2),
            "image_embeds": normal(s + 3, 1, 2, 6),
        },
    )


COG = {
    **HEADS,
    **CHANNELS,
    "num_layers": 2,
    "time_embed_dim": 8,
    "text_embed_dim": 8,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 5,
    "max_text_seq_length": 3,
}


def cog_inputs(seed: int) -> dict[str, Any]:
    return {"hidden_states": normal(seed, 1, 2, 4, 4, 4), "timestep": middle(), **text(seed)}


@entry("CogVideoXTransformer3DModel")
def cogvideox() -> Made:
    return made(diffusers.CogVideoXTransformer3DModel(**COG), cog_inputs)


@entry("ConsisIDTransformer3DModel")
def consisid() -> Made:
    model = diffusers.ConsisIDTransformer3DModel(
        **{**COG, "num_layers": 3},
        is_train_face=True,
        cross_attn_dim_head=4,
        cross_attn_num_heads=2,
        cross_attn_interval=1,
        LFE_id_dim=6,
        LFE_vit_dim=6,
        LFE_depth=2,
        LFE_dim_head=4,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=2,
        LFE_output_dim=10,
        LFE_num_scale=2,
    )
    return made(
        model,
        lambda s: {
            **cog_inputs(s),
            "id_cond": normal(s + 2, 1, 6),
            "id_vit_hidden": [normal(s + 3 + i, 1, 2, 6) for i in range(2)],
        },
    )


@entry("EasyAnimateTransformer3DModel")
def easy_animate() -> Made:
    model = diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        **CHANNELS,
        patch_size=2,
        sample_width=4,
        sample_height=4,
        num_layers=3,
        mmdit_layers=2,
        time_embed_dim=8,
        text_embed_dim=8,
    )
    return made(model, lambda s: {**video(s), **text(s)})


@entry("MochiTransformer3DModel")
def mochi() -> Made:
    model = diffusers.MochiTransformer3DModel(
        **HEADS,
        num_layers=2,
        pooled_projection_dim=8,
        in_channels=4,
        text_embed_dim=8,
        time_embed_dim=8,
        max_sequence_length=3,
    )
    return made(model, lambda s: {**video(s), **text(s), "encoder_attention_mask": ones(1, 3) > 0})


@entry("MotifVideoTransformer3DModel")
def motif_video() -> Made:
    model = diffusers.MotifVideoTransformer3DModel(
        **HEADS,
        **CHANNELS,
        num_layers=2,
        num_single_layers=3,
        num_decoder_layers=1,
        text_embed_dim=8,
        rope_axes_dim=(4, 2, 2),
    )
    return made(model, lambda s: {**video(s), **text_and_mask(s)})


LTX2 = {
    **HEADS,
    **CHANNELS,
    "cross_attention_dim": 16,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "num_layers": 2,
    "caption_channels": 8,
}


@entry("LTX2VideoTransformer3DModel")
def ltx2() -> Made:
    return made(
        diffusers.LTX2VideoTransformer3DModel(**LTX2),
        lambda s: {
            "hidden_states": normal(s, 1, 8, 4),
            "audio_hidden_states": normal(s + 1, 1, 5, 4),
            "encoder_hidden_states": normal(s + 2, 1, 3, 8),
            "audio_encoder_hidden_states": normal(s + 3, 1, 3, 8),
            "timestep": middle(),
            "num_frames": 2,
            "height": 2,
            "width": 2,
            "audio_num_frames": 5,
        },
    )


@entry("SanaWMLTX2RefinerTransformer3DModel")
def sana_wm_refiner() -> Made:
    model = diffusers.SanaWMLTX2RefinerTransformer3DModel(**LTX2)
    coords = model.rope.prepare_video_coords(1, 2, 2, 2, torch.device("cpu"), fps=24.0)
    rotary = model.rope(coords, device=torch.device("cpu"))
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 8, 4),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "timestep": middle(),
            "video_rotary_emb": rotary,
        },
    )


@entry("Kandinsky6Transformer3DModel")
def kandinsky6() -> Made:
    model = diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=8,
        in_text_dim2=8,
        time_dim=8,
        model_dim=16,
        ff_dim=16,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 2, 2),
        visual_cond=False,
        in_audio_dim=4,
        out_audio_dim=4,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 2, 4, 4, 4),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "pooled_projections": normal(s + 2, 1, 8),
            "timestep": half(),
            "audio_hidden_states": normal(s + 3, 1, 5, 4),
        },
    )


@entry("MiniMaxH3Transformer3DModel")
def minimax_h3() -> Made:
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        hidden_size=16,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=16,
        in_channels=4,
        audio_in_channels=4,
        text_dim=8,
        freq_dim=8,
        time_embed_hidden_dim=8,
        time_embed_dim=8,
        rope_freq_dim=2,
    )
    # Three tokens of text, four of video, two of sound; tags and time indices tell them apart.
    tags = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 16),
            "audio_hidden_states": normal(s + 1, 1, 2, 4),
            "encoder_hidden_states": normal(s + 2, 1, 3, 8),
            "timestep": torch.tensor([500.0, 0.0]),
            "timestep_indices": (tags == 0).long(),
            "token_tags": tags,
            "position_ids": torch.arange(9)[:, None].expand(9, 3),
            "video_indices": torch.arange(3, 7),
            "audio_indices": torch.arange(7, 9),
            "text_indices": torch.arange(3),
        },
    )
