"""What is neither picture, video nor sound alone: priors, proteins, worlds, parts of U-Nets."""

from __future__ import annotations

import diffusers
import torch

from zoo.base import Made, entry, half, made, middle, normal, ones

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


@entry("PriorTransformer")
def prior() -> Made:
    model = diffusers.PriorTransformer(**HEADS, num_layers=2, embedding_dim=8, num_embeddings=3)
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 8),
            "timestep": middle(),
            "proj_embedding": normal(s + 1, 1, 8),
            "encoder_hidden_states": normal(s + 2, 1, 3, 8),
            "attention_mask": ones(1, 3) > 0,
        },
    )


PART = {**HEADS, "in_channels": 4, "num_layers": 2, "norm_num_groups": 2}


@entry("Transformer2DModel")
def transformer_2d() -> Made:
    model = diffusers.Transformer2DModel(**PART, cross_attention_dim=8)
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 4, 4),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
        },
    )


@entry("DreamLiteTransformer2DModel")
def dream_lite() -> Made:
    model = diffusers.DreamLiteTransformer2DModel(**PART, cross_attention_dim=8)
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 4, 4),
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
        },
    )


@entry("TransformerTemporalModel")
def temporal() -> Made:
    model = diffusers.TransformerTemporalModel(**PART)
    return made(model, lambda s: {"hidden_states": normal(s, 2, 4, 4, 4), "num_frames": 2})


@entry("RFD4ProteinaTransformer")
def proteina() -> Made:
    times = ("time_emb_bb_ca", "time_emb_local_latents")
    model = diffusers.RFD4ProteinaTransformer(
        nlayers=3,
        token_dim=16,
        nheads=2,
        dim_cond=8,
        pair_repr_dim=8,
        latent_dim=4,
        t_emb_dim=8,
        xt_pair_dist_dim=4,
        feats_seq=("xt_bb_ca", "xt_local_latents"),
        feats_cond_seq=times,
        feats_pair_repr=("xt_bb_ca_pair_dists",),
        feats_pair_cond=times,
        tri_mult_c=8,
        num_sequence_classes=5,
    )
    flags = {
        "is_in_context_conditioning": torch.zeros(1, 5, dtype=torch.bool),
        "supports_local_latent": torch.ones(1, 5, dtype=torch.bool),
    }
    return made(
        model,
        lambda s: {
            "bb_ca": normal(s, 1, 5, 3),
            "local_latents": normal(s + 1, 1, 5, 4),
            "bb_ca_time": half(),
            "local_latents_time": half(),
            "padding_mask": torch.ones(1, 5, dtype=torch.bool),
            "conditioning": dict(flags),
            # The stack is walked twice, and what leaves it enters it again.
            "recycle_depth": 2,
        },
    )


@entry("Cosmos3OmniTransformer")
def cosmos3() -> Made:
    model = diffusers.Cosmos3OmniTransformer(
        head_dim=8,
        hidden_size=16,
        intermediate_size=16,
        latent_channel=4,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        patch_latent_dim=16,
        vocab_size=16,
        sound_dim=4,
        sound_gen=True,
        rope_scaling={"mrope_section": [2, 1, 1]},
    )
    # Three tokens of text, then four of video and two of sound, all of them noisy.
    return made(
        model,
        lambda s: {
            "input_ids": torch.tensor([1, 2, 3]),
            "text_indexes": torch.arange(3),
            "position_ids": torch.arange(9)[None].expand(3, 9),
            "und_len": 3,
            "sequence_length": 9,
            "vision_tokens": [normal(s, 1, 4, 1, 4, 4)],
            "vision_token_shapes": [(1, 2, 2)],
            "vision_sequence_indexes": torch.arange(3, 7),
            "vision_mse_loss_indexes": torch.arange(3, 7),
            "vision_timesteps": torch.full((4,), 500.0),
            "vision_noisy_frame_indexes": [torch.tensor([0])],
            "sound_tokens": [normal(s + 1, 4, 2)],
            "sound_token_shapes": [(2, 1, 1)],
            "sound_sequence_indexes": torch.arange(7, 9),
            "sound_mse_loss_indexes": torch.arange(7, 9),
            "sound_timesteps": torch.full((2,), 500.0),
            "sound_noisy_frame_indexes": [torch.arange(2)],
        },
    )
