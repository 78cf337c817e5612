"""Pipelines whose transformers are made after Wan's."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import image, quiet
from pipes.video_parts import video
from pipes.video_wan import BOTH, SIZE, call, parts, seen
from typing import Any

from diffusers import (
    AnyFlowFARPipeline,
    AnyFlowFARTransformer3DModel,
    AnyFlowPipeline,
    AnyFlowTransformer3DModel,
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    FlowMapEulerDiscreteScheduler,
    SkyReelsV2DiffusionForcingImageToVideoPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2DiffusionForcingVideoToVideoPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
)
from models import WAN, randomised

SHORT = {**SIZE, "num_frames": 5}
SEES = {"image_dim": 8, "added_kv_proj_dim": 24}


def animate() -> Any:
    return randomised(
        WanAnimateTransformer3DModel(
            **{**WAN, "in_channels": 12},
            **SEES,
            num_layers=2,
            latent_channels=4,
            motion_encoder_channel_sizes={"4": 4, "8": 4},
            motion_encoder_size=8,
            motion_style_dim=4,
            motion_dim=4,
            motion_encoder_dim=8,
            face_encoder_hidden_dim=8,
            face_encoder_num_heads=2,
            inject_face_latents_blocks=2,
        )
    )


def chrono() -> Any:
    config = {**WAN, **SEES, "in_channels": 12, "num_layers": 2, "rope_temporal_skip_len": 2}
    return randomised(ChronoEditTransformer3DModel(**config))


def skyreels(kind: Any, sees: bool = False, **config: Any) -> Any:
    config |= {**WAN, **SEES, "in_channels": 12} if sees else WAN
    transformer = randomised(SkyReelsV2Transformer3DModel(**config, num_layers=2))
    encoders = seen() if sees else {}
    return quiet(kind(**parts(transformer=transformer), **encoders))


def anyflow(kind: Any, transformer: Any, **config: Any) -> Any:
    config = {**WAN, **config, "num_layers": 2}
    scheduler = FlowMapEulerDiscreteScheduler(shift=3.0)
    made = randomised(transformer(**config))
    return quiet(kind(**parts(transformer=made, scheduler=scheduler)))


entry(
    name="WanAnimatePipeline",
    build=lambda: quiet(WanAnimatePipeline(**parts(transformer=animate()), **seen())),
    call=lambda: call(
        **SIZE,
        image=image(32),
        pose_video=video(9),
        face_video=video(9, 8),
        segment_frame_length=5,
    ),
    streams=BOTH,
    note="two segments: two runs in one call",
)
entry(
    name="ChronoEditPipeline",
    build=lambda: quiet(ChronoEditPipeline(**parts(transformer=chrono()), **seen())),
    call=lambda: call(**SHORT, image=image(32)),
    streams={"transformer": ("0", "1")},
)
entry(
    name="SkyReelsV2Pipeline",
    build=lambda: skyreels(SkyReelsV2Pipeline),
    call=lambda: call(**SHORT),
    streams=BOTH,
)
entry(
    name="SkyReelsV2ImageToVideoPipeline",
    build=lambda: skyreels(SkyReelsV2ImageToVideoPipeline, sees=True),
    call=lambda: call(**SHORT, image=image(32)),
    streams=BOTH,
)
entry(
    name="SkyReelsV2DiffusionForcingPipeline",
    build=lambda: skyreels(SkyReelsV2DiffusionForcingPipeline, inject_sample_info=True),
    call=lambda: call(**SHORT, prompt=None),
    streams=BOTH,
)
entry(
    name="SkyReelsV2DiffusionForcingImageToVideoPipeline",
    build=lambda: skyreels(SkyReelsV2DiffusionForcingImageToVideoPipeline),
    call=lambda: call(**SHORT, image=image(32)),
    streams=BOTH,
)
entry(
    name="SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    build=lambda: skyreels(SkyReelsV2DiffusionForcingVideoToVideoPipeline),
    call=lambda: call(**SIZE, num_frames=13, base_num_frames=9, overlap_history=5, video=video(5)),
    streams=BOTH,
)
entry(
    name="AnyFlowPipeline",
    build=lambda: anyflow(AnyFlowPipeline, AnyFlowTransformer3DModel),
    call=lambda: call(**SHORT),
    streams={"transformer": ("0",)},
    note="both prompts in one batch",
)
entry(
    name="AnyFlowFARPipeline",
    build=lambda: anyflow(AnyFlowFARPipeline, AnyFlowFARTransformer3DModel, chunk_partition=(1, 1)),
    call=lambda: call(**SHORT),
    streams={"transformer": ("0",)},
    # After the first chunk, the model is called once more to fill its cache of keys.
    plain_calls=1,
    note="a chunk at a time: two runs in one call; both prompts in one batch",
)
