"""Transformers for sound and music."""

from __future__ import annotations

import diffusers
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from zoo.base import Made, entry, half, made, normal, ones


@entry("StableAudioDiTModel")
def stable_audio() -> Made:
    model = diffusers.StableAudioDiTModel(
        sample_size=6,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        out_channels=4,
        cross_attention_dim=8,
        time_proj_dim=8,
        global_states_input_dim=8,
        cross_attention_input_dim=8,
    )
    rotary = get_1d_rotary_pos_embed(4, 7, use_real=True, repeat_interleave_real=False)
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 6),
            "timestep": half(),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "global_hidden_states": normal(s + 2, 1, 1, 8),
            "rotary_embedding": rotary,
        },
    )


@entry("StableAudio3DiTModel")
def stable_audio3() -> Made:
    model = diffusers.StableAudio3DiTModel(
        io_channels=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        cond_token_dim=8,
        global_cond_dim=8,
        local_add_cond_dim=3,
        timestep_features_dim=8,
        num_memory_tokens=2,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 6),
            "timestep": half(),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "global_hidden_states": normal(s + 2, 1, 8),
            "local_add_cond": normal(s + 3, 1, 3, 6),
        },
    )


@entry("AceStepTransformer1DModel")
def ace_step() -> Made:
    model = diffusers.AceStepTransformer1DModel(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        in_channels=12,
        audio_acoustic_hidden_dim=4,
        sliding_window=2,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 7, 4),
            "timestep": half(),
            "timestep_r": half(),
            "encoder_hidden_states": normal(s + 1, 1, 3, 16),
            "context_latents": normal(s + 2, 1, 7, 8),
        },
    )


@entry("LongCatAudioDiTTransformer")
def longcat_audio() -> Made:
    model = diffusers.LongCatAudioDiTTransformer(
        dit_dim=16, dit_depth=2, dit_heads=2, dit_text_dim=8, latent_dim=4
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 6, 4),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "encoder_attention_mask": ones(1, 3),
            "timestep": half(),
            "attention_mask": ones(1, 6) > 0,
            "latent_cond": normal(s + 2, 1, 6, 4),
        },
    )


@entry("MiniMaxMusic3Transformer1DModel")
def minimax_music() -> Made:
    model = diffusers.MiniMaxMusic3Transformer1DModel(
        in_channels=4,
        condition_dim=8,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        ff_inner_dim=16,
        rotary_dim=4,
        fourier_embedding_dim=8,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 6),
            "timestep": half(),
            "encoder_hidden_states": normal(s + 1, 1, 6, 8),
        },
    )


@entry("MiniMaxMusic3RVQDepthDecoder")
def minimax_depth_decoder() -> Made:
    model = diffusers.MiniMaxMusic3RVQDepthDecoder(
        hidden_size=16,
        num_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        audio_vocab_size=8,
        num_codebooks=3,
    )
    return made(model, lambda s: {"inputs_embeds": normal(s, 1, 3, 16)})


@entry("T5FilmDecoder")
def t5_film() -> Made:
    model = diffusers.T5FilmDecoder(
        input_dims=4, targets_length=6, d_model=16, num_layers=2, num_heads=2, d_kv=8, d_ff=16
    )
    return made(
        model,
        lambda s: {
            "encodings_and_masks": [(normal(s, 1, 3, 16), torch.ones(1, 3))],
            "decoder_input_tokens": normal(s + 1, 1, 6, 4),
            "decoder_noise_time": half(),
        },
    )
