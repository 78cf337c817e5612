"""Stable Diffusion 3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pipes.parts import (
    NEGATIVE,
    PROMPT,
    WIDTH,
    autoencoder,
    clip_text,
    flow,
    flow_heun,
    image,
    mask,
    picture_entry,
    randomised,
    t5,
    tokenizer,
)
from typing import Any

import diffusers

SIZE = 8
_DIT = {
    "sample_size": SIZE,
    "patch_size": 2,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 2 * WIDTH,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 2 * WIDTH,
    "pos_embed_max_size": SIZE,
}


def _parts(
    scheduler: Callable[[], Any] = flow, net: bool = False, inpaint: bool = False, **settings: Any
) -> dict[str, Any]:
    parts = {
        "scheduler": scheduler(),
        "vae": autoencoder(16),
        "text_encoder": clip_text(projected=True),
        "tokenizer": tokenizer(),
        "text_encoder_2": clip_text(projected=True),
        "tokenizer_2": tokenizer(),
        "text_encoder_3": t5(2 * WIDTH),
        "tokenizer_3": tokenizer(),
        "transformer": randomised(
            diffusers.SD3Transformer2DModel(**_DIT, in_channels=16, out_channels=16)
        ),
        **settings,
    }
    if net:
        config = {**_DIT, "num_layers": 2, "extra_conditioning_channels": 1 if inpaint else 0}
        model = diffusers.SD3ControlNetModel(**config, in_channels=16, out_channels=16)
        parts["controlnet"] = randomised(model, seed=1)
    return parts


def _entry(
    name: str,
    variant: str = "",
    parts: Any = _parts,
    streams: tuple[str, ...] = ("0",),
    **call: Any,
) -> None:
    call = {"negative_prompt": NEGATIVE, "max_sequence_length": 16, "guidance_scale": 4.0, **call}
    picture_entry(name, parts, streams, variant, **call)


PICTURE = {"image": partial(image, SIZE), "strength": 0.6}
SQUARE = {"height": SIZE, "width": SIZE}
HOLE = {"mask_image": partial(mask, SIZE), **PICTURE, **SQUARE}
_TWO = {"prompt": [PROMPT, "two green dogs"], "negative_prompt": [NEGATIVE] * 2}
_PAG = partial(_parts, pag_applied_layers=["blocks.1"])
# From before the first step to past the last.
_LAYERS = {
    "skip_guidance_layers": [1],
    "skip_layer_guidance_start": -1.0,
    "skip_layer_guidance_stop": 2.0,
}

_entry("StableDiffusion3Pipeline", **SQUARE)
_entry("StableDiffusion3Pipeline", "heun", partial(_parts, flow_heun), **SQUARE)
_entry("StableDiffusion3Pipeline", "two prompts", num_images_per_prompt=2, **_TWO, **SQUARE)
_entry("StableDiffusion3Pipeline", "skip-layer guidance", streams=("0", "1"), **_LAYERS, **SQUARE)
_entry("StableDiffusion3Img2ImgPipeline", **PICTURE)
_entry("StableDiffusion3Img2ImgPipeline", "heun", partial(_parts, flow_heun), **PICTURE)
_entry("StableDiffusion3InpaintPipeline", **HOLE)
_entry("StableDiffusion3PAGPipeline", parts=_PAG, **SQUARE)
_entry("StableDiffusion3PAGImg2ImgPipeline", parts=_PAG, **PICTURE)
_CONTROL = {"control_image": partial(image, SIZE, 1), **SQUARE}
_entry("StableDiffusion3ControlNetPipeline", parts=partial(_parts, net=True), **_CONTROL)
_entry(
    "StableDiffusion3ControlNetInpaintingPipeline",
    parts=partial(_parts, net=True, inpaint=True),
    control_mask=partial(mask, SIZE),
    **_CONTROL,
)
