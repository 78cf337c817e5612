"""Hunyuan-Image, Z-Image, Kandinsky 5, Bria, Ovis, LongCat-Image and PRX."""

from __future__ import annotations

from functools import partial
from pipes.parts import (
    NEGATIVE,
    PROMPT,
    WIDTH,
    VisionProcessor,
    autoencoder,
    clip_text,
    flow,
    image,
    llama,
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
import torch
import transformers as hf
from diffusers import AdaptiveProjectedMixGuidance, ClassifierFreeGuidance
from torch.nn import functional

BAD = {"negative_prompt": NEGATIVE}
HEADS = {"attention_head_dim": 8, "num_attention_heads": 2}
ONE, TWO, NAMED = ("0",), ("0", "1"), ("cond", "uncond")
GUIDED = ("pred_cond", "pred_uncond")
PART = {"strength": 0.6}


def square(size: int) -> dict[str, int]:
    return {"height": size, "width": size}


def picture(size: int) -> dict[str, Any]:
    return {"image": partial(image, size)}


def hole(size: int) -> dict[str, Any]:
    return {"mask_image": partial(mask, size), **picture(size)}


def _parts(model: Any, text: Any, channels: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "scheduler": flow(),
        "vae": autoencoder(channels),
        "text_encoder": text,
        "tokenizer": tokenizer(256),
        "transformer": randomised(model),
        **more,
    }


# Hunyuan-Image.

_HUNYUAN = {
    **HEADS,
    "out_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": WIDTH,
}


def _hunyuan(guider: Any = ClassifierFreeGuidance) -> dict[str, Any]:
    model = diffusers.HunyuanImageTransformer2DModel(
        **_HUNYUAN, in_channels=4, text_embed_2_dim=WIDTH, rope_axes_dim=(4, 4)
    )
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=8,
    )
    more = {"text_encoder_2": t5(), "tokenizer_2": tokenizer(256), "guider": guider()}
    return _parts(model, qwen2_vl(), vae=randomised(vae), **more)


def _refiner() -> dict[str, Any]:
    model = diffusers.HunyuanImageTransformer2DModel(
        **_HUNYUAN,
        in_channels=8,
        patch_size=(1, 1, 1),
        rope_axes_dim=(2, 2, 4),
        guidance_embeds=True,
    )
    vae = diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=2,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    return _parts(model, qwen2_vl(), vae=randomised(vae), guider=ClassifierFreeGuidance())


_TOKENS = {"tokenizer_max_length": 16, "tokenizer_2_max_length": 16}
_mixed = partial(_hunyuan, AdaptiveProjectedMixGuidance)
picture_entry("HunyuanImagePipeline", _hunyuan, GUIDED, "", _TOKENS, **BAD, **square(8))
picture_entry("HunyuanImagePipeline", _mixed, GUIDED, "APG", _TOKENS, **BAD, **square(8))
_TOKENS = {"tokenizer_max_length": 16}
picture_entry(
    "HunyuanImageRefinerPipeline", _refiner, GUIDED, "", _TOKENS, **picture(16), **BAD, **square(16)
)


# Z-Image: CFG as one batch of lists.

_Z = {"n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}


def _z(net: bool = False, omni: bool = False) -> dict[str, Any]:
    model = diffusers.ZImageTransformer2DModel(
        **_Z,
        dim=16,
        in_channels=4,
        n_layers=2,
        cap_feat_dim=WIDTH,
        siglip_feat_dim=8 if omni else None,
        axes_dims=[4, 2, 2],
        axes_lens=[256, 16, 16],
    )
    parts = _parts(model, qwen3())
    if net:
        control = diffusers.ZImageControlNetModel(
            **_Z,
            dim=16,
            control_layers_places=[0],
            control_refiner_layers_places=[0],
            control_in_dim=4 + 4 + 1,
        )
        parts["controlnet"] = randomised(control, seed=1)
    if omni:
        # The pipeline encodes its pictures in half precision.
        parts["vae"] = autoencoder(4, 4).to(torch.bfloat16)
        config = hf.Siglip2VisionConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_patches=16,
            patch_size=4,
        )
        parts["siglip"] = randomised(hf.Siglip2VisionModel(config))
        parts["siglip_processor"] = hf.Siglip2ImageProcessor(patch_size=4, max_num_patches=16)
    return parts


