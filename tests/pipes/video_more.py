"""Helios, Motif-Video and Sana-Video."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import flow, image, quiet, rng
from pipes.video_ltx import ltx2_vae
from pipes.video_parts import LATENTS, guided, wan_vae
from typing import Any

import numpy as np
from diffusers import (
    ClassifierFreeGuidance,
    DPMSolverMultistepScheduler,
    HeliosPipeline,
    HeliosPyramidPipeline,
    HeliosTransformer3DModel,
    MotifVideoImage2VideoPipeline,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
    SanaWMPipeline,
    SanaWMTransformer3DModel,
)
from diffusers.schedulers import HeliosScheduler
from models import randomised

NO_TEXT = dict.fromkeys(("text_encoder", "tokenizer"))
SIZE = {"height": 32, "width": 32}
BOTH = {"transformer": ("cond", "uncond")}
GUIDER = {"transformer": ("pred_cond", "pred_uncond")}
MASKS = "prompt_attention_mask"


def helios(kind: Any, **config: Any) -> Any:
    transformer = HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=16,
        num_layers=2,
        rope_dim=(4, 4, 4),
    )
    parts = {"vae": wan_vae(), "transformer": randomised(transformer)}
    return quiet(kind(**NO_TEXT, **parts, scheduler=HeliosScheduler(**config)))


def motif(kind: Any, **more: Any) -> Any:
    transformer = MotifVideoTransformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_single_layers=3,
        num_decoder_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=8,
        rope_axes_dim=(2, 2, 4),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )
    return quiet(
        kind(
            **NO_TEXT,
            vae=wan_vae(),
            scheduler=flow(),
            transformer=randomised(transformer),
            guider=ClassifierFreeGuidance(guidance_scale=3.0),
            feature_extractor=None,
        )
    )


def sana(kind: Any, scheduler: Any) -> Any:
    transformer = SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=8,
        sample_size=4,
    )
    parts = {"vae": wan_vae(), "transformer": randomised(transformer)}
    return quiet(kind(**NO_TEXT, **parts, scheduler=scheduler))


def sana_wm() -> Any:
    transformer = SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        softmax_every_n=2,
        linear_head_dim=16,
        chunk_plucker_post_attn_blocks=2,
        chunk_plucker_channels=48,
        caption_channels=8,
        image_size=64,
    )
    parts = {"vae": ltx2_vae(), "transformer": randomised(transformer)}
    return quiet(SanaWMPipeline(**NO_TEXT, **parts, scheduler=flow()))


def call(mask: str | None = MASKS, **more: Any) -> dict[str, Any]:
    return {**guided(mask=mask), **SIZE, **LATENTS, "generator": rng(), **more}


def helios_call(frames: int = 9, **more: Any) -> dict[str, Any]:
    windows = {"history_sizes": [4, 2, 1], "num_latent_frames_per_chunk": 2}
    return call(None, **windows, num_frames=frames, guidance_scale=3.0, **more)


def sana_call(**more: Any) -> dict[str, Any]:
    settings = {"frames": 5, "use_resolution_binning": False, "guidance_scale": 3.0}
    return call(negative_prompt=None, **settings, **more)


entry(
    name="HeliosPipeline",
    build=lambda: helios(HeliosPipeline, stages=1, stage_range=[0, 1]),
    call=helios_call,
    streams=BOTH,
    note="a window of frames at a time: two runs in one call",
)
entry(
    name="HeliosPyramidPipeline",
    build=lambda: helios(HeliosPyramidPipeline, stages=2, stage_range=[0, 0.5, 1], gamma=0.25),
    call=lambda: helios_call(5, pyramid_num_inference_steps_list=[8, 8]),
    streams=BOTH,
    argument="max_sequence_length",
    note="a run for each of two sizes; their steps are given as a list",
)
entry(
    name="MotifVideoPipeline",
    build=lambda: motif(MotifVideoPipeline),
    call=lambda: call(num_frames=5),
    streams=GUIDER,
)
entry(
    name="MotifVideoImage2VideoPipeline",
    build=lambda: motif(MotifVideoImage2VideoPipeline),
    call=lambda: call(num_frames=5, image=image(32), prompt=None),
    streams=GUIDER,
)
entry(
    name="SanaVideoPipeline",
    build=lambda: sana(
        SanaVideoPipeline,
        DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    ),
    call=sana_call,
    streams={"transformer": ("0",)},
)
entry(
    name="SanaImageToVideoPipeline",
    build=lambda: sana(SanaImageToVideoPipeline, flow()),
    call=lambda: sana_call(image=image(32)),
    streams={"transformer": ("0",)},
)
entry(
    name="SanaWMPipeline",
    build=sana_wm,
    call=lambda: call(
        height=64,
        width=64,
        image=image(64),
        prompt=None,
        c2w=np.tile(np.eye(4, dtype=np.float32), (9, 1, 1)),
        intrinsics=[50.0, 50.0, 32.0, 32.0],
        num_frames=9,
        guidance_scale=3.0,
    ),
    streams={"transformer": ("0",)},
)
