"""Wan, and what is made from it."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import image, quiet, rng
from pipes.video_parts import LATENTS, clip_processor, clip_vision, guided, unipc, video, wan_vae
from typing import Any

from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchHeunDiscreteScheduler,
    LucyEditPipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from models import WAN, randomised, wan

BOTH = {"transformer": ("cond", "uncond")}
EXPERTS = {**BOTH, "transformer_2": ("cond", "uncond")}
SIZE = {"height": 32, "width": 32}


def parts(**more: Any) -> dict[str, Any]:
    return {
        "tokenizer": None,
        "text_encoder": None,
        "vae": wan_vae(),
        "scheduler": unipc(),
        "transformer": wan(2),
        **more,
    }


def call(**more: Any) -> dict[str, Any]:
    return {**guided(), **LATENTS, "guidance_scale": 3.0, "generator": rng(), **more}


def seen() -> dict[str, Any]:
    return {"image_encoder": clip_vision(), "image_processor": clip_processor()}


def experts(kind: Any, **more: Any) -> Any:
    two = {"transformer_2": wan(2, seed=1, **more), "boundary_ratio": 0.7}
    return quiet(kind(**parts(transformer=wan(2, **more), **two)))


def interrupt(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Stop after the sixth step."""
    pipe._interrupt = step == 5
    return tensors


def vace(seed: int = 0) -> Any:
    config = {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 72}
    return randomised(WanVACETransformer3DModel(**WAN, **config), seed)


for name, scheduler in {
    "": unipc,
    " heun": FlowMatchHeunDiscreteScheduler,
    " dpm++": lambda: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    ),
}.items():
    entry(
        name=f"WanPipeline{name}",
        build=lambda scheduler=scheduler: quiet(WanPipeline(**parts(scheduler=scheduler()))),
        call=lambda: call(**SIZE, num_frames=5),
        streams=BOTH,
    )

entry(
    name="WanPipeline two prompts",
    build=lambda: quiet(WanPipeline(**parts())),
    call=lambda: call(
        **{name: tensor.repeat(2, 1, 1) for name, tensor in guided().items()},
        **SIZE,
        num_frames=5,
    ),
    streams=BOTH,
)
entry(
    name="WanPipeline interrupted",
    build=lambda: quiet(WanPipeline(**parts())),
    call=lambda: call(**SIZE, num_frames=5, callback_on_step_end=interrupt),
    streams=BOTH,
    expected_steps=lambda steps: 6,
)
entry(
    name="WanPipeline unguided",
    build=lambda: quiet(WanPipeline(**parts())),
    call=lambda: {**call(**SIZE, num_frames=5), "guidance_scale": 1.0},
    streams={"transformer": ("cond",)},
)
entry(
    name="WanPipeline experts",
    build=lambda: experts(WanPipeline),
    call=lambda: call(**SIZE, num_frames=5),
    streams=EXPERTS,
)
entry(
    name="WanPipeline expand_timesteps",
    build=lambda: quiet(WanPipeline(**parts(expand_timesteps=True))),
    call=lambda: call(**SIZE, num_frames=5),
    streams=BOTH,
)
entry(
    name="WanImageToVideoPipeline",
    build=lambda: quiet(
        WanImageToVideoPipeline(
            **parts(transformer=wan(2, in_channels=12, image_dim=8, added_kv_proj_dim=24)),
            **seen(),
        )
    ),
    call=lambda: call(**SIZE, num_frames=5, image=image(32)),
    streams=BOTH,
)
entry(
    name="WanImageToVideoPipeline experts",
    build=lambda: experts(WanImageToVideoPipeline, in_channels=12),
    call=lambda: call(**SIZE, num_frames=5, image=image(32)),
    streams=EXPERTS,
)
entry(
    name="WanVideoToVideoPipeline",
    build=lambda: quiet(WanVideoToVideoPipeline(**parts())),
    call=lambda: call(**SIZE, video=video(), strength=0.6),
    streams={"transformer": ("0", "1")},
    expected_steps=lambda steps: int(0.6 * steps),
)
entry(
    name="WanVACEPipeline",
    build=lambda: quiet(WanVACEPipeline(**parts(transformer=vace()))),
    call=lambda: call(**SIZE, num_frames=5, video=video(), reference_images=[image(32)]),
    streams=BOTH,
)
entry(
    name="WanVACEPipeline experts",
    build=lambda: quiet(
        WanVACEPipeline(**parts(transformer=vace(), transformer_2=vace(1), boundary_ratio=0.7))
    ),
    call=lambda: call(**SIZE, num_frames=5),
    streams=EXPERTS,
)
entry(
    name="LucyEditPipeline",
    build=lambda: quiet(LucyEditPipeline(**parts(transformer=wan(2, in_channels=8)))),
    call=lambda: call(**SIZE, num_frames=5, video=video()),
    streams=BOTH,
)
