"""EasyAnimate, without its control pipeline, which diffusers 0.42 cannot call."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import flow, quiet, rng
from pipes.video_parts import LATENTS, guided
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMagvit,
    EasyAnimateInpaintPipeline,
    EasyAnimatePipeline,
    EasyAnimateTransformer3DModel,
)
from models import randomised

ONE = {"transformer": ("0",)}


def animate(kind: Any, channels: int = 4, **config: Any) -> Any:
    transformer = EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=channels,
        out_channels=4,
        patch_size=2,
        num_layers=2,
        mmdit_layers=1,
        time_embed_dim=8,
        add_norm_text_encoder=True,
        text_embed_dim=8,
        **config,
    )
    vae = AutoencoderKLMagvit(
        latent_channels=4,
        block_out_channels=[4, 4, 4, 4],
        layers_per_block=1,
        norm_num_groups=1,
    )
    return quiet(
        kind(
            text_encoder=None,
            tokenizer=None,
            vae=randomised(vae),
            scheduler=flow(),
            transformer=randomised(transformer),
        )
    )


def frames(channels: int = 3) -> torch.Tensor:
    return torch.rand(1, channels, 5, 32, 32, generator=rng(1))


def call(**more: Any) -> dict[str, Any]:
    return {
        **guided(mask="prompt_attention_mask"),
        **LATENTS,
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "guidance_scale": 3.0,
        "generator": rng(),
        **more,
    }


entry(
    name="EasyAnimatePipeline",
    build=lambda: animate(EasyAnimatePipeline),
    call=call,
    streams=ONE,
)
entry(
    name="EasyAnimateInpaintPipeline",
    build=lambda: animate(EasyAnimateInpaintPipeline, 12, resize_inpaint_mask_directly=False),
    call=lambda: call(video=frames(), mask_video=255 * frames(1).round(), strength=0.75),
    streams=ONE,
    expected_steps=lambda steps: int(0.75 * steps),
)
