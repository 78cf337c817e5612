"""Qwen-Image."""

from __future__ import annotations

from functools import partial
from pipes.parts import (
    NEGATIVE,
    PROMPT,
    WIDTH,
    VisionProcessor,
    flow,
    image,
    mask,
    picture_entry,
    qwen2_vl,
    randomised,
    tokenizer,
)
from typing import Any

import diffusers
import torch
from torch.nn import functional

SIZE = 8
NAMED = ("cond", "uncond")
_DIT = {
    "patch_size": 2,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": (4, 2, 2),
}


class Pooling(diffusers.AutoencoderKLQwenImage):
    """Makes a picture small before it encodes it."""

    halvings = 5

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        # Pipelines take the scale from this list's length.
        self.temperal_downsample = [False] * self.halvings

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        side = 2**self.halvings
        return super().encode(functional.avg_pool3d(x, (1, side, side)), return_dict)


class Pooling16(Pooling):
    halvings = 4


def qwen_vae(channels: int = 2, *, pooling: bool | type[Pooling] = False, colours: int = 3) -> Any:
    kind = Pooling if pooling is True else pooling or diffusers.AutoencoderKLQwenImage
    return randomised(
        kind(
            base_dim=4,
            z_dim=channels,
            dim_mult=[1],
            num_res_blocks=1,
            temperal_downsample=[],
            input_channels=colours,
            latents_mean=[0.1] * channels,
            latents_std=[1.5] * channels,
        )
    )


def _parts(
    *, sees: bool = False, layered: bool = False, extra: int | None = None
) -> dict[str, Any]:
    config = {**_DIT, "in_channels": 8, "out_channels": 2}
    if layered:
        config |= {"use_additional_t_cond": True, "use_layer3d_rope": True}
    parts = {
        "scheduler": flow(),
        "vae": qwen_vae(pooling=sees, colours=4 if layered else 3),
        "text_encoder": qwen2_vl(),
        "tokenizer": tokenizer(1024),
        "transformer": randomised(diffusers.QwenImageTransformer2DModel(**config)),
    }
    if sees:
        parts["processor"] = VisionProcessor()
    if extra is not None:
        config = {**_DIT, "num_layers": 1, "in_channels": 8, "extra_condition_channels": extra}
        parts["controlnet"] = randomised(diffusers.QwenImageControlNetModel(**config), seed=1)
    return parts


def _entry(name: str, variant: str = "", parts: Any = _parts, **call: Any) -> None:
    call = {"negative_prompt": NEGATIVE, "true_cfg_scale": 3.0, **call}
    picture_entry(name, parts, NAMED, variant, **call)


SQUARE = {"height": SIZE, "width": SIZE}
PICTURE = {"image": partial(image, SIZE)}
HOLE = {"mask_image": partial(mask, SIZE), **PICTURE}
PART = {"strength": 0.6}
_TWO = {"prompt": [PROMPT, "two green dogs"], "negative_prompt": [NEGATIVE] * 2}

_entry("QwenImagePipeline", **SQUARE)
_entry("QwenImagePipeline", "two prompts", num_images_per_prompt=2, **_TWO, **SQUARE)
SIGMAS = [1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.05]
_entry("QwenImagePipeline", "sigmas", sigmas=SIGMAS, **SQUARE)
_entry("QwenImageImg2ImgPipeline", **PICTURE, **PART, **SQUARE)
_entry("QwenImageInpaintPipeline", **HOLE, **PART, **SQUARE)
_CONTROL = {"control_image": partial(image, SIZE, 1), **SQUARE}
_entry("QwenImageControlNetPipeline", parts=partial(_parts, extra=0), **_CONTROL)
_entry(
    "QwenImageControlNetInpaintPipeline",
    parts=partial(_parts, extra=4),
    control_mask=partial(mask, SIZE),
    **_CONTROL,
)
# These make every picture large.
_sees = partial(_parts, sees=True)
_entry("QwenImageEditPipeline", parts=_sees, **PICTURE, height=64, width=64)
_entry("QwenImageEditPlusPipeline", parts=_sees, **PICTURE, height=64, width=64)
_entry("QwenImageEditInpaintPipeline", parts=_sees, **HOLE, **PART)
_entry(
    "QwenImageLayeredPipeline",
    parts=partial(_parts, sees=True, layered=True),
    layers=2,
    image=lambda: image(SIZE).convert("RGBA"),
    output_type="pt",
)


# Qwen-Image 2.1: keeps the keys and values of text and pictures from its first step on.


def _causal(keeps: bool = True) -> dict[str, Any]:
    model = diffusers.QwenImage21Transformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        context_in_dim=WIDTH,
        axes_dims_rope=(4, 2, 2),
        causal_condition=keeps,
    )
    return {
        "scheduler": flow(),
        "vae": qwen_vae(4, pooling=Pooling16, colours=4),
        "text_encoder": qwen2_vl(),
        "processor": VisionProcessor(),
        "transformer": randomised(model),
    }


LARGE = {"height": 64, "width": 64, "output_resolution": 64}
_entry("QwenImage21Pipeline", parts=_causal, **LARGE)
_entry("QwenImage21Pipeline", "edit", _causal, image=partial(image, 64), **LARGE)
_entry("QwenImage21Pipeline", "no kept keys", partial(_causal, False), **LARGE)