_TEXT = {**BAD, "max_sequence_length": 32}
picture_entry("ZImagePipeline", _z, ONE, **_TEXT, **square(8))
picture_entry(
    "ZImagePipeline",
    _z,
    ONE,
    "two prompts",
    prompt=lambda: [PROMPT, "two green dogs"],
    negative_prompt=lambda: [NEGATIVE] * 2,
    max_sequence_length=32,
    **square(8),
)
picture_entry("ZImageImg2ImgPipeline", _z, ONE, **picture(8), **PART, **_TEXT, **square(8))
picture_entry("ZImageInpaintPipeline", _z, ONE, **hole(8), **PART, **_TEXT, **square(8))
_CONTROL = {"control_image": partial(image, 8, 1), **_TEXT, **square(8)}
_net = partial(_z, net=True)
picture_entry("ZImageControlNetPipeline", _net, ONE, **_CONTROL)
picture_entry("ZImageControlNetInpaintPipeline", _net, ONE, **hole(8), **_CONTROL)
picture_entry(
    "ZImageOmniPipeline", partial(_z, omni=True), ONE, **picture(64), **_TEXT, **square(64)
)


# Kandinsky 5.


def _kandinsky(sees: bool = False) -> dict[str, Any]:
    model = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=8,
        model_dim=16,
        ff_dim=16,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        visual_cond=sees,
    )
    return _parts(
        model,
        qwen2_vl(),
        vae=autoencoder(4, 4),
        tokenizer=VisionProcessor(),
        text_encoder_2=clip_text(max_length=77),
        tokenizer_2=tokenizer(77),
    )


# They draw in no other sizes.
_SIZES = {"resolutions": [(64, 64)]}
_edits = partial(_kandinsky, sees=True)
picture_entry("Kandinsky5T2IPipeline", _kandinsky, TWO, "", _SIZES, **BAD, **square(64))
picture_entry("Kandinsky5I2IPipeline", _edits, TWO, "", _SIZES, **picture(64), **BAD)


# Bria.

_JOINT = {
    **HEADS,
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": (2, 2, 4),
}


def _bria() -> dict[str, Any]:
    return _parts(diffusers.BriaTransformer2DModel(**_JOINT), t5(), 1)


def _fibo() -> dict[str, Any]:
    config = {**_JOINT, "joint_attention_dim": 2 * WIDTH, "text_encoder_dim": WIDTH}
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False] * 4,
        latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4,
    )
    scheduler = flow(use_dynamic_shifting=True)
    more = {"vae": randomised(vae), "scheduler": scheduler}
    return _parts(diffusers.BriaFiboTransformer2DModel(**config), llama(), **more)


picture_entry("BriaPipeline", _bria, ONE, **BAD, **square(16), max_sequence_length=16)
picture_entry("BriaFiboPipeline", _fibo, ONE, **BAD, **square(64))
_FIBO = {"prompt": '{"edit_instruction": "red"}', "_auto_resize": False, **BAD, **square(64)}
picture_entry("BriaFiboEditPipeline", _fibo, ONE, **picture(64), **_FIBO)


# Ovis and LongCat-Image.


def _ovis() -> dict[str, Any]:
    model = diffusers.OvisImageTransformer2DModel(**_JOINT, out_channels=4)
    return _parts(model, qwen3(), 1)


class Pooling(diffusers.AutoencoderKL):
    """Makes a picture small before it encodes it."""

    halvings = 5

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        return super().encode(functional.avg_pool2d(x, 2**self.halvings), return_dict)


def _longcat(edits: bool = False) -> dict[str, Any]:
    config = {**_JOINT, "in_channels": 64, "pooled_projection_dim": WIDTH}
    parts = _parts(
        diffusers.LongCatImageTransformer2DModel(**config),
        qwen2_vl(),
        16,
        text_processor=VisionProcessor(),
    )
    if edits:
        # It makes every picture large.
        vae = Pooling.from_config(parts["vae"].config)
        # Pipelines take the scale from this list's length.
        vae.register_to_config(block_out_channels=(4,) * (Pooling.halvings + 1))
        parts["vae"] = randomised(vae)
    return parts


_TOKENS = {"tokenizer_max_length": 32}
_CAT = {**BAD, **square(8), "enable_prompt_rewrite": False}
_EDIT = {**BAD, **picture(64)}
picture_entry("OvisImagePipeline", _ovis, NAMED, **BAD, **square(8), max_sequence_length=16)
picture_entry("LongCatImagePipeline", _longcat, NAMED, "", _TOKENS, **_CAT)
picture_entry("LongCatImageEditPipeline", partial(_longcat, True), NAMED, "", _TOKENS, **_EDIT)
