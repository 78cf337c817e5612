"""Kandinsky 5 and 6."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import flow, image, quiet, rng
from pipes.video_parts import LATENTS, hunyuan_vae, video
from typing import Any

import torch
from diffusers import (
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
    Kandinsky6SRPipeline,
    Kandinsky6SRTransformer3DModel,
    Kandinsky6SRVAE,
    Kandinsky6TI2VAPipeline,
    Kandinsky6Transformer3DModel,
    MMAudioVAE,
    MMAudioVocoder,
)
from models import normal, randomised

NO_TEXT = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
SIZE = {"height": 32, "width": 32}

CONFIG = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 8,
    "in_text_dim2": 8,
    "time_dim": 8,
    "model_dim": 16,
    "ff_dim": 16,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 2, 2),
}


def five(kind: Any, vae: Any, cond: bool) -> Any:
    transformer = Kandinsky5Transformer3DModel(**CONFIG, visual_cond=cond)
    parts = {"transformer": randomised(transformer), "vae": vae, "scheduler": flow()}
    return quiet(kind(**NO_TEXT, **parts))


def five_call(**more: Any) -> dict[str, Any]:
    seqlens = torch.tensor([0, 3])
    return {
        "prompt_embeds_qwen": normal(100, 1, 3, 8),
        "prompt_embeds_clip": normal(101, 1, 8),
        "prompt_cu_seqlens": seqlens,
        "negative_prompt_embeds_qwen": normal(102, 1, 3, 8),
        "negative_prompt_embeds_clip": normal(103, 1, 8),
        "negative_prompt_cu_seqlens": seqlens,
        **SIZE,
        **LATENTS,
        "guidance_scale": 3.0,
        "generator": rng(),
        **more,
    }


def six(**config: Any) -> Any:
    audio_vae = MMAudioVAE(
        mel_bins=8, latent_channels=4, hidden_channels=8, layers_per_block=1, n_fft=64
    )
    vocoder = MMAudioVocoder(
        num_mels=8,
        upsample_initial_channel=8,
        upsample_rates=(2,),
        upsample_kernel_sizes=(4,),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
    )
    transformer = Kandinsky6Transformer3DModel(**CONFIG, **config, in_audio_dim=4, out_audio_dim=4)
    return quiet(
        Kandinsky6TI2VAPipeline(
            **NO_TEXT,
            transformer=randomised(transformer),
            vae=hunyuan_vae(),
            scheduler=flow(),
            audio_vae=randomised(audio_vae),
            vocoder=randomised(vocoder),
        )
    )


def six_call(**more: Any) -> dict[str, Any]:
    return {
        "prompt_embeds": normal(100, 1, 3, 8),
        "pooled_prompt_embeds": normal(101, 1, 8),
        "negative_prompt_embeds": normal(102, 1, 3, 8),
        "negative_pooled_prompt_embeds": normal(103, 1, 8),
        **SIZE,
        **LATENTS,
        "num_frames": 5,
        "frame_rate": 24.0,
        "guidance_scale": 3.0,
        "generator": rng(),
        **more,
    }


def upscaler() -> Any:
    transformer = Kandinsky6SRTransformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        time_dim=8,
        model_dim=32,
        ff_dim=16,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        tile_sizes=((32, 32),),
    )
    vae = Kandinsky6SRVAE(
        latent_channels=4,
        encoder_block_out_channels=(4, 4, 4),
        decoder_block_out_channels=(4, 4, 4),
        layers_per_block=1,
    )
    parts = {"transformer": randomised(transformer), "vae": randomised(vae)}
    return quiet(Kandinsky6SRPipeline(**parts, scheduler=flow()))


ORDER = {"transformer": ("0", "1")}
entry(
    name="Kandinsky5T2VPipeline",
    build=lambda: five(Kandinsky5T2VPipeline, hunyuan_vae(), False),
    call=lambda: five_call(num_frames=5),
    streams=ORDER,
)
entry(
    name="Kandinsky5I2VPipeline",
    build=lambda: five(Kandinsky5I2VPipeline, hunyuan_vae(), True),
    call=lambda: five_call(num_frames=21, image=image(32)),
    streams=ORDER,
)
entry(
    name="Kandinsky6TI2VAPipeline",
    build=six,
    call=six_call,
    streams={"transformer": ("cond", "uncond")},
)
entry(
    name="Kandinsky6TI2VAPipeline image",
    build=lambda: six(visual_token_type_num_embeddings=2),
    call=lambda: six_call(image=image(32)),
    streams={"transformer": ("cond", "uncond")},
)
entry(
    name="Kandinsky6SRPipeline",
    build=upscaler,
    call=lambda: {
        "video": video(5, 16),
        "resolution_scale": 2,
        "output_type": "np",
        "generator": rng(),
    },
    streams={"transformer": ("0",)},
    note="a tile at a time: several runs in one call",
)
