"""Tiny parts and inputs that the video pipelines share."""

from __future__ import annotations

from pipes.parts import image
from typing import Any

import torch
import transformers as hf
from diffusers import AutoencoderKLHunyuanVideo, AutoencoderKLWan, UniPCMultistepScheduler
from models import normal, randomised
from PIL import Image
from torch import Tensor

__all__ = [
    "LATENTS",
    "clip_processor",
    "clip_vision",
    "guided",
    "hunyuan_vae",
    "siglip",
    "siglip_processor",
    "unipc",
    "video",
    "wan_vae",
]

# What every call asks for.
LATENTS = {"output_type": "latent"}


def video(frames: int = 5, size: int = 32) -> list[Image.Image]:
    return [image(size, seed) for seed in range(frames)]


def guided(width: int = 8, tokens: int = 3, mask: str | None = None) -> dict[str, Tensor]:
    """Embeddings of a prompt and of a negative prompt; `mask` names their masks' argument."""
    shape = (1, tokens, width)
    prompts = {
        "prompt_embeds": normal(100, *shape),
        "negative_prompt_embeds": normal(102, *shape),
    }
    if mask is not None:
        ones = torch.ones(1, tokens, dtype=torch.int64)
        # One object each: a mask that both prompts share would tell nothing apart.
        prompts |= {mask: ones, f"negative_{mask}": ones.clone()}
    return prompts


def wan_vae(channels: int = 4) -> Any:
    return randomised(
        AutoencoderKLWan(
            base_dim=4,
            z_dim=channels,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.0] * channels,
            latents_std=[1.0] * channels,
        )
    )


def unipc() -> Any:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def hunyuan_vae(channels: int = 4) -> Any:
    return randomised(
        AutoencoderKLHunyuanVideo(
            latent_channels=channels,
            block_out_channels=(4, 4, 4, 4),
            layers_per_block=1,
            norm_num_groups=1,
            mid_block_add_attention=False,
        )
    )


def siglip(width: int = 8) -> Any:
    config = hf.SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    return randomised(hf.SiglipVisionModel(config))


def siglip_processor() -> Any:
    return hf.SiglipImageProcessorPil(size={"height": 8, "width": 8})


def clip_vision(width: int = 8) -> Any:
    config = hf.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    return randomised(hf.CLIPVisionModel(config))


def clip_processor() -> Any:
    size = {"height": 8, "width": 8}
    return hf.CLIPImageProcessorPil(size=size, crop_size=size)
