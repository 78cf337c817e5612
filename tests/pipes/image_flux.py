"""Flux and pipelines with its packed latents: Flux2, Chroma, Bria, Ovis, LongCat-Image, ..."""

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
    image,
    mask,
    picture_entry,
    qwen2_vl,
    qwen3,
    randomised,
    t5,
    tokenizer,
)
from typing import Any

import diffusers
from diffusers import UniPCMultistepScheduler

SIZE = 8
SQUARE = {"height": SIZE, "width": SIZE}
ONE, TWO, NAMED = ("0",), ("0", "1"), ("cond", "uncond")
PICTURE = {"image": partial(image, SIZE)}
HOLE = {**PICTURE, "mask_image": partial(mask, SIZE)}
CONTROL = {"control_image": partial(image, SIZE, 1)}
PART = {"strength": 0.6}
BAD = {"negative_prompt": NEGATIVE}
SIGMAS = [1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.05]

_DIT = {
    "patch_size": 1,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": (2, 2, 4),
}
_POOLED = {"pooled_projection_dim": WIDTH}


def unipc() -> Any:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


# Flux.


def _flux(
    channels: int = 4, scheduler: Callable[[], Any] = flow, net: bool = False, **settings: Any
) -> dict[str, Any]:
    config = {**_DIT, **_POOLED, "in_channels": channels, "out_channels": 4}
    parts = {
        "scheduler": scheduler(),
        "vae": autoencoder(1),
        "text_encoder": clip_text(),
        "tokenizer": tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(),
        "transformer": randomised(diffusers.FluxTransformer2DModel(**config)),
        **settings,
    }
    if net:
        config = {**_DIT, **_POOLED, "in_channels": 4}
        parts["controlnet"] = randomised(diffusers.FluxControlNetModel(**config), seed=1)
    return parts


def _flux_entry(name: str, streams: tuple[str, ...] = ONE, variant: str = "", **more: Any) -> None:
    build = {k: more.pop(k) for k in ("channels", "scheduler", "net") if k in more}
    more = {**SQUARE, "max_sequence_length": 16, **more}
    picture_entry(name, partial(_flux, **build), streams, variant, **more)


_TRUE = {**BAD, "true_cfg_scale": 3.0}
_flux_entry("FluxPipeline", NAMED, **_TRUE)
_flux_entry("FluxPipeline", NAMED, "UniPC", scheduler=unipc, **_TRUE)
_flux_entry("FluxPipeline", NAMED, "sigmas", sigmas=SIGMAS, **_TRUE)
_flux_entry("FluxPipeline", NAMED[:1], "without CFG", num_images_per_prompt=2)
_flux_entry("FluxImg2ImgPipeline", TWO, **PICTURE, **PART, **_TRUE)
_flux_entry("FluxInpaintPipeline", TWO, **HOLE, **PART, **_TRUE)
_flux_entry("FluxFillPipeline", channels=4 + 4 + 4, **HOLE)
_flux_entry("FluxControlPipeline", channels=8, **CONTROL)
_flux_entry("FluxControlImg2ImgPipeline", channels=8, **PICTURE, **CONTROL, **PART)
_flux_entry("FluxControlInpaintPipeline", channels=8, **HOLE, **CONTROL, **PART)
_flux_entry("FluxControlNetPipeline", TWO, net=True, **CONTROL, **_TRUE)
_flux_entry("FluxControlNetImg2ImgPipeline", net=True, **PICTURE, **CONTROL, **PART)
_flux_entry("FluxControlNetInpaintPipeline", net=True, **HOLE, **CONTROL, **PART)
_KONTEXT = {"_auto_resize": False, "max_area": SIZE * SIZE}
_flux_entry("FluxKontextPipeline", TWO, **PICTURE, **_TRUE, **_KONTEXT)
_flux_entry("FluxKontextInpaintPipeline", TWO, **HOLE, **PART, **_TRUE, **_KONTEXT)
_CLOZE = {
    "task_prompt": PROMPT,
    "content_prompt": NEGATIVE,
    "image": lambda: [[image(SIZE), image(SIZE, 1)], [image(SIZE, 2), None]],
    "max_sequence_length": 16,
    "output_type": "pt",
}
_cloze = partial(_flux, channels=4 + 4 + 4, resolution=SIZE)
picture_entry("VisualClozeGenerationPipeline", _cloze, ONE, **_CLOZE)
_UP = {"upsampling_height": SIZE, "upsampling_width": SIZE}
picture_entry("VisualClozePipeline", _cloze, ONE, **_CLOZE, **_UP)


# Flux2.


def flux2_vae(levels: int) -> Any:
    model = diffusers.AutoencoderKLFlux2(
        block_out_channels=(4,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=1,
        norm_num_groups=1,
        mid_block_add_attention=False,
    )
    return randomised(model)


def _flux2(head: Callable[[], Any]) -> dict[str, Any]:
    config = {**_DIT, "joint_attention_dim": 3 * WIDTH, "axes_dims_rope": (2, 2, 2, 2)}
    return {
        "scheduler": flow(use_dynamic_shifting=True),
        "vae": flux2_vae(4),
        "text_encoder": head(),
        "tokenizer": tokenizer(),
        "transformer": randomised(
            diffusers.Flux2Transformer2DModel(**config, in_channels=4, timestep_guidance_channels=8)
        ),
    }


# Flux2 takes no smaller picture.
_LARGE = {"image": partial(image, 64)}
_LARGE_HOLE = {**_LARGE, "mask_image": partial(mask, 64)}
_LAYERS = {
    "max_sequence_length": 16,
    "text_encoder_out_layers": (0, 1, 2),
    "height": 64,
    "width": 64,
}
_dev, _klein = partial(_flux2, qwen2_vl), partial(_flux2, partial(qwen3, head=True))
picture_entry("Flux2Pipeline", _dev, **_LAYERS)
picture_entry("Flux2Pipeline", _dev, variant="edit", **_LARGE, **_LAYERS)
picture_entry("Flux2KleinPipeline", _klein, NAMED, **_LAYERS)
picture_entry("Flux2KleinPipeline", _klein, NAMED, "edit", **_LARGE, **_LAYERS)
picture_entry("Flux2KleinInpaintPipeline", _klein, NAMED, **_LARGE_HOLE, **PART, **_LAYERS)
picture_entry("Flux2KleinKVPipeline", _klein, **_LARGE, **_LAYERS)


# Chroma.


def _chroma() -> dict[str, Any]:
    model = diffusers.ChromaTransformer2DModel(
        **_DIT,
        in_channels=4,
        approximator_num_channels=4,
        approximator_hidden_dim=8,
        approximator_layers=1,
    )
    # The inpainting pipeline asks for it; checkpoints' configurations have it.
    model.register_to_config(guidance_embeds=False)
    return {
        "scheduler": flow(),
        "vae": autoencoder(1),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
        "transformer": randomised(model),
    }


_TWO_PROMPTS = {"prompt": [PROMPT, "two green dogs"], "negative_prompt": [NEGATIVE] * 2}
_CHROMA = {**SQUARE, "max_sequence_length": 16}
picture_entry("ChromaPipeline", _chroma, TWO, **BAD, **_CHROMA)
picture_entry("ChromaPipeline", _chroma, TWO, "two prompts", **_TWO_PROMPTS, **_CHROMA)
picture_entry("ChromaImg2ImgPipeline", _chroma, TWO, **PICTURE, **PART, **BAD, **_CHROMA)
picture_entry("ChromaInpaintPipeline", _chroma, TWO, **HOLE, **PART, **BAD, **_CHROMA)
