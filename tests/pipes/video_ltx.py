"""LTX and LTX-2."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import flow, image, quiet, rng, t5, tokenizer
from pipes.video_parts import LATENTS, guided, video
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    LTX2ConditionPipeline,
    LTX2HDRPipeline,
    LTX2ImageToVideoPipeline,
    LTX2InContextPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXConditionPipeline,
    LTXEulerAncestralRFScheduler,
    LTXI2VLongMultiPromptPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import (
    LTX2DFRPipeline,
    LTX2DFRTemporalRefinePipeline,
    LTX2LatentUpsamplerModel,
    LTX2TextConnectors,
)
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from models import normal, randomised

BATCHED = {"transformer": ("cond_uncond",)}
SIZE = {"height": 64, "width": 64, "num_frames": 9, "frame_rate": 8}

TRANSFORMER = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "num_layers": 2,
    "caption_channels": 8,
}
VAE = {
    "latent_channels": 4,
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 8, 8, 8),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}


def ltx(kind: Any, text: bool = False) -> Any:
    return quiet(
        kind(
            text_encoder=t5() if text else None,
            tokenizer=tokenizer() if text else None,
            vae=randomised(AutoencoderKLLTXVideo(**VAE)),
            scheduler=flow(),
            transformer=randomised(LTXVideoTransformer3DModel(**TRANSFORMER)),
        )
    )


def call(width: int = 8, **more: Any) -> dict[str, Any]:
    prompts = guided(width, 4, mask="prompt_attention_mask")
    return {**prompts, **SIZE, **LATENTS, "guidance_scale": 3.0, "generator": rng(), **more}


def connectors() -> Any:
    return randomised(
        LTX2TextConnectors(
            caption_channels=8,
            text_proj_in_factor=2,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=4,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=4,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=4,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=4,
        )
    )


def ltx2_vae() -> Any:
    return randomised(
        AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_block_out_channels=(8, 8, 8),
            decoder_layers_per_block=(1, 1, 1, 1),
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        )
    )


def ltx2(kind: Any, parts: dict[str, Any] | None = None, **config: Any) -> Any:
    transformer = LTX2VideoTransformer3DModel(
        **TRANSFORMER,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        **config,
    )
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=8, num_res_blocks=1, resolution=16, latent_channels=2, mel_bins=16
    )
    made = {
        "scheduler": flow(),
        "vae": ltx2_vae(),
        "audio_vae": randomised(audio_vae),
        "text_encoder": None,
        "tokenizer": None,
        "connectors": connectors(),
        "transformer": randomised(transformer),
        "vocoder": None,
    }
    return quiet(kind(**{**made, **(parts or {})}))


def refiner() -> Any:
    upsampler = LTX2LatentUpsamplerModel(
        in_channels=4,
        mid_channels=32,
        num_blocks_per_stage=1,
        spatial_upsample=False,
        temporal_upsample=True,
        use_rational_resampler=False,
    )
    parts = {
        "scheduler": LTXEulerAncestralRFScheduler(eta=0.5),
        "temporal_latent_upsampler": randomised(upsampler),
    }
    return ltx2(LTX2DFRTemporalRefinePipeline, parts, use_keyframes_abs_pos_embedding=True)


def call2(**more: Any) -> dict[str, Any]:
    plain = {"stg_scale": 0.0, "modality_scale": 1.0}
    audio = {"audio_stg_scale": 0.0, "audio_modality_scale": 1.0}
    return call(16, **{**plain, **audio, **more})


def dfr_call(**more: Any) -> dict[str, Any]:
    return {
        **SIZE,
        **LATENTS,
        "num_frames": 25,
        "prompt_embeds": normal(100, 1, 4, 16),
        "prompt_attention_mask": torch.ones(1, 4, dtype=torch.int64),
        "generator": rng(),
        **more,
    }


entry(name="LTXPipeline", build=lambda: ltx(LTXPipeline), call=call, streams=BATCHED)
entry(
    name="LTXImageToVideoPipeline",
    build=lambda: ltx(LTXImageToVideoPipeline),
    call=lambda: call(image=image(64)),
    streams=BATCHED,
)
entry(
    name="LTXConditionPipeline",
    build=lambda: ltx(LTXConditionPipeline),
    call=lambda: call(video=video(9, 64), denoise_strength=0.75),
    streams=BATCHED,
    expected_steps=lambda steps: int(0.75 * steps),
)
entry(
    name="LTXI2VLongMultiPromptPipeline",
    build=lambda: ltx(LTXI2VLongMultiPromptPipeline, text=True),
    call=lambda: {
        **SIZE,
        **LATENTS,
        "num_frames": 25,
        "prompt": "a red cat | a blue boat",
        "negative_prompt": "bad",
        "guidance_scale": 3.0,
        "temporal_tile_size": 16,
        "temporal_overlap": 8,
        "generator": rng(),
    },
    streams=BATCHED,
)
entry(name="LTX2Pipeline", build=lambda: ltx2(LTX2Pipeline), call=call2, streams=BATCHED)
entry(
    name="LTX2Pipeline skip-layer and modality guidance",
    build=lambda: ltx2(LTX2Pipeline),
    call=lambda: call2(stg_scale=1.0, modality_scale=3.0, spatio_temporal_guidance_blocks=[1]),
    streams={"transformer": ("cond_uncond", "uncond_stg", "uncond_modality")},
)
entry(
    name="LTX2ImageToVideoPipeline",
    build=lambda: ltx2(LTX2ImageToVideoPipeline),
    call=lambda: call2(image=image(64), image_crf=0),
    streams=BATCHED,
)
entry(
    name="LTX2ConditionPipeline",
    build=lambda: ltx2(LTX2ConditionPipeline),
    call=lambda: call2(conditions=[LTX2VideoCondition(video(9, 64), strength=0.8)]),
    streams=BATCHED,
)
entry(
    name="LTX2InContextPipeline",
    build=lambda: ltx2(LTX2InContextPipeline),
    call=lambda: call2(reference_conditions=[LTX2ReferenceCondition(video(9, 64))]),
    streams=BATCHED,
)
entry(
    name="LTX2HDRPipeline",
    build=lambda: ltx2(LTX2HDRPipeline),
    call=lambda: call(16, reference_conditions=[LTX2HDRReferenceCondition(video(9, 64))]),
    streams=BATCHED,
)
entry(
    name="LTX2DFRPipeline",
    build=lambda: ltx2(LTX2DFRPipeline, use_keyframes_abs_pos_embedding=True),
    call=dfr_call,
    streams={"transformer": ("0",)},
    argument="max_sequence_length",
    note="its own schedule has 8 steps; it takes no number of them",
)
entry(
    name="LTX2DFRTemporalRefinePipeline",
    build=refiner,
    call=lambda: dfr_call(
        latents=normal(1, 1, 4, 4, 2, 2),
        keyframes_latents=normal(2, 1, 4, 1, 2, 2),
        keyframe_positions=[24],
        audio_latents=normal(3, 1, 2, 78, 4),
        sigmas=[1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2],
    ),
    streams={"transformer": ("0",)},
    argument="max_sequence_length",
    note="its steps are given as noise levels",
)
