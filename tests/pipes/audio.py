"""Audio pipelines."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import NEGATIVE, PROMPT, flow, quiet, qwen3, rng, tokenizer, umt5
from typing import Any

import torch
from diffusers import (
    AceStepPipeline,
    AceStepTransformer1DModel,
    AutoencoderOobleck,
    AutoencoderSAME,
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTTransformer,
    LongCatAudioDiTVae,
    StableAudio3AudioToAudioPipeline,
    StableAudio3DiTModel,
    StableAudio3InpaintPipeline,
    StableAudio3Pipeline,
    StableAudioDiTModel,
    StableAudioPipeline,
)
from diffusers.pipelines.ace_step import AceStepConditionEncoder
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder
from models import normal, randomised

NO_TEXT = dict.fromkeys(("text_encoder", "tokenizer"))
ONE = {"transformer": ("0",)}
LATENT = {"output_type": "latent"}


def oobleck(channels: int, rate: int) -> Any:
    return randomised(
        AutoencoderOobleck(
            encoder_hidden_size=channels,
            downsampling_ratios=[2, 2],
            channel_multiples=[1, 1],
            decoder_channels=4,
            decoder_input_channels=channels,
            sampling_rate=rate,
        )
    )


def stable_audio(scheduler: Any) -> Any:
    transformer = StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        out_channels=4,
        cross_attention_dim=8,
        time_proj_dim=8,
        global_states_input_dim=16,
        cross_attention_input_dim=8,
    )
    projection = StableAudioProjectionModel(
        text_encoder_dim=8, conditioning_dim=8, min_value=0, max_value=8
    )
    return quiet(
        StableAudioPipeline(
            **NO_TEXT,
            vae=oobleck(4, 4),
            projection_model=randomised(projection),
            transformer=randomised(transformer),
            scheduler=scheduler(),
        )
    )


def stable_audio_3(kind: Any) -> Any:
    transformer = StableAudio3DiTModel(
        io_channels=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        cond_token_dim=8,
        global_cond_dim=8,
        local_add_cond_dim=5,
        timestep_features_dim=8,
        ff_mult=1.0,
        num_memory_tokens=2,
    )
    vae = AutoencoderSAME(
        patch_size=4,
        encoder_channels=8,
        encoder_c_mults=(1,),
        encoder_strides=(2,),
        encoder_transformer_depths=(1,),
        latent_dim=4,
        dim_heads=4,
        ff_mult=1,
        sampling_rate=64,
    )
    return quiet(
        kind(
            **NO_TEXT,
            vae=randomised(vae),
            duration_embedder=randomised(StableAudio3DurationEmbedder(8, 8)),
            transformer=randomised(transformer),
            scheduler=flow(1.0),
        )
    )


def ace_step() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "sliding_window": 4}
    transformer = AceStepTransformer1DModel(
        **heads, **sizes, num_hidden_layers=2, in_channels=12, audio_acoustic_hidden_dim=4
    )
    condition = AceStepConditionEncoder(
        **heads,
        **sizes,
        text_hidden_dim=8,
        timbre_hidden_dim=4,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
    )
    return quiet(
        AceStepPipeline(
            vae=oobleck(4, 16),
            text_encoder=qwen3(),
            tokenizer=tokenizer(256),
            transformer=randomised(transformer),
            condition_encoder=randomised(condition),
            scheduler=flow(1.0, num_train_timesteps=1),
        )
    )


def song(**more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "lyrics": "two dogs",
        "audio_duration": 4.0,
        "guidance_scale": 3.0,
        "generator": rng(),
        **LATENT,
        **more,
    }


def longcat() -> Any:
    transformer = LongCatAudioDiTTransformer(
        dit_dim=16, dit_depth=4, dit_heads=2, dit_text_dim=8, latent_dim=4, ff_mult=1.0
    )
    vae = LongCatAudioDiTVae(
        channels=8,
        c_mults=[1, 1],
        strides=[2, 2],
        latent_dim=4,
        encoder_latent_dim=8,
        downsampling_ratio=4,
        sample_rate=16,
    )
    return quiet(
        LongCatAudioDiTPipeline(
            vae=randomised(vae),
            text_encoder=umt5(),
            tokenizer=tokenizer(),
            transformer=randomised(transformer),
            scheduler=flow(1.0, invert_sigmas=True),
        )
    )


def prompt_3(**more: Any) -> dict[str, Any]:
    return {
        "prompt_embeds": normal(100, 1, 3, 8),
        "encoder_attention_mask": torch.ones(1, 3, dtype=torch.int64),
        "duration": 1.0,
        "generator": rng(),
        **LATENT,
        **more,
    }


def sounds(**more: Any) -> dict[str, Any]:
    return {
        "prompt_embeds": normal(100, 1, 3, 8),
        "negative_prompt_embeds": normal(102, 1, 3, 8),
        "audio_end_in_s": 4.0,
        "guidance_scale": 3.0,
        "generator": rng(),
        **LATENT,
        **more,
    }


def sound() -> torch.Tensor:
    return normal(9, 1, 2, 64) / 4


for name, scheduler in {
    "": EDMDPMSolverMultistepScheduler,
    " dpm++": DPMSolverMultistepScheduler,
}.items():
    entry(
        name=f"StableAudioPipeline{name}",
        build=lambda scheduler=scheduler: stable_audio(scheduler),
        call=sounds,
        streams=ONE,
    )
entry(
    name="StableAudioPipeline two waveforms",
    build=lambda: stable_audio(EDMDPMSolverMultistepScheduler),
    call=lambda: sounds(num_waveforms_per_prompt=2),
    streams=ONE,
)
entry(
    name="StableAudio3Pipeline",
    build=lambda: stable_audio_3(StableAudio3Pipeline),
    call=lambda: prompt_3(
        negative_prompt_embeds=normal(102, 1, 3, 8),
        negative_encoder_attention_mask=torch.ones(1, 3, dtype=torch.int64),
        guidance_scale=3.0,
    ),
    streams=ONE,
)
entry(
    name="StableAudio3AudioToAudioPipeline",
    build=lambda: stable_audio_3(StableAudio3AudioToAudioPipeline),
    call=lambda: prompt_3(audio=sound(), init_noise_level=0.8),
    streams=ONE,
)
entry(
    name="StableAudio3InpaintPipeline",
    build=lambda: stable_audio_3(StableAudio3InpaintPipeline),
    call=lambda: prompt_3(audio=sound(), mask_start_seconds=0.25, mask_end_seconds=0.75),
    streams=ONE,
)
entry(name="AceStepPipeline", build=ace_step, call=song, streams=ONE)
entry(
    name="AceStepPipeline guided at first",
    build=ace_step,
    call=lambda: song(cfg_interval_end=0.25),
    streams=ONE,
    note="both prompts in one batch, whose size changes with the guidance",
)
entry(
    name="LongCatAudioDiTPipeline",
    build=longcat,
    call=lambda: {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        "audio_duration_s": 2.0,
        "guidance_scale": 3.0,
        "generator": rng(),
        **LATENT,
    },
    streams={"transformer": ("0", "1")},
)
