"""MiniMax: models that have modular pipelines only."""

from __future__ import annotations

from pipes.base import entry
from pipes.other_modular import cfg, modular
from pipes.parts import flow, rng
from typing import Any

import torch
from diffusers import (
    MiniMaxH3Blocks,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
    MiniMaxMusic3Blocks,
    MiniMaxMusic3ConditionEncoder,
    MiniMaxMusic3Transformer1DModel,
)
from models import normal, randomised


def h3() -> Any:
    transformer = MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        hidden_size=16,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=16,
        text_dim=8,
        freq_dim=8,
        time_embed_hidden_dim=8,
        time_embed_dim=8,
        rope_freq_dim=4,
    )
    return modular(
        MiniMaxH3Blocks(),
        transformer=randomised(transformer),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
    )


def music() -> Any:
    transformer = MiniMaxMusic3Transformer1DModel(
        in_channels=4,
        condition_dim=8,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        ff_inner_dim=16,
        rotary_dim=4,
        fourier_embedding_dim=8,
    )
    condition = MiniMaxMusic3ConditionEncoder(
        condition_hidden_dim=8, num_condition_layers=2, out_dim=8
    )
    blocks = MiniMaxMusic3Blocks()
    blocks.sub_blocks.pop("semantic_generator")
    return modular(
        blocks,
        transformer=randomised(transformer),
        condition_encoder=randomised(condition),
        scheduler=flow(1.0),
        guider=cfg(),
    )


entry(
    name="MiniMaxH3ModularPipeline",
    build=h3,
    call=lambda: {
        "height": 32,
        "width": 32,
        "num_frames": 120,
        "prompt_embeds": normal(100, 1, 3, 8),
        "text_token_tags": torch.zeros(3, dtype=torch.int64),
        "generator": rng(),
        "output": "latents",
    },
    streams={"transformer": ("0",)},
)
entry(
    name="MiniMaxMusic3ModularPipeline",
    build=music,
    call=lambda: {
        "frame_hiddens": normal(100, 1, 230, 16),
        "generator": rng(),
        "output": "latent_chunks",
    },
    streams={"transformer": ("0", "1")},
    note="a window of frames at a time: two runs in one call",
)
